"""A monitor of the instances of one server, which detects those that die, hang or are poisoned."""

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
from torch_py_backend.processes.instance_status import Identity, InstanceState, Reader

# A poisoned instance may still send computed results, and may end by itself.
_GRACE_S = 1.0
# Triton 24.10 declares an instance dead that has not run for about 6 s. If the process then goes
# on, tritonserver uses freed shared memory and aborts, with all models (seen with plain Python
# models, too). If it is killed before that, this is an ordinary death. A busy process is in another
# state, so this limit may be short.
_STOPPED_S = 2.0
# Stopped by SIGSTOP, and by a debugger.
_STOPPED = frozenset("Tt")
# Where cgroups of version 2 are mounted: alone, or beside those of version 1.
_CGROUPS = Path("/sys/fs/cgroup")
_ZOMBIE = "Z"
_NS = 1e9
_HINTS: dict[int, str] = {
    signal.SIGBUS: " (is /dev/shm full?)",
    signal.SIGKILL: " (a kill, or the kernel was out of memory)",
}


@dataclass(frozen=True, slots=True)
class InstanceFailure:
    """An instance that cannot serve any more.

    Attributes:
        identity: the instance.
        reason: what happened, as a sentence without full stop.
        completing: the process was completing the config; Triton never stops waiting for it.
        loading: the instance was being loaded; other instances of the model may serve.
    """

    identity: Identity
    reason: str
    completing: bool = False
    loading: bool = False


class InstanceMonitor:
    """Monitors the processes that have a status file in a folder. For use in one thread.

    Args:
        folder: the folder with the status files.
        load_seconds: the time limit for loading an instance, by `serve` or through Triton's API.
    """

    def __init__(self, folder: Path, load_seconds: float = math.inf) -> None:
        self._folder, self._load_seconds = folder, load_seconds
        self._instances: dict[Path, _Instance] = {}
        self._poll = select.poll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wakeup, select.POLLIN)

    def wait(self, seconds: float) -> None:
        """Wait until a process ends or `wake` is called, or the time is over."""
        self._poll.poll(seconds * 1000)  # of the pidfds, too
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)

    def wake(self) -> None:
        """End the current wait, or the next one. May be called in any thread."""
        os.eventfd_write(self._wakeup, 1)

    def check(self) -> list[InstanceFailure]:
        """Return new failures, and kill processes that hang, are stopped or are poisoned."""
        for path in instance_status.files(self._folder):
            if path not in self._instances:
                # OSError: the instance has ended and removed its file. Damaged files are ignored.
                with contextlib.suppress(OSError, ValueError):
                    self._add(path)
        failures = []
        for path, instance in list(self._instances.items()):
            failure = instance.check()
            if failure is not None:
                failures.append(failure)
            if instance.gone:
                if path.exists():  # the instance did not end normally
                    orphan_cleanup.remove_region(instance.identity.region)
                # Removed last: until then, the file shows that the instance died.
                path.unlink(missing_ok=True)
                self._remove(path)
        return failures

    def live_processes(self, model: str) -> set[int]:
        """Return the IDs of the processes of a model that have not ended."""
        return {
            instance.identity.pid
            for instance in self._instances.values()
            if instance.identity.model == model and not instance.has_ended()
        }

    def kill(self, model: str, state: InstanceState) -> int:
        """Kill the instances of a model that are in a state; return their number."""
        return sum(
            orphan_cleanup.kill(instance.identity.pid, self._folder)
            for instance in self._instances.values()
            if instance.identity.model == model and instance.reader.read().state is state
        )

    def close(self) -> None:
        """Close all descriptors."""
        for path in list(self._instances):
            self._remove(path)
        os.close(self._wakeup)

    def _add(self, path: Path) -> None:
        instance = _Instance(Reader(path), self._folder, self._load_seconds)
        self._instances[path] = instance
        if instance.pidfd is not None:
            self._poll.register(instance.pidfd, select.POLLIN)

    def _remove(self, path: Path) -> None:
        pidfd = self._instances.pop(path).pidfd
        if pidfd is not None:
            self._poll.unregister(pidfd)
            os.close(pidfd)


class _Instance:
    """A monitored process."""

    def __init__(self, reader: Reader, folder: Path, load_seconds: float) -> None:
        self.reader = reader
        self.identity = reader.identity
        self._folder, self._load_seconds = folder, load_seconds
        # None: the process has ended, or the kernel has no pidfds.
        self.pidfd: int | None = None
        with contextlib.suppress(OSError):
            self.pidfd = os.pidfd_open(self.identity.pid)
        # The process ended before the pidfd was opened, and its ID belongs to another process.
        self._replaced = orphan_cleanup.is_foreign(self.identity.pid, folder)
        self.gone = False
        self._reported = False
        self._stopped_since = math.inf

    def has_ended(self) -> bool:
        if self._replaced:
            return True
        if self.pidfd is not None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            return bool(poll.poll(0))
        return _stat(self.identity.pid)[:1] in ([], [_ZOMBIE])

    def check(self) -> InstanceFailure | None:
        """Return the failure of this instance, once; kill the process if it hangs."""
        self.gone = self.has_ended()
        if not self.gone:
            reason = self._problem()
        elif not self.reader.path.exists():  # it ended normally
            reason = ""
        else:
            reason = "died" if self._replaced else _death(self.identity.pid)
        if not reason or self._reported:
            return None
        self._reported = True
        status = self.reader.read()
        loading = status.state is InstanceState.LOADING
        completing = status.state is InstanceState.COMPLETING
        if status.state is InstanceState.POISONED:
            reason = f"cannot compute any more: {status.reason}"
        elif loading:
            reason += " while it was loaded"
        subject = f"instance {self.identity.instance}"
        if completing:
            subject = "the process that completes its config"
        return InstanceFailure(self.identity, f"{subject} {reason}", completing, loading)

    def _problem(self) -> str:
        """Return why a running process cannot serve, and kill it; empty: there is no problem."""
        status, limit = self.reader.read(), self.identity.limit_ms
        seconds = time.monotonic() - status.since / _NS
        if status.state is InstanceState.COMPLETING:  # Triton would not notice its end
            return ""
        if status.state is InstanceState.POISONED:
            reason = "is poisoned"
            if seconds <= _GRACE_S:
                return reason
        elif self._stopped_seconds() > _STOPPED_S:
            reason = f"was stopped for {_STOPPED_S:g} s by a signal, a debugger or a frozen cgroup"
        elif status.state is InstanceState.LOADING and seconds > self._load_seconds:
            reason = f"took longer than {self._load_seconds:g} s (--load-timeout)"
        elif status.state is InstanceState.BUSY and limit is not None and seconds * 1000 > limit:
            reason = f"hung: a call took longer than EXECUTION_TIMEOUT_MS, {limit} ms"
        else:
            return ""
        orphan_cleanup.kill(self.identity.pid, self._folder)
        return reason

    def _stopped_seconds(self) -> float:
        """Return for how long the process has been stopped; 0 if it runs."""
        now, pid = time.monotonic(), self.identity.pid
        if _STOPPED.isdisjoint(_stat(pid)[:1]) and not _is_frozen(pid):
            self._stopped_since = math.inf
        self._stopped_since = min(self._stopped_since, now)
        return now - self._stopped_since


def _is_frozen(pid: int) -> bool:
    """Return whether the cgroup of a process is frozen; such a process has the state "sleeping"."""
    for line in _read_text(Path(f"/proc/{pid}/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        folder = path.lstrip("/")
        if controllers == "freezer":
            if _read_text(_CGROUPS / "freezer" / folder / "freezer.state").strip() == "FROZEN":
                return True
        elif not controllers:  # version 2
            for root in (_CGROUPS, _CGROUPS / "unified"):
                if "frozen 1" in _read_text(root / folder / "cgroup.events").splitlines():
                    return True
    return False


def _read_text(path: Path) -> str:
    """Return the contents of a file; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if the process is gone."""
    return _read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _death(pid: int) -> str:
    """Return how a process ended; its exit code is known until its parent reaps it."""
    fields = _stat(pid)
    code = int(fields[-1]) if fields[:1] == [_ZOMBIE] else 0
    if os.WIFSIGNALED(code):
        number = os.WTERMSIG(code)
        names = {known.value: known.name for known in signal.Signals}
        return f"was ended by {names.get(number, f'signal {number}')}{_HINTS.get(number, '')}"
    return f"ended with exit code {os.WEXITSTATUS(code)}" if code else "died"
