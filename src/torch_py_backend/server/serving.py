"""A tritonserver whose models are kept serving, with the endpoints for probes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch_py_backend.config import repository as repositories
from torch_py_backend.errors import ToolError
from torch_py_backend.page.app import Page
from torch_py_backend.server import server_arguments
from torch_py_backend.server.instances import InstanceMonitor
from torch_py_backend.server.lifecycle import Event
from torch_py_backend.server.ports import check_ports, choose_ports, client_address, listen
from torch_py_backend.server.reloading import Reloader
from torch_py_backend.server.supervisor import Supervisor
from torch_py_backend.server.tritonserver import Server

_SERVICES = ("http", "grpc", "metrics", "health")


class Serving:
    """A supervised server, for `with serving.running()`; `step` is called in a loop meanwhile.

    Args:
        repository: the model repository, a folder.
        on_event: called with what happens to models, in `step`.
        ports: the ports of HTTP, gRPC, metrics and readiness; 0 takes a free one.
        address: the address to listen on.
        tritonserver: the tritonserver to use; None: search for one.
        arguments: more arguments for tritonserver; they override others.
        restarts: how often a model that died is reloaded, until it has served for a minute.
        load_seconds: the time limit of one load.
        drain: seconds that requests are still accepted at the end, while no model is ready.
        allow_empty: whether the repository may be without models.
        reload: whether models are reloaded when their files change.

    Attributes:
        server: the server; its log can be set until it runs.
        supervisor: the supervisor of its models, while it runs.
        health_address: host and port of the readiness endpoints, while it runs.

    Raises:
        ToolError: an argument cannot be used, a port is taken, or there is no tritonserver.
    """

    supervisor: Supervisor
    health_address: str

    def __init__(
        self,
        repository: Path,
        on_event: Callable[[Event], None],
        *,
        ports: Sequence[int],
        address: str = "127.0.0.1",
        tritonserver: Path | None = None,
        arguments: Sequence[str] = (),
        restarts: int = 8,
        load_seconds: float = 1800.0,
        drain: float = 0.0,
        allow_empty: bool = False,
        reload: bool = False,
    ) -> None:
        mode, self._names, kept = _triton_arguments(arguments, reload=reload)
        http, grpc, metrics, self._health_port = choose_ports(*ports)
        self.server = Server(
            repository,
            http_port=http,
            grpc_port=grpc,
            metrics_port=metrics,
            address=address,
            executable=tritonserver,
            arguments=kept,
        )
        if not allow_empty:
            _refuse_empty(repository, self._names, kept)
        requested = {
            f"--{service}-port": port
            for service, port in zip(_SERVICES, ports, strict=True)
            if not server_arguments.configures(kept, service)
        }
        check_ports(address, requested)
        self._repository, self._on_event, self._address = repository, on_event, address
        self._controls, self._reload = mode == "explicit", reload
        self._restarts, self._load_seconds, self._drain = restarts, load_seconds, drain
        self._steps: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start the server and begin to load its models; stop it at the end of the block.

        Raises:
            ToolError: the server cannot start.
        """
        server = self.server
        with server:
            self.supervisor = supervisor = Supervisor(
                server.client,
                InstanceMonitor(server.status_folder, self._load_seconds),
                self._on_event,
                controls=self._controls,
                restarts=self._restarts,
                load_seconds=self._load_seconds,
            )
            listener = listen("--health-port", self._address, self._health_port)
            with Page(listener, lambda: supervisor.snapshot) as page:
                self.health_address = client_address(self._address, self._health_port)
                try:
                    states = server.wait_loaded()
                    if self._controls:
                        supervisor.load(self._names or sorted(state.name for state in states))
                    self._steps = [supervisor.step]
                    if self._reload:
                        self._steps.append(self._reloader().step)
                    yield
                finally:
                    # In this order, both the requests that a load balancer still sends and those in
                    # progress when Triton stops are answered.
                    page.stopping = True
                    deadline = time.monotonic() + self._drain
                    while server.process.poll() is None and time.monotonic() < deadline:
                        supervisor.step()
                    server.stop()

    def _reloader(self) -> Reloader:
        load = self.server.client.load
        return Reloader(self._repository, self._names, load, self._on_event, self._load_seconds)

    def step(self) -> None:
        """Wait shortly, then process what has happened."""
        for step in self._steps:
            step()


def _triton_arguments(
    arguments: Sequence[str], *, reload: bool
) -> tuple[str, list[str], list[str]]:
    """Return the model control mode, the models to load, and the arguments for tritonserver."""
    mode = (server_arguments.values(arguments, "model-control-mode") or ["explicit"])[-1]
    if reload and mode != "explicit":
        raise ToolError(
            f"--reload was given, and Triton's model control mode is {mode}; expected explicit."
            " Remove one of the two."
        )
    for service in ("http", "grpc") if mode == "explicit" else ("http",):
        allowed = server_arguments.values(arguments, f"allow-{service}")
        is_disabled = bool(allowed) and allowed[-1].lower() not in ("true", "1")
        if is_disabled or server_arguments.values(arguments, f"{service}-port"):
            raise ToolError(
                f"--{f'allow-{service}' if is_disabled else f'{service}-port'} was given after --,"
                f" and `serve` itself uses this service; expected --{service}-port before --."
            )
    kept = server_arguments.without(arguments, "model-control-mode")
    models: list[str] = []
    if mode == "explicit":
        # Loaded by the supervisor: Triton would not listen before it has loaded all of them.
        models = [name for name in server_arguments.values(kept, "load-model") if name != "*"]
        kept = server_arguments.without(kept, "load-model")
    return mode, models, [f"--model-control-mode={mode}", *kept]


def _refuse_empty(repository: Path, models: Sequence[str], arguments: Sequence[str]) -> None:
    is_replaced = any(
        server_arguments.values(arguments, name) for name in ("model-repository", "model-store")
    )
    if not is_replaced and not repositories.by_name(repository, models):
        raise ToolError(
            f"{repository} holds no models; expected folders with a config.pbtxt. --allow-empty"
            " serves it as it is."
        )
