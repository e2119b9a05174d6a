"""Repositories as users have them, on a real server.

Those written for Triton's C++ LibTorch backend and its Python runtime are served unchanged:
`install --name pytorch` puts our backend where Triton looks for LibTorch's. The first config is in
the manner of Triton's PyTorch tutorial; the others have one each of the things that such
repositories do.

`backend: "python"` with `platform: "pytorch"`, the other way to ask for the Python runtime, is not
here: Triton gives such a model to its Python backend, and none of ours is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import models
import packed
import pytest
import refused_configs
import scenarios
import torch
from scenarios import Call, Scenario, floats, tensor
from serving import Serving, asked
from torch import Tensor, nn

from torch_py_backend.config import execution_env

pytestmark = [pytest.mark.server, pytest.mark.slow]

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
    "TORCH_COMPILE_OPTIONAL_PARAMETERS": '{\\"disable\\": true}',
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


def _parameters(values: dict[str, str]) -> str:
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
        for key, value in values.items()
    )


TABLE = (
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
)
_GREETING = Scenario(
    "greets",
    scenarios.text(_GREETS),
    scenarios.x_to_y(4, **{execution_env.KEY: "$$TRITON_MODEL_DIRECTORY/env"}),
)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with our backend under both names; LibTorch's is not there."""
    folder = tmp_path_factory.mktemp("repositories")
    for scenario in (*TABLE, _GREETING):
        scenario.lay_out(folder / "repository")
    environment = packed.make(folder / "repository" / "greets" / "env")
    (environment / packed.SITE / "greeting.py").write_text("VALUE = 42.0\n")
    for name, (text, _) in refused_configs.TABLE.items():
        refused_configs.write(folder / "repository", name, text)
    with pytest.MonkeyPatch.context() as patch:
        # These configs leave the device to Triton; a GPU would round differently.
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        with asked(folder) as running:
            yield running


@pytest.mark.parametrize("scenario", TABLE, ids=lambda one: one.name)
def test_a_repository_s_own_way_is_served_as_it_is(scenario: Scenario, serving: Serving) -> None:
    """A config without our name reaches this backend, which answers as the network itself."""
    state = serving.states[scenario.name]
    assert state.ready, state.reason
    assert serving.http.get_model_config(scenario.name)["backend"] == "pytorch"
    for call in scenario.calls:
        serving.check("http", scenario.name, call)
    for part in scenario.logs:
        serving.until_logged(part)


def test_a_model_imports_what_only_its_environment_has(serving: Serving) -> None:
    state = serving.states["greets"]
    assert state.ready, state.reason
    serving.check("grpc", "greets", Call({"x": _X}, {"y": _X + 42}))


def test_configs_that_check_refuses_are_refused(serving: Serving) -> None:
    """tests/cli/test_check.py compares what `check` says of them, and of a valid one."""
    ready = {name for name, state in serving.states.items() if state.ready}
    assert not ready & refused_configs.TABLE.keys()
