"""`torch-py-backend serve`: a repository on a real tritonserver, and kept serving there."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from torch_py_backend.artifacts import repository as repositories
from torch_py_backend.errors import ServerError
from torch_py_backend.server import endpoint_restrictions
from torch_py_backend.server.instances import Watch
from torch_py_backend.server.model_control import Control
from torch_py_backend.server.readiness import Readiness
from torch_py_backend.server.supervision import Event, Kind, Plan, Supervisor
from torch_py_backend.server.tritonserver import Server, check_ports, ports

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SECRET = "TORCH_PY_BACKEND_ADMIN_KEY"  # noqa: S105  the name of the variable
_KEY = "admin-key"
_SERVICES = ("http", "grpc", "metrics", "health")
_LOCAL = ("127.0.0.1", "localhost", "::1")
_COLOURS = {
    Kind.READY: "green",
    Kind.FAILED: "red",
    Kind.DOWN: "yellow",
    Kind.GIVEN_UP: "bold red",
    Kind.RELEASED: "cyan",
}


class _Stopped(Exception):  # noqa: N818  no error: the user's wish
    """SIGTERM or Ctrl-C."""


def serve(
    repository: Annotated[Path, typer.Argument(help="The model repository.")],
    http_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8002,
    health_port: Annotated[
        int, typer.Option(help="Of /live, /ready and /ready/MODEL; 0 takes a free port.")
    ] = 8003,
    address: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="How often a model that died is loaded again, until it has served for a minute.",
        ),
    ] = 8,
    load_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that loading a model may take.")
    ] = 1800,
    drain: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds that requests are still taken after SIGTERM or Ctrl-C, while /ready says"
            " no: as many as load balancers take to look elsewhere.",
        ),
    ] = 0,
    restrict: Annotated[
        str,
        typer.Option(
            metavar="APIS",
            help="Endpoints of Triton's that ask for the key in the environment variable"
            f" {_SECRET}, over HTTP in the header {_KEY}: such as"
            " model-repository,shared-memory,trace,logging. Without the variable nobody has it.",
        ),
    ] = "",
    allow_empty: Annotated[
        bool,
        typer.Option(
            "--allow-empty",
            help="Serve a repository without models; they are loaded later, through Triton's API.",
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print Triton's log here, and not into a file.")
    ] = False,
    tritonserver: Annotated[
        Path | None, typer.Option(help="The tritonserver to use; by default one is searched for.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="After --: arguments for tritonserver itself.")
    ] = None,
) -> None:
    """Serve a model repository until Ctrl-C or SIGTERM; load again what dies."""
    console = Console(soft_wrap=True, highlight=False, emoji=False)
    given = list(arguments or ())
    # Taken out: tritonserver, the processes of models and the guard would inherit it.
    secret = os.environ.pop(_SECRET, "") or secrets.token_urlsafe()
    if restrict:
        given = [*endpoint_restrictions.arguments(restrict, _KEY, secret), *given]
    mode = (_values(given, "model-control-mode") or ["explicit"])[-1]
    given = _without(given, "model-control-mode")
    wanted: list[str] = []
    if mode == "explicit":
        # We load them: Triton itself listens only when all of them are there.
        wanted = [name for name in _values(given, "load-model") if name != "*"]
        given = _without(given, "load-model")
    http, grpc, metrics, health = ports(http_port, grpc_port, metrics_port, health_port)
    server = Server(
        repository,
        http_port=http,
        grpc_port=grpc,
        metrics_port=metrics,
        address=address,
        executable=tritonserver,
        arguments=[f"--model-control-mode={mode}", *given],
    )
    if not _values(given, "model-repository") and not _values(given, "model-store"):
        _check_repository(repository, wanted, allow_empty=allow_empty)
    wished = dict(zip(_SERVICES, (http_port, grpc_port, metrics_port, health_port), strict=True))
    check_ports(
        address,
        {f"--{name}-port": port for name, port in wished.items() if not _configures(given, name)},
    )
    server.log = _log(console, verbose=verbose)
    for number in _SIGNALS:
        signal.signal(number, _stop)
    code = 0
    try:
        server.start()
        with contextlib.closing(Control(server.grpc_address, server.keys)) as control:
            supervisor = Supervisor(
                server.models,
                Watch(server.vitals, load_timeout),
                control if mode == "explicit" else None,
                Plan(restarts, load_timeout),
                lambda event: console.print(_line(event)),
                spawn=_spawn,
            )
            readiness = Readiness(address, health, supervisor, server.lives)
            with readiness:
                try:
                    _warn(console, address, given)
                    code = _supervise(console, server, supervisor, readiness, wanted)
                finally:
                    # In this order: what a load balancer sends before it looks elsewhere is
                    # answered, and so is what is under way when Triton is told to leave.
                    readiness.stopping()
                    _drain(server, supervisor, drain)
                    server.stop()
    except _Stopped:
        console.print("stopped")
    finally:
        server.stop()  # also when a signal came while it was being started
    raise typer.Exit(code)


def _check_repository(path: Path, wanted: Sequence[str], *, allow_empty: bool) -> None:
    """Refuse a repository in which there is nothing to serve.

    Raises:
        ServerError: it holds no models, lacks a wanted one, or is a model itself.
    """
    if not repositories.by_name(path, wanted) and not allow_empty:
        raise ServerError(
            f"{path} holds no models; expected folders with a config.pbtxt. --allow-empty serves it"
            " as it is."
        )


def _configures(arguments: Sequence[str], service: str) -> bool:
    """Whether tritonserver's own arguments say where a service listens, or whether it does."""
    names = (f"{service}-port", f"{service}-address", f"allow-{service}", f"reuse-{service}-port")
    return any(_values(arguments, name) for name in names)


def _log(console: Console, *, verbose: bool) -> IO[bytes] | None:
    """Where Triton's log goes: into a file that is kept and named; None: where we print."""
    if verbose:
        return None
    try:
        # Not a `with`: it is open, and kept, for as long as this process lives.
        file = tempfile.NamedTemporaryFile(prefix="tritonserver-", suffix=".log", delete=False)  # noqa: SIM115
    except OSError as error:
        raise ServerError(
            f"a file for Triton's log cannot be made: {error.strerror}. --verbose needs none."
        ) from None
    console.print(f"log     {escape(file.name)} is Triton's log; --verbose prints it here")
    return file


def _supervise(
    console: Console,
    server: Server,
    supervisor: Supervisor,
    readiness: Readiness,
    wanted: Sequence[str],
) -> int:
    """Watch over the models until the server ends; the exit code.

    Raises:
        _Stopped: a signal came, also one whose exception got lost. Python drops what is raised
            inside a destructor, or while another signal's exception is on its way.
    """
    states = server.wait_loaded()
    if supervisor.heals:
        supervisor.load(wanted or sorted({state.name for state in states}))
    announced = False
    while server.process.poll() is None:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
            raise _Stopped
        supervisor.step()
        _reap_orphans(server.process.pid)
        if supervisor.settled and not announced:
            announced = True
            console.print(
                f"serving on http://{server.http_address} and grpc://{server.grpc_address};"
                f" metrics on http://{server.metrics_address}/metrics,"
                f" readiness on http://{readiness.address}/ready; Ctrl-C stops"
            )
    code: int = server.process.returncode
    how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    why = f"its log says why{escape(server.log_name)}"
    console.print(f"[red]tritonserver ended {how}[/]; {why}. Nothing of it is left.")
    return code if code >= 0 else 128 - code


def _drain(server: Server, supervisor: Supervisor, seconds: float) -> None:
    """Go on serving for as long as somebody may not know yet that we leave."""
    deadline = time.monotonic() + seconds
    while server.process.poll() is None and time.monotonic() < deadline:
        supervisor.step()


def _reap_orphans(server: int) -> None:
    """As the first process of a container: take the exit codes that nobody else will take."""
    with contextlib.suppress(ChildProcessError):  # there are none
        while os.getpid() == 1:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            # The server's own is waited for elsewhere.
            if ended is None or ended.si_pid == server:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def _spawn(work: Callable[[], None]) -> None:
    # A load that Triton never ends must not keep this process from ending.
    threading.Thread(target=work, daemon=True).start()


def _warn(console: Console, address: str, arguments: Sequence[str]) -> None:
    exposed = endpoint_restrictions.still_open(arguments)
    if address not in _LOCAL and exposed:
        console.print(
            f"[yellow]note[/]    every client that reaches {address} may use Triton's endpoints"
            f" {', '.join(exposed)};"
            f" --restrict={','.join(endpoint_restrictions.SENSITIVE)} closes them"
        )


def _values(arguments: Sequence[str], name: str) -> list[str]:
    """The values of an argument of tritonserver's, which may be repeated."""
    found = []
    for argument, following in itertools.pairwise([*arguments, ""]):
        if argument == f"--{name}":
            found.append(following)
        if argument.startswith(f"--{name}="):
            found.append(argument.partition("=")[2])
    return found


def _without(arguments: Sequence[str], name: str) -> list[str]:
    """The arguments, without one of tritonserver's and its values."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and argument != f"--{name}" and not argument.startswith(f"--{name}="):
            kept.append(argument)
        skip = not skip and argument == f"--{name}"
    return kept


def _stop(_number: int, _frame: FrameType | None) -> None:
    # Once is enough: a second signal must not interrupt the stopping, and leave the server behind.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise _Stopped


def _line(event: Event) -> str:
    # Triton appends the places in Python where the sentence was raised; its log has them too.
    text = event.text.split("\n\nAt:")[0].strip()
    label = f"[{_COLOURS[event.kind]}]{event.kind.value}[/]"
    padding = " " * max(1, 8 - len(event.kind.value))
    return f"{label}{padding}{escape(event.model)}" + (f": {escape(text)}" if text else "")
