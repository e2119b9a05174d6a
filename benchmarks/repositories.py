"""Model repositories for Triton: our backend, and others in the same server."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from benchmarks import models
from benchmarks.models import MAX_BATCH_SIZE, MODELS, Parameter

_SERVED = Path(__file__).parent / "served"
_CONFIG = """\
backend: "{backend}"
max_batch_size: {max_batch_size}
dynamic_batching {{ }}
input [
{inputs}
]
output [
{output}
]
instance_group [{{ kind: {kind} count: 1 }}]
"""
_PARAMETER = 'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def write(name: str, repository: Path, kind: str = "KIND_CPU", served: str = "") -> None:
    """Write a model of the comparison for our backend, under its own name or another one."""
    folder = repository / (served or name)
    version = _version(folder)
    shutil.copy(models.__file__, version / "model.py")
    chosen = _parameter("MODEL_CLASS", _fill(name, version))
    (folder / "config.pbtxt").write_text(_config("pytorch_py", name, kind) + chosen)


def write_compiled(name: str, repository: Path, kind: str = "KIND_CPU") -> str:
    """Write the model with `OPTIMIZE: "aoti"`; return its name on the server."""
    served = f"{name}_aoti"
    write(name, repository, kind, served)
    with (repository / served / "config.pbtxt").open("a") as config:
        config.write(_parameter("OPTIMIZE", "aoti"))
    return served


def write_floor(name: str, repository: Path) -> str:
    """Write the floor with the same inputs, outputs and batching; return its name on the server."""
    return _write_answer(name, repository, "floor")


def write_transfer(name: str, repository: Path) -> str:
    """Write a model that only reads and writes; return its name on the server."""
    return _write_answer(name, repository, "transfer")


def _write_answer(name: str, repository: Path, source: str) -> str:
    """Write a Python model that answers what is true of the example."""
    served = f"{name}_{source}"
    version = _version(repository / served)
    shutil.copy(_SERVED / f"{source}.py", version / "model.py")
    np.save(version / "answer.npy", MODELS[name].expected()[None].numpy())
    (repository / served / "config.pbtxt").write_text(_config("python", name))
    return served


def write_plain(name: str, repository: Path, kind: str = "KIND_CPU") -> str:
    """Write a backend made by hand for this model; return its name on the server."""
    served = f"{name}_plain"
    version = _version(repository / served)
    shutil.copy(_SERVED / "plain.py", version / "model.py")
    shutil.copy(models.__file__, version / "network.py")
    chosen = _parameter("MODEL_CLASS", _fill(name, version))
    (repository / served / "config.pbtxt").write_text(_config("python", name, kind) + chosen)
    return served


def write_runtime(name: str, repository: Path, runtime: Path, kind: str = "KIND_CPU") -> str:
    """Write the model for Triton's own Python runtime; return its name on the server.

    Args:
        name: the model.
        repository: the model repository.
        runtime: src/model.py of triton-inference-server/pytorch_backend.
        kind: the kind of the instance group.
    """
    served = f"{name}_runtime"
    version = _version(repository / served)
    shutil.copy(_SERVED / "runtime.py", version / "model.py")
    shutil.copy(runtime, version / "runtime.py")
    shutil.copy(models.__file__, version / "networks.py")
    module = MODELS[name].build()
    # The runtime takes the first class of the file.
    source = f"import sys\n\nsys.path.insert(0, {str(version)!r})\n"
    source += f"from networks import {type(module).__name__}\n"
    (version / "network.py").write_text(source)
    torch.save(module.state_dict(), version / "network.pt")
    (repository / served / "config.pbtxt").write_text(_config("python", name, kind))
    return served


def write_libtorch(name: str, repository: Path, threads: int, kind: str = "KIND_CPU") -> str:
    """Write the model as TorchScript for Triton's LibTorch backend; return its name on the server.

    Args:
        name: the model.
        repository: the model repository.
        threads: the threads of an operator.
        kind: the kind of the instance group.
    """
    served = f"{name}_libtorch"
    model = MODELS[name]
    torch.jit.script(model.build()).save(_version(repository / served) / "model.pt")
    config = _config("pytorch", name, kind)
    config = config.replace('backend: "pytorch"', 'platform: "pytorch_libtorch"')
    config = config.replace(f'"{model.output.name}"', f'"{libtorch_output(name)}"')
    threads_of_an_operator = _parameter("INTRA_OP_THREAD_COUNT", str(threads))
    (repository / served / "config.pbtxt").write_text(config + threads_of_an_operator)
    return served


def libtorch_output(name: str) -> str:
    """Return the name of the output for the LibTorch backend, which requires numbers."""
    return f"{MODELS[name].output.name}__0"


def _fill(name: str, version: Path) -> str:
    """Write the weights into a version folder; return the name of the model's class."""
    module = MODELS[name].build()
    if module.state_dict():
        safetensors.torch.save_model(module, str(version / "model.safetensors"))
    return type(module).__name__


def _parameter(key: str, value: str) -> str:
    return _PARAMETER.format(key=key, value=value)


def _version(folder: Path) -> Path:
    version = folder / "1"
    version.mkdir(parents=True)
    return version


def _config(backend: str, name: str, kind: str = "KIND_CPU") -> str:
    model = MODELS[name]
    return _CONFIG.format(
        backend=backend,
        kind=kind,
        max_batch_size=MAX_BATCH_SIZE,
        inputs=_tensors(model.inputs),
        output=_tensors([model.output]),
    )


def _tensors(parameters: Sequence[Parameter]) -> str:
    return ",\n".join(
        f'  {{ name: "{spec.name}" data_type: TYPE_{spec.dtype} dims: {list(spec.dims)} }}'
        for spec in parameters
    )
