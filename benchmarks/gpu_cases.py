"""Measure this package on a GPU, in one process and without a server.

    python -m benchmarks.gpu_cases CASE [OF] [MODE] [--device cuda] [--small]

prints each figure as a line of JSON as soon as it is known. `benchmarks.gpu` runs the cases and the
tests. Requests and responses are those of `tests/fake_triton.py`, so `tests` must be importable.
With `--small` the models are tiny; that, and the CPU, only prove that the program runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import fake_triton
import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

sys.modules.setdefault("triton_python_backend_utils", fake_triton)

import build  # noqa: E402  the adapter imports Triton's utilities
import children  # noqa: E402

from benchmarks import networks  # noqa: E402
from torch_py_backend.adapter import TritonPythonModel  # noqa: E402
from torch_py_backend.batching import runtime  # noqa: E402
from torch_py_backend.config import model_config, threads  # noqa: E402
from torch_py_backend.config.options import Options  # noqa: E402
from torch_py_backend.engine import plain_call  # noqa: E402
from torch_py_backend.engine.engine import Engine  # noqa: E402
from torch_py_backend.startup import builder, warmup  # noqa: E402

ROUNDS, SECONDS = 5, 0.3
_MEGABYTE = 1 << 20
_LARGE = 16  # MiB, from which on a copy is to reach the rate of the bus
_IMAGE, _SCORES = (3, 224, 224), (1000,)
_TINY = {"width": 64, "depth": 1}
# ViT has positions for the patches of its images.
_SMALL_DIMS: dict[tuple[int, ...], tuple[int, ...]] = {_IMAGE: (3, 32, 32)}


@dataclass(frozen=True)
class Subject:
    """A network of a measurement.

    Attributes:
        network: its class in `networks`.
        dims: one row of its input.
        dtype: Triton's name of the input's type.
        output: one row of its output.
        arguments: arguments of its class.
        small: its arguments with `--small`.
    """

    network: str
    dims: tuple[int, ...]
    dtype: str
    output: tuple[int, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)

    def shrink(self) -> Subject:
        """Return the subject with a tiny network."""
        dims = self.dims if self.network == "ViT" else _SMALL_DIMS.get(self.dims, self.dims)
        output = self.output if self.output == _SCORES else (*self.output[:-1], _TINY["width"])
        return Subject(self.network, dims, self.dtype, output, self.small)

    def module(self) -> nn.Module:
        """Return the network in eval mode, with the same weights in every process."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            made: nn.Module = getattr(networks, self.network)(**self.arguments).eval()
            return made

    def rows(self, count: int) -> list[np.ndarray[Any, Any]]:
        """Return one input of one row for each of several requests."""
        source = np.random.default_rng(0)
        shape = (1, *self.dims)
        if self.dtype == "INT64":
            return [source.integers(0, 30000, shape, dtype=np.int64) for _ in range(count)]
        return [source.random(shape, dtype=np.float32) for _ in range(count)]


SUBJECTS = {
    "ResNet-50": Subject("ResNet50", _IMAGE, "FP32", _SCORES, small={"blocks": (1, 1)}),
    "ViT-B": Subject("ViT", _IMAGE, "FP32", _SCORES, small=_TINY),
    "BERT-base": Subject("Bert", (128,), "INT64", (128, 768), small=_TINY),
    "ViT-S": Subject("ViT", _IMAGE, "FP32", _SCORES, {"width": 384}, small=_TINY),
    "ConvNeXt-T": Subject("ConvNeXt", _IMAGE, "FP32", _SCORES, small={"blocks": (1,)}),
}

# A figure of a case: its name, and what it means.
Figure: TypeAlias = dict[str, object]


class Bench:
    """The device, the sizes and a scratch folder of one case."""

    def __init__(self, device: str, folder: Path, *, small: bool, of: str, mode: str) -> None:
        self.device, self.folder, self.small = torch.device(device), folder, small
        self.of, self.mode = of, mode
        self.seconds = 0.05 if small else SECONDS
        self.rounds = 2 if small else ROUNDS

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def subject(self) -> Subject:
        return SUBJECTS[self.of].shrink() if self.small else SUBJECTS[self.of]

    def sync(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def rates(self, contenders: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Return the calls per second of each contender in each round, A B A B."""
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for call in contenders.values():
            for _ in range(3):
                call()
        for _ in range(self.rounds):
            for name, call in contenders.items():
                self.sync()
                began, calls = time.perf_counter(), 0
                while time.perf_counter() - began < self.seconds:
                    call()
                    calls += 1
                self.sync()
                rates[name].append(calls / (time.perf_counter() - began))
        return rates

    def arguments(self, subject: Subject, batch: int, **parameters: str) -> dict[str, str]:
        """Write a model folder; return Triton's arguments of initialize()."""
        version = Path(tempfile.mkdtemp(dir=self.folder)) / "net" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(Path(networks.__file__).read_text())
        safetensors.torch.save_file(subject.module().state_dict(), version / "model.safetensors")
        options = {
            "MODEL_CLASS": subject.network,
            "MODEL_KWARGS": json.dumps(subject.arguments),
            **parameters,
        }
        kind = "GPU" if self.on_gpu else "CPU"
        arguments = build.arguments(
            max_batch_size=batch,
            input=[{"name": "x", "data_type": f"TYPE_{subject.dtype}", "dims": list(subject.dims)}],
            output=[{"name": "y", "data_type": "TYPE_FP32", "dims": list(subject.output)}],
            instance_group=[{"name": "net", "kind": f"KIND_{kind}", "count": 1, "gpus": []}],
            parameters={key: {"string_value": value} for key, value in options.items()},
        )
        return arguments | {
            "model_repository": str(version.parent),
            "model_instance_kind": kind,
        }

    def engine(self, subject: Subject, batch: int, **parameters: str) -> Engine:
        """Return the engine of a model, warmed up."""
        arguments = self.arguments(subject, batch, **parameters)
        config = model_config.parse(arguments)
        engine = builder.build(config, threads.budget(config))
        warmup.run(engine)
        return engine


# --- cases -----------------------------------------------------------------------------------


def served(bench: Bench) -> Iterator[Figure]:
    """Throughput of execute() ÷ a loop over the same module and batches, both from host memory."""
    subject = bench.subject()
    model = TritonPythonModel()
    model.initialize(bench.arguments(subject, 32))
    module = subject.module().to(bench.device)
    for batch in (1, 2) if bench.small else (8, 32, 1):
        rows = subject.rows(batch)
        requests = [fake_triton.InferenceRequest([fake_triton.Tensor("x", row)]) for row in rows]
        loop = _loop(module, rows, bench.device)
        with torch.inference_mode():
            expected = loop().numpy()
        outputs = [response.output_tensors()[0] for response in model.execute(requests)]
        actual = np.concatenate([output.as_numpy() for output in outputs])
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)
        calls: dict[str, Callable[[], object]] = {
            "ours": partial(model.execute, requests),
            "loop": loop,
        }
        with torch.inference_mode():
            rates = bench.rates(calls)
        figure = _ratio("served ÷ loop", f"{bench.of}, batch {batch}", rates, "ours", "loop")
        yield figure if batch == 1 else figure | {"at least": 0.95}
    model.close()


def _loop(
    module: nn.Module, rows: Sequence[np.ndarray[Any, Any]], device: torch.device
) -> Callable[[], Tensor]:
    def loop() -> Tensor:
        result: Tensor = module(torch.from_numpy(np.concatenate(rows)).to(device)).cpu()
        return result

    return loop


def graphs(bench: Bench) -> Iterator[Figure]:
    """Latency of one request with CUDA graphs ÷ without."""
    subject = bench.subject()
    requests = [
        fake_triton.InferenceRequest([fake_triton.Tensor("x", row)]) for row in subject.rows(1)
    ]
    calls: dict[str, Callable[[], object]] = {}
    answers = []
    for kind in ("eager", "graphs"):
        model = TritonPythonModel()
        optimize = "cuda_graphs" if kind == "graphs" and bench.on_gpu else "none"
        model.initialize(bench.arguments(subject, 1, OPTIMIZE=optimize))
        (response,) = model.execute(requests)
        answers.append(response.output_tensors()[0].as_numpy())
        calls[kind] = partial(model.execute, requests)
    rates = bench.rates(calls)
    figure = _ratio(
        "latency, CUDA graphs ÷ eager", f"{bench.of}, batch 1", rates, "eager", "graphs"
    )
    yield figure | {"at most": 0.5} if bench.of == "BERT-base" else figure
    np.testing.assert_allclose(answers[1], answers[0], rtol=1e-3, atol=1e-3)


def copies(bench: Bench) -> Iterator[Figure]:
    """Rate of copies from the memory that batches are gathered in ÷ that of a pinned copy."""
    ours = runtime.create(Options(), bench.device, ())
    for size in (1,) if bench.small else (16, 64, 1):
        values = size * _MEGABYTE // 4
        config = build.config(max_batch_size=1, inputs=(build.spec("x", dims=(values,)),))
        (column,) = plain_call.page_locked(config, ["x"])
        pinned = torch.empty_like(column, pin_memory=bench.on_gpu)
        target = torch.empty_like(column, device=bench.device)

        def copy(column: Tensor = column) -> None:
            ours.to_device([column])
            bench.sync()

        def copy_pinned(target: Tensor = target, pinned: Tensor = pinned) -> None:
            target.copy_(pinned, non_blocking=True)
            bench.sync()

        rates = bench.rates({"ours": copy, "pinned": copy_pinned})
        figure = _ratio("copy to the device ÷ pinned copy", f"{size} MiB", rates, "ours", "pinned")
        yield figure | {"at least": 0.9} if size >= _LARGE else figure


# The least throughput compiled ÷ eager, which timm's tables have for these networks.
_COMPILED = {"ResNet-50": 1.9, "ViT-S": 1.2, "ConvNeXt-T": 1.45}


def compiled(bench: Bench) -> Iterator[Figure]:
    """Throughput compiled ÷ eager, both in bfloat16 with the images on the device."""
    subject, batch = bench.subject(), 2 if bench.small else 128
    of = f"{bench.of}, batch {batch}, {bench.mode}"
    optimize = "bf16" if bench.of.startswith("ViT") else "bf16,channels_last"
    eager = bench.engine(subject, batch, OPTIMIZE=optimize)
    # With `--small` nothing is generated: that takes a minute.
    options = {"backend": "aot_eager"} if bench.small else {"mode": bench.mode}
    began = time.perf_counter()
    engine = bench.engine(
        subject,
        batch,
        OPTIMIZE=optimize,
        TORCH_COMPILE_OPTIONAL_PARAMETERS=json.dumps(options),
        COMPILE_REQUIRED="true",
        BATCH_BUCKETS=str(batch),
    )
    yield {"figure": "start, s", "of": of, "value": time.perf_counter() - began}
    with engine.guard():
        # As the batch that an instance has copied: torch.compile tells inference tensors apart.
        x = torch.from_numpy(np.concatenate(subject.rows(batch))).to(bench.device, copy=True)
    with torch.inference_mode():
        calls = {"compiled": _on_device(engine, x), "eager": _on_device(eager, x)}
        actual, expected = (call().float() for call in calls.values())
        figure = _ratio("compiled ÷ eager", of, bench.rates(calls), "compiled", "eager")
        yield figure | {"at least": _COMPILED[bench.of]}
        torch.testing.assert_close(actual, expected, rtol=0.1, atol=0.1)
    if engine.counts.eager_calls:
        raise RuntimeError(f"{of}: {engine.counts.eager_calls} calls were not compiled")


def _on_device(engine: Engine, x: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with engine.guard():
            result: Tensor = engine.runner.forward.call(x)
        return result

    return call


# Starts, and reports the memory that is in use on the GPU.
_INSTANCE = """
import json, sys
import fake_triton
sys.modules["triton_python_backend_utils"] = fake_triton
import torch
from torch_py_backend.config import model_config, threads
from torch_py_backend.startup import builder, warmup
config = model_config.parse(json.loads(sys.argv[1]))
engine = builder.build(config, threads.budget(config))
warmup.run(engine)
print("ready", flush=True)
for line in sys.stdin:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    print(total - free, flush=True)
engine.close()
"""


def memory(bench: Bench) -> Iterator[Figure]:
    """Memory of the weights of four instances ÷ that of one, and of all of a further instance."""
    subject = bench.subject()
    weights = sum(value.nbytes for value in subject.module().state_dict().values())
    added = {}
    for sharing in ("true", "false"):
        arguments = bench.arguments(subject, 8, ENABLE_WEIGHT_SHARING=sharing)
        used = []
        with children.starting(bench.folder) as start:
            for number in range(4):
                named = arguments | {"model_instance_name": f"net_0_{number}"}
                child = start(_INSTANCE, json.dumps(named))
                assert child.hear() == "ready"  # noqa: S101  else the figures mean nothing
                used.append(int(child.ask("used")))
        added[sharing] = (used[3] - used[0]) / 3
        yield {
            "figure": "memory of each further instance, MB",
            "of": f"{bench.of}, weights {weights / 1e6:.0f} MB, sharing {sharing}",
            "value": added[sharing] / 1e6,
        }
    # Contexts and activations are in both.
    saved = 3 * (added["false"] - added["true"])
    yield {
        "figure": "weights of 4 instances ÷ of one",
        "of": f"{bench.of}, sharing true",
        "value": (4 * weights - saved) / weights,
        "at most": 1.1,
    }


class _EnoughError(Exception):
    """A trial has tuned enough."""


def tune(bench: Bench) -> Iterator[Figure]:
    """Throughput of what `tune --quick --reduced-precision` tries ÷ that of the module as it is."""
    # Imports psutil, which other cases do not need.
    from torch_py_backend.tools.candidates import Allowed  # noqa: PLC0415
    from torch_py_backend.tools.tuning import Goal, Limits, Plan, Row, Tuning  # noqa: PLC0415

    arguments = bench.arguments(bench.subject(), 2 if bench.small else 32)
    plan = Plan(
        folder=Path(arguments["model_repository"]),
        version="1",
        document=json.loads(arguments["model_config"]),
        allowed=Allowed(reduced_precision=True, quick=True),
        limits=Limits(3e-2),
        goal=Goal.THROUGHPUT,
        inputs=None,
        timeout_s=120.0,
    )
    tuning = Tuning(plan)

    def end(row: Row) -> None:
        of = f"{bench.of}, {row.candidate}" + (f", {row.failure}" if row.failure else "")
        figure: Figure = {"figure": "throughput of a candidate of tune ÷ untuned", "of": of}
        figure |= {"value": row.throughput_gain, "per second": {"rows": row.throughput}}
        print(json.dumps(figure), flush=True)  # not later: a run may be cut off
        if bench.small and len(tuning.rows) > 1:
            raise _EnoughError

    with contextlib.suppress(_EnoughError):
        tuning.run(lambda _: None, end)
    chosen = tuning.choice()
    if chosen is not None:
        of = f"{bench.of}, {chosen.candidate}"
        yield {"figure": "chosen by tune ÷ untuned", "of": of, "value": chosen.throughput_gain}


CASES = {case.__name__: case for case in (served, graphs, copies, compiled, memory, tune)}


def _ratio(figure: str, of: str, rates: dict[str, list[float]], above: str, below: str) -> Figure:
    ratios = [ours / other for ours, other in zip(rates[above], rates[below], strict=True)]
    return {
        "figure": figure,
        "of": of,
        "value": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "per second": {name: statistics.median(values) for name, values in rates.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("of", nargs="?", default="", choices=["", *SUBJECTS])
    parser.add_argument("mode", nargs="?", default="", help="of torch.compile")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    arguments = vars(parser.parse_args())
    case = CASES[arguments.pop("case")]
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(folder=Path(scratch), **arguments)
        for figure in case(bench):
            print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
