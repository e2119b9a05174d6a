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
import os
import queue
import signal
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
from torch_py_backend.tools.candidates import Allowed  # noqa: E402
from torch_py_backend.tools.ranking import Goal, Limits, Row  # noqa: E402

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

    def arguments(
        self,
        subject: Subject,
        batch: int,
        document: Mapping[str, object] | None = None,
        **parameters: str,
    ) -> dict[str, str]:
        """Write a model folder; return Triton's arguments of initialize().

        Args:
            subject: the network.
            batch: max_batch_size.
            document: entries of the config instead of those of a plain model.
            parameters: those of the config.
        """
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
        plain = {
            "input": [_spec("x", subject.dtype, subject.dims)],
            "output": [_spec("y", "FP32", subject.output)],
        }
        arguments = build.arguments(
            max_batch_size=batch,
            instance_group=[{"name": "net", "kind": f"KIND_{kind}", "count": 1, "gpus": []}],
            parameters={key: {"string_value": value} for key, value in options.items()},
            **(plain | dict(document or {})),
        )
        return arguments | {
            "model_repository": str(version.parent),
            "model_instance_kind": kind,
        }

    def engine(self, subject: Subject, batch: int, **parameters: str) -> Engine:
        """Return the engine of a model, warmed up."""
        arguments = self.arguments(subject, batch, None, **parameters)
        config = model_config.parse(arguments)
        engine = builder.build(config, threads.budget(config))
        warmup.run(engine)
        return engine


def _spec(name: str, dtype: str, dims: Sequence[int]) -> dict[str, object]:
    return {"name": name, "data_type": f"TYPE_{dtype}", "dims": list(dims)}


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


_TOGETHER = 8  # requests that are sent to a server at once


def tritonserver(bench: Bench) -> Iterator[Figure]:
    """Throughput of a tritonserver ÷ a loop over the same module and batches.

    A request is a batch, which comes and goes in shared memory of the host.
    """
    # `make gpu-site` packs the server and its clients: a machine may lack them.
    import scenarios  # noqa: PLC0415
    import serving  # noqa: PLC0415
    import tritonclient.grpc  # noqa: PLC0415
    from tritonclient.utils import shared_memory  # noqa: PLC0415

    subject, batch = bench.subject(), 2 if bench.small else 8
    folder = Path(bench.arguments(subject, batch)["model_repository"])
    config = scenarios.config(
        {"x": list(subject.dims)},
        {"y": list(subject.output)},
        max_batch_size=batch,
        parameters={
            "MODEL_CLASS": subject.network,
            "MODEL_KWARGS": json.dumps(subject.arguments),
        },
        more=f"instance_group [{{ kind: KIND_{'GPU' if bench.on_gpu else 'CPU'} count: 1 }}]",
    )
    (folder / "config.pbtxt").write_text(config)
    folder.parent.rename(bench.folder / "repository")
    rows = subject.rows(batch)
    loop = _loop(subject.module().to(bench.device), rows, bench.device)
    x = tritonclient.grpc.InferInput("x", [batch, *subject.dims], subject.dtype)
    y = tritonclient.grpc.InferRequestedOutput("y")
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        server = stack.enter_context(serving.asked(bench.folder))
        expected = loop().numpy()

        def share(name: str, tensor: Any, size: int) -> Any:
            region = shared_memory.create_shared_memory_region(name, f"/{name}-{os.getpid()}", size)
            stack.callback(shared_memory.destroy_shared_memory_region, region)
            server.grpc.register_system_shared_memory(name, f"/{name}-{os.getpid()}", size)
            tensor.set_shared_memory(name, size)
            return region

        images = np.concatenate(rows)
        shared_memory.set_shared_memory_region(share("x", x, images.nbytes), [images])
        answer = share("y", y, expected.nbytes)

        def ours() -> None:
            errors: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
            report = partial(_put_error, errors)
            for _ in range(_TOGETHER):
                server.grpc.async_infer(folder.name, [x], report, outputs=[y])
            for _ in range(_TOGETHER):
                error = errors.get(timeout=60)
                if error is not None:
                    raise error

        def loops() -> None:
            for _ in range(_TOGETHER):
                loop()

        rates = bench.rates({"ours": ours, "loop": loops})
        actual = shared_memory.get_contents_as_numpy(answer, np.float32, list(expected.shape))
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)
        figure = _ratio("tritonserver ÷ loop", f"{bench.of}, batch {batch}", rates, "ours", "loop")
    yield figure | {"at least": 0.95}


def _put_error(
    errors: queue.SimpleQueue[Exception | None],
    result: object,  # noqa: ARG001  tritonclient passes it
    error: Exception | None,
) -> None:
    errors.put(error)


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
        ((column,), _) = plain_call.page_locked(config, ["x"], ours)
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
    yield _small_copies(bench, ours)


def _small_copies(bench: Bench, ours: runtime.Runtime) -> Figure:
    """Return the rate of copies of BERT's inputs together ÷ that of a copy for each of them."""
    names, batch, tokens = ["ids", "mask", "segments"], 32, 128
    specs = tuple(build.spec(name, "INT64", (tokens,)) for name in names)
    config = build.config(max_batch_size=batch, inputs=specs)
    columns, send = plain_call.page_locked(config, names, ours)

    def copy_together() -> None:
        send(columns)
        bench.sync()

    def copy_each() -> None:
        ours.to_device(columns)
        bench.sync()

    rates = bench.rates({"together": copy_together, "each": copy_each})
    of = f"{len(names)} inputs of {columns[0].nbytes >> 10} KiB"
    return _ratio("copies of small inputs, together ÷ each", of, rates, "together", "each")


# The least throughput compiled ÷ eager, which timm's tables have for these networks.
_COMPILED = {"ResNet-50": 1.9, "ViT-S": 1.2, "ConvNeXt-T": 1.45}


def compiled(bench: Bench) -> Iterator[Figure]:
    """Throughput compiled ÷ eager, both in bfloat16 with the images on the device."""
    subject, batch = bench.subject(), 2 if bench.small else 128
    of = f"{bench.of}, batch {batch}, {bench.mode}"
    optimize = "bf16" if bench.of.startswith("ViT") else "bf16,channels_last"
    eager = bench.engine(subject, batch, OPTIMIZE=optimize)
    # With `--small` nothing is generated: that takes a minute.
    backend = {"backend": "aot_eager"} if bench.small else {"mode": bench.mode}
    began = time.perf_counter()
    engine = bench.engine(
        subject,
        batch,
        OPTIMIZE=optimize,
        TORCH_COMPILE_OPTIONAL_PARAMETERS=json.dumps({**backend, "dynamic": False}),
        COMPILE_REQUIRED="true",
        BATCH_BUCKETS=str(batch),
    )
    yield {"figure": "start, s", "of": of, "value": time.perf_counter() - began}
    with engine.guard():
        # As the batch that an instance has copied: torch.compile tells inference tensors apart.
        x = torch.from_numpy(np.concatenate(subject.rows(batch))).to(bench.device, copy=True)
    with torch.inference_mode():
        calls = {"compiled": _on_device(engine, x), "eager": _on_device(eager, x)}
        actual, expected = _answer(engine, x), _answer(eager, x)
        bench.sync()
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


def _answer(engine: Engine, x: Tensor) -> Tensor:
    with engine.guard():  # on the stream of the call
        return _on_device(engine, x)().float()


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
        with children.starting(bench.folder) as start:
            named = [
                json.dumps(arguments | {"model_instance_name": f"net_0_{number}"})
                for number in range(4)
            ]
            first = start(_INSTANCE, named[0])
            assert first.hear() == "ready"  # noqa: S101  else the figures mean nothing
            before = int(first.ask("used"))
            others = [start(_INSTANCE, each) for each in named[1:]]  # in parallel: a start is slow
            assert [other.hear() for other in others] == ["ready"] * 3  # noqa: S101
            added[sharing] = (int(first.ask("used")) - before) / 3
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


_TOKENS = 128  # of a stream
_STREAM = ("first", "count")


def tokens(bench: Bench) -> Iterator[Figure]:
    """Tokens per second of a stream ÷ those of a loop over an equal module, each on the host.

    The loop is the way of gpt-fast: a cache of fixed size, and a compiled step as a CUDA graph.
    """
    count = 8 if bench.small else _TOKENS
    kwargs = (_TINY if bench.small else {}) | {"mode": "" if bench.small else bench.mode}
    subject = Subject("Llama", (1,), "INT32", (1,), kwargs)
    config = {
        "input": [_spec(name, "INT32", [1]) for name in _STREAM],
        "output": [_spec("token", "INT64", [1])],
        "model_transaction_policy": {"decoupled": True},
    }
    model = TritonPythonModel()
    model.initialize(bench.arguments(subject, 0, config))
    module = subject.module().to(bench.device)

    def ours() -> list[int]:
        inputs = [np.array([value], np.int32) for value in (1, count)]
        tensors = [fake_triton.Tensor(*pair) for pair in zip(_STREAM, inputs, strict=True)]
        request = fake_triton.InferenceRequest(tensors)
        model.execute([request])
        request.sender.ended.wait()
        return [_output(response).item() for response in request.sender.responses]

    def loop() -> list[int]:
        return [token.item() for token in module(1, count)]

    with torch.inference_mode():
        same = [one == other for one, other in zip(ours(), loop(), strict=True)]
        streams = bench.rates({"ours": ours, "loop": loop})
    model.close()
    if not all(same):
        raise RuntimeError(f"the tokens differ from the {same.index(False) + 1}th on")
    of = f"Llama, {bench.mode or 'eager'}, streams of {count} tokens"
    rates = {name: [count * rate for rate in values] for name, values in streams.items()}
    yield _ratio("token steps ÷ loop", of, rates, "ours", "loop") | {"at least": 0.9}


def _output(response: fake_triton.InferenceResponse) -> np.ndarray[Any, Any]:
    if error := response.error():
        raise RuntimeError(error.message())
    array: np.ndarray[Any, Any] = response.output_tensors()[0].as_numpy()
    return array


class _EnoughError(KeyboardInterrupt):
    """A trial has tuned enough, or its time is up. asyncio lets no other exception through."""


_TUNING_S = 130  # of its step; the rest is for the start, and for the end of a candidate


def tune(bench: Bench) -> Iterator[Figure]:
    """Throughput of what `tune --quick --reduced-precision` tries ÷ that of the module as it is."""
    # Imports psutil, which other cases do not need.
    from torch_py_backend.tools.tuning import Plan, Tuning  # noqa: PLC0415

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

    def stop(*_: object) -> None:
        raise _EnoughError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(_TUNING_S)
    with contextlib.suppress(_EnoughError):
        tuning.run(lambda _: None, end)
    chosen = tuning.choice()
    if chosen is not None:
        of = f"{bench.of}, {chosen.candidate}"
        yield {"figure": "chosen by tune ÷ untuned", "of": of, "value": chosen.throughput_gain}


_CASES = (served, tritonserver, graphs, copies, compiled, memory, tokens, tune)
CASES = {case.__name__: case for case in _CASES}


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
    parser.add_argument("of", nargs="?", default="", choices=["", "Llama", *SUBJECTS])
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
