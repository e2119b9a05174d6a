"""Check the data types of the config's inputs against what the artifact takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from torch_py_backend.config import dtypes
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import BindingError
from torch_py_backend.signature.arguments import ArgumentType, Signature


def check_arguments(
    config: ModelConfig, signature: Signature, special: Mapping[str, ArgumentType]
) -> None:
    """Check that each argument takes the type of its input without loss."""
    function = signature.name
    tensors_only = signature.torchscript or signature.leaves is not None
    for spec in config.inputs:
        takes = special.get(spec.name)
        if takes is None:
            if tensors_only and spec.dtype.torch is None:
                raise BindingError(
                    config.name,
                    f"input '{spec.name}' is {spec.dtype.config}, and {function}() takes a tensor",
                    expected="a type of numbers in config.pbtxt",
                )
            continue
        accepted = _ACCEPTED.get(takes, ("BYTES",))
        if not spec.dtype.triton.startswith(accepted):
            raise BindingError(
                config.name,
                f"input '{spec.name}' is {spec.dtype.triton}, and {function}() takes {takes.value}",
                expected=f"{' or '.join(accepted)} in config.pbtxt",
            )
    for batch_input in config.batch_inputs:
        name = batch_input.name
        if name in special:
            raise BindingError(
                config.name,
                f"batch_input makes '{name}' a tensor, and {function}() takes"
                f" {special[name].value}",
                expected="an argument that takes a tensor",
            )


def check_leaves(
    config: ModelConfig, signature: Signature, names: Sequence[str], cast: torch.dtype | None
) -> None:
    """Check the types of inputs against those that the artifact was exported with."""
    exported = dict(zip(names, signature.dtypes, strict=False))
    for spec in config.inputs:
        dtype: torch.dtype | None = getattr(torch, spec.dtype.torch or "", None)
        if cast is not None and dtype is not None and dtype.is_floating_point:
            dtype = cast
        expected = exported.get(spec.name, dtype)
        if expected is not dtype:
            raise BindingError(
                config.name,
                f"input '{spec.name}' is {spec.dtype.config}",
                expected=f"{dtypes.config_name(expected)}, with which the program was exported",
                cure="Write that type into config.pbtxt, or export the program with the other one.",
            )


_ACCEPTED = {
    ArgumentType.INT: ("INT", "UINT"),
    ArgumentType.FLOAT: ("FP", "BF16", "INT", "UINT"),
    ArgumentType.BOOL: ("BOOL",),
    ArgumentType.VALUE: ("",),  # any type
}
