"""The model file of a module in memory: its weights, a program, a package."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_py_backend.errors import SaveError, summarize
from torch_py_backend.saving.examples import Example

_CHECK = "aot_inductor.check_lowerbound"
_CURE = "Save it with another format."


def write_weights(module: nn.Module, path: Path) -> None:
    """Write the state_dict as safetensors, unless it is empty; tied weights once.

    Raises:
        SaveError: safetensors cannot store it, such as sparse tensors.
    """
    own = module.state_dict(keep_vars=True)
    state: dict[str, Tensor] = {}
    storages: set[int] = set()
    try:
        # Weights that are tied will be tied in the module that is built, too.
        for key, value in {id(value): (key, value) for key, value in own.items()}.values():
            tensor = value.detach().cpu().contiguous()
            storage = tensor.untyped_storage().data_ptr()
            state[key] = tensor.clone() if storage in storages else tensor
            storages.add(storage)
        if state:
            safetensors.torch.save_file(state, path)
    except Exception as error:  # sparse and quantized tensors, and states of other types
        raise SaveError(
            f"its weights cannot be written as safetensors: {summarize(error)}",
            cure=_CURE,
        ) from error


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Leave out what torch.export writes to standard error about a failure, such as the graph."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def write_program(
    module: nn.Module, example: Example, dynamic_shapes: Any, path: Path, *, compiled: bool
) -> None:
    """Export a module.

    Args:
        module: the module.
        example: valid inputs.
        dynamic_shapes: as of `torch.export.export`; None: the batch dimension alone.
        path: the file to write.
        compiled: write a package of AOTInductor, not the program. It serves one row as such,
            without a check of minimum sizes, if only the batch is dynamic; its answer has to be
            compared.

    Raises:
        SaveError: the module cannot be exported or compiled.
    """
    if example.arguments is None:
        raise SaveError(
            "hooks are given, and the module is saved as a program, for which forward() is called"
            " with example_inputs",
            expected="a module whose class can be imported",
            cure="Put the class into a .py file, or save it without hooks and write hooks.py beside"
            " the program.",
        )
    # torch.export takes one tensor in two places for one input.
    call = example.arguments.map(torch.clone)
    if example.max_batch_size and example.rows == 1:
        # torch.export takes a size of 1 for a constant.
        call = call.map(lambda tensor: torch.cat([tensor, tensor]))
    batch_alone = example.max_batch_size > 0 and dynamic_shapes is None
    if batch_alone:
        dynamic_shapes, batch = torch.export.ShapesCollection(), torch.export.Dim("batch", min=1)
        for tensor in pytree.tree_leaves(tuple(call)):
            dynamic_shapes[tensor] = {0: batch}
    failed = f"torch.export cannot export {type(module).__name__}"
    try:
        with _quiet_torch():
            program = torch.export.export(
                module, call.args, call.kwargs, dynamic_shapes=dynamic_shapes
            )
        if not compiled:
            torch.export.save(program, path)
            return
        failed = f"AOTInductor cannot compile {type(module).__name__}"
        from torch._inductor import aoti_compile_and_package, config  # noqa: PLC0415  slow

        # By default, a package takes at least 2 rows.
        configs = {_CHECK: False} if batch_alone and _CHECK in config.get_config_copy() else {}
        aoti_compile_and_package(program, package_path=str(path), inductor_configs=configs)
    except Exception as error:  # of the module's own code, or the compiler's
        raise SaveError(f"{failed}: {summarize(error)}", cure=_CURE) from error
