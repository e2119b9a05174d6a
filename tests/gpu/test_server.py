"""A real tritonserver with its instances on a GPU: answers, sequences, streams, memory.

`make gpu-site` packs the server for a bare machine. With GPU_DEVICE=cpu, the tests without the mark
`_CUDA` run on the CPU, which proves that they run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import scenarios
import torch
from scenarios import Call, Scenario

from torch_py_backend.errors import ToolError

_ON_CPU = os.environ.get("GPU_DEVICE") == "cpu"
_NO_GPU = not torch.cuda.is_available()
_CUDA = pytest.mark.skipif(_NO_GPU, reason="no CUDA device on this machine")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.server,
    pytest.mark.skipif(_NO_GPU and not _ON_CPU, reason="no CUDA device on this machine"),
]

try:
    from torch_py_backend.server import installation

    installation.TritonInstallation()
    import grpc_streams
    import streamed
    import tritonclient.grpc
    from serving import Serving, asked, check, check_together
except (ToolError, ModuleNotFoundError) as error:
    pytest.skip(f"{error} (make gpu-site)", allow_module_level=True)


def _affine(name: str, instances: int, **parameters: str) -> Scenario:
    more = f"instance_group [{{ kind: KIND_CPU count: {instances} }}]\n"
    config = scenarios.config({"x": [4]}, {"y": [3]}, parameters=parameters, more=more)
    return Scenario(name, scenarios.affine_files(), config)


_X = np.arange(4, dtype=np.float32)[None]
_Y = scenarios.eager(scenarios.affine(), x=_X)
# On the CPU, tests/live/ has the others.
_EACH = 1 if _ON_CPU else 3
_TABLES = (scenarios.NAMES, scenarios.FILES, scenarios.BATCHES, scenarios.SEQUENCES)
_SINGLE = [one for table in _TABLES for one in table[:_EACH]]
_STREAMED = [one for one in streamed.TABLE if one.scenario.name in ("continuous", "rows")][:_EACH]
_SHARED = _affine("shared", 2, ENABLE_WEIGHT_SHARING="true")
_ON_GPU = _affine("on_gpu", 1, FORCE_CPU_ONLY_INPUT_TENSORS="no")


def _lay_out(scenario: Scenario, folder: Path) -> None:
    kind = "KIND_CPU" if _ON_CPU else "KIND_GPU"
    config = scenario.config.replace("KIND_CPU", kind)
    dataclasses.replace(scenario, config=config).lay_out(folder / "repository")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("gpu")
    for scenario in (*_SINGLE, *(one.scenario for one in _STREAMED), _SHARED, _ON_GPU):
        _lay_out(scenario, folder)
    with asked(folder) as running:
        yield running


@pytest.mark.parametrize("scenario", _SINGLE, ids=lambda one: one.name)
def test_the_table_of_scenarios(scenario: Scenario, serving: Serving) -> None:
    state = serving.states[scenario.name]
    assert state.ready, state.reason
    for call in scenario.calls:
        check(serving.grpc, scenario.name, call)


@pytest.mark.parametrize("one", _STREAMED, ids=lambda one: one.scenario.name)
def test_the_table_of_streams(one: streamed.Streamed, serving: Serving) -> None:
    client = grpc_streams.connect(serving.server)
    for stream in one.streams:
        grpc_streams.check(client, one.scenario.name, stream)
    client.channel.close()


def test_instances_that_share_their_weights_answer_at_the_same_time(serving: Serving) -> None:
    check_together(serving.grpc, "shared", [Call({"x": _X}, {"y": _Y})] * 32)
    if not _ON_CPU:
        assert serving.log.count("shared by the instances on a GPU") == 2


@_CUDA
def test_a_client_s_cuda_shared_memory_has_inputs_and_outputs(serving: Serving) -> None:
    try:
        from tritonclient.utils import cuda_shared_memory as memory
    except (ImportError, RuntimeError) as error:  # its own error without cuda-bindings
        pytest.skip(f"tritonclient has no CUDA shared memory: {error}")
    with contextlib.ExitStack() as stack:
        for name, size in (("in", _X.nbytes), ("out", _Y.nbytes)):
            region = memory.create_shared_memory_region(name, size, 0)
            stack.callback(memory.destroy_shared_memory_region, region)
            handle = memory.get_raw_handle(region)
            serving.grpc.register_cuda_shared_memory(name, handle, 0, size)
            stack.callback(serving.grpc.unregister_cuda_shared_memory, name)
            if name == "in":
                memory.set_shared_memory_region(region, [_X])
        sent = tritonclient.grpc.InferInput("x", [1, 4], "FP32")
        sent.set_shared_memory("in", _X.nbytes)
        wanted = tritonclient.grpc.InferRequestedOutput("y")
        wanted.set_shared_memory("out", _Y.nbytes)
        serving.grpc.infer("on_gpu", [sent], outputs=[wanted])
        answer = memory.get_contents_as_numpy(region, np.float32, [1, 3])
        np.testing.assert_allclose(answer, _Y, rtol=1e-3, atol=1e-4)
