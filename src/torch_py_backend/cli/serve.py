"""`torch-py-backend serve`: a repository on a real tritonserver, in the foreground."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from torch_py_backend.server import ModelState, Server

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL_SECONDS = 0.5


class _Stopped(Exception):  # noqa: N818  no error: the user's wish
    """SIGTERM or Ctrl-C."""


def serve(
    repository: Annotated[Path, typer.Argument(help="The model repository.")],
    http_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8002,
    address: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    tritonserver: Annotated[
        Path | None, typer.Option(help="The tritonserver to use; by default one is searched for.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="After --: arguments for tritonserver itself.")
    ] = None,
) -> None:
    """Serve a model repository until Ctrl-C or SIGTERM."""
    console = Console(soft_wrap=True, highlight=False, emoji=False)
    server = Server(
        repository,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        address=address,
        executable=tritonserver,
        arguments=arguments or (),
    )
    for number in _SIGNALS:
        signal.signal(number, _stop)
    code = 0
    try:
        with server:
            for state in server.wait_loaded():
                console.print(_line(state))
            console.print(
                f"serving on http://{server.http_address} and grpc://{server.grpc_address};"
                f" metrics on http://{server.metrics_address}/metrics; Ctrl-C stops"
            )
            code = _wait(server.process)
    except _Stopped:
        console.print("stopped")
    finally:
        server.stop()  # also when a signal came while it was being started
    raise typer.Exit(code)


def _stop(_number: int, _frame: FrameType | None) -> None:
    # Once is enough: a second signal must not interrupt the stopping, and leave the server behind.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise _Stopped


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The server's exit code.

    Raises:
        _Stopped: a signal came, also one whose exception got lost. Python drops what is raised
            inside a destructor, or while another signal's exception is on its way.
    """
    while True:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
            raise _Stopped
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_SECONDS)


def _line(state: ModelState) -> str:
    label = escape(f"{state.name} {state.version}".strip())
    if state.ready:
        return f"[green]READY[/]   {label}"
    # Triton appends the places in Python where the sentence was raised; its log has them too.
    reason = state.reason.split("\n\nAt:")[0].strip()
    return f"[red]FAILED[/]  {label}: {escape(reason)}"
