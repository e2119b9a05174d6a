"""The status of an instance, published to the supervisor without system calls.

Each instance keeps a file in a private folder that an environment variable names. Its first 8
bytes are mapped into memory: nanoseconds of CLOCK_MONOTONIC, and the state in the lowest bits.
Lines of JSON follow: its identity; once the model is loaded, what `check` prints, with the warnings
of the load; and why it is poisoned. The file stays unless the instance ends normally.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import selectors
import sys
import time
from array import array
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.files import replace

# Every process of a server inherits this variable; it names the server's status folder.
VARIABLE = "TORCH_PY_BACKEND_STATUS"
_SUFFIX = ".status"
_STATE_BITS = 3
_WORD_BYTES = 8


class InstanceState(IntEnum):
    LOADING = 1
    IDLE = 2
    BUSY = 3
    POISONED = 4


class Identity(NamedTuple):
    pid: int
    model: str
    instance: str
    limit_ms: int | None  # of one call of the model
    copied: bool = False  # the model's folder is a temporary copy made by Triton


class Status(NamedTuple):
    """The state of an instance, and its start in seconds of CLOCK_MONOTONIC."""

    state: InstanceState
    since: float


class InstanceStatus:
    """The status of this instance, for its metrics and, if it has an identity, in a file."""

    def __init__(self, identity: Identity | None = None) -> None:
        self._path: Path | None = None
        self._state = memoryview(array("Q", [_word(InstanceState.LOADING)]))
        if identity is not None and (parent := folder()) is not None:
            self._path = parent / f"{identity.pid}{_SUFFIX}"
            replace(self._path, self._state.tobytes() + _line(identity), 0o600)
            with self._path.open("r+b") as file:
                # Reads and writes of an aligned word are atomic.
                self._state = memoryview(mmap.mmap(file.fileno(), _WORD_BYTES)).cast("Q")

    def report(self, document: Mapping[str, object]) -> None:
        """Add to the report; a load does so before Triton reports the model READY."""
        if self._path is not None:
            # A model serves without a report, as on a full disk.
            with contextlib.suppress(OSError), self._path.open("ab") as file:
                file.write(_line(document))

    def busy(self) -> None:
        self._state[0] = _word(InstanceState.BUSY)

    def idle(self) -> None:
        """Report the end of a load or a call."""
        self._state[0] = _word(InstanceState.IDLE)

    def running_seconds(self) -> float:
        """Return the seconds since the start of the current call; 0 between calls."""
        status = _status(self._state[0])
        return time.monotonic() - status.since if status.state is InstanceState.BUSY else 0.0

    def poisoned(self, reason: str) -> None:
        """Report that the instance must be replaced; its file stays, so the model is reloaded."""
        self.report({"poisoned": reason})
        self._state[0] = _word(InstanceState.POISONED)
        self._path = None
        self._state = memoryview(array("Q", [_word(InstanceState.LOADING)]))

    def ended(self) -> None:
        """Report a normal end, after which the model is not reloaded. May be called twice."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _word(state: InstanceState) -> int:
    return time.monotonic_ns() << _STATE_BITS | state


def _status(word: int) -> Status:
    state = InstanceState(word & ((1 << _STATE_BITS) - 1))
    return Status(state, (word >> _STATE_BITS) * 1e-9)


def start(config: ModelConfig) -> InstanceStatus:
    # Triton copies models of cloud stores and load requests to a temporary folder (LocalizePath in
    # its src/filesystem: `/tmp/folderXXXXXX`). All other folders must have the model's name.
    copied = config.folder.absolute().name != config.name
    limit = config.options.execution_timeout_ms
    return InstanceStatus(Identity(os.getpid(), config.name, config.instance, limit, copied))


def folder() -> Path | None:
    """Return the status folder of this process's server; None: this package has not started it."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path and Path(path).is_dir() else None


def files(status_folder: Path) -> list[Path]:
    """Return the status files of all instances that have not ended normally."""
    return sorted(status_folder.glob(f"*{_SUFFIX}"))


class Reader:
    """Reads the file of one instance; OSError if it has ended, ValueError if it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.identity = Identity(*json.loads(self._map[_WORD_BYTES:].partition(b"\n")[0]))

    def read(self) -> Status:
        return _status(int.from_bytes(self._map[:_WORD_BYTES], sys.byteorder))

    def report(self) -> dict[str, Any]:
        """Return what the instance has reported, up to where its file is damaged or gone."""
        report: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            for line in self.path.read_bytes()[_WORD_BYTES:].splitlines()[1:]:
                report |= json.loads(line)
        return report


class Selector(selectors.DefaultSelector):
    """The selector of an event loop, which runs the model's code between two waits."""

    status: InstanceStatus | None = None

    def select(self, timeout: float | None = None) -> Any:
        if self.status is None:  # in the warm-up
            return super().select(timeout)
        self.status.idle()
        events = super().select(timeout)
        self.status.busy()
        return events
