"""The status of an instance, published to the supervisor without system calls.

Each instance keeps two files in a private folder that an environment variable names. One is mapped
into memory: 8 bytes with nanoseconds of CLOCK_MONOTONIC, and the state in the lowest bits. The
other one is its report in JSON: its identity; once the model is loaded, what `check` prints, with
the warnings of the load; and why it is poisoned. They stay unless the instance ends normally.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
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
_SUFFIX, _REPORT = ".status", ".json"
_STATE_BITS = 3


class InstanceState(IntEnum):
    LOADING = 1
    IDLE = 2
    BUSY = 3
    POISONED = 4


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
    """The state of an instance, and its start in seconds of CLOCK_MONOTONIC."""

    state: InstanceState
    since: float


class InstanceStatus:
    """The status of this instance, for its metrics and, in a supervised server, in files.

    Args:
        identity: written to the report; None: there are no files.
    """

    def __init__(self, identity: Identity | None = None) -> None:
        self._path: Path | None = None
        self._state = memoryview(array("Q", [_word(InstanceState.LOADING)]))
        if identity is not None and (parent := folder()) is not None:
            self._path = parent / f"{identity.pid}{_SUFFIX}"
            self._report: dict[str, object] = {}
            self.report({"identity": identity._asdict()})
            replace(self._path, self._state.tobytes(), 0o600)
            with self._path.open("r+b") as file:
                # Reads and writes of an aligned word are atomic.
                self._state = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")

    def report(self, document: Mapping[str, object]) -> None:
        """Add to the report; a load does so before Triton reports the model READY."""
        if self._path is not None:
            self._report |= document
            # A model serves without a report, as on a full disk.
            with contextlib.suppress(OSError):
                replace(self._path.with_suffix(_REPORT), json.dumps(self._report).encode(), 0o600)

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
        """Report that the instance cannot compute any more and must be replaced.

        Its files stay as they are now, so that the model is reloaded.
        """
        self.report({"poisoned": reason})
        self._state[0] = _word(InstanceState.POISONED)
        self._path = None
        self._state = memoryview(array("Q", [_word(InstanceState.LOADING)]))

    def ended(self) -> None:
        """Report a normal end, after which the model is not reloaded. May be called twice."""
        if self._path is not None:
            remove(self._path)


def _word(state: InstanceState) -> int:
    return time.monotonic_ns() << _STATE_BITS | state


def _status(word: int) -> Status:
    state = InstanceState(word & ((1 << _STATE_BITS) - 1))
    return Status(state, (word >> _STATE_BITS) * 1e-9)


def start(config: ModelConfig) -> InstanceStatus:
    # Triton copies models from cloud stores and from load requests to a temporary folder
    # (`/tmp/folderXXXXXX`: LocalizePath in its src/filesystem). In all other cases it requires that
    # a model's folder has the model's name.
    copied = config.folder.absolute().name != config.name
    limit = config.options.execution_timeout_ms
    return InstanceStatus(Identity(os.getpid(), config.name, config.instance, limit, copied))


def folder() -> Path | None:
    """Return the status folder, in the temporary folder of the server that this process belongs to.

    None: that server was not started by this package, and its folder is not removed.
    """
    path = os.environ.get(VARIABLE)
    return Path(path) if path and Path(path).is_dir() else None


def files(status_folder: Path) -> list[Path]:
    """Return the status files of all instances that have not ended normally."""
    return sorted(status_folder.glob(f"*{_SUFFIX}"))


def remove(path: Path) -> None:
    """Remove a status file and its report, if they are there."""
    path.unlink(missing_ok=True)
    path.with_suffix(_REPORT).unlink(missing_ok=True)


class Reader:
    """Reads the files of one instance.

    Raises:
        OSError: the instance has ended and removed its files.
        ValueError: a file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._report = path.with_suffix(_REPORT)
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.identity = Identity(**json.loads(self._report.read_bytes())["identity"])

    def read(self) -> Status:
        return _status(int.from_bytes(self._map[:8], sys.byteorder))

    def report(self) -> dict[str, Any]:
        """Return what the instance has reported; nothing if its files are gone or damaged."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(self._report.read_bytes()))
        return {}
