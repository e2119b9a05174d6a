"""Keeping the models of a tritonserver serving, with the endpoints for probes."""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_py_backend.config import repository as repositories
from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.errors import ToolError, sanitize_line
from torch_py_backend.page.models import ModelsPage
from torch_py_backend.page.probes import Probes
from torch_py_backend.server import http_server
from torch_py_backend.server.client import KEY_HEADER
from torch_py_backend.server.instances import InstanceMonitor
from torch_py_backend.server.supervisor import Event, Supervisor
from torch_py_backend.server.tritonserver import RESTRICTIONS, Server, listen

_STEP_S = 0.1
# Files that stay the same for this time are complete.
_POLL_S = 1.0
# Folders that are written by loads of a model, and by Python.
_IGNORED = ("compile_cache", "__pycache__")
# Arguments of tritonserver that `serve` sets itself, and uses.
_REFUSED = (
    *("model-control-mode", "model-repository", *RESTRICTIONS),
    *("http-port", "allow-http", "grpc-port", "allow-grpc", "metrics-port"),
    *("http-address", "grpc-address", "grpc-use-ssl", "grpc-use-ssl-mutual"),
)


def take_names(server: Server, *, allow_empty: bool = False) -> list[str]:
    """Take the models to load, none for all, from a server's arguments, and check the others.

    Triton would not listen before it has loaded them.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--load-model", action="append", default=[])
    parser.add_argument("--exit-timeout-secs", type=int, default=server.exit_seconds)
    try:
        parsed, others = parser.parse_known_args(server.arguments)
    except argparse.ArgumentError as error:
        raise ToolError(f"{error}.") from None
    for word in others:
        if word.removeprefix("--").partition("=")[0] in _REFUSED:
            raise ToolError(f"`serve` sets {word} itself; use the options before --.")
    server.arguments = ["--model-control-mode=explicit", *others]
    server.exit_seconds = parsed.exit_timeout_secs
    names = [name for name in parsed.load_model if name != "*"]
    if not allow_empty and not repositories.by_name(server.repository, names):
        raise ToolError(
            f"{server.repository} holds no models; expected folders with a config.pbtxt."
            " --allow-empty (in Python: allow_empty=True) serves it as it is."
        )
    return names


def run(
    server: Server,
    names: Sequence[str],
    on_event: Callable[[Event], None],
    on_loaded: Callable[[Mapping[str, str]], None],
    is_over: Callable[[], bool],
    *,
    restarts: int = 8,
    load_seconds: float = 1800.0,
    drain: float = 0.0,
    reload: bool = False,
    page: bool = True,
) -> None:
    """Run a server, and keep its models serving, in a thread that lives as long.

    `names` are the models to load; none: all. `on_event` is called with what happens to them, and
    `on_loaded`, when the first load of every model has succeeded or failed, with the reason why
    each does not serve; empty: it does. The server ends when `is_over`, which is called several
    times a second, returns true or raises. The others are options of `torch-py-backend serve`.

    Raises:
        ToolError: tritonserver has ended by itself.
    """
    listener = listen(server.address, server.ports[3])
    with contextlib.closing(listener), server:
        served = _Served(server, on_event, restarts, load_seconds)
        supervisor = served.supervisor
        probes = Probes(lambda: supervisor.snapshot)
        routes = [*probes.routes, *(served.page().routes if page else ())]
        with http_server.run(listener, routes):
            try:
                found = sorted(server.wait_loaded(is_over))
                # Not hidden folders, such as .git and .ipynb_checkpoints.
                supervisor.load(names or [n for n in found if n[0] != "." and n not in _IGNORED])
                steps = [served.step]
                if reload:
                    steps.append(Reloader(server.repository, names, supervisor.reload).step)
                is_loaded = False
                while not is_over():
                    server.check_running()
                    time.sleep(_STEP_S)
                    for step in steps:
                        step()
                    if supervisor.initial_loads_done and not is_loaded:
                        is_loaded = True
                        on_loaded(supervisor.snapshot.models)
            finally:
                # In this order, both the requests that a load balancer still sends and those in
                # progress when Triton stops are answered.
                probes.stopping = True
                deadline = time.monotonic() + drain
                while server.process.poll() is None and time.monotonic() < deadline:
                    time.sleep(_STEP_S)
                    supervisor.step()
                server.stop()


class _Served:
    """The models of a server, with what its page shows of them and changes."""

    def __init__(
        self,
        server: Server,
        on_event: Callable[[Event], None],
        restarts: int,
        load_seconds: float,
    ) -> None:
        self._server, self._on_event = server, on_event
        self._monitor = InstanceMonitor(server.status_folder, load_seconds)
        self.supervisor = Supervisor(
            server.client, self._monitor, self._record, restarts, load_seconds
        )
        self._failures: dict[str, str] = {}
        # Requests of the page, which has a thread of its own.
        self._changes: collections.deque[tuple[str, str]] = collections.deque()

    def page(self) -> ModelsPage:
        return ModelsPage(
            self._server.http_address,
            self._server.ports[:2],
            KEY_HEADER,
            self._server.key,
            self._describe,
            self._monitor.report,
            lambda action, name: self._changes.append((action, name)),
        )

    def step(self) -> None:
        """Begin the loads and unloads that the page requests, and let the supervisor step."""
        while self._changes:
            action, name = self._changes.popleft()
            if action == "load":
                self.supervisor.reload(name, "requested on the page")
            else:
                # The supervisor observes it. A call is cancelled when its object is deleted.
                self._unload = self._server.client.unload(name)
        self.supervisor.step()

    def _record(self, event: Event) -> None:
        if event.kind in ("FAILED", "DOWN", "GIVEN UP"):
            self._failures[event.model] = f"{time.strftime('%X')} {event.kind}: {event.text}"
        self._on_event(event)

    def _describe(self) -> JsonObject:
        """Return what the page shows, for any thread."""
        snapshot = self.supervisor.snapshot
        reasons = dict.fromkeys(snapshot.others, "is not loaded") | dict(snapshot.models)
        models = {}
        for name, reason in sorted(reasons.items()):
            models[name] = {
                "reason": sanitize_line(reason),
                "warnings": [sanitize_line(text) for text in snapshot.warnings.get(name, ())],
                "failure": sanitize_line(self._failures.get(name, "")),
                "instances": [instance.describe() for instance in self._monitor.instances(name)],
            }
        return {"problem": snapshot.problem, "models": models}


@dataclass
class Reloader:
    """Reloads the models of a repository whose files change, and loads those that are added to it.

    Triton loads the new model beside the one that serves, and replaces that when the new one is
    READY; if the load fails, the old one serves on.

    Attributes:
        names: the models to watch; empty: all.
        reload: begins to load a model; False: it cannot be loaded now, and is tried again.
    """

    repository: Path
    names: Collection[str]
    reload: Callable[[str], bool]

    def __post_init__(self) -> None:
        self._polled = self._poll()
        self._loaded = dict(self._polled)
        self._due = 0.0

    def step(self) -> None:
        """Poll the files if that is due, and begin loads."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _POLL_S
        before, self._polled = self._polled, self._poll()
        for name, files in self._polled.items():
            is_changed = files == before.get(name) and files != self._loaded.get(name)
            if is_changed and self.reload(name):
                self._loaded[name] = files

    def _poll(self) -> dict[str, set[tuple[Path, int]]]:
        """Return the path and the time of change of each file, by model."""
        polled = {}
        with contextlib.suppress(OSError):  # a file is being replaced: the next poll sees it
            for model in repositories.models(self.repository):
                files = set[tuple[Path, int]]()
                for parent, folders, names in os.walk(model, followlinks=True):
                    folders[:] = [name for name in folders if name not in _IGNORED]
                    for name in names:
                        path = Path(parent, name)
                        if not name.startswith(".") and path.exists():  # an editor's; a broken link
                            files.add((path, path.stat().st_mtime_ns))
                if not self.names or model.name in self.names:
                    polled[model.name] = files
        return polled
