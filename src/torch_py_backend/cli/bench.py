"""`torch-py-backend bench`: throughput, latencies and Triton's split of the time of a model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from torch_py_backend.artifacts import repository
from torch_py_backend.cli import interruption
from torch_py_backend.cli.interruption import Stopped
from torch_py_backend.errors import ServerError, ToolError
from torch_py_backend.server.tritonserver import Server
from torch_py_backend.tools import artifact_files, load_client, load_generator, payloads, report
from torch_py_backend.tools.load_client import Address
from torch_py_backend.tools.report import Report

_MAX_CONCURRENCY = 100_000  # of outstanding requests: more than one client can send
_MAX_SECONDS = 86_400
_LOG_LINES = 10
_TABLE_WIDTH = 100
_STDERR = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)


def bench(
    target: Annotated[
        str,
        typer.Argument(
            metavar="REPOSITORY|URL",
            help="A model repository, for which a server is started, or the address of a running"
            " server: grpc://host:port or http://host:port.",
        ),
    ],
    model: Annotated[str, typer.Argument(help="The model's name.")],
    concurrency: Annotated[
        str, typer.Option(help="Numbers of outstanding requests, one load for each.")
    ] = "1,8,32",
    duration: Annotated[
        float, typer.Option(min=0.1, max=_MAX_SECONDS, help="Seconds for each load.")
    ] = 5.0,
    warmup: Annotated[
        float,
        typer.Option(min=0, max=_MAX_SECONDS, help="Seconds before each load that do not count."),
    ] = 1.0,
    rows: Annotated[
        int | None, typer.Option(help="Rows in a request, for models with a batch dimension.")
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="The inputs to send: safetensors, or JSON as Triton reads it. By default the"
            f" model's {artifact_files.EXAMPLE}, else made-up values."
        ),
    ] = None,
    json_path: Annotated[
        str, typer.Option("--json", help="Write the figures as JSON; - prints them only.")
    ] = "",
) -> None:
    """Put load on a model; report throughput, latencies, Triton's split and batch sizes."""
    loads = _counts(concurrency)
    results = Report(model, duration, warmup)
    path = None if json_path in ("", "-") else Path(json_path)
    if path is not None:
        report.check_writable(path)
    interruption.raise_at_signals()
    try:
        with _served(target, model) as (address, example):
            try:
                asyncio.run(_measure(results, loads, address, inputs or example, rows))
            finally:
                # A further signal must not interrupt the shutdown of the server. asyncio.run()
                # resets handlers.
                interruption.ignore_signals()
    except Stopped:
        results.interrupted = True
    finally:
        if results.points:
            _print(results, as_json=json_path == "-")
            if path is not None:
                report.write_json(path, results.as_json())
                _STDERR.print(f"wrote {escape(str(path))}")
        elif results.interrupted:
            _STDERR.print("stopped before anything was measured")
    raise typer.Exit(1 if results.interrupted else 0)


# --- options ---------------------------------------------------------------------------------


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or not all(0 < count <= _MAX_CONCURRENCY for count in counts):
        raise ToolError(
            f"--concurrency is '{text}'; expected integers above 0, up to {_MAX_CONCURRENCY},"
            " separated by commas."
        )
    return counts


# --- the server ------------------------------------------------------------------------------


@contextlib.contextmanager
def _served(target: str, model: str) -> Iterator[tuple[Address, Path | None]]:
    """Yield the server's address, and the model's file of example inputs if there is one."""
    if "://" in target:
        yield load_client.address(target), None
        return
    path = Path(target)
    if not path.is_dir():
        raise ServerError(
            f"'{target}' is neither a folder nor an address; expected a model repository, or"
            " grpc://host:port or http://host:port."
        )
    folder = repository.by_name(path, [model])[model]
    # The server loads only this model and the models that it is composed of.
    only = ("--model-control-mode=explicit", f"--load-model={model}")
    with (
        tempfile.TemporaryFile() as log,
        Server(path, http_port=0, grpc_port=0, metrics_port=0, arguments=only, log=log) as server,
    ):
        with _STDERR.status(f"starting a server for {escape(model)}"):
            try:
                server.wait_loaded()
            except ServerError:
                log.seek(0)
                for line in log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]:
                    _STDERR.print(escape(line))
                raise
        example = folder / repository.latest(folder) / artifact_files.EXAMPLE
        yield Address("grpc", server.grpc_address), example if example.is_file() else None


# --- the measurement -------------------------------------------------------------------------


async def _measure(
    results: Report, loads: list[int], address: Address, inputs: Path | None, rows: int | None
) -> None:
    """Add one point for each load to the report; a signal ends the load and keeps its point."""
    stop = asyncio.Event()
    for number in interruption.SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with contextlib.aclosing(load_client.Client(address)) as client:
        await load_client.require_ready(client, results.model)
        target = payloads.model(results.model, await client.config(results.model))
        results.server = str(address)
        if inputs is None:
            requests = payloads.generate(target, rows)
        else:
            requests = payloads.read(inputs, target, rows)
            results.inputs = str(inputs)
        if target.max_batch_size:
            counts = [len(next(iter(payload.values())).array) for payload in requests]
            results.rows = sum(counts) / len(counts)
        send = client.sender(results.model, requests)
        for position, concurrency in enumerate(loads, start=1):
            if _STDERR.is_terminal:
                _STDERR.print(f"concurrency {concurrency} ({position} of {len(loads)})")
            point = await load_generator.measure(
                send,
                concurrency,
                results.seconds,
                warmup=results.warmup,
                statistics=partial(client.statistics, results.model),
                stop=stop,
            )
            if point is not None:
                results.points.append(point)
            if stop.is_set():
                break
    results.interrupted = stop.is_set()


def _print(results: Report, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(results.as_json(), indent=2))
    else:
        console = Console(highlight=False, emoji=False)
        console.width = max(console.width, _TABLE_WIDTH)  # figures are not cut off
        console.print(results.table())
    for note in results.notes():
        _STDERR.print(f"[yellow]note[/] {escape(note)}")
