"""Repositories written for Triton's C++ LibTorch backend and its Python runtime, served unchanged.

`install --name pytorch` puts our backend where Triton looks for LibTorch's. The first two configs
are in the manner of Triton's documentation and of its PyTorch tutorial; the others have one each of
the things that such repositories do.

`backend: "python"` with `platform: "pytorch"`, the other way to ask for the Python runtime, is not
here: Triton gives such a model to its Python backend, and none of ours is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scenarios
import torch
from scenarios import Call, Scenario, floats, tensor
from serving import Serving, asked, until
from torch import Tensor, nn
from typer.testing import CliRunner

from torch_py_backend import cli
from torch_py_backend.server import triton_installation

pytestmark = [pytest.mark.server, pytest.mark.slow]

_LIBTORCH = """
name: "resnet50"
platform: "pytorch_libtorch"
max_batch_size: 8
input [
  {
    name: "input__0"
    data_type: TYPE_FP32
    dims: [ 3, 32, 32 ]
  }
]
output [
  {
    name: "output__0"
    data_type: TYPE_FP32
    dims: [ 1000 ]
  }
]
"""
_TUTORIAL = """
name: "resnet50_tutorial"
platform: "pytorch_libtorch"
max_batch_size : 0
input [
  {
    name: "input__0"
    data_type: TYPE_FP32
    dims: [ 3, 32, 32 ]
    reshape { shape: [ 1, 3, 32, 32 ] }
  }
]
output [
  {
    name: "output__0"
    data_type: TYPE_FP32
    dims: [ 1, 1000 ,1, 1]
    reshape { shape: [ 1, 1000 ] }
  }
]
"""


# --- small models ------------------------------------------------------------------------------


class Mixer(nn.Module):
    """As the Python runtime wants it: no constructor arguments, inputs named in forward()."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(4, 3)

    def forward(self, INPUT0: Tensor, INPUT1: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(INPUT0) - self.right(INPUT1), self.left(INPUT1)


class Block(nn.Module):
    """Part of Backbone, and later in the alphabet: Triton's runtime takes the first class."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks(x)
        return result


class Louder(nn.Module):
    def forward(self, texts: list[str]) -> tuple[Tensor, list[str]]:
        return torch.tensor([len(text) for text in texts]), [text + "!" for text in texts]


class Parser(nn.Module):
    """The made-up string of the warm-up is no number."""

    def forward(self, texts: list[str]) -> Tensor:
        return torch.tensor([int(text) for text in texts])


class Network(nn.Module):
    """Has inputs and outputs like a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 16, 16)
        self.linear = nn.Linear(8 * 2 * 2, 1000)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.linear(self.convolution(images).flatten(1))
        return result


class Window(nn.Module):
    """The made-up values of the warm-up are shorter than the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 1, 10)

    def forward(self, x: Tensor) -> Tensor:
        return torch.amax(self.convolution(x.unsqueeze(1)), dim=2)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return make().eval()


def eager(make: Callable[[], nn.Module], *arguments: Any) -> list[Any]:
    """What the module itself answers, as a list of arrays."""
    with torch.inference_mode():
        result = seeded(make)(*arguments)
    parts = result if isinstance(result, tuple) else (result,)
    return [one.numpy() if isinstance(one, Tensor) else one for one in parts]


def said(texts: list[str]) -> Call:
    lengths, louder = eager(Louder, texts)
    return Call(
        {"INPUT__0": np.array([[text] for text in texts], dtype=np.object_)},
        {
            "OUTPUT__0": lengths[:, None],
            "OUTPUT__1": np.array([[one.encode()] for one in louder], dtype=np.object_),
        },
    )


def libtorch(*tensors: str, first: str = 'platform: "pytorch_libtorch"', **parameters: str) -> str:
    lines = [first, "max_batch_size: 8", *tensors]
    for key, value in parameters.items():
        escaped = value.replace('"', '\\"')
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{escaped}" }} }}')
    return "\n".join(lines) + "\n"


def _traced(folder: Path) -> None:
    torch.jit.trace(seeded(Network), torch.zeros(1, 3, 32, 32)).save(folder / "model.pt")


IMAGES = floats(3, 3, 32, 32, seed=4)
(LOGITS,) = eager(Network, torch.from_numpy(IMAGES))
A, B = floats(3, 4), floats(3, 4, seed=1)
LONG = floats(2, 16, seed=3)
MIXED = dict(
    zip(("OUTPUT0", "OUTPUT1"), eager(Mixer, torch.from_numpy(A), torch.from_numpy(B)), strict=True)
)
# In another order than forward()'s: the names decide.
TWO_INPUTS = tensor("input", "INPUT1", [4]) + tensor("input", "INPUT0", [4])
TWO_OUTPUTS = tensor("output", "OUTPUT0", [3]) + tensor("output", "OUTPUT1", [3])
EVERY_PARAMETER = {
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

TABLE = (
    Scenario(
        "resnet50",
        _traced,
        _LIBTORCH,
        tuple(Call({"input__0": IMAGES[:n]}, {"output__0": LOGITS[:n]}) for n in (1, 3)),
    ),
    Scenario(  # reshape gives a model without batches its batch dimension
        "resnet50_tutorial",
        _traced,
        _TUTORIAL,
        (Call({"input__0": IMAGES[1]}, {"output__0": LOGITS[1].reshape(1, 1000, 1, 1)}),),
    ),
    Scenario(
        "python_runtime_options",
        scenarios.both(
            scenarios.python(Mixer, name="mixer.py"),
            lambda folder: torch.save(seeded(Mixer).state_dict(), folder / "mixer.pt"),
        ),
        libtorch(
            'default_model_filename: "mixer.py"',
            TWO_INPUTS,
            TWO_OUTPUTS,
            first='backend: "pytorch"\nruntime: "model.py"',
            NUM_THREADS="1",
            NUM_INTEROP_THREADS="1",
            TORCH_COMPILE_OPTIONAL_PARAMETERS='{"disable": true}',
        ),
        (Call({"INPUT0": A, "INPUT1": B}, MIXED),),
    ),
    Scenario(
        "python_runtime_classes",
        scenarios.both(
            scenarios.python(Block, Backbone),
            lambda folder: torch.save(seeded(Backbone).state_dict(), folder / "model.pt"),
        ),
        libtorch(
            tensor("input", "x", [4]),
            tensor("output", "y", [4]),
            first='backend: "pytorch"\nruntime: "model.py"',
        ),
        (Call({"x": A}, {"y": eager(Backbone, torch.from_numpy(A))[0]}),),
        logs=("Backbone is served, the first in the alphabet",),
    ),
    Scenario(
        "strings",
        scenarios.script(Louder()),
        libtorch(
            tensor("input", "INPUT__0", [1], "STRING"),
            tensor("output", "OUTPUT__0", [1], "INT64"),
            tensor("output", "OUTPUT__1", [1], "STRING"),
            "dynamic_batching { preferred_batch_size: [ 3 ]"
            " max_queue_delay_microseconds: 5000000 }",
        ),
        (said(["one", "three", "seventeen"]),),
    ),
    Scenario(
        "other_dims",
        scenarios.script(seeded(Mixer)),
        libtorch(
            TWO_INPUTS,
            tensor("output", "OUTPUT0", [16]),
            tensor("output", "OUTPUT1", [3]),
        ),
        (Call({"INPUT0": A, "INPUT1": B}, MIXED),),
        logs=("output 'OUTPUT0' is [8, 3], and config.pbtxt says [-1, 16]",),
    ),
    Scenario(
        "string_parser",
        scenarios.script(Parser()),
        libtorch(
            tensor("input", "INPUT__0", [1], "STRING"), tensor("output", "OUTPUT__0", [1], "INT64")
        ),
        (
            Call(
                {"INPUT__0": np.array([["12"], ["7"]], dtype=np.object_)},
                {"OUTPUT__0": np.array([[12], [7]])},
            ),
        ),
        logs=("'string_parser': the warm-up with INPUT__0 [8, 1] failed",),
    ),
    Scenario(
        "every_parameter",
        scenarios.script(seeded(Window)),
        libtorch(
            tensor("input", "INPUT__0", [-1]), tensor("output", "OUTPUT__0", [1]), **EVERY_PARAMETER
        ),
        (Call({"INPUT__0": LONG}, {"OUTPUT__0": eager(Window, torch.from_numpy(LONG))[0]}),),
        logs=(
            "the parameter ENABLE_NVFUSER has no effect",
            "'every_parameter': the warm-up with INPUT__0 [8, 8] failed",
        ),
    ),
)
# As users of AOTInductor write it. docs/migrate.md says what to change: then it is a config
# as any other.
AOTI = Scenario(
    "aoti",
    # Of any kind: Triton refuses the platform before a backend sees the model.
    scenarios.script(seeded(Mixer)),
    libtorch(TWO_INPUTS, TWO_OUTPUTS, first='backend: "pytorch"\nplatform: "torch_aoti"'),
)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with our backend under both names; LibTorch's is not there."""
    folder = tmp_path_factory.mktemp("drop_in")
    backends = folder / "backends"
    triton_installation.populate_backends(triton_installation.find(), backends)
    command = ["install", "--backend-dir", str(backends), "--name", "pytorch"]
    result = CliRunner().invoke(cli.commands, command)
    assert result.exit_code == 0, result.output
    assert {entry.name for entry in backends.iterdir()} == {"python", "pytorch", "pytorch_py"}
    for scenario in (*TABLE, AOTI):
        scenario.lay_out(folder / "repository")
    with pytest.MonkeyPatch.context() as patch:
        # These configs leave the device to Triton; a GPU would round differently.
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        with asked(folder, f"--backend-directory={backends}") as running:
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


def test_the_platform_torch_aoti(serving: Serving) -> None:
    """Servers that do not know it refuse it themselves."""
    refused = "unexpected 'platform' and 'backend' pair, got:torch_aoti, pytorch"
    assert refused in serving.log or serving.states["aoti"].ready


def test_requests_of_one_batch_get_their_own_strings(serving: Serving) -> None:
    """With LibTorch every request in a batch gets the first one's."""
    rows, executions = _counts(serving)
    serving.check_together("strings", [said(["a"]), said(["bcd", "ef"])])
    # Triton counts a batch after it has answered it.
    until(lambda: _counts(serving)[0] == rows + 3)
    assert _counts(serving)[1] == executions + 1


def _counts(serving: Serving) -> tuple[int, int]:
    """Return the rows of the model `strings` that were answered, and its executions."""
    (statistics,) = serving.grpc.get_inference_statistics("strings").model_stats
    return statistics.inference_count, statistics.execution_count
