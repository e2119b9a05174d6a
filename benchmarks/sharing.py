"""What several instances of a model with large weights cost: memory, time to load, throughput.

    python -m benchmarks.sharing [--gigabytes 1] [--instances 1,2,4,8] [--pairs 3] [--seconds 10]

Three ways to serve the same file: "shared", which is what our backend does by itself; "copied",
with ENABLE_WEIGHT_SHARING false; and "by hand", a Python-based backend model that builds its module
and calls load_state_dict. Memory is the proportional set size (PSS) of the instances after each has
answered, so that its weights are in memory, without that of as many instances of a tiny model. Load
times take turns, and so do throughputs, of two servers that are up together (A B A B …).
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import safetensors.torch
import torch
from rich.console import Console
from torch import nn

from benchmarks import clients
from torch_py_backend.errors import BenchError
from torch_py_backend.server import Server
from torch_py_backend.tools.load_generator import Result
from torch_py_backend.tools.payloads import Payload, Tensor

_NAME = "large"
_WIDTH = 4096
_LAYER_BYTES = 4 * _WIDTH * _WIDTH
_LOAD_SECONDS = 600
WAYS = ("shared", "copied", "by hand")

_MODULE = """
from torch import nn


class Large(nn.Module):
    def __init__(self, layers, width):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def forward(self, x):
        return self.layers(x)
"""
_BY_HAND = """
import network
import numpy as np
import safetensors.torch
import torch
import triton_python_backend_utils as pb_utils
from pathlib import Path


class TritonPythonModel:
    def initialize(self, args):
        torch.set_num_threads(1)
        self.model = network.Large({layers}, {width})
        path = Path(__file__).with_name("model.safetensors")
        self.model.load_state_dict(safetensors.torch.load_file(path))

    def execute(self, requests):
        answers = []
        for request in requests:
            x = torch.from_numpy(pb_utils.get_input_tensor_by_name(request, "x").as_numpy())
            with torch.inference_mode():
                y = self.model(x)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y.numpy())]))
        return answers
"""
_CONFIG = """\
backend: "{backend}"
max_batch_size: 8
input [{{ name: "x" data_type: TYPE_FP32 dims: [{width}] }}]
output [{{ name: "y" data_type: TYPE_FP32 dims: [{width}] }}]
instance_group [{{ kind: KIND_CPU count: {instances} }}]
"""
_PARAMETER = 'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def write(repository: Path, way: str, weights: Path, layers: int, instances: int) -> None:
    """The model, served in one of the ways; the file of weights is linked, not copied."""
    version = repository / _NAME / "1"
    version.mkdir(parents=True)
    (version / "model.safetensors").hardlink_to(weights)
    width = _WIDTH if layers else 4
    backend = "python" if way == "by hand" else "pytorch_py"
    text = _CONFIG.format(backend=backend, width=width, instances=instances)
    layers = layers or 1
    if way == "by hand":
        (version / "network.py").write_text(_MODULE)
        (version / "model.py").write_text(_BY_HAND.format(layers=layers, width=width))
    else:
        (version / "model.py").write_text(_MODULE)
        keywords = f'{{\\"layers\\": {layers}, \\"width\\": {width}}}'
        text += _PARAMETER.format(key="MODEL_KWARGS", value=keywords)
        text += _PARAMETER.format(key="NUM_THREADS", value="1")
    if way == "copied":
        text += _PARAMETER.format(key="ENABLE_WEIGHT_SHARING", value="false")
    (version.parent / "config.pbtxt").write_text(text)


def save(path: Path, layers: int) -> None:
    """The file of weights; the same each time."""
    torch.manual_seed(0)
    width = _WIDTH if layers else 4
    state = {
        f"layers.{number}.weight": torch.randn(width, width) / width**0.5
        for number in range(layers or 1)
    }
    safetensors.torch.save_file(state, path)


@contextlib.contextmanager
def started(way: str, weights: Path, layers: int, instances: int) -> Iterator[tuple[Server, float]]:
    """A server with the model, and the seconds from its start to READY."""
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        repository = Path(scratch) / "repository"
        write(repository, way, weights, layers, instances)
        begun = time.perf_counter()
        with (
            (Path(scratch) / "server.log").open("wb") as log,
            Server(repository, http_port=0, grpc_port=0, metrics_port=0, log=log) as server,
        ):
            (state,) = server.wait_loaded(timeout=_LOAD_SECONDS)
            if not state.ready:
                raise BenchError(f"{_NAME} was not loaded: {state.reason}")
            yield server, time.perf_counter() - begun


def payload(layers: int) -> Payload:
    """One request."""
    row = np.linspace(-1, 1, _WIDTH if layers else 4, dtype=np.float32)
    return {"x": Tensor("FP32", row[None])}


def ask(server: Server, layers: int, concurrency: int, seconds: float) -> Result:
    """Put a load on a server."""
    return clients.load(server.grpc_address, _NAME, [payload(layers)], concurrency, seconds)


def memory(server: Server) -> int:
    """Bytes of all instances' PSS."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    return sum(one.memory_full_info().pss for one in family)


def main(words: list[str]) -> int:
    """Measure, and print three tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--instances", default="1,2,4,8")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    settings = parser.parse_args(words)
    layers = max(1, round(settings.gigabytes * 1e9 / _LAYER_BYTES))
    counts = [int(count) for count in settings.instances.split(",")]
    told = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        large, tiny = Path(scratch) / "large.safetensors", Path(scratch) / "tiny.safetensors"
        save(large, layers)
        save(tiny, 0)
        size = large.stat().st_size
        print(f"W = {size / 1e9:.2f} GB, {layers} layers; torch {torch.__version__}\n")
        _check(large, layers)
        _memory(told, large, tiny, layers, counts)
        _times(told, large, layers, settings.pairs)
        _throughput(large, layers, settings.pairs, settings.seconds)
    return 0


def _check(large: Path, layers: int) -> None:
    """All ways answer what PyTorch does."""
    state = safetensors.torch.load_file(large)
    x = torch.from_numpy(payload(layers)["x"].array)
    with torch.inference_mode():
        for number in range(layers):
            x = nn.functional.linear(x, state[f"layers.{number}.weight"])
    for way in WAYS:
        with started(way, large, layers, 1) as (server, _):
            import tritonclient.grpc  # noqa: PLC0415  not on every machine

            connection = tritonclient.grpc.InferenceServerClient(server.grpc_address)
            sent = tritonclient.grpc.InferInput("x", [1, _WIDTH], "FP32")
            sent.set_data_from_numpy(payload(layers)["x"].array)
            came = connection.infer(_NAME, [sent]).as_numpy("y")
            connection.close()
        np.testing.assert_allclose(came, x.numpy(), rtol=1e-4, atol=1e-5)


def _memory(told: Console, large: Path, tiny: Path, layers: int, counts: list[int]) -> None:
    print("| instances | " + " | ".join(f"{way}, ÷ W" for way in WAYS) + " |")
    print("|---|" + "---|" * len(WAYS))
    size = large.stat().st_size
    for count in counts:
        ratios = []
        for way in WAYS:
            taken = []
            for path, used in ((tiny, 0), (large, layers)):
                with started(way, path, used, count) as (server, _):
                    ask(server, used, 2 * count, 2.0 + count)
                    taken.append(memory(server))
            ratios.append((taken[1] - taken[0]) / size)
            told.print(f"{count} instances, {way}: {ratios[-1]:.2f} W")
        print(f"| {count} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")


def _times(told: Console, large: Path, layers: int, turns: int) -> None:
    count = 4
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(turns):
        for way in WAYS:
            with started(way, large, layers, count) as (_, taken):
                seconds[way].append(taken)
                told.print(f"{count} instances, {way}: READY after {taken:.1f} s")
    print(f"\n| {count} instances, to READY | seconds | shared ÷ it |")
    print("|---|---|---|")
    for way, values in seconds.items():
        ratios = [mine / other for mine, other in zip(seconds["shared"], values, strict=True)]
        middle = statistics.median(values)
        print(f"| {way} | {middle:.1f} | {statistics.median(ratios):.2f} |")


def _throughput(large: Path, layers: int, turns: int, seconds: float) -> None:
    count = 2
    found: dict[str, list[float]] = {"shared": [], "copied": []}
    with contextlib.ExitStack() as stack:
        servers = {way: stack.enter_context(started(way, large, layers, count))[0] for way in found}
        for way in found:
            ask(servers[way], layers, count, seconds)
        for _ in range(turns):
            for way, values in found.items():
                values.append(ask(servers[way], layers, count, seconds).throughput)
    pairs = zip(found["shared"], found["copied"], strict=True)
    ratios = [mine / other for mine, other in pairs]
    told = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})"
    print(f"\n| {count} instances | requests/s | shared ÷ copied |")
    print("|---|---|---|")
    for way, values in found.items():
        print(f"| {way} | {statistics.median(values):.2f} | {told if way == 'shared' else ''} |")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
