"""A tritonserver whose models are kept serving, with the endpoints for probes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch_py_backend.config import repository as repositories
from torch_py_backend.errors import ToolError
from torch_py_backend.page.app import Page
from torch_py_backend.server import server_arguments
from torch_py_backend.server.instances import InstanceMonitor
from torch_py_backend.server.reloading import Reloader
from torch_py_backend.server.supervisor import Event, Supervisor
from torch_py_backend.server.tritonserver import Server, client_address, listen

_STEP_S = 0.1


@dataclass
class Serving:
    """A supervised server.

    Args: as the options of `torch-py-backend serve`, and
        on_event: called with what happens to models.
        ports: the ports of HTTP, gRPC, metrics and readiness.
        restrict: Triton's endpoints that require the key.
        key: what clients must send to restricted endpoints.

    Attributes:
        server: the server; its log can be set until it runs.
        supervisor: the supervisor of its models, while it runs.
        health_address: host and port of the endpoints for probes, while it runs.

    Raises:
        ToolError: an argument cannot be used, a port is taken, or there is no tritonserver.
    """

    repository: Path
    on_event: Callable[[Event], None]
    ports: Sequence[int]
    address: str = "127.0.0.1"
    tritonserver: Path | None = None
    arguments: Sequence[str] = ()
    restrict: Sequence[str] = ()
    key: str = ""
    restarts: int = 8
    load_seconds: float = 1800.0
    drain: float = 0.0
    allow_empty: bool = False
    reload: bool = False

    supervisor: Supervisor = field(init=False)
    health_address: str = field(init=False)

    def __post_init__(self) -> None:
        parsed = server_arguments.parse(self.arguments)
        # Loaded by the supervisor: Triton would not listen before it has loaded all of them.
        self._names = [name for name in parsed.load_model if name != "*"]
        restrictions = server_arguments.restriction_arguments(self.restrict, self.key)
        self.server = Server(
            self.repository,
            ports=self.ports[:3],
            address=self.address,
            executable=self.tritonserver,
            arguments=["--model-control-mode=explicit", *restrictions, *parsed.others],
            key=self.key if self.restrict else "",
            exit_seconds=parsed.exit_timeout_secs,
        )
        if not self.allow_empty and not repositories.by_name(self.repository, self._names):
            raise ToolError(
                f"{self.repository} holds no models; expected folders with a config.pbtxt."
                " --allow-empty serves it as it is."
            )

    def run(
        self,
        on_loaded: Callable[[], None],
        is_over: Callable[[], bool],
    ) -> int | None:
        """Run the server, and keep its models serving, in a thread that lives as long.

        Args:
            on_loaded: called when the first load of every model has succeeded or failed.
            is_over: called several times a second; the server ends if it returns True or raises.

        Returns:
            The exit code of a tritonserver that has ended by itself; None: `is_over`.

        Raises:
            ToolError: the server cannot start.
        """
        listener = listen(self.address, self.ports[3])
        self.health_address = client_address(self.address, listener.getsockname()[1])
        with contextlib.closing(listener), self.server as server:
            self.supervisor = supervisor = Supervisor(
                server.client,
                InstanceMonitor(server.status_folder, self.load_seconds),
                self.on_event,
                restarts=self.restarts,
                load_seconds=self.load_seconds,
            )
            with Page(listener, lambda: supervisor.snapshot) as page:
                try:
                    states = server.wait_loaded(is_over)
                    supervisor.load(self._names or sorted(state.name for state in states))
                    if self.reload:
                        reloader = Reloader(self.repository, self._names, supervisor.reload)
                    is_loaded = False
                    while (code := server.process.poll()) is None and not is_over():
                        time.sleep(_STEP_S)
                        supervisor.step()
                        if self.reload:
                            reloader.step()
                        if supervisor.initial_loads_done and not is_loaded:
                            is_loaded = True
                            on_loaded()
                    return code
                finally:
                    # In this order, both the requests that a load balancer still sends and those in
                    # progress when Triton stops are answered.
                    page.stopping = True
                    deadline = time.monotonic() + self.drain
                    while server.process.poll() is None and time.monotonic() < deadline:
                        time.sleep(_STEP_S)
                        supervisor.step()
                    server.stop()
