"""How an instance is, told without system calls to whoever watches it.

Each instance keeps one small file, mapped into memory, in a private folder that the watcher names
in the environment: who it is, as JSON, and one word with its state and since when. An instance
that ends in order removes its file; a file without its process is that of one that died.

    word     8 bytes: nanoseconds of CLOCK_MONOTONIC, and in the lowest bits the state
    reason   why it is poisoned, UTF-8
    identity JSON
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.processes import orphan_cleanup
from torch_py_backend.processes.orphan_cleanup import VARIABLE

SUFFIX = ".vitals"
_SIZE = mmap.PAGESIZE
_STATE_BITS = 3
_STATES = (1 << _STATE_BITS) - 1
_REASON = slice(8, 1024)
_IDENTITY = slice(1024, _SIZE)


class State(IntEnum):
    LOADING = 1
    IDLE = 2
    BUSY = 3
    POISONED = 4
    COMPLETING = 5


@dataclass(frozen=True, slots=True)
class Identity:
    """Which instance of which model a process is.

    Attributes:
        pid: the process.
        model: the model's name.
        version: the model's version.
        instance: the instance's name.
        limit_ms: how long one call of the model may take; None: as long as it wants.
        region: the shared memory through which Triton talks to it; empty: not known.
    """

    pid: int
    model: str
    version: str
    instance: str
    limit_ms: int | None
    region: str = ""


@dataclass(frozen=True, slots=True)
class Sign:
    """What an instance told last.

    Attributes:
        state: what it does.
        since: since when, in nanoseconds of CLOCK_MONOTONIC.
        reason: why it is poisoned.
    """

    state: State
    since: int
    reason: str = ""


class Vitals(Protocol):
    """What an instance tells of itself."""

    def ready(self) -> None:
        """It is loaded, and waits for requests."""

    def busy(self) -> None:
        """A call begins."""

    def idle(self) -> None:
        """The call is over. A poisoned instance stays poisoned."""

    def under_way(self) -> float:
        """Seconds that the call has taken that goes on; 0: none does."""

    def poisoned(self, reason: str) -> None:
        """It cannot compute any more; only a new process can."""

    def ended(self) -> None:
        """It ends in order, or was never loaded: nobody needs to heal it. Twice is no error."""


class Untold:
    """The vitals of an instance that nobody watches but its own metrics."""

    def __init__(self) -> None:
        self._began = 0.0

    def ready(self) -> None: ...

    def busy(self) -> None:
        self._began = time.monotonic()

    def idle(self) -> None:
        self._began = 0.0

    def under_way(self) -> float:
        began = self._began
        return time.monotonic() - began if began else 0.0

    def poisoned(self, reason: str) -> None: ...

    def ended(self) -> None: ...


def start(config: ModelConfig) -> Vitals:
    """Tell from now on how this process is, if somebody watches."""
    limit = config.options.execution_timeout_ms
    own = orphan_cleanup.region()
    return _tell(
        Identity(os.getpid(), config.name, config.version, config.instance, limit, own),
        State.LOADING,
    )


def completing(model: str) -> Vitals:
    """As `start`, for the process that completes a model's config and ends then."""
    own = orphan_cleanup.region()
    return _tell(Identity(os.getpid(), model, "", "", None, own), State.COMPLETING)


def _tell(identity: Identity, state: State) -> Vitals:
    folder = os.environ.get(VARIABLE)
    if not folder or not Path(folder).is_dir():
        return Untold()
    return Told(Path(folder), identity, state)


class Told:
    """The vitals of an instance that is watched."""

    def __init__(self, folder: Path, identity: Identity, state: State) -> None:
        self._path = folder / f"{identity.pid}{SUFFIX}"
        text = json.dumps(asdict(identity), ensure_ascii=False).encode()
        # Made under another name: what the watcher sees is complete. mkstemp: 0600, and new.
        handle, part = tempfile.mkstemp(dir=folder)
        with open(handle, "r+b") as file:  # noqa: PTH123  a descriptor
            file.truncate(_SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._map[_IDENTITY] = text.ljust(_SIZE - _IDENTITY.start, b"\0")
        # One aligned word is read and written at once: its two halves never disagree.
        self._word = memoryview(self._map).cast("Q")
        self._poisoned = False
        self._tell(state)
        Path(part).rename(self._path)

    def ready(self) -> None:
        self.idle()

    def busy(self) -> None:
        if not self._poisoned:
            self._word[0] = time.monotonic_ns() << _STATE_BITS | State.BUSY

    def idle(self) -> None:
        if not self._poisoned:
            self._word[0] = time.monotonic_ns() << _STATE_BITS | State.IDLE

    def under_way(self) -> float:
        word = self._word[0]
        if word & _STATES != State.BUSY:
            return 0.0
        return (time.monotonic_ns() - (word >> _STATE_BITS)) * 1e-9

    def poisoned(self, reason: str) -> None:
        room = _REASON.stop - _REASON.start
        self._map[_REASON] = reason.encode(errors="replace")[:room].ljust(room, b"\0")
        self._poisoned = True
        self._tell(State.POISONED)

    def ended(self) -> None:
        # A poisoned instance that Triton finalizes still has to be healed.
        if not self._poisoned:
            self._path.unlink(missing_ok=True)

    def _tell(self, state: State) -> None:
        self._word[0] = time.monotonic_ns() << _STATE_BITS | state


def files(folder: Path) -> list[Path]:
    """The files of all instances that have not ended in order."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(folder.glob(f"*{SUFFIX}"))
    return []


class Reader:
    """One instance's file, as the watcher sees it.

    Raises:
        OSError: the file is gone.
        ValueError: it is none of ours.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Never through a link: nobody but our instances writes here.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:  # noqa: PTH123
            if os.fstat(file.fileno()).st_size != _SIZE:
                raise ValueError(path.name)
            self._map = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
        self.identity = _identity(self._map[_IDENTITY].rstrip(b"\0"))
        if path.name != f"{self.identity.pid}{SUFFIX}":
            raise ValueError(path.name)

    def sign(self) -> Sign:
        """What the instance told last."""
        word = int.from_bytes(self._map[:8], sys.byteorder)
        state = State(word & _STATES)
        reason = self._map[_REASON].rstrip(b"\0").decode(errors="ignore")
        return Sign(state, word >> _STATE_BITS, reason)


def _identity(text: bytes) -> Identity:
    try:
        told = json.loads(text)
        found = Identity(**told)
    except TypeError:
        raise ValueError(text) from None
    limit = found.limit_ms
    texts = (found.model, found.version, found.instance, found.region)
    sound = all(isinstance(one, str) for one in texts)
    if not sound or type(found.pid) is not int or not (limit is None or type(limit) is int):
        raise ValueError(text)
    return found
