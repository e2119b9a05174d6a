"""A supervisor that keeps the models of one server serving: it loads, monitors and reloads them.

One thread calls `step` and owns all records. The supervisor requests the states of the models
from Triton regularly, so that users may load and unload models through Triton's API, too: it does
not reload what they unload, and it monitors what they load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from torch_py_backend.processes.instance_status import InstanceState
from torch_py_backend.server import model_status
from torch_py_backend.server.healing import Lifecycle, Phase
from torch_py_backend.server.instances import InstanceFailure
from torch_py_backend.server.model_control import LoadTimeoutError
from torch_py_backend.server.model_status import ModelStatus
from torch_py_backend.server.pending_operations import ModelControl, Operation, PendingOperations
from torch_py_backend.server.tritonserver import ModelState

_STEP_S = 0.2
_INDEX_S = 0.5
# The time for the other instances of a model to end, before new ones need their memory.
_SURVIVORS_S = 10.0
# Triton 24.10 may never end the instances of a model if one of them died during a request. After
# this time the idle ones are killed here; Triton does not send them requests any more.
_IDLE_S = 1.0
# The time for a load to fail in Triton, after its process was killed.
_FAILING_S = 30.0
# A part of Triton's message for a process that has died.
_DEAD = "is not healthy"


class EventKind(Enum):
    READY = "READY"
    FAILED = "FAILED"
    DOWN = "DOWN"
    GIVEN_UP = "GIVEN UP"
    RELEASED = "RELEASED"


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a model's phase, for the user."""

    kind: EventKind
    model: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The readiness of all models, for other threads.

    Attributes:
        models: the models that should serve, each with the reason why it does not; empty: it does.
        problem: a problem of the whole server.
        at: the time of the snapshot, in the clock's seconds.
    """

    models: Mapping[str, str] = field(default_factory=dict)
    problem: str = "the server is being started"
    at: float = 0.0


class Monitor(Protocol):
    """Detects failed instances; implemented by `instances.InstanceMonitor`."""

    def check(self) -> list[InstanceFailure]: ...

    def wait(self, seconds: float) -> None: ...

    def wake(self) -> None: ...

    def live_processes(self, model: str) -> set[int]: ...

    def kill(self, model: str, state: InstanceState) -> int: ...


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """The limits of loading models again.

    Attributes:
        restarts: how often a model is loaded again, until it has served for a minute.
        load_seconds: the time limit of one load.
    """

    restarts: int
    load_seconds: float


@dataclass(slots=True)
class _Model:
    """The record of one model.

    Attributes:
        lifecycle: the phase, and when the model is loaded again.
        operation: the load or unload in progress.
        first: whether the first load has not completed yet.
        processes: the live processes when the last load began.
        failure: why the load in progress, or the last one, is of no use.
        down_since: when the model failed.
        dependents: the ensembles that Triton unloaded with the model.
        versions: the versions that served last.
    """

    lifecycle: Lifecycle
    operation: Operation | None = None
    first: bool = True
    processes: set[int] = field(default_factory=set)
    failure: str = ""
    down_since: float = 0.0
    dependents: set[str] = field(default_factory=set)
    versions: frozenset[str] = frozenset()

    def is_unloaded(self, status: ModelStatus | None) -> bool:
        """Return whether the model was unloaded.

        Triton still reports versions that had failed before.
        """
        if status is None or status.unloaded:
            return True
        return bool(self.versions) and self.versions <= status.withdrawn


class Supervisor:
    """Keeps the models of one server serving.

    Args:
        states: returns Triton's states of the models.
        monitor: detects failed instances.
        control: loads and unloads models; None: Triton alone does, and no model is reloaded.
        limits: the limits of loading models again.
        on_event: is called with each event.
        clock: returns the seconds of a monotonic clock.
        spawn: runs a function in a thread of its own.

    Attributes:
        snapshot: the readiness of all models after the last step.
    """

    def __init__(
        self,
        states: Callable[[], Sequence[ModelState]],
        monitor: Monitor,
        control: ModelControl | None,
        limits: RestartLimits,
        on_event: Callable[[Event], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        spawn: Callable[[Callable[[], None]], None],
    ) -> None:
        self._states, self._monitor = states, monitor
        self._limits, self._on_event, self._clock = limits, on_event, clock
        self._operations = (
            PendingOperations(states, control, spawn, monitor.wake) if control is not None else None
        )
        self._events: list[Event] = []
        self._models: dict[str, _Model] = {}
        self._index_due = 0.0
        self._statuses: dict[str, ModelStatus] = {}
        self.snapshot = Snapshot()

    @property
    def controls_models(self) -> bool:
        """Whether the supervisor loads and unloads models, and not Triton alone."""
        return self._operations is not None

    @property
    def initial_loads_done(self) -> bool:
        """Whether the first load of every model has succeeded or failed."""
        return not any(model.first for model in self._models.values())

    def load(self, names: Sequence[str]) -> None:
        """Start to load models, all at the same time."""
        for name in names:
            self._models[name] = _Model(Lifecycle(self._limits.restarts))
            self._start_load(name)

    def step(self) -> None:
        """Wait shortly, then process failures, completed operations and due loads."""
        self._monitor.wait(_STEP_S)
        failures = self._monitor.check()
        completed = self._operations.completed() if self._operations is not None else []
        # Requested last: states from before a load or unload completed are outdated.
        problem = self._refresh(force=bool(failures or completed))
        for failure in failures:
            self._handle_failure(failure)
        for operation in completed:
            self._handle_completed(operation)
        if not problem:
            for name in sorted(self._statuses.keys() | self._models.keys()):
                self._compare(name)
        self._start_due_loads()
        self._stop_overdue_loads()
        self._publish(problem)
        # After the snapshot: a client that sees the event must not get the previous readiness.
        events, self._events = self._events, []
        for event in events:
            self._on_event(event)

    # --- states in Triton ----------------------------------------------------------------------

    def _refresh(self, *, force: bool) -> str:
        """Request the states of the models if this is due; return the problem if that fails."""
        if force or self._clock() >= self._index_due:
            try:
                self._statuses = model_status.by_model(self._states())
            except OSError:
                return "tritonserver does not answer"
            self._index_due = self._clock() + _INDEX_S
        return ""

    def _compare(self, name: str) -> None:
        """Detect that a model was loaded or unloaded through Triton's API."""
        status, model = self._statuses.get(name), self._models.get(name)
        if model is None:
            self._adopt(name, status)
            return
        if model.operation is not None or self._blocker(name):
            return
        ready = status is not None and status.ready
        phase = model.lifecycle.phase
        if status is not None and status.ready:
            model.versions = status.serving
        if phase is Phase.SERVING and not ready:
            if status is None or model.is_unloaded(status):
                model.lifecycle.unloaded()
                text = "unloaded through Triton's API; not loaded again"
                self._add_event(EventKind.RELEASED, name, text)
            elif model.failure and _DEAD in status.reason:  # reported when the process was killed
                model.lifecycle.given_up(model.failure)
            elif status.reason:
                self._give_up(name, status.reason)
        elif phase is not Phase.SERVING and ready and self._is_replaced(name):
            model.failure = ""
            model.lifecycle.serving(self._clock())
            self._add_event(EventKind.READY, self._label(name), "loaded through Triton's API")

    def _adopt(self, name: str, status: ModelStatus | None) -> None:
        """Add a record of a model that the supervisor did not load."""
        is_failed = status is not None and status.reason and self._operations is None
        if status is None or not (status.ready or is_failed):
            return
        model = self._models[name] = _Model(Lifecycle(self._limits.restarts), first=False)
        if status.ready:
            model.lifecycle.serving(self._clock())
            self._add_event(EventKind.READY, self._label(name))
        elif not status.unloaded:
            self._give_up(name, status.reason)
        else:
            model.lifecycle.unloaded()

    def _is_replaced(self, name: str) -> bool:
        """Return whether a model that is READY in Triton has new processes since its failure."""
        model = self._models[name]
        if model.lifecycle.phase is Phase.UNLOADED or not model.failure:
            return True
        return bool(self._monitor.live_processes(name) - model.processes)

    def _blocker(self, name: str) -> str:
        """Return the model with which Triton unloaded this ensemble; empty if there is none."""
        for other, model in self._models.items():
            if name in model.dependents and model.lifecycle.phase is not Phase.SERVING:
                return other
        return ""

    # --- failures ------------------------------------------------------------------------------

    def _handle_failure(self, failure: InstanceFailure) -> None:
        name, pid = failure.identity.model, failure.identity.pid
        if name not in self._models:
            self._adopt(name, self._statuses.get(name))
        model = self._models.get(name)
        if model is None:
            # A load through Triton's API, which reports the failure to its client.
            if failure.loading:
                self._add_event(EventKind.FAILED, name, failure.reason)
        elif model.operation is not None:
            if not model.operation.is_load or pid in model.processes:
                return  # a process that was to end anyway
            model.failure = model.failure or failure.reason
            if failure.completing:
                self._abandon_load(name, model.failure)
        elif failure.loading:
            # A load through Triton's API: Triton reports its failure, and keeps what serves.
            model.failure = failure.reason
            self._add_event(EventKind.FAILED, name, failure.reason)
        elif model.lifecycle.phase in (
            Phase.SERVING,
            Phase.UNLOADED,
        ) and not model.is_unloaded(self._statuses.get(name)):
            self._take_down(name, failure.reason)

    def _take_down(self, name: str, reason: str) -> None:
        """Unload a failed model, and plan when it is loaded again."""
        model, now = self._models[name], self._clock()
        if model.lifecycle.phase is Phase.SERVING:
            model.down_since = now
        model.first = False
        model.processes, model.failure = self._monitor.live_processes(name), reason
        if self._operations is None:
            model.lifecycle.given_up(reason)
            text = f"{reason}; Triton alone controls its models"
            self._add_event(EventKind.GIVEN_UP, name, text)
            return
        model.lifecycle.failed(now, reason)
        self._report_down(name)
        model.operation = self._operations.unload(name, now)

    def _add_event(self, kind: EventKind, model: str, text: str = "") -> None:
        self._events.append(Event(kind, model, text))

    def _report_down(self, name: str) -> None:
        lifecycle = self._models[name].lifecycle
        attempts = lifecycle.attempts
        if lifecycle.phase is Phase.GIVEN_UP:
            times = "once" if attempts == 1 else f"{attempts} times"
            text = f"{lifecycle.reason}; loaded again {times} without success, stays down until"
            self._add_event(EventKind.GIVEN_UP, name, f"{text} it is loaded through Triton's API")
            return
        wait = lifecycle.due - self._clock()
        when = "now" if wait <= 0 else f"in {wait:.0f} s"
        text = f"loading it again {when} (attempt {attempts} of {lifecycle.restarts})"
        self._add_event(EventKind.DOWN, name, f"{lifecycle.reason}; {text}")

    def _give_up(self, name: str, reason: str) -> None:
        self._models[name].lifecycle.given_up(model_status.public_reason(reason))
        self._add_event(EventKind.FAILED, self._label(name), reason)

    def _abandon_load(self, name: str, reason: str) -> None:
        """Give up a load that Triton never completes."""
        model = self._models[name]
        model.operation, model.first = None, False
        model.failure, model.processes = reason, self._monitor.live_processes(name)
        text = f"{reason}; Triton never stops waiting for it: only a new server can load it"
        model.lifecycle.given_up(text)
        self._add_event(EventKind.GIVEN_UP, name, text)

    # --- loads ---------------------------------------------------------------------------------

    def _start_due_loads(self) -> None:
        now = self._clock()
        for name, model in self._models.items():
            if model.lifecycle.phase is not Phase.DOWN or model.operation is not None:
                continue
            survivors = self._monitor.live_processes(name)
            if survivors and now >= model.down_since + _IDLE_S:
                self._monitor.kill(name, InstanceState.IDLE)
            if now >= model.lifecycle.due and (
                not survivors or now >= model.down_since + _SURVIVORS_S
            ):
                model.lifecycle.loading()
                self._start_load(name)

    def _start_load(self, name: str) -> None:
        model = self._models[name]
        model.processes, model.failure = self._monitor.live_processes(name), ""
        assert self._operations is not None  # noqa: S101  without it, nothing is loaded
        model.operation = self._operations.load(
            name,
            self._clock(),
            self._limits.load_seconds + _FAILING_S,
            sorted(model.dependents),
            again=model.lifecycle.attempts > 0,
        )

    def _handle_completed(self, operation: Operation) -> None:
        name, model = operation.model, self._models[operation.model]
        if model.operation is not operation:
            return  # an abandoned load
        model.operation = None
        if not operation.is_load:
            model.dependents |= operation.dependents
            return
        first, model.first = model.first, False
        if operation.error is None and not model.failure:
            self._handle_loaded(name, first=first)
            return
        reason = model.failure or model_status.public_reason(str(operation.error))
        died = bool(model.failure) or _DEAD in reason
        if isinstance(operation.error, LoadTimeoutError):
            self._abandon_load(name, f"its load {operation.error}")
        elif operation.error is None:
            self._take_down(name, reason)
        elif died or not first:
            model.processes, model.failure = self._monitor.live_processes(name), reason
            model.lifecycle.failed(self._clock(), reason)
            self._report_down(name)
        else:
            # Another load of the same files would fail in the same way.
            self._give_up(name, str(operation.error))

    def _handle_loaded(self, name: str, *, first: bool) -> None:
        model, now = self._models[name], self._clock()
        model.lifecycle.serving(now)
        for dependent in model.dependents & self._models.keys():
            self._models[dependent].lifecycle.serving(now)
        model.dependents.clear()
        text = "" if first else f"serves again after {now - model.down_since:.1f} s"
        self._add_event(EventKind.READY, self._label(name), text)

    def _stop_overdue_loads(self) -> None:
        """Kill the processes of loads that take too long; the loads then fail in Triton."""
        limit = self._limits.load_seconds
        for name, model in self._models.items():
            operation = model.operation
            if operation is None or not operation.is_load:
                continue
            if self._clock() - operation.started > limit:
                # In every step: other instances of the model may still load, or start to load.
                killed = self._monitor.kill(name, InstanceState.LOADING)
                if not model.failure:
                    model.failure = f"its load took longer than {limit:g} s (--load-timeout)"
                    if not killed:
                        self._abandon_load(name, model.failure)

    # --- readiness -----------------------------------------------------------------------------

    def _publish(self, problem: str) -> None:
        models = {
            name: self._why_not_ready(name, model)
            for name, model in sorted(self._models.items())
            if model.lifecycle.phase is not Phase.UNLOADED
        }
        self.snapshot = Snapshot(models, problem, self._clock())

    def _why_not_ready(self, name: str, model: _Model) -> str:
        """Return why a model does not serve; empty if it does."""
        blocker = self._blocker(name)
        if blocker:
            return f"needs the model '{blocker}', which does not serve"
        phase, reason = model.lifecycle.phase, model.lifecycle.reason
        if phase is Phase.SERVING:
            status = self._statuses.get(name)
            # Not ready: the model is being unloaded and loaded again through Triton's API.
            return "" if status is None or status.ready else Phase.LOADING.value
        return f"{phase.value}: {reason}" if reason else phase.value

    def _label(self, name: str) -> str:
        status = self._statuses.get(name)
        return f"{name} {status.versions}".strip() if status else name
