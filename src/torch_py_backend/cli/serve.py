"""`torch-py-backend serve`: run a tritonserver on a model repository and supervise its models."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape

from torch_py_backend.errors import ToolError
from torch_py_backend.model_folders import remote_repository
from torch_py_backend.processes import procfs
from torch_py_backend.server import cleanup, server_arguments, triton_installation
from torch_py_backend.server.lifecycle import Event
from torch_py_backend.server.serving import Serving

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_KEY_VARIABLE = "TORCH_PY_BACKEND_ADMIN_KEY"
_LOCAL = ("127.0.0.1", "localhost", "::1")
_COLOURS = {
    "READY": "green",
    "FAILED": "red",
    "DOWN": "yellow",
    "GIVEN UP": "bold red",
    "RELEASED": "cyan",
    "CHANGED": "cyan",
    "WARNING": "yellow",
}


def serve(
    repository: Annotated[
        str,
        typer.Argument(
            help="The model repository: a folder, or one in an object store, such as"
            " s3://bucket/folder, gs://, az:// or hf://organization/model@revision."
        ),
    ],
    http_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8002,
    health_port: Annotated[
        int, typer.Option(help="Port of /live, /ready and /ready/MODEL; 0 takes a free port.")
    ] = 8003,
    address: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="How often a model that died is reloaded, until it has served for a minute.",
        ),
    ] = 8,
    load_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that loading a model may take.")
    ] = 1800,
    drain: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds that requests are still accepted after SIGTERM or Ctrl-C, while /ready"
            " answers 503: as many as load balancers need to stop sending requests.",
        ),
    ] = 0,
    restrict: Annotated[
        str,
        typer.Option(
            metavar="APIS",
            help="Triton's endpoints that require the key in the environment variable"
            f" {_KEY_VARIABLE}, over HTTP in the header {server_arguments.KEY_HEADER}: such as"
            " model-repository,shared-memory,trace,logging. Without the variable, no client can"
            " use them.",
        ),
    ] = "",
    cache: Annotated[
        Path | None,
        typer.Option(
            help="The folder for what is fetched from a URL. By default ~/.cache/torch-py-backend."
        ),
    ] = None,
    allow_empty: Annotated[
        bool,
        typer.Option(
            "--allow-empty",
            help="Serve a repository without models; they are loaded later, through Triton's API.",
        ),
    ] = False,
    reload: Annotated[
        bool,
        typer.Option(
            "--reload",
            help="Reload a model when its files change. The old one keeps serving until the new one"
            " is READY. For development.",
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print Triton's log instead of writing it to a file.")
    ] = False,
    tritonserver: Annotated[
        Path | None, typer.Option(help="The tritonserver to use; by default one is searched for.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="After --: arguments for tritonserver itself.")
    ] = None,
) -> None:
    """Serve a model repository until Ctrl-C or SIGTERM, and reload models that die."""
    console = Console(
        file=cast("IO[str]", _Output(sys.stdout)), soft_wrap=True, highlight=False, emoji=False
    )

    def report(event: Event) -> None:
        console.print(format_event(event))

    def note(text: str) -> None:
        console.print(f"[yellow]note[/]    {escape(text)}")

    # Removed, so that tritonserver and its instances do not inherit the key.
    key = os.environ.pop(_KEY_VARIABLE, "") or secrets.token_urlsafe()
    triton_installation.find(tritonserver)  # before much is fetched
    serving = Serving(
        remote_repository.local(repository, cache, note),
        report,
        ports=(http_port, grpc_port, metrics_port, health_port),
        address=address,
        tritonserver=tritonserver,
        arguments=arguments or (),
        restrict=restrict,
        key=key,
        restarts=restarts,
        load_seconds=load_timeout,
        drain=drain,
        allow_empty=allow_empty,
        reload=reload,
    )
    if exposed := exposure_note(address, restrict):
        note(exposed)
    serving.server.log = None if verbose else _open_log(console)
    for number in SIGNALS:
        signal.signal(number, _stop)
    try:
        code = serving.run(lambda: _announce(console, serving), lambda: _is_over(serving))
    except Stopped:
        console.print("stopped")
        return
    if code is not None:
        how = f"with exit code {code}" if code >= 0 else f"by {procfs.signal_name(-code)}"
        log = escape(serving.server.log_name)
        console.print(f"[red]tritonserver ended {how}[/]; its log says why{log}.")
        raise typer.Exit(code if code >= 0 else 128 - code)


class Stopped(KeyboardInterrupt):
    """The end of the command. asyncio lets no other exception of a signal handler through."""


def _stop(_number: int, _frame: FrameType | None) -> None:
    """End the command at the first signal; further ones are ignored, and let it clean up."""
    # Python would report SIG_IGN for a signal that is pending as a race condition.
    for number in SIGNALS:
        signal.signal(number, _ignore)
    raise Stopped


def _ignore(_number: int, _frame: FrameType | None) -> None:
    pass


class _Output:
    """A text stream whose errors, such as a full disk or a closed pipe, do not end the server."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def _open_log(console: Console) -> IO[bytes]:
    """Open a file for Triton's log, which is kept, and print its name."""
    try:
        # No `with`: the file stays open until this process ends, and is kept.
        file = tempfile.NamedTemporaryFile(prefix="tritonserver-", suffix=".log", delete=False)  # noqa: SIM115
    except OSError as error:
        raise ToolError(
            f"a file for Triton's log cannot be created: {error.strerror}. --verbose needs none."
        ) from None
    console.print(f"log     {escape(file.name)} is Triton's log; --verbose prints it here")
    return file


def _announce(console: Console, serving: Serving) -> None:
    server, models = serving.server, serving.supervisor.snapshot.models
    none_serves = bool(models) and all(models.values())
    state = "[red]no model serves[/]; listening" if none_serves else "serving"
    console.print(
        f"{state} on http://{server.http_address} and grpc://{server.grpc_address};"
        f" metrics on http://{server.metrics_address}/metrics,"
        f" readiness on http://{serving.health_address}/ready; Ctrl-C stops"
    )


def _is_over(serving: Serving) -> bool:
    """Raise Stopped if a signal was received.

    This includes signals whose exception was lost: Python drops exceptions in destructors, and
    while another one propagates.
    """
    if signal.getsignal(signal.SIGTERM) is _ignore:
        raise Stopped
    cleanup.reap_orphans(serving.server.process.pid)
    return False


def exposure_note(address: str, restrict: str) -> str:
    """Return a note on the sensitive endpoints that every client can use; empty: there are none."""
    exposed = [api for api in server_arguments.SENSITIVE if api not in restrict]
    if address in _LOCAL or not exposed:
        return ""
    return (
        f"every client that reaches {address} may use Triton's endpoints {', '.join(exposed)};"
        f" --restrict={','.join(server_arguments.SENSITIVE)} closes them"
    )


def format_event(event: Event) -> str:
    """Return an event as one line with markup of rich."""
    label, rest = f"{event.kind:<7}", str(event)[max(7, len(event.kind)) :]
    return f"[{_COLOURS[event.kind]}]{label}[/]{escape(rest)}"
