"""Weights of AOTInductor packages that were compiled without them.

They are in a file beside the package, like those of a module, and instances map them.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from torch_py_backend.artifacts import file_types
from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError
from torch_py_backend.loading import state_dict

# Options of inductor for a package without weights. Without the second, it contains small ones.
_WITHOUT_WEIGHTS = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
    "freezing": False,  # makes them constants of the graph
}


def compile_package(
    program: ExportedProgram, path: Path, inductor_configs: Mapping[str, Any] | None = None
) -> None:
    """Compile a program to a package without weights, and write these beside it as safetensors.

    The file has all constants under the package's names: parameters, buffers, and tensors that
    forward() creates from literals, but neither unused weights nor second names of tied ones.
    """
    from torch._inductor.package.package import package_aoti  # noqa: PLC0415  imports the compiler

    options = {
        "aot_inductor.metadata": {"torch_version": torch.__version__},
        **(inductor_configs or {}),
        **_WITHOUT_WEIGHTS,
        # These two add the weights to the result of aot_compile, as a dict.
        "aot_inductor.package": True,
        "aot_inductor.package_constants_on_disk_format": "pickle_weights",
    }
    args, kwargs = program.example_inputs or ((), {})
    files: Any = torch._inductor.aot_compile(program.module(), args, kwargs, options=options)
    (weights,) = (file for file in files if isinstance(file, dict))
    package_aoti(str(path), [file for file in files if isinstance(file, str)])
    state = {
        # Copies: safetensors refuses tensors that share memory.
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, (tensor, _) in weights.items()
    }
    file = path.with_suffix(".safetensors")
    safetensors.torch.save_file(state, file)
    file.chmod(0o644)  # safetensors 0.8 writes it for the owner only


def read(config: ModelConfig, artifact: Artifact, device: torch.device | None) -> nn.Module | None:
    """Return a module with the weights of a package that was compiled without them.

    Its parameters have the names, shapes, strides and dtypes of the package's constants: the
    package checks nothing, and reads past the memory of smaller tensors.

    Returns:
        The module, or None: the package contains its weights.

    Raises:
        ArtifactError: there is no file of weights, or it cannot be read.
        WeightsError: its names or shapes are not those of the package.
    """
    constants = file_types.external_constants(artifact.path)
    if not constants:
        return None
    if artifact.weights is None:
        absent = "WEIGHTS is 'none'" if artifact.weightless else "no file of weights is beside it"
        raise ArtifactError(
            config.name,
            f"{artifact.path.name} was compiled without its weights, and {absent}",
            expected=f"{artifact.path.stem}.safetensors, .pt or .pth",
            cure="Save them there under the names of the package's get_constant_fqns().",
        )
    owner = nn.Module()
    for name, constant in constants.items():
        if not constant.computed:
            _add_parameter(owner, name, _uninitialized(constant, device))
    state_dict.load_into(
        config,
        artifact,
        owner,
        hint="Save the tensors under the names of the package's get_constant_fqns(), or compile the"
        " package again.",
    )
    return owner


def _uninitialized(constant: file_types.Constant, device: torch.device | None) -> Tensor:
    dtype = getattr(torch, constant.dtype)
    # A package for a GPU may have constants on the CPU.
    place = torch.device(constant.device) if constant.device == "cpu" or device is None else device
    return torch.empty_strided(constant.shape, constant.stride, dtype=dtype, device=place)


def _add_parameter(owner: nn.Module, name: str, tensor: Tensor) -> None:
    """Add a parameter with a name such as "layers.0.weight", and the modules that it is in."""
    *modules, last = name.split(".")
    for module in modules:
        if module not in owner._modules:
            setattr(owner, module, nn.Module())
        owner = owner.get_submodule(module)
    owner.register_parameter(last, nn.Parameter(tensor, requires_grad=False))


def refuse_unknown(config: ModelConfig, path: Path, names: list[str], folder: Path) -> None:
    """Refuse a package that lacks weights whose shapes are not known: calling it would crash.

    Args:
        config: the model's config.
        path: the package.
        names: the names of its constants.
        folder: where torch has unpacked it.

    Raises:
        ArtifactError: it lacks weights, and its source does not describe them.
    """
    constants = file_types.external_constants(path)
    if constants is None:
        known = _contains_constants(folder)
    else:
        known = not constants or constants.keys() == set(names)
    if names and not known:
        raise ArtifactError(
            config.name,
            f"{path.name} was compiled without its weights, and their shapes are not known",
            expected="its *.wrapper.cpp in the package, with strided tensors only",
            cure="Compile it again with this version of torch, and keep that file in the package.",
        )


def _contains_constants(folder: Path) -> bool:
    """Return whether the library of an unpacked package contains constants.

    They are between two symbols, with a single byte for none (see AotCodeCompiler in torch's
    _inductor/codecache.py).
    """
    for path in folder.rglob("*.so"):
        library = ctypes.CDLL(str(path))
        with contextlib.suppress(ValueError):  # a library of kernels
            start, end = (
                ctypes.addressof(ctypes.c_char.in_dll(library, f"_binary_constants_bin_{edge}"))
                for edge in ("start", "end")
            )
            return end - start > 1
    return True
