"""Repositories written for Triton's C++ LibTorch backend and its Python runtime, served unchanged.

`install --name pytorch` puts our backend where Triton looks for LibTorch's. The first config below
is in the manner of Triton's documentation, the second that of its PyTorch tutorial; the network has
the sizes of ResNet-50. After them come small models, one for each thing that such repositories do.

`backend: "python"` with `platform: "pytorch"`, the other way to ask for the Python runtime, is not
here: Triton gives such a model to its Python backend, and none of ours is asked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import scenarios
import torch
from scenarios import Call, Scenario, floats, tensor
from serving import Serving, infer_inputs
from serving import running as started
from torch import Tensor, nn
from tritonclient import grpc, http
from typer.testing import CliRunner

from torch_py_backend import cli
from torch_py_backend.server import triton_installation, tritonserver

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

LIBTORCH = """
name: "resnet50"
platform: "pytorch_libtorch"
max_batch_size: 8
input [
  {
    name: "input__0"
    data_type: TYPE_FP32
    dims: [ 3, 224, 224 ]
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

TUTORIAL = """
name: "resnet50_tutorial"
platform: "pytorch_libtorch"
max_batch_size : 0
input [
  {
    name: "input__0"
    data_type: TYPE_FP32
    dims: [ 3, 224, 224 ]
    reshape { shape: [ 1, 3, 224, 224 ] }
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

CONFIGS = {"resnet50": LIBTORCH, "resnet50_tutorial": TUTORIAL}

pytestmark = [pytest.mark.server, pytest.mark.slow]


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

FEATURES = (
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
AOTI = libtorch(TWO_INPUTS, TWO_OUTPUTS, first='backend: "pytorch"\nplatform: "torch_aoti"')
BY_NAME = {one.name: one for one in FEATURES}


@pytest.fixture(scope="module")
def network() -> nn.Module:
    """A network with the inputs and outputs of ResNet-50."""
    return seeded(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 16, 16), nn.Flatten(), nn.Linear(8 * 14 * 14, 1000))
    )


@pytest.fixture(scope="module")
def images() -> Array:
    return np.random.default_rng(0).standard_normal((3, 3, 224, 224), dtype=np.float32)


@pytest.fixture(scope="module")
def expected(network: nn.Module, images: Array) -> Array:
    with torch.inference_mode():
        logits: Array = network(torch.from_numpy(images)).numpy()
    # Else mixed-up rows would pass for right ones.
    assert not np.allclose(logits[0], logits[1], rtol=1e-2, atol=1e-4)
    return logits


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, network: nn.Module) -> Path:
    """One traced file in three models, and the small ones."""
    root = tmp_path_factory.mktemp("drop_in") / "repository"
    traced = torch.jit.trace(network, torch.zeros(1, 3, 224, 224), check_trace=False)
    first: Path | None = None
    for name, config in CONFIGS.items():
        version = root / name / "1"
        version.mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config, encoding="utf-8")
        if first is None:
            first = version / "model.pt"
            traced.save(first)
        else:
            os.link(first, version / "model.pt")
    for feature in FEATURES:
        feature.lay_out(root)
    # Of any kind: Triton refuses the platform before a backend sees the model.
    Scenario("aoti", scenarios.script(seeded(Mixer)), AOTI).lay_out(root)
    return root


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server's backend folder, ours in it under both names; LibTorch's is not there."""
    folder = tmp_path_factory.mktemp("server") / "backends"
    triton_installation.populate_backends(triton_installation.find(), folder)
    command = ["install", "--backend-dir", str(folder), "--name", "pytorch"]
    result = CliRunner().invoke(cli.commands, command)
    assert result.exit_code == 0, result.output
    assert {entry.name for entry in folder.iterdir()} == {"python", "pytorch", "pytorch_py"}
    return folder


@pytest.fixture(scope="module")
def running(repository: Path, backends: Path) -> Iterator[tritonserver.Server]:
    with pytest.MonkeyPatch.context() as patch:
        # These configs leave the device to Triton; a GPU would round differently.
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        with started(repository.parent, f"--backend-directory={backends}") as one:
            ready = {state.name for state in one.models() if state.ready}
            assert ready - {"aoti"} == {*CONFIGS, *BY_NAME}
            yield one


def over_http(running: tritonserver.Server, model: str, images: Array) -> Array:
    with http.InferenceServerClient(running.http_address) as client:
        return infer(http, client, model, images)


def over_grpc(running: tritonserver.Server, model: str, images: Array) -> Array:
    with grpc.InferenceServerClient(running.grpc_address) as client:
        return infer(grpc, client, model, images)


def infer(protocol: Any, client: Any, model: str, images: Array) -> Array:
    inputs = infer_inputs(protocol, {"input__0": images})
    logits: Array = client.infer(model, inputs).as_numpy("output__0")
    return logits


Ask: TypeAlias = Callable[[tritonserver.Server, str, Array], Array]
both_protocols = pytest.mark.parametrize("ask", [over_http, over_grpc])


def test_config_without_our_name_is_triton_s_pytorch_backend(running: tritonserver.Server) -> None:
    with http.InferenceServerClient(running.http_address) as client:
        chosen = {name: client.get_model_config(name)["backend"] for name in CONFIGS}
    assert chosen == {
        "resnet50": "pytorch",
        "resnet50_tutorial": "pytorch",
    }


@both_protocols
@pytest.mark.parametrize("rows", [1, 3])
def test_batches_are_answered_as_by_the_network_itself(
    running: tritonserver.Server, images: Array, expected: Array, rows: int, ask: Ask
) -> None:
    logits = ask(running, "resnet50", images[:rows])
    np.testing.assert_allclose(logits, expected[:rows], rtol=1e-4, atol=1e-6)


@both_protocols
def test_reshape_gives_a_model_without_batches_its_batch_dimension(
    running: tritonserver.Server, images: Array, expected: Array, ask: Ask
) -> None:
    logits = ask(running, "resnet50_tutorial", images[1])
    assert logits.shape == (1, 1000, 1, 1)
    np.testing.assert_allclose(logits[:, :, 0, 0], expected[1:2], rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def serving(running: tritonserver.Server, repository: Path) -> Iterator[Serving]:
    log = repository.parent / "server.log"
    with (
        http.InferenceServerClient(running.http_address) as over_http,
        grpc.InferenceServerClient(running.grpc_address) as over_grpc,
    ):
        yield Serving(running, {}, over_http, over_grpc, log)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("feature", FEATURES, ids=lambda one: one.name)
def test_a_repository_s_own_way_is_served_as_it_is(
    serving: Serving, feature: Scenario, protocol: str
) -> None:
    assert serving.http.get_model_config(feature.name)["backend"] == "pytorch"
    for call in feature.calls:
        serving.check(protocol, feature.name, call)
    for batch in feature.batches:
        serving.check_together(feature.name, batch)
    for part in feature.logs:
        serving.until_logged(part)


def test_the_platform_torch_aoti(serving: Serving) -> None:
    """Servers that do not know it refuse it themselves."""
    refused = "unexpected 'platform' and 'backend' pair, got:torch_aoti, pytorch"
    ready = {state.name for state in serving.server.models() if state.ready}
    assert refused in serving.log or "aoti" in ready


def test_requests_of_one_batch_get_their_own_strings(serving: Serving) -> None:
    """With LibTorch every request in a batch gets the first one's."""
    calls = [said(["a"]), said(["bcd", "ef"])]
    before = executions(serving, "strings")
    with ThreadPoolExecutor(len(calls)) as clients:
        list(clients.map(lambda call: serving.check("grpc", "strings", call), calls))
    assert executions(serving, "strings", before + 1) == before + 1


def executions(serving: Serving, model: str, least: int = 0) -> int:
    """Calls of a model, once they stand still: Triton counts a batch after it has answered it."""
    seen: list[int] = []
    while len(seen) < 2 or seen[-1] != seen[-2] or seen[-1] < least:
        (statistics,) = serving.grpc.get_inference_statistics(model).model_stats
        seen.append(statistics.execution_count)
        time.sleep(0.5)
    return seen[-1]
