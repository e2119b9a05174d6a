"""Our backend against the no-op floor, and against other servers of PyTorch models from PyPI.

    python -m benchmarks.serving --output docs/benchmarks.md
        [--models add,mlp] [--against floor,pytriton] [--concurrency 1,8,32]
        [--seconds 5] [--pairs 5] [--threads 1] [--protocol grpc] [--device cuda]
        [--runtime model.py] [--libtorch FOLDER] [--client perf_analyzer]

Outputs are compared with eager PyTorch; then both servers are loaded in turn. The packages of a
peer are installed at first use. Ctrl-C ends the run and keeps its measurements.

With `--device cuda`, the tritonservers run the models on a GPU. `--runtime` names src/model.py of
triton-inference-server/pytorch_backend, `--libtorch` a backend directory with Triton's LibTorch
backend (in NVIDIA's containers /opt/tritonserver/backends), and `--client` NVIDIA's perf_analyzer,
which then loads what tritonservers serve (see perf_analyzer.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime as dt
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.progress import Progress

import torch_py_backend
from benchmarks import (
    clients,
    contenders,
    harness,
    load_generator,
    perf_analyzer,
    report,
    repositories,
)
from benchmarks.clients import Endpoint
from benchmarks.contenders import PEERS
from benchmarks.harness import Pair
from benchmarks.models import MODELS
from benchmarks.report import AOTI, FLOOR, HTTP, LIBTORCH, PLAIN, RUNTIME, TRANSFER, Report, Row
from torch_py_backend.errors import BackendError, ToolError

# Triton's Python runtime compiles for each number of requests that it meets in a batch.
_COMPILATION_SECONDS = 45
# On a GPU: cuDNN convolves in TF32.
_TOLERANCES = {"cpu": 0.0, "cuda": 1e-2}
_AGAINST = (FLOOR, TRANSFER, PLAIN, AOTI, HTTP, RUNTIME, LIBTORCH, *PEERS)


@dataclass(frozen=True)
class Settings:
    """The command line."""

    models: tuple[str, ...]
    against: tuple[str, ...]
    concurrency: tuple[int, ...]
    seconds: float
    pairs: int
    threads: int
    protocol: str
    device: str
    runtime: Path | None
    libtorch: Path | None
    client: Path | None
    output: Path | None

    @property
    def kind(self) -> str:
        """The kind of the instance groups."""
        return "KIND_GPU" if self.device == "cuda" else "KIND_CPU"


@dataclass(frozen=True)
class Ours:
    """A tritonserver with our model over one protocol, and its other endpoints."""

    endpoint: Endpoint
    others: Mapping[str, Endpoint]
    version: str


def main(words: Sequence[str]) -> int:
    """Measure; return 1 if nothing could be measured."""
    settings = _settings(words)
    # Every server reads it, ours too.
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    results = Report(" ".join(["python -m benchmarks.serving", *words]), _facts(settings))
    with Progress(console=Console(stderr=True)) as progress:
        try:
            _run(settings, results, progress)
        except KeyboardInterrupt:
            results.interrupted = True
    document = report.markdown(results)
    if settings.output is None:
        print(document, end="")
    else:
        settings.output.write_text(document, encoding="utf-8")
    return 0 if results.rows else 1


def _run(settings: Settings, results: Report, progress: Progress) -> None:
    """Fill the report; failures are noted in it."""
    each = settings.pairs * len(settings.concurrency)
    task = progress.add_task("", total=each * len(settings.models) * len(settings.against))
    done = 0
    for model in settings.models:
        with _serving(model, settings) as ours:
            results.facts["tritonserver"] = ours.version
            for against in settings.against:
                progress.update(task, description=f"{model} against {against}", completed=done)
                try:
                    _against(
                        model, against, ours, settings, results, lambda: progress.advance(task)
                    )
                except BackendError as error:
                    results.missing[model, against] = str(error)
                done += each
    progress.update(task, completed=done)


@contextlib.contextmanager
def _serving(model: str, settings: Settings) -> Iterator[Ours]:
    """Serve our model and the others that the same server has; check their outputs."""
    protocol = settings.protocol
    with harness.scratch() as scratch:
        repository = Path(scratch) / "repository"
        repositories.write(model, repository, settings.kind)
        others = {
            FLOOR: repositories.write_floor(model, repository),
            TRANSFER: repositories.write_transfer(model, repository),
            PLAIN: repositories.write_plain(model, repository, settings.kind),
        }
        if AOTI in settings.against:
            others[AOTI] = repositories.write_compiled(model, repository, settings.kind)
        if RUNTIME in settings.against and settings.runtime is not None:
            others[RUNTIME] = repositories.write_runtime(
                model, repository, settings.runtime, settings.kind
            )
        with harness.served(repository) as server:
            addresses = {"grpc": server.grpc_address, "http": server.http_address}
            ours = Ours(
                Endpoint(model, protocol, addresses[protocol], model, counts=True),
                {
                    HTTP: Endpoint(model, "http", server.http_address, model, counts=True),
                    **{
                        other: Endpoint(model, protocol, addresses[protocol], name, counts=True)
                        for other, name in others.items()
                    },
                },
                _triton_version(server.http_address),
            )
            for endpoint in (ours.endpoint, *ours.others.values()):
                contenders.check(endpoint, _TOLERANCES[settings.device])
            yield ours


def _against(
    model: str,
    against: str,
    ours: Ours,
    settings: Settings,
    results: Report,
    advance: Callable[[], None],
) -> None:
    """Measure one contender at every concurrency."""
    other: contextlib.AbstractContextManager[Endpoint]
    if against in PEERS:
        results.versions[against] = contenders.version(against)
        other = contenders.started(against, model)
    elif against == LIBTORCH and settings.libtorch is not None:
        other = _serving_libtorch(model, settings, settings.libtorch)
    else:
        other = contextlib.nullcontext(ours.others[against])
    with other as endpoint:
        for concurrency in settings.concurrency:
            done: list[Pair] = []
            if against == RUNTIME:
                asyncio.run(_warm_up(endpoint, concurrency))
            try:
                asyncio.run(_measure(ours.endpoint, endpoint, concurrency, settings, done, advance))
            finally:
                if done:
                    results.rows.append(Row(model, against, concurrency, tuple(done)))


@contextlib.contextmanager
def _serving_libtorch(model: str, settings: Settings, backends: Path) -> Iterator[Endpoint]:
    """Serve the model by the LibTorch backend in a backend directory, and check its answer."""
    with harness.scratch() as scratch:
        repository = Path(scratch) / "repository"
        name = repositories.write_libtorch(model, repository, settings.threads, settings.kind)
        with harness.served(repository, f"--backend-directory={backends.absolute()}") as server:
            address = server.grpc_address if settings.protocol == "grpc" else server.http_address
            output = repositories.libtorch_output(model)
            endpoint = Endpoint(model, settings.protocol, address, name, output, counts=True)
            contenders.check(endpoint, _TOLERANCES[settings.device])
            yield endpoint


async def _warm_up(endpoint: Endpoint, concurrency: int) -> None:
    async with clients.connected(endpoint) as (send, _):
        await load_generator.run(send, concurrency, _COMPILATION_SECONDS)


async def _measure(
    ours: Endpoint,
    other: Endpoint,
    concurrency: int,
    settings: Settings,
    done: list[Pair],
    advance: Callable[[], None],
) -> None:
    program = settings.client if ours.counts and other.counts else None
    load = (concurrency, settings.seconds)
    async with clients.connected(ours) as first, clients.connected(other) as second:
        turns = [
            partial(harness.turn, connection, *load)
            if program is None
            else partial(perf_analyzer.turn, program, endpoint, connection, *load)
            for endpoint, connection in ((ours, first), (other, second))
        ]
        async for pair in harness.in_turn(turns, settings.pairs):
            done.append(pair)
            advance()


def _facts(settings: Settings) -> dict[str, str]:
    """Return the machine, the versions and the settings."""
    memory = psutil.virtual_memory().total / 2**30
    versions = {
        name: importlib.metadata.version(name)
        for name in ("torch", "numpy", "tritonclient", "aiohttp")
    }
    device = torch.cuda.get_device_name() if settings.device == "cuda" else "CPU"
    return {
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "machine": f"{_processor()}, {psutil.cpu_count()} cores, {memory:.0f} GiB",
        "load before the run": f"{os.getloadavg()[0]:.1f}",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "device": device,
        "Python": platform.python_version(),
        "torch-py-backend": torch_py_backend.__version__,
        **versions,
        "OMP_NUM_THREADS": str(settings.threads),
        "our protocol": settings.protocol,
        "client": _client(settings),
        "turns": f"{settings.pairs} pairs of {settings.seconds:g} s each, after one to warm up",
    }


def _client(settings: Settings) -> str:
    if settings.client is None:
        return "asyncio"
    version = perf_analyzer.version(settings.client)
    return f"perf_analyzer {version} for what the same server serves, asyncio for the others"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _triton_version(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/v2", timeout=10) as response:
        version: str = json.load(response)["version"]
        return version


def _settings(words: Sequence[str]) -> Settings:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving")
    add = parser.add_argument
    add("--models", type=_names(MODELS), default=tuple(MODELS), help=", ".join(MODELS))
    add("--against", type=_names(_AGAINST), help=", ".join(_AGAINST))
    add("--concurrency", type=_counts, default=(1, 8, 32), help="requests outstanding")
    add("--seconds", type=_seconds, default=5.0, help="of one turn")
    add("--pairs", type=_count, default=5, help="turns of each side")
    add("--threads", type=_count, default=1, help="OMP_NUM_THREADS of every server")
    add("--protocol", choices=("grpc", "http"), default="grpc", help="of our server")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of the models")
    add("--runtime", type=_source, help="Triton's Python runtime, a model.py")
    add("--libtorch", type=_folder, help="a backend directory with Triton's LibTorch backend")
    add("--client", type=_program, help="perf_analyzer; unset: an asyncio client")
    add("--output", type=_file, help="the Markdown file to write; unset: print it")
    given = parser.parse_args(words)
    if given.against is None:
        absent = {name for name in (RUNTIME, LIBTORCH) if getattr(given, name) is None}
        given.against = tuple(name for name in _AGAINST if name not in absent)
    for name, value in ((RUNTIME, "model.py"), (LIBTORCH, "FOLDER")):
        if name in given.against and getattr(given, name) is None:
            parser.error(f"--against {name} needs --{name} {value}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can use")
    return Settings(**vars(given))


def _names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(
                f"'{', '.join(unknown)}' is not known; expected some of {', '.join(known)}"
            )
        return names

    return parse


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number above 0")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"'{text}' is no number above 0")


def _source(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"'{text}' is no file")
    return path


def _folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"'{text}' is no folder")
    return path


def _program(text: str) -> Path:
    if (found := shutil.which(text)) is None:
        raise argparse.ArgumentTypeError(f"'{text}' is no program")
    try:
        perf_analyzer.version(Path(found))
    except ToolError as error:  # a library is missing
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(found)


def _file(text: str) -> Path:
    """Return a path that can be written: a run takes long."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"'{text}' is no file that can be written")
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
