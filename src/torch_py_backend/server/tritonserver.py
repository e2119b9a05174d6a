"""Find a tritonserver, and run it on a model repository with this backend."""

from __future__ import annotations

import contextlib
import errno
import http.client
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import psutil

from torch_py_backend.errors import ServerError
from torch_py_backend.processes import instance_status, orphan_cleanup
from torch_py_backend.processes.orphan_cleanup import ResourceOwner
from torch_py_backend.server import installation, server_arguments

if TYPE_CHECKING:
    from typing_extensions import Self

NGC = Path("/opt/tritonserver")
_STUB = "triton_python_backend_stub"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_LIBPYTHON = re.compile(rb"libpython(3\.\d+)\.so")
# Triton waits this long for models in use before it exits; a little later it is killed.
_EXIT_SECONDS = 30
_EXIT_OPTION = "exit-timeout-secs"
_GRACE_SECONDS = 5
# A server that is being stopped may run for this long after its last instance has ended.
_IDLE_SECONDS = 5
# The platforms of models that do not compute in the process of tritonserver itself.
_CHILD_PLATFORMS = ("python", "ensemble")
_SERVICES = ("http", "grpc", "metrics")
_POLL_SECONDS = 0.05
_REQUEST_SECONDS = 10
_OTHER_ADDRESS = "Choose an --address of this machine."


@dataclass(frozen=True, slots=True)
class TritonInstallation:
    """The paths of an installed tritonserver.

    Attributes:
        python_backend: the folder with libtriton_python.so and Triton's utilities.
        stub: the executable that runs Python models, built for this version of Python.
        libraries: the folders with its shared libraries.
    """

    executable: Path
    python_backend: Path
    stub: Path
    libraries: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class ModelState:
    """The state of one version of a model in Triton's repository index.

    Attributes:
        version: the version; empty if Triton does not report one.
        reason: why it does not serve.
        unloaded: whether it was unloaded, or is being unloaded.
    """

    name: str
    version: str
    ready: bool
    reason: str
    unloaded: bool = False


def find(executable: Path | None = None) -> TritonInstallation:
    """Find a tritonserver: on PATH, in /opt/tritonserver, or in the wheel nvidia-pytriton.

    Args:
        executable: the tritonserver to use instead.

    Raises:
        ServerError: there is none, or it has no Python backend or no stub for this Python.
    """
    if executable is None:
        name = "tritonserver"
        path = shutil.which(name) or shutil.which(name, path=NGC / "bin")
        executable = Path(path) if path else None
    wheel = importlib.util.find_spec("pytriton")  # not imported
    if executable is not None:
        if not executable.is_file():
            raise ServerError(f"{executable} is not a file; expected a tritonserver executable.")
        # The layout of NVIDIA's containers.
        prefix = executable.resolve().parents[1]
        backend, libraries = prefix / "backends" / "python", prefix / "lib"
        stub = backend / _STUB
    elif wheel is not None and wheel.origin is not None:
        package = Path(wheel.origin).parent
        root = package / "tritonserver"
        executable = root / "bin" / "tritonserver"
        backend, libraries = root / "backends" / "python", package.parent / "nvidia_pytriton.libs"
        stub = root / "python_backend_stubs" / _PYTHON / _STUB
    else:
        raise ServerError(
            f"no tritonserver was found on PATH, in {NGC} or in a wheel. Install one with"
            " pip install 'torch-py-backend[server]', or name it with --tritonserver."
        )
    for part in (backend / "libtriton_python.so", stub):
        if not part.is_file():
            raise ServerError(
                f"{executable} comes without {part}: its Python backend does not support Python"
                f" {_PYTHON}, or is not installed."
            )
    libpython = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    return TritonInstallation(executable, backend, stub, (libraries, libpython))


def stub_python(triton: TritonInstallation) -> str:
    """Return the Python version of a server's stub, such as 3.12, from the library that it loads.

    Raises:
        ServerError: the stub cannot be read, or names no library of Python.
    """
    try:
        match = _LIBPYTHON.search(triton.stub.read_bytes())
    except OSError as error:
        raise ServerError(f"cannot read {triton.stub}: {error.strerror}.") from None
    if match is None:
        raise ServerError(f"{triton.stub} names no libpython; expected a stub of Triton's.")
    return match[1].decode()


def populate_backends(triton: TritonInstallation, backends: Path) -> None:
    """Fill a backend directory with Triton's Python backend and this backend.

    Files are copied: Triton refuses a library whose real path is outside its backend folder.
    """
    python = backends / "python"
    shutil.copytree(triton.python_backend, python, ignore=shutil.ignore_patterns("__pycache__"))
    if not (python / _STUB).exists():
        shutil.copy2(triton.stub, python / _STUB)
    installation.install(backends, "pytorch_py")


def environment(triton: TritonInstallation) -> dict[str, str]:
    """Return the environment variables with which a server finds its libraries and this Python.

    Raises:
        ServerError: there is no `python3` beside this interpreter that is the same interpreter.
    """
    folder = Path(sys.executable).parent
    python3 = folder / "python3"
    if not python3.exists() or python3.resolve() != Path(sys.executable).resolve():
        raise ServerError(
            f"Triton's stub runs the first python3 on PATH, and {python3} is not this Python"
            f" ({sys.executable}). Run from a virtual environment: python -m venv .venv."
        )
    values = dict(os.environ)
    for name, paths in (("LD_LIBRARY_PATH", triton.libraries), ("PATH", (folder,))):
        values[name] = os.pathsep.join(filter(None, [*map(str, paths), values.get(name, "")]))
    return values


def ports(*requested: int) -> list[int]:
    """Return the ports, with a free port in place of each 0."""
    with contextlib.ExitStack() as stack:
        # Open until all are chosen, so that they differ. "": free on all addresses.
        sockets = [stack.enter_context(socket.socket()) for _ in requested]
        for free in sockets:
            free.bind(("", 0))
        return [
            port or free.getsockname()[1] for port, free in zip(requested, sockets, strict=True)
        ]


def client_address(address: str, port: int) -> str:
    """Return the address at which clients on this machine reach a service."""
    return f"{'127.0.0.1' if address == '0.0.0.0' else address}:{port}"  # noqa: S104


def check_ports(address: str, requested: Mapping[str, int]) -> None:
    """Listen for a moment on each port, named by its option, as the server will; 0 is any port.

    Raises:
        ServerError: a port is out of range, taken, named twice or not allowed for this user.
    """
    with contextlib.ExitStack() as open_sockets:
        for option, port in requested.items():
            listener = open_sockets.enter_context(socket.socket())
            # As Triton does: a port with connections in TIME_WAIT only is free.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
                listener.listen()
            except OverflowError:
                raise ServerError(f"{option} is {port}; expected a port from 0 to 65535.") from None
            except OSError as error:
                is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
                raise ServerError(
                    f"{option} {port} on {address} cannot be listened on: {error.strerror}. "
                    + ("Choose another port; 0 takes a free one." if is_port else _OTHER_ADDRESS)
                ) from None


class Server:
    """A tritonserver on a model repository, with this backend, as a context manager.

    Args:
        http_port: the HTTP port; 0 takes a free one, here and below.
        metrics_port: the port of the Prometheus metrics.
        executable: the tritonserver to use; None: search for one.
        arguments: more arguments for tritonserver; they override others.
        log: the file for the server's log; None: the output of this process. The attribute can be
            set until the server is started.

    Attributes:
        http_address, grpc_address, metrics_address: host and port of each service.
        keys: the keys of restricted endpoints.
    """

    def __init__(
        self,
        repository: Path,
        *,
        http_port: int = 8000,
        grpc_port: int = 8001,
        metrics_port: int = 8002,
        address: str = "127.0.0.1",
        executable: Path | None = None,
        arguments: Sequence[str] = (),
        log: IO[bytes] | IO[str] | None = None,
    ) -> None:
        if not repository.is_dir():
            raise ServerError(f"{repository} is not a folder; expected a model repository.")
        self._repository = repository.absolute()
        self._ports = ports(http_port, grpc_port, metrics_port)
        self._address = address
        self.http_address, self.grpc_address, self.metrics_address = (
            client_address(address, port) for port in self._ports
        )
        self._triton = find(executable)
        self._arguments = tuple(arguments)
        self._exit_seconds = exit_seconds(arguments)
        self.log = log
        self.keys = server_arguments.required_keys(arguments)
        self._resource_owner: ResourceOwner | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log_name(self) -> str:
        """A colon and the name of the log file, for the end of a sentence; empty without a name."""
        name = getattr(self.log, "name", None)
        return f": {name}" if isinstance(name, str) else ""

    @property
    def status_folder(self) -> Path:
        """The folder with the status files of the instances of the running server."""
        if self._resource_owner is None:
            raise ServerError("the server was not started; call start() first.")
        return self._resource_owner.resources.status_folder

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server was not started; call start() first.")
        return self._process

    def start(self) -> None:
        """Start the server, which loads its models before it listens.

        Raises:
            ServerError: the server cannot run on this machine.
        """
        variables = environment(self._triton)
        orphan_cleanup.sweep()
        try:
            self._resource_owner = ResourceOwner()
        except OSError as error:
            raise ServerError(
                f"cannot write to {orphan_cleanup.SHARED_MEMORY}, as Triton must: {error.strerror}."
            ) from None
        resources = self._resource_owner.resources
        variables[orphan_cleanup.VARIABLE] = str(resources.status_folder)
        try:
            self._resource_owner.start_guard()
            populate_backends(self._triton, resources.backends)
            # A session of its own: Ctrl-C reaches this process, which then stops the server. A
            # folder of its own: Triton's stub would import a model.py from the current folder.
            self._process = subprocess.Popen(  # noqa: S603  the executable found above
                [
                    str(self._triton.executable),
                    f"--model-repository={self._repository}",
                    f"--backend-directory={resources.backends}",
                    # Distinguishes its shared memory from that of other servers.
                    f"--backend-config=python,shm-region-prefix-name={resources.prefix}",
                    f"--{_EXIT_OPTION}={_EXIT_SECONDS}",
                    # A model that does not load must not stop the server.
                    "--exit-on-error=false",
                    *(
                        f"--{service}-{argument}"
                        for service, port in zip(_SERVICES, self._ports, strict=True)
                        for argument in (f"address={self._address}", f"port={port}")
                    ),
                    *self._arguments,
                ],
                env=variables,
                cwd=resources.folder,
                stdout=self.log,
                stderr=self.log,
                start_new_session=True,
            )
        except BaseException:
            self.stop()
            raise

    def wait_loaded(self, timeout: float = math.inf) -> list[ModelState]:
        """Wait until the server has tried to load every model, and return their states.

        Raises:
            ServerError: the server ended, or took too long.
        """
        deadline = time.monotonic() + timeout
        while True:
            if (code := self.process.poll()) is not None:
                raise ServerError(
                    f"tritonserver ended with exit code {code}; its log says why{self.log_name}."
                )
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                return self.models()
            if time.monotonic() > deadline:
                raise ServerError(f"tritonserver was not ready within {timeout:g} seconds.")
            time.sleep(_POLL_SECONDS)

    def models(self) -> list[ModelState]:
        """Return the current states of the models in the repository."""
        with self._request("repository/index", b"{}") as response:
            return [parse_state(entry) for entry in json.load(response)]

    def lives(self) -> bool:
        """Return whether the server answers that it is live."""
        if self._process is None or self._process.poll() is not None:
            return False
        with contextlib.suppress(OSError, http.client.HTTPException), self._request("health/live"):
            return True
        return False

    def _request(self, path: str, data: bytes | None = None) -> http.client.HTTPResponse:
        url = f"http://{self.http_address}/v2/{path}"
        request = urllib.request.Request(url, data, dict(self.keys.http))
        response: http.client.HTTPResponse
        response = urllib.request.urlopen(request, timeout=_REQUEST_SECONDS)  # noqa: S310
        return response

    def _computes_in_children(self) -> bool:
        """Return whether all models run in child processes, and none in tritonserver itself."""
        try:
            monitored = {
                instance_status.Reader(path).identity.model
                for path in instance_status.files(self.status_folder)
            }
            for name in {state.name for state in self.models() if state.ready} - monitored:
                with self._request(f"models/{urllib.parse.quote(name, safe='')}") as response:
                    if json.load(response).get("platform") not in _CHILD_PLATFORMS:
                        return False
        except (OSError, ValueError, http.client.HTTPException):
            return False  # the server does not answer, or restricts the endpoint
        return True

    def stop(self) -> None:
        """Stop the server, and remove its instances and shared memory. May be called twice."""
        if self._process is not None:
            with _interrupts_deferred():
                in_children = self._process.poll() is None and self._computes_in_children()
                process, self._process = self._process, None
                terminate(process, self._exit_seconds, in_children=in_children)
        resource_owner, self._resource_owner = self._resource_owner, None
        if resource_owner is not None:
            resource_owner.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def parse_state(entry: Mapping[str, str]) -> ModelState:
    """Return the state of a model from an entry of Triton's repository index."""
    status, reason = entry.get("state"), entry.get("reason", "")
    unloaded = status == "UNLOADING" or reason == "unloaded"
    return ModelState(
        entry["name"], entry.get("version", ""), status == "READY", reason, unloaded=unloaded
    )


def exit_seconds(arguments: Sequence[str]) -> int:
    """Return how long a server with these arguments waits for models in use when it is stopped."""
    seconds = server_arguments.values(arguments, _EXIT_OPTION)
    # Triton itself refuses other text than a number.
    return int(seconds[-1]) if seconds and seconds[-1].isdecimal() else _EXIT_SECONDS


def terminate(process: subprocess.Popen[bytes], seconds: float, *, in_children: bool) -> None:
    """Terminate the server; after its own time limit, kill it and its descendants.

    Triton 24.10 waits for the whole limit for an instance that it has lost: of a model whose
    process died in a call, or whose reload was refused. If all its models run in child processes,
    it has nothing to wait for once they are gone.
    """
    descendants = _descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + seconds + _GRACE_SECONDS
    idle_since = math.inf
    while process.poll() is None:
        now = time.monotonic()
        is_busy = not in_children or any(map(_is_running, _descendants(process.pid)))
        idle_since = math.inf if is_busy else min(idle_since, now)
        if now > deadline or now - idle_since > _IDLE_SECONDS:
            process.kill()
        time.sleep(_POLL_SECONDS)
    for descendant in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendant.kill()
    # Not psutil.wait_procs, which raises FileNotFoundError while a process is being reaped.
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(map(_is_running, descendants)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def _is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Ignore Ctrl-C, so that it does not interrupt the shutdown of the server."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ValueError):  # not the main thread, which receives signals
            previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
            stack.callback(signal.signal, signal.SIGINT, previous)
        yield
