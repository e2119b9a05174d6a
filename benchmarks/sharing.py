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
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import safetensors.torch
import torch
import tritonclient.grpc
from torch import nn

from benchmarks import harness
from benchmarks.payloads import Payload, Tensor
from benchmarks.tables import markdown, spread
from torch_py_backend.server import Server

_NAME = "large"
_WIDTH = 4096
_LAYER_BYTES = 4 * _WIDTH * _WIDTH
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
    """Write the model, served in one of the ways; the file of weights is linked, not copied."""
    width = _WIDTH if layers else 4
    backend = "python" if way == "by hand" else "pytorch_py"
    config = _CONFIG.format(backend=backend, width=width, instances=instances)
    layers = layers or 1
    if way == "by hand":
        files = {"network.py": _MODULE, "model.py": _BY_HAND.format(layers=layers, width=width)}
    else:
        files = {"model.py": _MODULE}
        keywords = f'{{\\"layers\\": {layers}, \\"width\\": {width}}}'
        config += _PARAMETER.format(key="MODEL_KWARGS", value=keywords)
        config += _PARAMETER.format(key="NUM_THREADS", value="1")
    if way == "copied":
        config += _PARAMETER.format(key="ENABLE_WEIGHT_SHARING", value="false")
    version = harness.write_model(repository / _NAME, config, files)
    (version / "model.safetensors").hardlink_to(weights)


def save(path: Path, layers: int) -> None:
    """Write the file of weights; the same each time."""
    torch.manual_seed(0)
    width = _WIDTH if layers else 4
    state = {
        f"layers.{number}.weight": torch.randn(width, width) / width**0.5
        for number in range(layers or 1)
    }
    safetensors.torch.save_file(state, path)


@contextlib.contextmanager
def started(way: str, weights: Path, layers: int, instances: int) -> Iterator[tuple[Server, float]]:
    """Yield a server with the model, and the seconds from its start to READY."""
    with harness.scratch() as scratch:
        repository = Path(scratch) / "repository"
        write(repository, way, weights, layers, instances)
        start = time.perf_counter()
        with harness.served(repository) as server:
            yield server, time.perf_counter() - start


def payload(layers: int) -> Payload:
    """One request."""
    row = np.linspace(-1, 1, _WIDTH if layers else 4, dtype=np.float32)
    return {"x": Tensor("FP32", row[None])}


def load(server: Server, layers: int, concurrency: int, seconds: float) -> float:
    """Put a load on a server; return its requests per second."""
    payloads = [payload(layers)]
    return harness.load(
        server.grpc_address, _NAME, payloads, concurrency, seconds
    ).result.throughput


def memory(server: Server) -> int:
    """Bytes of all instances' PSS."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    return sum(process.memory_full_info().pss for process in family)


def main(words: list[str]) -> None:
    """Measure, and print three tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--instances", default="1,2,4,8")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    settings = parser.parse_args(words)
    layers = max(1, round(settings.gigabytes * 1e9 / _LAYER_BYTES))
    counts = [int(count) for count in settings.instances.split(",")]
    with harness.scratch() as scratch:
        large, tiny = Path(scratch) / "large.safetensors", Path(scratch) / "tiny.safetensors"
        save(large, layers)
        save(tiny, 0)
        print(f"W = {large.stat().st_size / 1e9:.2f} GB, {layers} layers; {torch.__version__}\n")
        _check(large, layers)
        rows = [(str(count), *_memory(large, tiny, layers, count)) for count in counts]
        print(markdown(("instances", *(f"{way}, ÷ W" for way in WAYS)), rows))
        print(_times(large, layers, settings.pairs))
        print(_throughput(large, layers, settings.pairs, settings.seconds))


def _check(large: Path, layers: int) -> None:
    """Compare the outputs of all ways with PyTorch's."""
    state = safetensors.torch.load_file(large)
    request = payload(layers)["x"].array
    x = torch.from_numpy(request)
    with torch.inference_mode():
        for number in range(layers):
            x = nn.functional.linear(x, state[f"layers.{number}.weight"])
    for way in WAYS:
        with (
            started(way, large, layers, 1) as (server, _),
            tritonclient.grpc.InferenceServerClient(server.grpc_address) as client,
        ):
            tensor = tritonclient.grpc.InferInput("x", [1, _WIDTH], "FP32")
            output = client.infer(_NAME, [tensor.set_data_from_numpy(request)]).as_numpy("y")
        np.testing.assert_allclose(output, x.numpy(), rtol=1e-4, atol=1e-5)


def _memory(large: Path, tiny: Path, layers: int, count: int) -> Iterator[str]:
    """Yield the memory of each way in multiples of the weights."""
    for way in WAYS:
        sizes = []
        for path, used in ((tiny, 0), (large, layers)):
            with started(way, path, used, count) as (server, _):
                load(server, used, 2 * count, 2.0 + count)
                sizes.append(memory(server))
        yield f"{(sizes[1] - sizes[0]) / large.stat().st_size:.2f}"


def _times(large: Path, layers: int, turns: int) -> str:
    count = 4
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(turns):
        for way, values in seconds.items():
            with started(way, large, layers, count) as (_, to_ready):
                values.append(to_ready)
    rows = []
    for way, values in seconds.items():
        ratios = [ours / other for ours, other in zip(seconds["shared"], values, strict=True)]
        rows.append((way, f"{spread(values).median:.1f}", f"{spread(ratios).median:.2f}"))
    return "\n" + markdown((f"{count} instances, to READY", "seconds", "shared ÷ it"), rows)


def _throughput(large: Path, layers: int, turns: int, seconds: float) -> str:
    count = 2
    rates: dict[str, list[float]] = {"shared": [], "copied": []}
    with contextlib.ExitStack() as stack:
        servers = {way: stack.enter_context(started(way, large, layers, count))[0] for way in rates}
        for server in servers.values():
            load(server, layers, count, seconds)  # a warm-up
        for _ in range(turns):
            for way, values in rates.items():
                values.append(load(servers[way], layers, count, seconds))
    ratios = [ours / other for ours, other in zip(*rates.values(), strict=True)]
    rows = [
        (way, f"{spread(values).median:.2f}", spread(ratios).text(3) if way == "shared" else "")
        for way, values in rates.items()
    ]
    return "\n" + markdown((f"{count} instances", "requests/s", "shared ÷ copied"), rows)


if __name__ == "__main__":
    main(sys.argv[1:])
