"""The instances of one server, watched through their vitals: who died, hangs or is poisoned."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from torch_py_backend.processes import instance_status, orphan_cleanup
from torch_py_backend.processes.instance_status import Identity, Reader, State

# A poisoned instance may still send what it has computed, and leave by itself.
_GRACE_S = 1.0
# Triton of 24.10 declares an instance dead that has not run for about 6 s. If the process then goes
# on, tritonserver uses freed shared memory and aborts, with all models (seen with plain Python
# models, too). Killed before that, it is an ordinary death. A busy process is in another state, so
# this limit may be short.
_STOPPED_S = 2.0
# SIGSTOP, and a debugger's stop.
_STOPPED = ("T", "t")
# Where the cgroups of version 2 are mounted: alone, or beside those of version 1.
_CGROUPS = Path("/sys/fs/cgroup")
_ZOMBIE = "Z"
_NS = 1e9


@dataclass(frozen=True, slots=True)
class Fall:
    """An instance that serves no more, and why.

    Attributes:
        completing: it was none yet, but completed the config. Triton waits for it for ever.
        loading: it had not been loaded yet; other instances of the model may serve.
    """

    identity: Identity
    reason: str
    completing: bool = False
    loading: bool = False


class Watch:
    """The processes whose vitals lie in a folder. Used in one thread.

    Args:
        folder: where the instances tell how they are.
        load_seconds: how long an instance may be loading, for loads by `serve` and through the API.
    """

    def __init__(self, folder: Path, load_seconds: float = math.inf) -> None:
        self._folder, self._load_seconds = folder, load_seconds
        self._instances: dict[Path, _Instance] = {}
        self._poll = select.poll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._bell, select.POLLIN)

    def wait(self, seconds: float) -> None:
        """Wait until a process ends or somebody wakes us, at most so long."""
        self._poll.poll(seconds * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def wake(self) -> None:
        """End the wait, or the next one; in any thread."""
        os.eventfd_write(self._bell, 1)

    def look(self) -> list[Fall]:
        """The falls since the last look. Ends processes that hang, or are stopped or poisoned."""
        self._discover()
        falls = []
        for path, one in list(self._instances.items()):
            fall = one.examine()
            if fall is not None:
                falls.append(fall)
            if one.gone:
                if path.exists():  # it died
                    orphan_cleanup.remove_region(one.identity.region)
                # Only now: while the file is there, whoever looks sees that it did not end.
                path.unlink(missing_ok=True)
                self._forget(path)
        return falls

    def alive(self, model: str) -> set[int]:
        """The processes of a model that have not ended."""
        found = (one for one in self._instances.values() if one.identity.model == model)
        return {one.identity.pid for one in found if not one.ended()}

    def end(self, model: str, state: State) -> int:
        """End the instances of a model that are in this state; how many they were."""
        count = 0
        for one in self._instances.values():
            if one.identity.model == model and one.reader.sign().state is state:
                count += orphan_cleanup.kill(one.identity.pid, self._folder)
        return count

    def _discover(self) -> None:
        for path in instance_status.files(self._folder):
            if path not in self._instances:
                # One that ends meanwhile takes its file along; what is damaged tells nothing.
                with contextlib.suppress(OSError, ValueError):
                    one = _Instance(Reader(path), self._folder, self._load_seconds)
                    self._instances[path] = one
                    if one.handle is not None:
                        self._poll.register(one.handle, select.POLLIN)

    def _forget(self, path: Path) -> None:
        one = self._instances.pop(path)
        if one.handle is not None:
            self._poll.unregister(one.handle)
            os.close(one.handle)

    def close(self) -> None:
        """Watch no more."""
        for path in list(self._instances):
            self._forget(path)
        os.close(self._bell)


class _Instance:
    """One process, and what is known of it."""

    def __init__(self, reader: Reader, folder: Path, load_seconds: float) -> None:
        self.reader = reader
        self.identity = reader.identity
        self._folder, self._load_seconds = folder, load_seconds
        # Held open, its number stays its own; and its end wakes us.
        self.handle = _open(self.identity.pid)
        # It ended before it was held, and its number is a stranger's by now.
        self._lost = orphan_cleanup.foreign(self.identity.pid, folder)
        self.gone = False
        self._fallen = False
        self._stopped_since: float | None = None

    def ended(self) -> bool:
        if self._lost:
            return True
        if self.handle is not None:
            poll = select.poll()
            poll.register(self.handle, select.POLLIN)
            return bool(poll.poll(0))
        return _stat(self.identity.pid)[:1] in ([], [_ZOMBIE])

    def examine(self) -> Fall | None:
        """Its fall, once."""
        if self.ended():
            self.gone = True
            in_order = not self.reader.path.exists()
            how = "died" if self._lost else _death(self.identity.pid)
            return None if in_order or self._fallen else self._fall(how)
        reason = self._trouble()
        return self._fall(reason) if reason and not self._fallen else None

    def _fall(self, reason: str) -> Fall:
        self._fallen = True
        sign = self.reader.sign()
        if sign.state is State.POISONED:
            reason = f"cannot compute any more: {sign.reason}"
        elif sign.state is State.LOADING:
            reason += " while it was loaded"
        completing = sign.state is State.COMPLETING
        who = "what completes its config" if completing else f"instance {self.identity.instance}"
        loading = sign.state is State.LOADING
        return Fall(self.identity, f"{who} {reason}", completing, loading)

    def _trouble(self) -> str:
        """Why a process that lives serves no more; empty: it does. Ends one that never will."""
        sign, limit = self.reader.sign(), self.identity.limit_ms
        seconds = time.monotonic() - sign.since / _NS
        if sign.state is State.POISONED:
            if seconds > _GRACE_S:
                orphan_cleanup.kill(self.identity.pid, self._folder)
            return "is poisoned"
        if sign.state is State.COMPLETING:  # Triton would never notice its end
            return ""
        if self._stopped_s() > _STOPPED_S:
            reason = f"was stopped for {_STOPPED_S:g} s by a signal, a debugger or a frozen cgroup"
        elif sign.state is State.LOADING and seconds > self._load_seconds:
            reason = f"took longer than {self._load_seconds:g} s (--load-timeout)"
        elif sign.state is State.BUSY and limit is not None and seconds * 1000 > limit:
            reason = f"hung: a call took longer than EXECUTION_TIMEOUT_MS, {limit} ms"
        else:
            return ""
        orphan_cleanup.kill(self.identity.pid, self._folder)
        return reason

    def _stopped_s(self) -> float:
        """For how long the process has been seen stopped; 0: it may run."""
        now, pid = time.monotonic(), self.identity.pid
        stopped = any(one in _STOPPED for one in _stat(pid)[:1])
        if not (stopped or _frozen(pid)):
            self._stopped_since = None
            return 0.0
        self._stopped_since = self._stopped_since or now
        return now - self._stopped_since


def _frozen(pid: int) -> bool:
    """Whether the cgroup of a process is frozen; the state of such a process is "sleeping"."""
    for line in _text(Path(f"/proc/{pid}/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        inner = path.lstrip("/")
        if controllers == "freezer":
            if _text(_CGROUPS / "freezer" / inner / "freezer.state").strip() == "FROZEN":
                return True
        elif not controllers:  # version 2
            for root in (_CGROUPS, _CGROUPS / "unified"):
                if "frozen 1" in _text(root / inner / "cgroup.events").splitlines():
                    return True
    return False


def _text(path: Path) -> str:
    """The contents of a file; empty where it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _open(pid: int) -> int | None:
    """A descriptor of a process; None: it is gone, or this kernel has none."""
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    return None


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty: the process is gone."""
    return _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _death(pid: int) -> str:
    """How a process ended, as far as the kernel still tells: until its parent asks."""
    fields = _stat(pid)
    code = int(fields[-1]) if fields[:1] == [_ZOMBIE] else 0
    if os.WIFSIGNALED(code):
        number = os.WTERMSIG(code)
        return f"was ended by {_named(number)}{_HINTS.get(number, '')}"
    return f"ended with exit code {os.WEXITSTATUS(code)}" if code else "died"


_HINTS: dict[int, str] = {
    signal.SIGBUS: " (is /dev/shm full?)",
    signal.SIGKILL: " (a kill, or the kernel was out of memory)",
}


def _named(number: int) -> str:
    return {one.value: one.name for one in signal.Signals}.get(number, f"signal {number}")
