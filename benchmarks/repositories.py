"""Model repositories for Triton: a model as a user of ours writes it, and the no-op floor."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.torch

from benchmarks import models
from benchmarks.models import MAX_BATCH_SIZE, MODELS, Parameter

_HERE = Path(__file__).parent
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
instance_group [{{ kind: KIND_CPU count: 1 }}]
"""
_MODEL_CLASS = 'parameters {{ key: "MODEL_CLASS" value {{ string_value: "{name}" }} }}\n'


def write(name: str, repository: Path) -> None:
    """A model of the comparison, served by our backend under its own name."""
    model = MODELS[name]
    version = _version(repository / name)
    module = model.build()
    shutil.copy(Path(models.__file__), version / "model.py")
    if module.state_dict():
        safetensors.torch.save_model(module, str(version / "model.safetensors"))
    chosen = _MODEL_CLASS.format(name=type(module).__name__)
    (repository / name / "config.pbtxt").write_text(_config("pytorch_py", name) + chosen)


def write_floor(name: str, repository: Path) -> str:
    """The floor with the same inputs, outputs and batching; returns the name it is served under."""
    served = f"{name}_floor"
    version = _version(repository / served)
    shutil.copy(_HERE / "floor.py", version / "model.py")
    np.save(version / "answer.npy", MODELS[name].expected()[None].numpy())
    (repository / served / "config.pbtxt").write_text(_config("python", name))
    return served


def _version(folder: Path) -> Path:
    version = folder / "1"
    version.mkdir(parents=True)
    return version


def _config(backend: str, name: str) -> str:
    model = MODELS[name]
    return _CONFIG.format(
        backend=backend,
        max_batch_size=MAX_BATCH_SIZE,
        inputs=_tensors(model.inputs),
        output=_tensors([model.output]),
    )


def _tensors(parameters: Sequence[Parameter]) -> str:
    return ",\n".join(
        f'  {{ name: "{one.name}" data_type: TYPE_{one.dtype} dims: {list(one.dims)} }}'
        for one in parameters
    )
