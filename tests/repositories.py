"""Repositories as users have them, which a real server takes.

Those written for Triton's C++ LibTorch backend and its Python runtime are served unchanged:
`install --name pytorch` puts our backend where Triton looks for LibTorch's. The first config is in
the manner of Triton's PyTorch tutorial; the others have one each of the things that such
repositories do.

`backend: "python"` with `platform: "pytorch"`, the other way to ask for the Python runtime, is not
here: Triton gives such a model to its Python backend, and none of ours is asked.
"""

from __future__ import annotations

from pathlib import Path

import models
import packed
import scenarios
import torch
from scenarios import Call, Scenario, floats, tensor
from torch import Tensor, nn

from torch_py_backend.config import execution_env

_TUTORIAL = """
name: "resnet50"
platform: "pytorch_libtorch"
max_batch_size : 0
input [{
  name: "input__0" data_type: TYPE_FP32 dims: [ 3, 32, 32 ] reshape { shape: [ 1, 3, 32, 32 ] }
}]
output [{
  name: "output__0" data_type: TYPE_FP32 dims: [ 1, 1000 ,1, 1] reshape { shape: [ 1, 1000 ] }
}]
"""
_PYTHON_RUNTIME = """
backend: "pytorch"
runtime: "model.py"
default_model_filename: "nets.py"
max_batch_size: 8
"""
_LIBTORCH_PARAMETERS = {
    "DISABLE_OPTIMIZED_EXECUTION": "true",
    "INFERENCE_MODE": "false",
    "ENABLE_NVFUSER": "true",
    "ENABLE_JIT_EXECUTOR": "true",
    "ENABLE_JIT_PROFILING": "on",
    "ENABLE_TENSOR_FUSER": "1",
    "DISABLE_CUDNN": "TRUE",
    "ENABLE_WEIGHT_SHARING": "true",
    "ENABLE_CACHE_CLEANING": "true",
    "INTRA_OP_THREAD_COUNT": "1",
    "INTER_OP_THREAD_COUNT": "1",
    "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
}
_PYTHON_PARAMETERS = {
    "NUM_THREADS": "1",
    "NUM_INTEROP_THREADS": "1",
    "TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"disable": true}',
}


class Network(nn.Module):
    """Has inputs and outputs like a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 16, 16)
        self.linear = nn.Linear(8 * 2 * 2, 1000)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.linear(self.convolution(images).flatten(1))
        return result


# A package that the server's own environment lacks.
_GREETS = """
import greeting


def forward(x):
    return x + greeting.VALUE
"""


torch.manual_seed(1)
_NETWORK = Network().eval()
_IMAGE, _X = floats(3, 32, 32, seed=4), floats(3, 4)
_LOGITS = scenarios.eager(_NETWORK, images=_IMAGE[None])
_AFFINE = scenarios.affine()


def _traced(folder: Path) -> None:
    torch.jit.trace(_NETWORK, torch.zeros(1, 3, 32, 32)).save(folder / "model.pt")


def _environment(folder: Path) -> None:
    environment = packed.make(folder.parent / "env")
    (environment / packed.SITE / "greeting.py").write_text("VALUE = 42.0\n")


def _parameters(values: dict[str, str]) -> str:
    return "".join(scenarios.option(key, value) for key, value in values.items())


TABLE = (
    # The first two do not name this backend.
    Scenario(  # reshape gives a model without batches its batch dimension
        "resnet50",
        _traced,
        _TUTORIAL + _parameters(_LIBTORCH_PARAMETERS),
        (Call({"input__0": _IMAGE}, {"output__0": _LOGITS.reshape(1, 1000, 1, 1)}),),
        logs=("the parameter ENABLE_NVFUSER is unknown and ignored",),
    ),
    Scenario(
        "python_runtime",
        scenarios.both(
            scenarios.python(models.Negate, models.Affine, name="nets.py"),
            scenarios.saved(_AFFINE.state_dict(), "nets.pt"),
        ),
        _PYTHON_RUNTIME
        + tensor("input", "x", [4])
        + tensor("output", "y", [3])
        + _parameters(_PYTHON_PARAMETERS),
        (Call({"x": _X}, {"y": scenarios.eager(_AFFINE, x=_X)}),),
    ),
    Scenario(
        "greets",
        scenarios.both(scenarios.text(_GREETS), _environment),
        scenarios.x_to_y(4, **{execution_env.KEY: "$$TRITON_MODEL_DIRECTORY/env"}),
        (Call({"x": _X}, {"y": _X + 42}),),
    ),
)
