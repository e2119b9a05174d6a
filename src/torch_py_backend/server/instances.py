"""A monitor of the instances of one server, which detects those that die, hang or are poisoned."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from torch_py_backend.errors import printable
from torch_py_backend.processes import instance_status, procfs
from torch_py_backend.processes.instance_status import Identity, InstanceState, Reader
from torch_py_backend.server import cleanup

# A poisoned instance may still send computed results, and may end by itself.
_GRACE_S = 1.0
# Triton 24.10 declares an instance dead that has not run for about 6 s. If the process then goes
# on, tritonserver uses freed shared memory and aborts, with all models. If it is killed before
# that, this is an ordinary death. A busy process is in another state, so this limit may be short.
_STOPPED_S = 2.0
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class InstanceFailure(NamedTuple):
    """An instance that cannot serve any more, and whether it was being loaded."""

    identity: Identity
    reason: str
    in_load: bool = False


class InstanceMonitor:
    """Monitors the processes that have a status file in a folder. `check` is for one thread.

    The time limit for loading an instance holds for loads through Triton's API, too.
    """

    def __init__(self, folder: Path, load_seconds: float = math.inf) -> None:
        self._folder, self._load_seconds = folder, load_seconds
        self._instances: dict[Path, _Instance] = {}

    def check(self) -> list[InstanceFailure]:
        """Return new failures, and kill processes that hang, are stopped or are poisoned."""
        for path in instance_status.files(self._folder):
            if path not in self._instances:
                # OSError: the instance has ended and removed its file. A damaged one is ignored.
                with contextlib.suppress(OSError, ValueError):
                    self._instances[path] = _Instance(Reader(path))
        failures = []
        for path, instance in list(self._instances.items()):
            process_status = instance.process_status()
            reason = instance.problem(process_status, self._load_seconds)
            if reason and not instance.reported:
                instance.reported = True
                is_loading = instance.reader.read().state is InstanceState.LOADING
                text = f"instance {instance.identity.instance} {reason}"
                text += " while it was loaded" if is_loading else ""
                failures.append(InstanceFailure(instance.identity, text, is_loading))
            if not process_status:
                # Triton 24.10 keeps the memory of one that died until the server ends.
                if instance.region and path.exists():
                    (cleanup.SHARED_MEMORY / instance.region).unlink(missing_ok=True)
                # Removed last: until then, the file shows that the instance died.
                path.unlink(missing_ok=True)
                del self._instances[path]
        return failures

    def instances(self, model: str) -> list[_Instance]:
        """Return the instances of a model whose processes had not ended at the last check."""
        instances = list(self._instances.values())  # at once: another thread may add to them
        return [instance for instance in instances if instance.identity.model == model]

    def models_with_instances(self) -> set[str]:
        return {instance.identity.model for instance in self._instances.values()}

    def disregard(self, model: str) -> None:
        """Return no failures of the instances that a model has now."""
        for instance in self.instances(model):
            instance.reported = True

    def idle_seconds(self, model: str) -> float:
        """Return for how long all instances have been idle; 0 if one is busy, or without instances.

        It is the time since the last of them ended its load or a call.
        """
        statuses = [instance.reader.read() for instance in self.instances(model)]
        if not statuses or any(status.state is not InstanceState.IDLE for status in statuses):
            return 0.0
        return time.monotonic() - max(status.since for status in statuses)

    def kill_idle(self, model: str, *, left: bool) -> None:
        """Kill idle instances of a model: those `left` of a load that failed, or the others."""
        for instance in self.instances(model):
            is_idle = instance.reader.read().state is InstanceState.IDLE
            if is_idle and instance.reported is left:
                instance.kill()

    def report(self, model: str) -> dict[str, Any]:
        """Return what the newest instance of a model has reported. For any thread."""
        for instance in self.instances(model)[-1:]:
            return instance.reader.report()
        return {}

    def warnings(self, model: str) -> list[str]:
        """Return the warnings of the last load of a model."""
        return [printable(text) for text in self.report(model).get("warnings", [])]


class _Instance:
    """A monitored process."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.identity = reader, reader.identity
        self.region = ""
        self.reported = False
        self._process: psutil.Process | None = None
        self._stopped_since = math.inf
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.identity.pid)
            # Otherwise the instance has ended, and its process ID belongs to another process.
            # Checked once: a process may overwrite its environment, as setproctitle does.
            if cleanup.belongs_to_server(process, reader.path.parent) is not False:
                self._process = process
                # Triton's stub has it on its command line.
                words = process.cmdline()
                self.region = next((word for word in words if word.startswith(cleanup.NAME)), "")

    def process_status(self) -> str:
        """Return the state of the process in psutil's words; empty: it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process is not None and self._process.is_running():
                status = str(self._process.status())
                return "" if status == psutil.STATUS_ZOMBIE else status
        return ""

    def describe(self) -> dict[str, object]:
        """Return what the page shows of it; memory in bytes, `shared` with other processes."""
        state, since = self.reader.read()
        described = {
            "name": self.identity.instance,
            "pid": self.identity.pid,
            "state": state.name.lower(),
            "seconds": round(time.monotonic() - since, 1),
        }
        with contextlib.suppress(psutil.Error):
            if self._process is not None:
                memory = self._process.memory_info()
                described |= {"memory": memory.rss, "shared": memory.shared}
        return described

    def kill(self) -> None:
        with contextlib.suppress(psutil.Error):
            if self._process is not None:
                self._process.kill()  # unless its ID belongs to another process now

    def problem(self, process_status: str, load_seconds: float) -> str:
        """Return why the instance cannot serve, and kill it; empty: there is no problem."""
        if not process_status and not self.reader.path.exists():
            return ""  # it has ended normally
        now = time.monotonic()
        limit = self.identity.limit_ms or math.inf
        state, since = self.reader.read()
        is_stopped = process_status in _STOPPED
        self._stopped_since = min(self._stopped_since, now) if is_stopped else math.inf
        if state is InstanceState.POISONED:
            reason = f"cannot compute any more: {self.reader.report().get('poisoned', '')}"
            if now - since <= _GRACE_S:
                return reason
        elif not process_status:
            reason = procfs.cause_of_death(self.identity.pid)
        elif now - self._stopped_since > _STOPPED_S:
            reason = f"was stopped for {_STOPPED_S:g} s by a signal or a debugger"
        elif state is InstanceState.LOADING and now - since > load_seconds:
            reason = f"took longer than {load_seconds:g} s (--load-timeout)"
        elif state is InstanceState.BUSY and (now - since) * 1000 > limit:
            reason = f"hung: a call took longer than EXECUTION_TIMEOUT_MS, {limit} ms"
        else:
            return ""
        self.kill()
        return reason
