"""`torch-py-backend bench`: how fast a model answers, and where the time goes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from torch_py_backend.artifacts import repository
from torch_py_backend.errors import BenchError, ServerError
from torch_py_backend.server.tritonserver import Server
from torch_py_backend.tools import bench_report, load_client, load_generator, payloads, sweep
from torch_py_backend.tools.bench_report import Report
from torch_py_backend.tools.load_client import Address, Client
from torch_py_backend.tools.load_generator import Closed, Load, Open
from torch_py_backend.tools.payloads import Model, Payload
from torch_py_backend.tools.sweep import Point

_CONCURRENCY = "1,8,32"
_MOST = 100_000  # of either load: beyond what one client can do
_LOG_LINES = 10
_TABLE_WIDTH = 100
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Stopped(KeyboardInterrupt):
    """SIGTERM or Ctrl-C. asyncio lets nothing else through from within a task."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to be measured, checked before anything is started."""

    model: str
    loads: tuple[Load, ...]
    seconds: float
    warmup: float
    rows: int | None
    seed: int
    inputs: Path | None


def bench(
    target: Annotated[
        str,
        typer.Argument(
            metavar="REPOSITORY|URL",
            help="A model repository, for which a server is started; or where one listens:"
            " grpc://host:port or http://host:port.",
        ),
    ],
    model: Annotated[str, typer.Argument(help="The model's name.")],
    concurrency: Annotated[
        str, typer.Option(help=f"Requests outstanding at any time: {_CONCURRENCY}, say.")
    ] = "",
    rate: Annotated[
        str, typer.Option(help="Or: requests sent a second, whatever the server does: 100,200.")
    ] = "",
    duration: Annotated[float, typer.Option(help="Seconds for each of them.")] = 5.0,
    warmup: Annotated[float, typer.Option(help="Seconds before each that do not count.")] = 1.0,
    rows: Annotated[int | None, typer.Option(help="Rows in a request, of a batched model.")] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="What is sent: safetensors, or JSON as Triton or perf_analyzer reads it. By"
            f" default the model's {payloads.EXAMPLE}, else made-up values."
        ),
    ] = None,
    protocol: Annotated[
        str, typer.Option(help="grpc or http, for a repository; by default grpc.")
    ] = "",
    json_path: Annotated[
        str, typer.Option("--json", help="Where the figures go as JSON; - prints nothing else.")
    ] = "",
    plot: Annotated[Path | None, typer.Option(help="A picture: a .png or .html file.")] = None,
    seed: Annotated[int, typer.Option(help="Of made-up values and of sending times.", min=0)] = 0,
) -> None:
    """Put load on a model, and tell throughput, latencies, Triton's split, batch sizes."""
    plan = _Plan(
        model, _loads(concurrency, rate, seed), _positive("--duration", duration),
        _positive("--warmup", warmup, or_zero=True), rows, seed, inputs,
    )  # fmt: skip
    outputs = _outputs(json_path, plot)
    stderr = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    for number in _SIGNALS:
        signal.signal(number, _stop)
    measured = _Measured()
    try:
        with _address(target, model, protocol, stderr) as (address, folder):
            _measure(plan, address, folder, measured, stderr)
    except _Stopped:
        measured.interrupted = True
    finally:
        if measured.points:
            _tell(measured.report(), json_path, outputs, stderr)
        elif measured.interrupted:
            stderr.print("stopped before anything was measured")
    raise typer.Exit(1 if measured.interrupted else 0)


# --- what is asked for -----------------------------------------------------------------------


def _loads(concurrency: str, rate: str, seed: int) -> tuple[Load, ...]:
    if concurrency and rate:
        raise BenchError(
            "--concurrency and --rate are both given; a load is closed (so many requests"
            " outstanding) or open (so many sent a second). Give one of them."
        )
    if rate:
        return tuple(Open(one, seed) for one in _numbers("--rate", rate, float))
    return tuple(Closed(one) for one in _numbers("--concurrency", concurrency or _CONCURRENCY, int))


def _numbers(option: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < one <= _MOST for one in found):
        noun = "integers above 0," if kind is int else "numbers above 0,"
        raise BenchError(
            f"{option} is '{text}'; expected {noun} up to {_MOST}, separated by commas."
        )
    return found


def _positive(option: str, value: float, *, or_zero: bool = False) -> float:
    if 0 < value < float("inf") or (or_zero and value == 0):
        return value
    least = "0 or more" if or_zero else "more than 0"
    raise BenchError(f"{option} is {value:g}; expected {least} seconds.")


_Output = tuple[Path, Callable[[Report], bytes]]


def _outputs(json_path: str, plot: Path | None) -> list[_Output]:
    """The files to write, each tried before a second of measuring is spent."""
    wanted: list[_Output] = []
    if json_path not in ("", "-"):
        wanted.append((Path(json_path), _json))
    if plot is not None:
        wanted.append((plot, bench_report.writer(plot)))
    for path, _ in wanted:
        _try(path)
    return wanted


def _try(path: Path) -> None:
    if path.is_dir():
        raise BenchError(f"cannot write {path}: it is a folder.")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}.") from error


def _json(measured: Report) -> bytes:
    return (json.dumps(bench_report.document(measured), indent=2) + "\n").encode()


# --- the server ------------------------------------------------------------------------------


@contextlib.contextmanager
def _address(
    target: str, model: str, protocol: str, stderr: Console
) -> Iterator[tuple[Address, Path | None]]:
    """Where the model is served, and its folder where that is known."""
    if protocol not in ("", *load_client.PROTOCOLS):
        raise BenchError(f"--protocol is '{protocol}'; expected grpc or http.")
    if "://" in target:
        address = load_client.address(target)
        if protocol not in ("", address.protocol):
            raise BenchError(
                f"--protocol is {protocol}, and {target} says {address.protocol}. Leave it out."
            )
        yield address, None
        return
    path = Path(target)
    if not path.is_dir():
        raise ServerError(
            f"'{target}' is neither a folder nor an address; expected a model repository, or"
            " grpc://host:port or http://host:port."
        )
    folder = repository.by_name(path, [model])[model]
    with tempfile.TemporaryFile() as log, _server(path, model, log) as server:
        with stderr.status(f"starting a server for {escape(model)}"):
            _wait(server, log, stderr)
        host = server.http_address if protocol == "http" else server.grpc_address
        yield Address(protocol or "grpc", host), folder


def _server(path: Path, model: str, log: IO[bytes]) -> Server:
    """A server on free ports that loads this model and what it is made of."""
    only = ("--model-control-mode=explicit", f"--load-model={model}")
    return Server(path, http_port=0, grpc_port=0, metrics_port=0, arguments=only, log=log)


def _wait(server: Server, log: IO[bytes], stderr: Console) -> None:
    try:
        server.wait_loaded()
    except ServerError:
        log.seek(0)
        for line in log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]:
            stderr.print(escape(line))
        raise


# --- the measurement -------------------------------------------------------------------------


class _Measured:
    """What is known so far: it is told even if the rest fails."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.interrupted = False
        self.about: dict[str, Any] = {}

    def report(self) -> Report:
        return Report(**self.about, interrupted=self.interrupted, points=tuple(self.points))


def _measure(
    plan: _Plan, address: Address, folder: Path | None, measured: _Measured, stderr: Console
) -> None:
    loop = load_generator.event_loop()
    try:
        loop.run_until_complete(_sweep(plan, address, folder, measured, stderr))
    finally:
        loop.close()
        # A signal that comes now must not interrupt the stopping of the server.
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)


async def _sweep(
    plan: _Plan, address: Address, folder: Path | None, measured: _Measured, stderr: Console
) -> None:
    stop = asyncio.Event()
    _stop_gently(stop)
    asked = load_client.connect(address)
    try:
        await load_client.ready(asked, plan.model)
        target = payloads.model(plan.model, await asked.config(plan.model))
        source, chosen = _payloads(plan, target, folder)
        measured.about = {
            "model": plan.model,
            "server": str(address),
            "inputs": source,
            "rows": _rows(target, chosen),
            "seconds": plan.seconds,
            "warmup": plan.warmup,
        }
        await _points(plan, asked, chosen, measured, stop, stderr)
    finally:
        await asked.close()
    measured.interrupted = stop.is_set()


async def _points(
    plan: _Plan,
    asked: Client,
    chosen: Sequence[Payload],
    measured: _Measured,
    stop: asyncio.Event,
    stderr: Console,
) -> None:
    send = asked.sender(plan.model, chosen)
    # Drawn once a second, in a thread: what it takes from the requests is not seen in a p99.
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns,
        console=stderr,
        transient=True,
        refresh_per_second=1,
        disable=not stderr.is_terminal,
    ) as progress:
        task = progress.add_task("", total=len(plan.loads))
        for number, shape in enumerate(plan.loads, start=1):
            progress.update(
                task, description=f"{sweep.named(shape)} ({number} of {len(plan.loads)})"
            )
            found = await sweep.point(
                asked, plan.model, send, shape,
                seconds=plan.seconds, warmup=plan.warmup, stop=stop,
            )  # fmt: skip
            if found is not None:
                measured.points.append(found)
            if stop.is_set():
                return
            progress.advance(task)


def _payloads(plan: _Plan, target: Model, folder: Path | None) -> tuple[str, list[Payload]]:
    """Where the inputs come from, and the inputs."""
    if plan.inputs is not None:
        return str(plan.inputs), payloads.read(plan.inputs, target, plan.rows)
    if folder is not None:
        example = folder / repository.latest(folder) / payloads.EXAMPLE
        if example.is_file():
            return example.name, payloads.read(example, target, plan.rows)
    return "made up", payloads.made_up(target, plan.rows, plan.seed)


def _rows(target: Model, chosen: Sequence[Payload]) -> float:
    if not target.max_batch_size:
        return 1
    return sum(len(next(iter(one.values())).array) for one in chosen) / len(chosen)


# --- Ctrl-C ----------------------------------------------------------------------------------


def _stop_gently(stop: asyncio.Event) -> None:
    """The first signal ends the load and keeps what it gave; a second one ends everything."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        stop.set()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, _stop)

    for number in _SIGNALS:
        loop.add_signal_handler(number, first)


def _stop(_number: int, _frame: FrameType | None) -> None:
    # Once is enough: a further signal must not interrupt the stopping, and leave the server behind.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise _Stopped


# --- the telling -----------------------------------------------------------------------------


def _tell(measured: Report, json_path: str, outputs: Sequence[_Output], stderr: Console) -> None:
    if json_path == "-":
        typer.echo(_json(measured), nl=False)
    else:
        console = Console(highlight=False, emoji=False)
        console.width = max(console.width, _TABLE_WIDTH)  # a wrapped line beats a figure cut off
        console.print(bench_report.table(measured))
    for note in bench_report.notes(measured):
        stderr.print(f"[yellow]note[/] {escape(note)}")
    for path, make in outputs:
        _write(path, make(measured))
        stderr.print(f"wrote {escape(str(path))}")


def _write(path: Path, content: bytes) -> None:
    """The whole file, or none."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise BenchError(f"cannot write {path}: {error.strerror}.") from error
