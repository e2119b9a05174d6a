"""A tritonserver that this process starts and stops, with this backend."""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from torch_py_backend.errors import ToolError
from torch_py_backend.processes import instance_status
from torch_py_backend.server import cleanup, server_arguments, triton_installation
from torch_py_backend.server.cleanup import ServerFolder
from torch_py_backend.server.client import ModelState, TritonClient
from torch_py_backend.server.ports import choose_ports, client_address, is_ipv6

if TYPE_CHECKING:
    from typing_extensions import Self

# Becomes tritonserver, which the kernel kills when the thread that has started it ends: 1 is
# PR_SET_PDEATHSIG of <linux/prctl.h>, and 9 SIGKILL.
_LAUNCH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9);"
    " os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[2], sys.argv[2:])"
)
# Triton waits this long for models in use before it exits; a little later it is killed.
_EXIT_SECONDS = 30
_EXIT_OPTION = "exit-timeout-secs"
_GRACE_SECONDS = 5
_POLL_SECONDS = 0.05
# The end of the log in which a reason is searched.
_LOG_BYTES = 1 << 18
# Of the server's own start: other errors, such as a GPU that is missing, do not end it.
_ERROR = re.compile(
    r"^(?:E\d{4} .* (?:main|tritonserver)\.cc:\d+\] \"?(.*?)\"?|error: (.+)"
    r"|\w+Error: (.+)|.*(unrecognized option .+)|(Bad option: .+\n.+))$",
    re.MULTILINE,
)
# The parser of protobuf writes the line before.
_POLL_FAILED = (
    r"^(?:.*Error parsing text-format inference\.ModelConfig: (.*)\n)?"
    r".*\] \"?Poll failed for model directory '{}': (.*?)\"?$"
)


class Server:
    """A tritonserver on a model repository, with this backend, as a context manager.

    It ends with the thread that starts it.

    Args:
        http_port: the HTTP port; 0 takes a free one, here and below.
        metrics_port: the port of the Prometheus metrics.
        executable: the tritonserver to use; None: search for one.
        arguments: more arguments for tritonserver; they override others.
        key: the key of the endpoints that the arguments restrict.
        log: the file for the server's log; None: the output of this process. The attribute can be
            set until the server is started.

    Attributes:
        http_address, grpc_address, metrics_address: host and port of each service.
        client: a client of its endpoints.
        variables: more variables of its environment, for `start`.
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
        key: str = "",
        log: IO[bytes] | IO[str] | None = None,
    ) -> None:
        if not repository.is_dir():
            raise ToolError(f"{repository} is not a folder; expected a model repository.")
        self._repository = repository.absolute()
        self._address = address
        self._ports = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
        # A service that the arguments configure listens elsewhere.
        requested = {
            f"--{service}-port": 0 if server_arguments.configures(arguments, service) else port
            for service, port in self._ports.items()
        }
        for service, port in zip(self._ports, choose_ports(address, requested), strict=True):
            self._ports[service] = self._ports[service] or port
        self.http_address, self.grpc_address, self.metrics_address = (
            client_address(address, port) for port in self._ports.values()
        )
        self._triton = triton_installation.find(executable)
        self._arguments = tuple(arguments)
        self._exit_seconds = exit_seconds(arguments)
        self.log = log
        self.client = TritonClient(
            self.http_address,
            self.grpc_address,
            key=key,
            uses_shell=self._triton.uses_shell,
            poll_failure=self._poll_failure,
        )
        self.variables: dict[str, str] = {}
        self._folder: ServerFolder | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log_name(self) -> str:
        """A colon and the name of the log file, for the end of a sentence; empty without a name."""
        name = getattr(self.log, "name", None)
        return f": {name}" if isinstance(name, str) else ""

    @property
    def status_folder(self) -> Path:
        """The folder with the status files of the instances of the running server."""
        if self._folder is None:
            raise ToolError("the server was not started; call start() first.")
        return self._folder.status

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ToolError("the server was not started; call start() first.")
        return self._process

    def start(self) -> None:
        """Start the server, which loads its models before it listens.

        Raises:
            ToolError: the server cannot run on this machine.
        """
        variables = triton_installation.environment(self._triton) | self.variables
        # libevent and gRPC write an IPv6 address in their own ways.
        http = grpc = self._address
        if is_ipv6(self._address):
            http, grpc = f"ipv6:{self._address}", f"[{self._address}]"
        try:
            self._refuse_in_shell()
            cleanup.sweep()
            folder = self._folder = ServerFolder()
            triton_installation.populate_backends(self._triton, folder.backends)
            options = {
                "model-repository": self._repository,
                "backend-directory": folder.backends,
                "cache-directory": self._triton.caches,
                # Distinguishes its shared memory from that of other servers.
                "backend-config": f"python,shm-region-prefix-name={folder.prefix}",
                _EXIT_OPTION: _EXIT_SECONDS,
                # A model that does not load must not stop the server.
                "exit-on-error": "false",
                "http-address": http,
                "grpc-address": grpc,
                "metrics-address": http,
                **{f"{service}-port": port for service, port in self._ports.items()},
            }
            # A session of its own: Ctrl-C reaches this process, which then stops the server. A
            # folder of its own: Triton's stub would import a model.py from the current folder.
            self._process = subprocess.Popen(  # noqa: S603  the executable found above
                [
                    *(sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid())),
                    str(self._triton.executable),
                    *(f"--{name}={value}" for name, value in options.items()),
                    *self._arguments,
                ],
                env=variables | {instance_status.VARIABLE: str(folder.status)},
                cwd=folder.path,
                stdout=self.log,
                stderr=self.log,
                start_new_session=True,
            )
        except BaseException as error:
            self.stop()
            if isinstance(error, OSError):
                raise ToolError(
                    f"tritonserver cannot be started: {error}. It needs a temporary folder and"
                    f" {cleanup.SHARED_MEMORY} that can be written."
                ) from error
            raise

    def _refuse_in_shell(self) -> None:
        """Raise a ToolError if a shell between Triton and its stubs would change their paths."""
        if not self._triton.uses_shell:
            return
        for subject, path, cure in (
            ("the model repository", self._repository, "Rename it, or serve a link to it."),
            ("the temporary folder", tempfile.gettempdir(), "Set TMPDIR to another folder."),
        ):
            triton_installation.refuse_in_shell(subject, str(path), cure)

    def wait_loaded(self, timeout: float = math.inf) -> list[ModelState]:
        """Wait until the server has tried to load every model, and return their states.

        Raises:
            ToolError: the server ended, could not start, or took too long.
        """
        deadline = time.monotonic() + timeout
        while True:
            if (code := self.process.poll()) is not None:
                raise self._failure(f"ended with exit code {code}")
            with contextlib.suppress(OSError):
                return self.client.models()
            if self.client.is_dead():
                raise self._failure("could not start")
            if time.monotonic() > deadline:
                raise ToolError(f"tritonserver was not ready within {timeout:g} seconds.")
            time.sleep(_POLL_SECONDS)

    def _failure(self, problem: str) -> ToolError:
        reason = "".join(f": {text}" for text in self._logged(_ERROR))
        more = "more" if reason else "why"
        return ToolError(f"tritonserver {problem}{reason}; its log says {more}{self.log_name}.")

    def _poll_failure(self, model: str) -> str:
        """Return why Triton could not read a model's folder, from the log; empty: unknown."""
        pattern = re.compile(_POLL_FAILED.format(re.escape(model)), re.MULTILINE)
        return ": ".join(self._logged(pattern)[::-1])

    def _logged(self, pattern: re.Pattern[str]) -> list[str]:
        """Return the groups of the last match of a pattern in the log, near its end.

        Only for the text of a reason: no decision depends on the log, which may be on a terminal.
        """
        name = getattr(self.log, "name", None)
        log = ""
        if isinstance(name, str):
            with contextlib.suppress(OSError), Path(name).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
                log = file.read().decode(errors="replace")
        *_, last = [None, *pattern.finditer(log)]
        groups = () if last is None else last.groups()
        # Triton escapes a message as a string of C.
        texts = (text.replace('\\"', '"').replace("\\n", "\n") for text in groups if text)
        return [" ".join(text.split()) for text in texts]

    def stop(self) -> None:
        """Stop the server, and remove its instances and shared memory. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(self._exit_seconds + _GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.client.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def exit_seconds(arguments: Sequence[str]) -> int:
    """Return how long a server with these arguments waits for models in use when it is stopped."""
    seconds = server_arguments.values(arguments, _EXIT_OPTION)
    # Triton itself refuses other text than a number.
    return int(seconds[-1]) if seconds and seconds[-1].isdecimal() else _EXIT_SECONDS
