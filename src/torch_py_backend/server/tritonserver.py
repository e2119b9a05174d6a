"""A tritonserver that this process starts and stops, with this backend."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch_py_backend.errors import ToolError
from torch_py_backend.processes import instance_status, procfs
from torch_py_backend.server import cleanup
from torch_py_backend.server.client import KEY_HEADER, ModelState, TritonClient, logged
from torch_py_backend.server.installation import TritonInstallation, refuse_in_shell

if TYPE_CHECKING:
    from typing_extensions import Self

# Becomes tritonserver, which the kernel kills when the thread that has started it ends: 1 is
# PR_SET_PDEATHSIG of <linux/prctl.h>, and 9 SIGKILL.
_LAUNCH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9);"
    " os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[2], sys.argv[2:])"
)
# Triton waits this long for models in use before it exits. A little later it is killed.
EXIT_SECONDS = 30
_GRACE_SECONDS = 5
# Of the server's own start: other errors, such as a GPU that is missing, do not end it.
_ERROR = (
    r"^(?:E\d{4} .* (?:main|tritonserver)\.cc:\d+\] \"?(.*?)\"?|error: (.+)"
    r"|.*((?:unrecognized option|Unexpected argument:) .+)|(Bad option: .+\n.+))$"
)
# Clients on this machine reach all addresses at the loopback address of the same family.
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
# With these a client can run code, read memory or write files.
SENSITIVE = ("model-repository", "shared-memory", "trace", "logging")
RESTRICTIONS = ("http-restricted-api", "grpc-restricted-protocol")


@dataclass(repr=False)
class Server:
    """A tritonserver on a model repository, which ends with the context, or with its thread.

    Attributes:
        ports: those of HTTP, gRPC, metrics and readiness, which `serving` adds; 0 takes a free one.
        arguments: more arguments for tritonserver; they override others.
        restrict: Triton's endpoints that need the key.
        exit_seconds: how long it waits for models in use when it is stopped.
        log: the file for its log; None: the output of this process.
        own_temporary: whether temporary files of its instances are removed with it.
        http_address, grpc_address, metrics_address, health_address: host and port of each service.
        process, client, status_folder: in the context, its process, a client of it, and the folder
            with the status files of its instances.
    """

    repository: Path
    ports: Sequence[int] = (0, 0, 0, 0)
    address: str = "127.0.0.1"
    executable: Path | None = None
    arguments: Sequence[str] = ()
    restrict: Sequence[str] = ()
    key: str = ""
    exit_seconds: int = EXIT_SECONDS
    log: Path | None = None
    own_temporary: bool = False

    def __post_init__(self) -> None:
        self._triton = TritonInstallation(self.executable)
        if not all(re.fullmatch(r"[a-z-]+", name) for name in self.restrict):
            raise ToolError(f"--restrict has {self.restrict}; expected names of endpoints.")
        if self.restrict and not (self.key.isascii() and self.key.isprintable()):
            raise ToolError("the admin key has characters that no header holds; expected ASCII.")
        self.repository = self.repository.absolute()
        if ":" not in self.address:  # Triton takes no name
            try:
                self.address = socket.gethostbyname(self.address)
            except (OSError, UnicodeError) as error:
                raise ToolError(f"--address is '{self.address}': {error}.") from None
        self.ports = choose_ports(self.address, self.ports)
        host = _WILDCARDS.get(self.address, self.address)
        host = f"[{host}]" if ":" in host else host  # as in a URL
        addresses = [f"{host}:{port}" for port in self.ports]
        self.http_address, self.grpc_address, self.metrics_address, self.health_address = addresses
        self._stack = contextlib.ExitStack()  # what `stop` does

    def _options(self) -> dict[str, object]:
        """Return the options of tritonserver that depend on these attributes only."""
        options: dict[str, object] = {
            "model-repository": self.repository,
            "cache-directory": self._triton.python_backend.parents[1] / "caches",
            "exit-timeout-secs": self.exit_seconds,
        }
        # libevent and gRPC write an IPv6 address in their own ways.
        is_6 = ":" in self.address
        http = f"ipv6:{self.address}" if is_6 else self.address
        grpc = f"[{self.address}]" if is_6 else self.address
        services = {"http": http, "grpc": grpc, "metrics": http}
        for (service, address), port in zip(services.items(), self.ports, strict=False):
            options |= {f"{service}-address": address, f"{service}-port": port}
        if self.restrict:
            value = f"{','.join(self.restrict)}:{KEY_HEADER}={self.key}"
            options |= dict.fromkeys(RESTRICTIONS, value)
        return options

    def __enter__(self) -> Self:
        """Start the server, which loads its models before it listens."""
        for path in (self.repository, tempfile.gettempdir()):
            refuse_in_shell(str(path))
        with contextlib.ExitStack() as stack:
            key = self.key if self.restrict else ""
            self.client = TritonClient(self.http_address, self.grpc_address, key, self.log)
            stack.callback(self.client.close)
            cleanup.sweep()
            folder = cleanup.ServerFolder()
            stack.callback(folder.close)
            self.status_folder = folder.status
            self._triton.populate_backends(folder.backends)
            log = stack.enter_context(self.log.open("ab")) if self.log else None
            options = self._options() | {
                "backend-directory": folder.backends,
                # Distinguishes its shared memory from that of other servers.
                "backend-config": f"python,shm-region-prefix-name={folder.prefix}",
            }
            variables = {instance_status.VARIABLE: str(folder.status)}
            if self.own_temporary:
                variables["TMPDIR"] = str(folder.path)
            # A session of its own: Ctrl-C reaches this process, which then stops the server. A
            # folder of its own: Triton's stub would import a model.py from the current folder.
            self.process = subprocess.Popen(  # noqa: S603  the executable found above
                [
                    *(sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid())),
                    str(self._triton.executable),
                    *(f"--{name}={value}" for name, value in options.items()),
                    *self.arguments,
                ],
                env=self._triton.environment() | variables,
                cwd=folder.path,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(self._end_process)
            self._stack = stack.pop_all()
        return self

    def _end_process(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(self.exit_seconds + _GRACE_SECONDS)
        self.process.kill()  # if it has not ended
        self.process.wait()

    def check_running(self) -> None:
        """Raise ToolError if the server has ended by itself."""
        code = self.process.poll()
        if code is not None:
            how = f"by {procfs.signal_name(-code)}"
            if code >= 0:
                reason = logged(self.log, _ERROR)
                how = f"with exit code {code}" + (f": {reason}" if reason else "")
            log = f": {self.log}" if self.log else ""
            raise ToolError(f"tritonserver ended {how}; its log says more{log}.")

    def wait_loaded(self, is_over: Callable[[], bool] = lambda: False) -> Mapping[str, ModelState]:
        """Return the states of models once the server has tried to load them; none if `is_over`."""
        while not is_over():
            self.check_running()
            with contextlib.suppress(OSError):
                return self.client.models()
            time.sleep(0.05)
        return {}

    def stop(self, *_: object) -> None:
        """Stop the server, and remove its instances and shared memory. May be called twice."""
        self._stack.close()

    __exit__ = stop


def create_log() -> Path:
    """Return a new temporary file for the log of a server."""
    with tempfile.NamedTemporaryFile(prefix="tritonserver-", suffix=".log", delete=False) as file:
        return Path(file.name)


def choose_ports(address: str, ports: Sequence[int]) -> list[int]:
    """Return ports that can be listened on; 0 becomes any port."""
    with contextlib.ExitStack() as stack:
        # Open until all are chosen, so that they differ.
        listeners = [stack.enter_context(listen(address, port)) for port in ports]
        return [listener.getsockname()[1] for listener in listeners]


def listen(address: str, port: int) -> socket.socket:
    """Listen on a port, as Triton does; 0 is any port."""
    is_6 = ":" in address
    family = socket.AF_INET6 if is_6 else socket.AF_INET
    # The address :: is all addresses of both families, as for Triton.
    return socket.create_server((address, port), family=family, dualstack_ipv6=is_6)
