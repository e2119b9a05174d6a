"""The status of an instance, published to the supervisor without system calls.

Each instance keeps one small file, mapped into memory, in a private folder that an environment
variable names. An instance that ends normally removes its file; if it dies, the file stays.

    word     8 bytes: nanoseconds of CLOCK_MONOTONIC, and the state in the lowest bits
    reason   why the instance is poisoned, UTF-8
    identity JSON

Beside it, a loaded instance keeps a load report, a JSON object: the artifact, how its weights are
shared, the options in effect, and the warnings of the load.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import printable
from torch_py_backend.files import replace

# Every process of a server inherits this variable; it names the server's status folder.
VARIABLE = "TORCH_PY_BACKEND_STATUS"
# Regions of shared memory of servers that this package starts: a prefix for all regions of one
# server, and the suffix that Triton appends.
REGION = re.compile(rb"torch_py_backend_[0-9a-f]{12}_(?!owner$)[0-9A-Za-z-]+")
SUFFIX = ".status"
_REPORT_SUFFIX = ".json"
_SIZE = mmap.PAGESIZE
_STATE_BITS = 3
_STATES = (1 << _STATE_BITS) - 1
_REASON = slice(8, 1024)
_IDENTITY = slice(1024, _SIZE)


class InstanceState(IntEnum):
    LOADING = 1
    IDLE = 2
    BUSY = 3
    POISONED = 4
    COMPLETING = 5


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of an instance.

    Attributes:
        limit_ms: the time limit of one call of the model; None: no limit.
        region: the name of the shared memory between Triton and the instance; empty: unknown.
        copied: whether the model's folder is a temporary copy made by Triton.
    """

    pid: int
    model: str
    instance: str
    limit_ms: int | None
    region: str = ""
    copied: bool = False


@dataclass(frozen=True, slots=True)
class Status:
    """The status of an instance at one moment.

    Attributes:
        since: the start of this state, in nanoseconds of CLOCK_MONOTONIC.
        reason: why the instance is poisoned.
    """

    state: InstanceState
    since: int
    reason: str = ""


class InstanceStatus:
    """The status of this instance, for its metrics and, in a supervised server, in a file.

    Args:
        state: the first state.
        identity: written to the file; None: there is no file.
    """

    def __init__(
        self, state: InstanceState = InstanceState.LOADING, identity: Identity | None = None
    ) -> None:
        folder = os.environ.get(VARIABLE, "")
        self._path: Path | None = None
        self._poisoned = False
        if identity is not None and folder and Path(folder).is_dir():
            self._path = Path(folder) / f"{identity.pid}{SUFFIX}"
            self._map = _create(self._path, identity)
        else:
            self._map = mmap.mmap(-1, _SIZE)
        # Reads and writes of an aligned word are atomic.
        self._word = memoryview(self._map).cast("Q")
        self._set(state)

    def report(self, document: Mapping[str, object]) -> None:
        """Write the load report, once the model is loaded and before Triton reports it READY."""
        if self._path is not None:
            # A model serves without a report, as on a full disk.
            with contextlib.suppress(OSError):
                replace(_report_path(self._path), json.dumps(document).encode(), 0o600)

    def busy(self) -> None:
        """Report the start of a call."""
        if not self._poisoned:
            self._word[0] = time.monotonic_ns() << _STATE_BITS | InstanceState.BUSY

    def idle(self) -> None:
        """Report the end of a load or a call. A poisoned instance stays poisoned."""
        if not self._poisoned:
            self._word[0] = time.monotonic_ns() << _STATE_BITS | InstanceState.IDLE

    def running_seconds(self) -> float:
        """Return the seconds since the start of the current call; 0 between calls."""
        word = self._word[0]
        if word & _STATES != InstanceState.BUSY:
            return 0.0
        return (time.monotonic_ns() - (word >> _STATE_BITS)) * 1e-9

    def poisoned(self, reason: str) -> None:
        """Report that the instance cannot compute any more and must be replaced."""
        size = _REASON.stop - _REASON.start
        self._map[_REASON] = reason.encode(errors="replace")[:size].ljust(size, b"\0")
        self._poisoned = True
        self._set(InstanceState.POISONED)

    def ended(self) -> None:
        """Report a normal end, after which the model is not reloaded. May be called twice."""
        # A poisoned instance keeps its file, so that the model is reloaded.
        if self._path is not None and not self._poisoned:
            remove(self._path)

    def _set(self, state: InstanceState) -> None:
        self._word[0] = time.monotonic_ns() << _STATE_BITS | state


def start(config: ModelConfig) -> InstanceStatus:
    """Return the status of this instance."""
    identity = Identity(
        os.getpid(),
        config.name,
        config.instance,
        config.options.execution_timeout_ms,
        region(),
        copied=is_copy(config),
    )
    return InstanceStatus(identity=identity)


def start_completing(model: str) -> InstanceStatus:
    """Return the status of a process that completes a model's config and then ends."""
    identity = Identity(os.getpid(), model, "", None, region())
    return InstanceStatus(InstanceState.COMPLETING, identity)


def region() -> str:
    """Return the name of the shared memory between Triton and this process; empty if unknown.

    Triton passes it on the command line of its stub.
    """
    with contextlib.suppress(OSError):
        words = Path("/proc/self/cmdline").read_bytes().split(b"\0")
        return next((os.fsdecode(word) for word in words if REGION.fullmatch(word)), "")
    return ""


def server_folder() -> Path | None:
    """Return the temporary folder of the server that this process belongs to.

    None: that server was not started by this package, and its folder is not removed.
    """
    status = os.environ.get(VARIABLE)
    return Path(status).parent if status and Path(status).is_dir() else None


def _create(path: Path, identity: Identity) -> mmap.mmap:
    """Create and map the status file; it has no state yet, and readers do not accept it."""
    text = json.dumps(asdict(identity), ensure_ascii=False).encode()
    page = bytes(_IDENTITY.start) + text.ljust(_SIZE - _IDENTITY.start, b"\0")
    replace(path, page, 0o600)
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), _SIZE)


def is_copy(config: ModelConfig) -> bool:
    """Return whether a model's folder is a temporary copy made by Triton.

    Triton copies models from cloud stores and from load requests to a temporary folder
    (`/tmp/folderXXXXXX`: LocalizePath in its src/filesystem). In all other cases Triton requires
    that a model's folder has the model's name.
    """
    return config.folder.absolute().name != config.name


def files(folder: Path) -> list[Path]:
    """Return the status files of all instances that have not ended normally."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(folder.glob(f"*{SUFFIX}"))
    return []


def remove(path: Path) -> None:
    """Remove a status file, if it is there, and the load report beside it."""
    _report_path(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def load_warnings(path: Path) -> list[str]:
    """Return the warnings in the load report beside a status file; empty if there is no report."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return [printable(text) for text in json.loads(_report_path(path).read_bytes())["warnings"]]
    return []


def _report_path(path: Path) -> Path:
    return path.with_suffix(_REPORT_SUFFIX)


class Reader:
    """Reads the status file of one instance.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is not a status file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:  # noqa: PTH123
            if os.fstat(file.fileno()).st_size != _SIZE:
                raise ValueError(path.name)
            self._map = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
        try:
            self.identity = Identity(**json.loads(self._map[_IDENTITY].rstrip(b"\0")))
        except TypeError:
            raise ValueError(path.name) from None
        # The process may be killed.
        if path.name != f"{self.identity.pid}{SUFFIX}":
            raise ValueError(path.name)
        self.read()  # raises a ValueError if there is no such state

    def read(self) -> Status:
        """Return the current status."""
        word = int.from_bytes(self._map[:8], sys.byteorder)
        state = InstanceState(word & _STATES)
        reason = self._map[_REASON].rstrip(b"\0").decode(errors="ignore")
        return Status(state, word >> _STATE_BITS, reason)
