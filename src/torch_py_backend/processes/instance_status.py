"""The status of an instance, published to the supervisor without system calls.

Each instance keeps two files in a private folder that an environment variable names. One is mapped
into memory: 8 bytes with nanoseconds of CLOCK_MONOTONIC, and the state in the lowest bits. The
other one, its report, is a JSON object: the identity of the instance; once the model is loaded, the
artifact, how its weights are shared, the options in effect and the warnings of the load; and why it
is poisoned. An instance that ends normally removes them; if it dies, they stay.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import time
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import printable
from torch_py_backend.files import replace

# Every process of a server inherits this variable; it names the server's status folder.
VARIABLE = "TORCH_PY_BACKEND_STATUS"
SUFFIX = ".status"
_REPORT = ".json"
_SIZE = mmap.PAGESIZE
_STATE_BITS = 3
_STATES = (1 << _STATE_BITS) - 1


class InstanceState(IntEnum):
    LOADING = 1
    IDLE = 2
    BUSY = 3
    POISONED = 4
    COMPLETING = 5


class Identity(NamedTuple):
    """The identity of an instance.

    Attributes:
        limit_ms: the time limit of one call of the model; None: no limit.
        copied: whether the model's folder is a temporary copy made by Triton.
    """

    pid: int
    model: str
    instance: str
    limit_ms: int | None
    copied: bool = False


class Status(NamedTuple):
    """The state of an instance, and its start in nanoseconds of CLOCK_MONOTONIC."""

    state: InstanceState
    since: int


class InstanceStatus:
    """The status of this instance, for its metrics and, in a supervised server, in files.

    Args:
        state: the first state.
        identity: written to the report; None: there are no files.
    """

    def __init__(
        self, state: InstanceState = InstanceState.LOADING, identity: Identity | None = None
    ) -> None:
        folder = os.environ.get(VARIABLE, "")
        self._path: Path | None = None
        if identity is not None and folder and Path(folder).is_dir():
            self._path = Path(folder) / f"{identity.pid}{SUFFIX}"
            self._report: dict[str, object] = {}
            self.report({"identity": identity._asdict()})
            page = _word(state).to_bytes(8, sys.byteorder).ljust(_SIZE, b"\0")
            replace(self._path, page, 0o600)
            with self._path.open("r+b") as file:
                # Reads and writes of an aligned word are atomic.
                self._state = memoryview(mmap.mmap(file.fileno(), _SIZE)).cast("Q")
        else:
            self._state = _unpublished()

    def report(self, document: Mapping[str, object]) -> None:
        """Add to the report, as once the model is loaded and before Triton reports it READY."""
        if self._path is not None:
            self._report |= document
            # A model serves without a report, as on a full disk.
            with contextlib.suppress(OSError):
                replace(self._path.with_suffix(_REPORT), json.dumps(self._report).encode(), 0o600)

    def busy(self) -> None:
        """Report the start of a call."""
        self._state[0] = _word(InstanceState.BUSY)

    def idle(self) -> None:
        """Report the end of a load or a call."""
        self._state[0] = _word(InstanceState.IDLE)

    def running_seconds(self) -> float:
        """Return the seconds since the start of the current call; 0 between calls."""
        word = self._state[0]
        if word & _STATES != InstanceState.BUSY:
            return 0.0
        return (time.monotonic_ns() - (word >> _STATE_BITS)) * 1e-9

    def poisoned(self, reason: str) -> None:
        """Report that the instance cannot compute any more and must be replaced.

        Its files stay as they are now, so that the model is reloaded.
        """
        self.report({"poisoned": reason})
        self._state[0] = _word(InstanceState.POISONED)
        self._path, self._state = None, _unpublished()

    def ended(self) -> None:
        """Report a normal end, after which the model is not reloaded. May be called twice."""
        if self._path is not None:
            remove(self._path)


def _word(state: InstanceState) -> int:
    return time.monotonic_ns() << _STATE_BITS | state


def _unpublished() -> memoryview[int]:
    """Return the memory of a state that no file has."""
    return memoryview(bytearray(8)).cast("Q")


def start(config: ModelConfig) -> InstanceStatus:
    """Return the status of this instance."""
    # Triton copies models from cloud stores and from load requests to a temporary folder
    # (`/tmp/folderXXXXXX`: LocalizePath in its src/filesystem). In all other cases it requires that
    # a model's folder has the model's name.
    copied = config.folder.absolute().name != config.name
    limit = config.options.execution_timeout_ms
    identity = Identity(os.getpid(), config.name, config.instance, limit, copied)
    return InstanceStatus(identity=identity)


def start_completing(model: str) -> InstanceStatus:
    """Return the status of a process that completes a model's config and then ends."""
    return InstanceStatus(InstanceState.COMPLETING, Identity(os.getpid(), model, "", None))


def server_folder() -> Path | None:
    """Return the temporary folder of the server that this process belongs to.

    None: that server was not started by this package, and its folder is not removed.
    """
    status = os.environ.get(VARIABLE)
    return Path(status).parent if status and Path(status).is_dir() else None


def files(folder: Path) -> list[Path]:
    """Return the status files of all instances that have not ended normally."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def remove(path: Path) -> None:
    """Remove a status file and its report, if they are there."""
    path.unlink(missing_ok=True)
    path.with_suffix(_REPORT).unlink(missing_ok=True)


class Reader:
    """Reads the files of one instance.

    Raises:
        OSError: a file cannot be opened.
        ValueError: they are not those of an instance.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
        self.read()  # raises a ValueError if there is no such state
        try:
            self.identity = Identity(**self._report()["identity"])
        except (KeyError, TypeError):
            raise ValueError(path.name) from None
        # The process may be killed.
        if path.name != f"{self.identity.pid}{SUFFIX}":
            raise ValueError(path.name)

    def read(self) -> Status:
        """Return the current status."""
        word = int.from_bytes(self._map[:8], sys.byteorder)
        return Status(InstanceState(word & _STATES), word >> _STATE_BITS)

    def warnings(self) -> list[str]:
        """Return the warnings of the load; empty if it has not ended."""
        warnings: list[str] = self._report().get("warnings", [])
        return [printable(text) for text in warnings]

    def poison(self) -> str:
        """Return why the instance is poisoned; empty: it is not, or its disk is full."""
        return str(self._report().get("poisoned", ""))

    def _report(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.path.with_suffix(_REPORT).read_bytes())
        return document
