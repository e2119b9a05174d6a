"""What several instances of a model with large weights cost: memory, time to load, throughput.

    python -m benchmarks.sharing [--gigabytes 1] [--instances 1,2,4,8] [--ways shared,copied,aoti]
        [--pairs 3] [--seconds 10]
    python -m benchmarks.sharing --starts [--against CHECKOUT] [--gigabytes 1] [--pairs 3]

Three ways to serve the same file: "shared", which is what our backend does by itself; "copied",
with ENABLE_WEIGHT_SHARING false; and "by hand", a Python-based backend model that builds its module
and calls load_state_dict. A fourth one is "aoti", shared weights with OPTIMIZE "aoti". Memory is
the proportional set size (PSS) of the instances after each has answered, so that its weights are in
memory, without that of as many instances of a tiny model. Load times take turns, and so do
throughputs, of two servers that are up together (A B A B …).

`--starts` measures starts of several instances, with this checkout's backend and with another one's
in turn: the largest PSS of tritonserver and four instances that load TorchScript, above that of a
tiny model, and the time that two instances take to compile a transformer without any cache.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import safetensors.torch
import torch
import tritonclient.grpc
from torch import nn

from benchmarks import harness, repositories, stubs
from benchmarks.payloads import Payload, Tensor
from benchmarks.tables import markdown, spread
from torch_py_backend.server import Server

if TYPE_CHECKING:
    from typing_extensions import Self


_NAME = "large"
_WIDTH = 4096
_LAYER_BYTES = 4 * _WIDTH * _WIDTH
_WAYS = "shared,copied,by hand"

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
    if way == "aoti":
        config += _PARAMETER.format(key="OPTIMIZE", value="aoti")
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
    parser.add_argument("--ways", default=_WAYS)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--starts", action="store_true")
    parser.add_argument("--against", type=Path, help="another checkout, for --starts")
    settings = parser.parse_args(words)
    layers = max(1, round(settings.gigabytes * 1e9 / _LAYER_BYTES))
    if settings.starts:
        checkouts = {"this": stubs.ROOT}
        if settings.against is not None:
            checkouts["other"] = settings.against.absolute()
        print(_starts(layers, checkouts, settings.pairs))
        return
    counts = [int(count) for count in settings.instances.split(",")]
    ways = settings.ways.split(",")
    with harness.scratch() as scratch:
        large, tiny = Path(scratch) / "large.safetensors", Path(scratch) / "tiny.safetensors"
        save(large, layers)
        save(tiny, 0)
        print(f"W = {large.stat().st_size / 1e9:.2f} GB, {layers} layers; {torch.__version__}\n")
        _check(ways, large, layers)
        rows = [(str(count), *_memory(ways, large, tiny, layers, count)) for count in counts]
        print(markdown(("instances", *(f"{way}, ÷ W" for way in ways)), rows))
        print(_times(ways, large, layers, settings.pairs))
        print(_throughput(large, layers, settings.pairs, settings.seconds))


def _check(ways: Sequence[str], large: Path, layers: int) -> None:
    """Compare the outputs of all ways with PyTorch's."""
    state = safetensors.torch.load_file(large)
    request = payload(layers)["x"].array
    x = torch.from_numpy(request)
    with torch.inference_mode():
        for number in range(layers):
            x = nn.functional.linear(x, state[f"layers.{number}.weight"])
    for way in ways:
        with (
            started(way, large, layers, 1) as (server, _),
            tritonclient.grpc.InferenceServerClient(server.grpc_address) as client,
        ):
            tensor = tritonclient.grpc.InferInput("x", [1, _WIDTH], "FP32")
            output = client.infer(_NAME, [tensor.set_data_from_numpy(request)]).as_numpy("y")
        np.testing.assert_allclose(output, x.numpy(), rtol=1e-4, atol=1e-5)


def _memory(ways: Sequence[str], large: Path, tiny: Path, layers: int, count: int) -> Iterator[str]:
    """Yield the memory of each way in multiples of the weights."""
    for way in ways:
        sizes = []
        for path, used in ((tiny, 0), (large, layers)):
            with started(way, path, used, count) as (server, _):
                load(server, used, 2 * count, 2.0 + count)
                sizes.append(memory(server))
        yield f"{(sizes[1] - sizes[0]) / large.stat().st_size:.2f}"


def _times(ways: Sequence[str], large: Path, layers: int, turns: int) -> str:
    count = 4
    seconds: dict[str, list[float]] = {way: [] for way in ways}
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


# --- starts of several instances ---------------------------------------------------------------


class _Peak(threading.Thread):
    """Records the largest PSS of all processes that this one has started, until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self._stopped = threading.Event()

    def run(self) -> None:
        """Look every tenth of a second."""
        while not self._stopped.wait(0.1):
            total = 0
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error, OSError):
                    total += process.memory_full_info().pss
            self.most = max(self.most, total)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join()


def _starts(layers: int, checkouts: Mapping[str, Path], turns: int) -> str:
    """Return a table of the starts of each version, in turn."""
    figures: dict[tuple[str, str], list[float]] = defaultdict(list)
    with harness.scratch() as scratch:
        large, tiny = (save_script(Path(scratch, str(count)), count) for count in (layers, 0))
        least = {name: _script_start(tiny, checkout)[0] for name, checkout in checkouts.items()}
        for _, (name, checkout) in itertools.product(range(turns), checkouts.items()):
            most, seconds = _script_start(large, checkout)
            peak = (most - least[name]) / large.stat().st_size
            figures["TorchScript, 4 instances, peak ÷ W", name].append(peak)
            figures["TorchScript, 4 instances, s to READY", name].append(seconds)
            seconds, processor = _cold_start(checkout)
            figures["compiled, 2 instances, cold, s to READY", name].append(seconds)
            figures["compiled, 2 instances, cold, s of CPU", name].append(processor)
    rows = [
        (
            figure,
            name,
            spread(values).text(2),
            spread(_over(values, figures[figure, "this"])).text(2),
        )
        for (figure, name), values in figures.items()
    ]
    return markdown(("start", "version", "median (least..most)", "÷ this"), rows)


def _over(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value / other for value, other in zip(values, others, strict=True)]


def save_script(folder: Path, layers: int) -> Path:
    """Write a TorchScript model of large layers, or a tiny one without."""
    width = _WIDTH if layers else 4
    torch.manual_seed(0)
    count = layers or 1
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    config = _CONFIG.format(backend="pytorch_py", width=width, instances=4)
    config += _PARAMETER.format(key="NUM_THREADS", value="1")
    path = harness.write_model(folder / _NAME, config, {}) / "model.pt"
    torch.jit.trace(module.eval(), torch.zeros(1, width)).save(str(path))
    return path


def _script_start(path: Path, checkout: Path) -> tuple[int, float]:
    """Return the largest PSS while a model is loaded, and the seconds to READY."""
    repository = path.parents[2]
    start = time.perf_counter()
    with _Peak() as peak, stubs.served(repository, {"pytorch_py": checkout}):
        seconds = time.perf_counter() - start
    return peak.most, seconds


def _cold_start(checkout: Path) -> tuple[float, float]:
    """Return the seconds to READY of two compiled instances, and those of all processors."""
    with harness.scratch() as scratch:
        repository, cache = Path(scratch, "repository"), Path(scratch, "inductor")
        repositories.write("transformer", repository)
        config = repository / "transformer" / "config.pbtxt"
        text = config.read_text().replace("count: 1", "count: 2")
        option = _PARAMETER.format(key="TORCH_COMPILE_OPTIONAL_PARAMETERS", value="{}")
        config.write_text(text + option)
        # Without a folder for temporary files of its own, torch finds headers that an earlier start
        # has precompiled.
        temporary = Path(scratch, "temporary")
        temporary.mkdir()
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TMPDIR": str(temporary)}
        before, start = _processor_seconds(), time.perf_counter()
        with stubs.served(repository, {"pytorch_py": checkout}, variables):
            seconds = time.perf_counter() - start
        return seconds, _processor_seconds() - before


def _processor_seconds() -> float:
    """Return the CPU time of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main(sys.argv[1:])
