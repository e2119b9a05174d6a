"""A real tritonserver: found, given our backend, started, asked about its models, stopped."""

from __future__ import annotations

import contextlib
import errno
import http.client
import importlib.util
import itertools
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
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import psutil

from torch_py_backend.errors import ServerError
from torch_py_backend.processes import instance_status, orphan_cleanup
from torch_py_backend.processes.orphan_cleanup import Owned, Ownership
from torch_py_backend.server import endpoint_restrictions, installation

if TYPE_CHECKING:
    from typing_extensions import Self

NGC = Path("/opt/tritonserver")
_STUB = "triton_python_backend_stub"
_LIBPYTHON = re.compile(rb"libpython(3\.\d+)\.so")
# Triton waits this long for models in use, then leaves; a little later we end what is left.
_EXIT_SECONDS = 30
_EXIT = "--exit-timeout-secs"
_GRACE_SECONDS = 5
# For this long a server that is being stopped may have no instance left, and not have ended.
_IDLE_SECONDS = 5
# Triton's names for models that run in processes of its Python backend, or in no process.
_IN_PROCESSES = ("python", "ensemble")
_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 10
_NO_ADDRESS = "Choose an --address of this machine."


@dataclass(frozen=True, slots=True)
class Triton:
    """Where the parts of a tritonserver lie.

    Attributes:
        executable: the server.
        python_backend: the folder with libtriton_python.so and Triton's utilities.
        stub: the process that runs Python, built for this Python's version.
        libraries: folders that the loader must search.
    """

    executable: Path
    python_backend: Path
    stub: Path
    libraries: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class ModelState:
    """What the server says of one version of a model; `reason` when it is not ready.

    `unloaded`: it was taken out of service, or is being.
    """

    name: str
    version: str
    ready: bool
    reason: str
    unloaded: bool = False


def find(executable: Path | None = None) -> Triton:
    """The tritonserver to use: the one given, else on PATH, in /opt/tritonserver, in the wheel.

    Raises:
        ServerError: there is none, or it lacks its Python backend or a stub for this Python.
    """
    if executable is not None:
        if not executable.is_file():
            raise ServerError(f"{executable} is not a file; expected a tritonserver executable.")
        return _installed(executable)
    on_path = shutil.which("tritonserver")
    if on_path:
        return _installed(Path(on_path))
    if (NGC / "bin" / "tritonserver").is_file():
        return _installed(NGC / "bin" / "tritonserver")
    wheel = _wheel()
    if wheel is not None:
        return wheel
    raise ServerError(
        f"no tritonserver was found on PATH, in {NGC} or in a wheel. Install one with"
        " pip install 'torch-py-backend[server]', or name it with --tritonserver."
    )


def _installed(executable: Path) -> Triton:
    """The layout of NVIDIA's containers: bin/, lib/ and backends/ side by side."""
    prefix = executable.resolve().parents[1]
    backend = prefix / "backends" / "python"
    return _complete(executable, backend, backend / _STUB, (prefix / "lib",))


def _wheel() -> Triton | None:
    """The server inside the wheel nvidia-pytriton, found without importing that package."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    root = package / "tritonserver"
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    return _complete(
        root / "bin" / "tritonserver",
        root / "backends" / "python",
        root / "python_backend_stubs" / minor / _STUB,
        (package.parent / "nvidia_pytriton.libs",),
    )


def _complete(executable: Path, backend: Path, stub: Path, libraries: tuple[Path, ...]) -> Triton:
    for part in (backend / "libtriton_python.so", stub):
        if not part.is_file():
            raise ServerError(
                f"{executable} comes without {part}: its Python backend does not support Python"
                f" {sys.version_info.major}.{sys.version_info.minor}, or is not installed."
            )
    libpython = sysconfig.get_config_var("LIBDIR")
    return Triton(executable, backend, stub, (*libraries, Path(libpython or "/usr/lib")))


def stub_python(triton: Triton) -> str:
    """The Python that a server's stub is built for, as 3.12, told by the library that it loads.

    Raises:
        ServerError: the stub cannot be read, or is none.
    """
    try:
        found = _LIBPYTHON.search(triton.stub.read_bytes())
    except OSError as error:
        raise ServerError(f"cannot read {triton.stub}: {error.strerror}.") from None
    if found is None:
        raise ServerError(f"{triton.stub} names no libpython; expected a stub of Triton's.")
    return found[1].decode()


def lay_out(triton: Triton, backends: Path) -> None:
    """Fill a backend folder with Triton's Python backend and ours.

    Files are copied: Triton refuses a library whose real path is outside its backend folder.
    """
    python = backends / "python"
    shutil.copytree(triton.python_backend, python, ignore=shutil.ignore_patterns("__pycache__"))
    if not (python / _STUB).exists():
        shutil.copy2(triton.stub, python / _STUB)
    installation.install(backends, "pytorch_py")


def environment(triton: Triton) -> dict[str, str]:
    """The environment in which the server finds its libraries and its stubs this Python.

    Raises:
        ServerError: no `python3` beside this interpreter leads to it.
    """
    folder = Path(sys.executable).parent
    python3 = folder / "python3"
    if not python3.exists() or python3.resolve() != Path(sys.executable).resolve():
        raise ServerError(
            f"Triton's stub runs the first python3 on PATH, and {python3} is not this Python"
            f" ({sys.executable}). Run from a virtual environment: python -m venv .venv."
        )
    values = dict(os.environ)
    libraries = [str(path) for path in triton.libraries]
    values["LD_LIBRARY_PATH"] = _joined([*libraries, values.get("LD_LIBRARY_PATH", "")])
    values["PATH"] = _joined([str(folder), values.get("PATH", "")])
    return values


def _joined(paths: Sequence[str]) -> str:
    return os.pathsep.join(path for path in paths if path)


def ports(*wished: int) -> list[int]:
    """These ports; in place of each 0 another one that nobody listened on a moment ago."""
    with contextlib.ExitStack() as held:
        found = []
        for port in wished:
            taken = port
            if not taken:
                # Held until all are found, so that they differ; of every address of the machine.
                listener = held.enter_context(socket.socket())
                listener.bind(("", 0))
                taken = listener.getsockname()[1]
            found.append(taken)
        return found


def check_ports(address: str, wished: Mapping[str, int]) -> None:
    """Listen on each port for a moment, as the server will; 0 is any free port.

    Args:
        address: the address to listen on.
        wished: ports by the option that names them.

    Raises:
        ServerError: a port is out of range, taken, named twice or not allowed for this user.
    """
    with contextlib.ExitStack() as held:
        for option, port in wished.items():
            listener = held.enter_context(socket.socket())
            # As Triton does: a port whose last connections have just ended is free.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
                listener.listen()
            except OverflowError:
                raise ServerError(f"{option} is {port}; expected a port from 0 to 65535.") from None
            except OSError as error:
                of_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
                raise ServerError(
                    f"{option} {port} on {address} cannot be listened on: {error.strerror}. "
                    + ("Choose another port; 0 takes a free one." if of_port else _NO_ADDRESS)
                ) from None


class Server:
    """A tritonserver on one repository, with our backend. A context manager: leaving stops it.

    Args:
        repository: the model repository.
        http_port: port of HTTP; 0 takes a free one, here and below.
        grpc_port: port of gRPC.
        metrics_port: port of Prometheus metrics.
        address: the address to listen on.
        executable: the tritonserver to use; None searches for one.
        arguments: more arguments for tritonserver; they come last and win.
        log: where the server's log goes; None: where this process writes. The attribute may be
            set until the server is started.
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
        log: IO[Any] | None = None,
    ) -> None:
        if not repository.is_dir():
            raise ServerError(f"{repository} is not a folder; expected a model repository.")
        self._repository = repository.absolute()
        self._ports = ports(http_port, grpc_port, metrics_port)
        self._address = address
        self._triton = find(executable)
        self._arguments = tuple(arguments)
        self._exit_seconds = exit_seconds(arguments)
        self.log = log
        self.keys = endpoint_restrictions.keys(arguments)
        self._ownership: Ownership | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def http_address(self) -> str:
        return f"{self._reachable}:{self._ports[0]}"

    @property
    def grpc_address(self) -> str:
        return f"{self._reachable}:{self._ports[1]}"

    @property
    def metrics_address(self) -> str:
        return f"{self._reachable}:{self._ports[2]}"

    @property
    def _reachable(self) -> str:
        return "127.0.0.1" if self._address == "0.0.0.0" else self._address  # noqa: S104

    @property
    def log_name(self) -> str:
        """The log's name after a colon, for the end of a sentence; empty where it has none."""
        name = getattr(self.log, "name", None)
        return f": {name}" if isinstance(name, str) else ""

    @property
    def vitals(self) -> Path:
        """Where the instances of the running server tell how they are.

        Raises:
            ServerError: it was not started.
        """
        if self._ownership is None:
            raise ServerError("the server was not started; call start() first.")
        return self._ownership.owned.vitals

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running tritonserver.

        Raises:
            ServerError: it was not started.
        """
        if self._process is None:
            raise ServerError("the server was not started; call start() first.")
        return self._process

    def start(self) -> None:
        """Start the server; it loads its models before it listens.

        Raises:
            ServerError: the environment does not fit; the message says why.
        """
        values = environment(self._triton)
        orphan_cleanup.sweep()
        try:
            self._ownership = Ownership()
        except OSError as error:
            raise ServerError(
                f"cannot write to {orphan_cleanup.SHARED_MEMORY}, as Triton must: {error.strerror}."
            ) from None
        owned = self._ownership.owned
        values[orphan_cleanup.VARIABLE] = str(owned.vitals)
        try:
            self._ownership.guard()
            lay_out(self._triton, owned.backends)
            # Its own session: Ctrl-C reaches us, and we stop it in order. Its own folder: Triton's
            # stub imports a model.py from where it was started before it finds the backend's.
            self._process = subprocess.Popen(  # noqa: S603  the executable found above
                self._command(owned),
                env=values,
                cwd=owned.folder,
                stdout=self.log,
                stderr=self.log,
                start_new_session=True,
            )
        except BaseException:
            self.stop()
            raise

    def _command(self, owned: Owned) -> list[str]:
        command = [
            str(self._triton.executable),
            f"--model-repository={self._repository}",
            f"--backend-directory={owned.backends}",
            # Regions of shared memory bear this prefix, so that ours can be told from others'.
            f"--backend-config=python,shm-region-prefix-name={owned.prefix}",
            f"{_EXIT}={_EXIT_SECONDS}",
            # One model that does not load must not take the others with it.
            "--exit-on-error=false",
        ]
        for service, port in zip(("http", "grpc", "metrics"), self._ports, strict=True):
            command += [f"--{service}-address={self._address}", f"--{service}-port={port}"]
        return [*command, *self._arguments]

    def wait_loaded(self, timeout: float | None = None) -> list[ModelState]:
        """Wait until the server has tried to load every model, and say what became of each.

        Args:
            timeout: seconds to wait at most; None waits as long as the server lives.

        Raises:
            ServerError: the server ended, or the time is over.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            code = self.process.poll()
            if code is not None:
                raise ServerError(
                    f"tritonserver ended with exit code {code}; its log says why{self.log_name}."
                )
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                return self.models()
            if deadline is not None and time.monotonic() > deadline:
                raise ServerError(f"tritonserver was not ready within {timeout:g} seconds.")
            time.sleep(_POLL_SECONDS)

    def models(self) -> list[ModelState]:
        """The models of the repository, as the server sees them now."""
        with self._ask("repository/index", b"{}") as response:
            return [state(entry) for entry in json.load(response)]

    def lives(self) -> bool:
        """Whether the server answers that it lives."""
        if self._process is None or self._process.poll() is not None:
            return False
        with contextlib.suppress(OSError, http.client.HTTPException), self._ask("health/live"):
            return True
        return False

    def _ask(self, what: str, data: bytes | None = None) -> Any:
        request = urllib.request.Request(
            f"http://{self.http_address}/v2/{what}", data=data, headers=dict(self.keys.http)
        )
        return urllib.request.urlopen(request, timeout=_ANSWER_SECONDS)  # noqa: S310

    def _works_in_processes(self) -> bool:
        """Whether tritonserver itself computes nothing: every model runs in child processes."""
        try:
            names = {one.name for one in self.models() if one.ready} - self._own_models()
            return all(self._platform(name) in _IN_PROCESSES for name in names)
        except (OSError, ValueError, http.client.HTTPException):
            return False  # it does not answer, or keeps this back

    def _own_models(self) -> set[str]:
        """The models whose instances are processes of this backend."""
        return {
            instance_status.Reader(path).identity.model
            for path in instance_status.files(self.vitals)
        }

    def _platform(self, model: str) -> str:
        with self._ask(f"models/{urllib.parse.quote(model, safe='')}") as response:
            return str(json.load(response).get("platform"))

    def stop(self) -> None:
        """End the server, its instances and their shared memory. Calling it twice is no error."""
        process = self._process
        if process is not None:
            with _interrupts_deferred():
                in_processes = process.poll() is None and self._works_in_processes()
                self._process = None
                _end(process, self._exit_seconds, in_processes=in_processes)
        ownership, self._ownership = self._ownership, None
        if ownership is not None:
            ownership.end()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def state(entry: Mapping[str, str]) -> ModelState:
    """An entry of the repository's index."""
    told, reason = entry.get("state"), entry.get("reason", "")
    unloaded = told == "UNLOADING" or reason == "unloaded"
    return ModelState(
        entry["name"], entry.get("version", ""), told == "READY", reason, unloaded=unloaded
    )


def exit_seconds(arguments: Sequence[str]) -> int:
    """How long a server with these arguments waits for models in use when it is told to leave."""
    told = str(_EXIT_SECONDS)
    for argument, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = argument.partition("=")
        if name == _EXIT:
            told = value if equals else following
    # What is no number Triton refuses itself, in its own words.
    return int(told) if told.isdecimal() else _EXIT_SECONDS


def _end(process: subprocess.Popen[bytes], seconds: float, *, in_processes: bool) -> None:
    """Ask the server to leave; after its own time limit end it and what it started.

    Triton 24.10 waits for the whole limit for an instance that it has lost: of a model whose
    process died in a call, or whose reload was refused. If all its models run in processes, it has
    nothing to wait for once they are gone.
    """
    family = _family(process.pid)
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + seconds + _GRACE_SECONDS
    idle_since = math.inf
    while process.poll() is None:
        now = time.monotonic()
        works = not in_processes or any(map(_runs, _family(process.pid)))
        idle_since = math.inf if works else min(idle_since, now)
        if now > deadline or now - idle_since > _IDLE_SECONDS:
            process.kill()
        time.sleep(_POLL_SECONDS)
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    # Not psutil.wait_procs: of a process that is just being reaped it raises FileNotFoundError.
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(map(_runs, family)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _family(pid: int) -> list[psutil.Process]:
    """The processes below this one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """A second Ctrl-C does not leave the server behind."""
    try:
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread: signals do not come here
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
