"""`torch-py-backend serve`: run a tritonserver on a model repository and supervise its models."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from torch_py_backend.model_folders import remote_repository
from torch_py_backend.server import serving
from torch_py_backend.server import tritonserver as tritonservers
from torch_py_backend.server.client import KEY_HEADER
from torch_py_backend.server.installation import TritonInstallation

_KEY_VARIABLE = "TORCH_PY_BACKEND_ADMIN_KEY"
_LOCAL = ("127.0.0.1", "localhost", "::1")
_Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port.")]
_COLORS = {"READY": "green", "FAILED": "red", "GIVEN UP": "red"}


def serve(
    repository: Annotated[
        str,
        typer.Argument(
            help="The model repository: a folder, or one in an object store, such as"
            " s3://bucket/folder, gs://, az:// or hf://organization/model@revision."
        ),
    ],
    http_port: _Port = 8000,
    grpc_port: _Port = 8001,
    metrics_port: _Port = 8002,
    health_port: _Port = 8003,
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
            f" {_KEY_VARIABLE}, over HTTP in the header {KEY_HEADER}: such as"
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
    page: Annotated[
        bool,
        typer.Option(" /--no-page", help="Serve no page at the health port, only the probes."),
    ] = True,
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
    # Removed, so that tritonserver and its instances do not inherit the key.
    key = os.environ.pop(_KEY_VARIABLE, "") or secrets.token_urlsafe()
    restricted = [name.strip() for name in restrict.split(",")] if restrict else []
    TritonInstallation(tritonserver)  # before much is fetched
    server = tritonservers.Server(
        remote_repository.local(repository, cache, _say),
        (http_port, grpc_port, metrics_port, health_port),
        address,
        tritonserver,
        arguments or (),
        restricted,
        key,
    )
    names = serving.take_names(server, allow_empty=allow_empty)
    exposed = [api for api in tritonservers.SENSITIVE if api not in restricted]
    if exposed and address not in _LOCAL:
        _say(
            f"note    every client that reaches {address} may use Triton's endpoints"
            f" {', '.join(exposed)}; --restrict={','.join(tritonservers.SENSITIVE)} closes them",
            "yellow",
        )
    if not verbose:
        server.log = tritonservers.create_log()
        _say(f"log     {server.log} is Triton's log; --verbose prints it here")
    if page:
        _say(f"page    http://{server.health_address} shows the models, and tries them")
    ended = threading.Event()
    # The first signal ends the command; further ones let it clean up.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())

    def announce(_: object) -> None:
        _say(
            f"serving on http://{server.http_address} and grpc://{server.grpc_address};"
            f" metrics on http://{server.metrics_address}/metrics,"
            f" readiness on http://{server.health_address}/ready; Ctrl-C stops"
        )

    def is_over() -> bool:
        reap_orphans(server.process.pid)
        return ended.is_set()

    serving.run(
        server,
        names,
        lambda event: _say(str(event), _COLORS.get(event.kind, "yellow")),
        announce,
        is_over,
        restarts=restarts,
        load_seconds=load_timeout,
        drain=drain,
        reload=reload,
        page=page,
    )
    _say("stopped")


def _say(text: str, color: str | None = None) -> None:
    with contextlib.suppress(OSError):  # a full disk, or a closed pipe, does not end the server
        typer.secho(text, fg=color)


def reap_orphans(server: int) -> None:
    """Reap orphaned processes, but not the server, if this is the first process of a container."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):  # no child processes
        while os.getpid() == 1 and (ended := os.waitid(os.P_ALL, 0, flags)):
            if ended.si_pid == server:  # it is waited for elsewhere
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
