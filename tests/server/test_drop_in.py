"""Repositories written for Triton's C++ LibTorch backend, served unchanged: ResNet-50.

`install --name pytorch` puts our backend where Triton looks for LibTorch's. The first config below
is the one in the manner of Triton's documentation, the last the one of its PyTorch tutorial.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from resnet50 import ResNet50
from tritonclient import grpc, http
from typer.testing import CliRunner

from torch_py_backend import cli, server

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

OURS = LIBTORCH.replace('platform: "pytorch_libtorch"', 'backend: "pytorch_py"').replace(
    'name: "resnet50"', 'name: "resnet50_pytorch_py"'
)

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

CONFIGS = {"resnet50": LIBTORCH, "resnet50_pytorch_py": OURS, "resnet50_tutorial": TUTORIAL}

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def network() -> ResNet50:
    """Random weights, the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ResNet50().eval()


@pytest.fixture(scope="module")
def images() -> Array:
    return np.random.default_rng(0).standard_normal((3, 3, 224, 224), dtype=np.float32)


@pytest.fixture(scope="module")
def expected(network: ResNet50, images: Array) -> Array:
    with torch.inference_mode():
        logits: Array = network(torch.from_numpy(images)).numpy()
    # Else mixed-up rows would pass for right ones.
    assert not np.allclose(logits[0], logits[1], rtol=1e-2, atol=1e-4)
    return logits


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, network: ResNet50) -> Path:
    """One traced file in three models."""
    root = tmp_path_factory.mktemp("repository")
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
    return root


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server's backend folder, ours in it under both names; LibTorch's is not there."""
    folder = tmp_path_factory.mktemp("server") / "backends"
    server.lay_out(server.find(), folder)
    command = ["install", "--backend-dir", str(folder), "--name", "pytorch"]
    result = CliRunner().invoke(cli.commands, command)
    assert result.exit_code == 0, result.output
    assert {entry.name for entry in folder.iterdir()} == {"python", "pytorch", "pytorch_py"}
    return folder


@pytest.fixture(scope="module")
def running(repository: Path, backends: Path) -> Iterator[server.Server]:
    log = backends.parent / "server.log"
    with pytest.MonkeyPatch.context() as patch, log.open("wb") as file:
        # These configs leave the device to Triton; a GPU would round differently.
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        one = server.Server(
            repository,
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            log=file,
            arguments=[f"--backend-directory={backends}"],
        )
        with one:
            states = one.wait_loaded(timeout=200)
            assert all(state.ready for state in states), (states, log.read_text(errors="replace"))
            assert {state.name for state in states} == set(CONFIGS)
            yield one


def over_http(running: server.Server, model: str, images: Array) -> Array:
    with http.InferenceServerClient(running.http_address) as client:
        return infer(http, client, model, images)


def over_grpc(running: server.Server, model: str, images: Array) -> Array:
    with grpc.InferenceServerClient(running.grpc_address) as client:
        return infer(grpc, client, model, images)


def infer(protocol: Any, client: Any, model: str, images: Array) -> Array:
    sent = protocol.InferInput("input__0", list(images.shape), "FP32")
    sent.set_data_from_numpy(images)
    logits: Array = client.infer(model, [sent]).as_numpy("output__0")
    return logits


Ask: TypeAlias = Callable[[server.Server, str, Array], Array]
both_protocols = pytest.mark.parametrize("ask", [over_http, over_grpc])


def test_config_without_our_name_is_triton_s_pytorch_backend(running: server.Server) -> None:
    with http.InferenceServerClient(running.http_address) as client:
        chosen = {name: client.get_model_config(name)["backend"] for name in CONFIGS}
    assert chosen == {
        "resnet50": "pytorch",
        "resnet50_pytorch_py": "pytorch_py",
        "resnet50_tutorial": "pytorch",
    }


@both_protocols
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("model", ["resnet50", "resnet50_pytorch_py"])
def test_batches_are_answered_as_by_the_network_itself(
    running: server.Server, images: Array, expected: Array, model: str, rows: int, ask: Ask
) -> None:
    logits = ask(running, model, images[:rows])
    np.testing.assert_allclose(logits, expected[:rows], rtol=1e-4, atol=1e-6)


@both_protocols
def test_reshape_gives_a_model_without_batches_its_batch_dimension(
    running: server.Server, images: Array, expected: Array, ask: Ask
) -> None:
    logits = ask(running, "resnet50_tutorial", images[1])
    assert logits.shape == (1, 1000, 1, 1)
    np.testing.assert_allclose(logits[:, :, 0, 0], expected[1:2], rtol=1e-4, atol=1e-6)
