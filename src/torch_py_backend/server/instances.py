"""A monitor of the instances of one server, which detects those that die, hang or are poisoned."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from torch_py_backend.processes import instance_status, procfs
from torch_py_backend.processes.instance_status import Identity, InstanceState, Reader
from torch_py_backend.server import cleanup

# A poisoned instance may still send computed results, and may end by itself.
_GRACE_S = 1.0
# Triton 24.10 declares an instance dead that has not run for about 6 s. If the process then goes
# on, tritonserver uses freed shared memory and aborts, with all models (seen with plain Python
# models, too). If it is killed before that, this is an ordinary death. A busy process is in another
# state, so this limit may be short.
_STOPPED_S = 2.0
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_NS = 1e9


class InstanceFailure(NamedTuple):
    """An instance that cannot serve any more.

    Attributes:
        state: the last state. If it dies while COMPLETING, Triton waits for it forever; while
            LOADING, other instances of the model may serve.
    """

    identity: Identity
    reason: str
    state: InstanceState = InstanceState.IDLE


class InstanceMonitor:
    """Monitors the processes that have a status file in a folder. For use in one thread.

    The time limit for loading an instance holds for loads through Triton's API, too.
    """

    def __init__(self, folder: Path, load_seconds: float = math.inf) -> None:
        self._folder = folder
        self._load_seconds = load_seconds
        self._instances: dict[Path, _Instance] = {}

    def check(self) -> list[InstanceFailure]:
        """Return new failures, and kill processes that hang, are stopped or are poisoned."""
        for path in instance_status.files(self._folder):
            if path not in self._instances:
                # OSError: the instance has ended and removed its files. Damaged ones are ignored.
                with contextlib.suppress(OSError, ValueError):
                    self._instances[path] = _Instance(Reader(path), self._load_seconds)
        failures = []
        for path, instance in list(self._instances.items()):
            process_status = instance.process_status()
            reason = instance.problem(process_status)
            if reason and not instance.reported:
                instance.reported = True
                failures.append(instance.failure(reason))
            if not process_status:
                # Triton 24.10 keeps the memory of one that died until the server ends.
                if instance.region and path.exists():
                    (cleanup.SHARED_MEMORY / instance.region).unlink(missing_ok=True)
                # Removed last: until then, the file shows that the instance died.
                instance_status.remove(path)
                del self._instances[path]
        return failures

    def _of(self, model: str) -> list[_Instance]:
        return [
            instance for instance in self._instances.values() if instance.identity.model == model
        ]

    def is_loading(self) -> bool:
        """Return whether an instance of any model is being loaded, or a config completed."""
        states = {instance.reader.read().state for instance in self._instances.values()}
        return bool(states & {InstanceState.LOADING, InstanceState.COMPLETING})

    def idle_seconds(self, model: str) -> float:
        """Return for how long all instances have been idle; 0 if one is busy, or without instances.

        It is the time since the last of them ended its load or a call.
        """
        statuses = [instance.reader.read() for instance in self._of(model)]
        if not statuses or any(status.state is not InstanceState.IDLE for status in statuses):
            return 0.0
        return time.monotonic() - max(status.since for status in statuses) / _NS

    def warnings(self, model: str) -> list[str]:
        """Return the warnings of the loads of a model's instances, each once."""
        texts = (text for instance in self._of(model) for text in instance.warnings())
        return list(dict.fromkeys(texts))

    def models_with_instances(self) -> set[str]:
        """Return the models that have instances."""
        return {instance.identity.model for instance in self._instances.values()}

    def live_processes(self, model: str) -> set[int]:
        """Return the IDs of the processes of a model that had not ended at the last check."""
        return {instance.identity.pid for instance in self._of(model)}

    def kill(self, model: str, *states: InstanceState) -> None:
        """Kill the instances of a model that are in one of these states."""
        for instance in self._of(model):
            if instance.reader.read().state in states:
                instance.kill()


class _Instance:
    """A monitored process."""

    def __init__(self, reader: Reader, load_seconds: float) -> None:
        self.reader = reader
        self.identity = reader.identity
        self.region = ""
        self.reported = False
        self._load_seconds = load_seconds
        self._process: psutil.Process | None = None
        self._stopped_since = math.inf
        self._warnings: list[str] | None = None
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.identity.pid)
            # Otherwise the instance has ended, and its process ID belongs to another process.
            # Checked once: a process may overwrite its environment, as setproctitle does.
            if cleanup.belongs_to_server(process, reader.path.parent) is not False:
                self._process = process
                self.region = cleanup.region(process)

    def warnings(self) -> list[str]:
        """Return the warnings of its load; none before it has ended."""
        if self._warnings is None and self.reader.read().state is not InstanceState.LOADING:
            with contextlib.suppress(OSError, ValueError):  # the instance has just ended
                self._warnings = self.reader.warnings()
        return self._warnings or []

    def process_status(self) -> str:
        """Return the state of the process in psutil's words; empty: it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process is not None and self._process.is_running():
                status = str(self._process.status())
                return "" if status == psutil.STATUS_ZOMBIE else status
        return ""

    def kill(self) -> None:
        with contextlib.suppress(psutil.Error):
            if self._process is not None:
                self._process.kill()  # unless its ID belongs to another process now

    def failure(self, reason: str) -> InstanceFailure:
        """Return the failure for a reason, which is a clause without its subject."""
        state, subject = self.reader.read().state, f"instance {self.identity.instance}"
        if state is InstanceState.COMPLETING:
            subject = "the process that completes its config"
        elif state is InstanceState.LOADING:
            reason += " while it was loaded"
        elif state is InstanceState.POISONED:
            reason = "cannot compute any more"
            with contextlib.suppress(OSError, ValueError):
                reason += f": {self.reader.poison()}"
        return InstanceFailure(self.identity, f"{subject} {reason}", state)

    def problem(self, process_status: str) -> str:
        """Return why the instance cannot serve, and kill it; empty: there is no problem."""
        if not process_status:
            ended_normally = not self.reader.path.exists()
            return "" if ended_normally else procfs.cause_of_death(self.identity.pid)
        now = time.monotonic()
        limit = self.identity.limit_ms
        state, since = self.reader.read()
        seconds = now - since / _NS
        is_stopped = process_status in _STOPPED
        self._stopped_since = min(self._stopped_since, now) if is_stopped else math.inf
        if state is InstanceState.COMPLETING:  # Triton would not notice its end
            return ""
        if state is InstanceState.POISONED:
            reason = "is poisoned"
            if seconds <= _GRACE_S:
                return reason
        elif now - self._stopped_since > _STOPPED_S:
            reason = f"was stopped for {_STOPPED_S:g} s by a signal or a debugger"
        elif state is InstanceState.LOADING and seconds > self._load_seconds:
            reason = f"took longer than {self._load_seconds:g} s (--load-timeout)"
        elif state is InstanceState.BUSY and limit is not None and seconds * 1000 > limit:
            reason = f"hung: a call took longer than EXECUTION_TIMEOUT_MS, {limit} ms"
        else:
            return ""
        self.kill()
        return reason
