"""A supervisor that keeps the models of one server serving: it loads, monitors and reloads them.

One thread calls `step` and owns all records. Loads and unloads are futures, which it polls. Each
step turns what Triton, the instances and these futures report into transitions of the table in
`healing`. The supervisor requests the states of the models from Triton regularly, so that users may
load and unload models through Triton's API, too: it does not reload what they unload, and it
monitors what they load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch_py_backend.errors import ServerError
from torch_py_backend.processes.instance_status import InstanceState
from torch_py_backend.server import healing, model_control, model_status
from torch_py_backend.server.healing import Action, Event, EventKind, Lifecycle, Phase, Transition
from torch_py_backend.server.instances import InstanceFailure, InstanceMonitor
from torch_py_backend.server.model_control import LoadTimeoutError, RepositoryClient
from torch_py_backend.server.model_status import ModelState, ModelStatus, Snapshot

_STEP_S = 0.1
_INDEX_S = 0.5
# The time for the other instances of a model to end, before new ones need their memory.
_SURVIVORS_S = 10.0
# Triton 24.10 may never end the instances of a model if one of them died during a request. After
# this time the idle ones are killed here; Triton does not send them requests any more.
_IDLE_S = 1.0
# The time for a load to fail in Triton, after its process was killed.
_FAILING_S = 30.0
# The time for Triton to accept loaded instances while nothing else loads. Triton 24.10 gives a load
# up if the process shows no sign of life for a second, as when the machine stalls. It then waits
# for the process to end, without killing it (ReceiveMessageFromStub and WaitForStubProcess in
# stub_launcher.cc).
_ACCEPTED_S = 30.0
# A part of Triton's message for a process that has died.
_DEAD = "is not healthy"
_NO_ANSWER = "tritonserver does not answer"
_STUCK = "Triton never stops waiting for it: only a new server can load it"


@dataclass(slots=True, kw_only=True)
class _Model(Lifecycle):
    """The lifecycle of one model, and the observations of it.

    Attributes:
        call: the load (in the phase LOADING) or unload in progress.
        called: when it began.
        processes: the live processes when the model failed, or its last load began.
        failure: why the load in progress, or the last one, failed.
        dependents: the ensembles that Triton unloaded with the model, until all their parts serve.
        versions: the versions that served last.
        warnings: the warnings of its last load, all of which were reported.
        processes_loaded: the processes that the supervisor's last load has started.
        loaded: the config after that load; empty: unknown.
        config: the config that it was loaded with through Triton's API; empty: its own.
    """

    name: str
    call: Future[None] | None = None
    called: float = 0.0
    processes: set[int] = field(default_factory=set)
    failure: str = ""
    dependents: set[str] = field(default_factory=set)
    versions: frozenset[str] = frozenset()
    warnings: Sequence[str] = ()
    processes_loaded: set[int] = field(default_factory=set)
    loaded: str = ""
    config: str = ""

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
        states: returns Triton's states of the models; its argument names those with instances.
        config: returns the config of a loaded model; empty if it is not loaded.
        control: loads and unloads models; None: Triton alone does, and no model is reloaded.
        restarts: how often a model is reloaded, until it has served for a minute.
        load_seconds: the time limit of one load.
        sleep: waits for a time in seconds.

    Attributes:
        snapshot: the readiness of all models after the last step.
    """

    def __init__(
        self,
        states: Callable[[Collection[str]], Sequence[ModelState]],
        config: Callable[[str], str],
        monitor: InstanceMonitor,
        control: RepositoryClient | None,
        on_event: Callable[[Event], None],
        *,
        restarts: int,
        load_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._states, self._config = states, config
        self._monitor, self._control = monitor, control
        self._on_event, self._clock, self._sleep = on_event, clock, sleep
        self._restarts, self._load_seconds = restarts, load_seconds
        self._events: list[Event] = []
        self._models: dict[str, _Model] = {}
        self._index_due = 0.0
        self._loading_at = 0.0  # when an instance of any model was last being loaded
        self._statuses: dict[str, ModelStatus] = {}
        self.snapshot = Snapshot()

    @property
    def initial_loads_done(self) -> bool:
        """Whether the first load of every model has succeeded or failed."""
        return not any(
            model.phase is Phase.LOADING and not model.attempts for model in self._models.values()
        )

    def load(self, names: Sequence[str]) -> None:
        """Start to load models, all at the same time."""
        for name in names:
            self._apply(self._model(name), healing.DUE)

    def step(self) -> None:
        """Wait shortly, then process failures, completed calls and due loads."""
        self._sleep(_STEP_S)
        failures = self._monitor.check()
        if self._monitor.is_loading():
            self._loading_at = self._clock()
        completed = [
            model for model in self._models.values() if model.call is not None and model.call.done()
        ]
        problem = ""
        # Requested last: states from before a load or unload completed are outdated.
        if failures or completed or self._clock() >= self._index_due:
            try:
                models = {failure.identity.model for failure in failures}
                models |= self._monitor.models_with_instances()
                self._statuses = model_status.by_model(self._states(models))
                self._index_due = self._clock() + _INDEX_S
            except OSError:  # a later step handles what has completed
                problem, completed = _NO_ANSWER, []
        for failure in failures:
            self._handle_failure(failure)
        for model in completed:
            self._handle_completed(model)
        if not problem:
            for name in sorted(self._statuses.keys() | self._models.keys()):
                self._compare(self._model(name))
            self._load_ensembles()
        for model in self._models.values():
            self._check_deadlines(model)
            self._report_warnings(model)
        readiness = {
            name: self._why_not_ready(model)
            for name, model in sorted(self._models.items())
            if model.phase not in (Phase.NEW, Phase.UNLOADED)
        }
        warnings = {name: model.warnings for name, model in self._models.items() if model.warnings}
        self.snapshot = Snapshot(readiness, problem, self._clock(), warnings)
        # After the snapshot: a client that sees the event must not get the previous readiness.
        events, self._events = self._events, []
        for event in events:
            self._on_event(event)

    def _model(self, name: str) -> _Model:
        """Return the record of a model, which is added if it is missing."""
        if name not in self._models:
            self._models[name] = _Model(self._restarts, name=name)
        return self._models[name]

    # --- transitions -------------------------------------------------------------------------

    def _apply(self, model: _Model, transition: Transition, reason: str = "") -> bool:
        """Make a transition, report it and start its action; return whether it had an effect."""
        applied = model.handle(transition, self._clock(), reason)
        if applied is None:
            return False
        if transition not in (healing.REFUSED, healing.RELOAD_DIED):
            # After a death, only new processes show that Triton has reloaded the model.
            model.failure = reason
            model.processes = self._monitor.live_processes(model.name)
        if applied.event is not None:
            has_label = applied.event in (EventKind.READY, EventKind.FAILED)
            status = self._statuses.get(model.name) if has_label else None
            label = f"{model.name} {status.versions}".strip() if status else model.name
            text = model_status.cause(model.name, applied.text)
            self._events.append(Event(applied.event, label, text))
        if applied.action is not None:
            self._start(model, applied.action)
        return True

    def _start(self, model: _Model, action: Action) -> None:
        """Start to load or to unload a model."""
        control = self._control
        assert control is not None  # noqa: S101  without it, nothing is loaded
        model.called = self._clock()
        if action is Action.LOAD:
            seconds = self._load_seconds + _FAILING_S
            model.call = control.load(model.name, seconds, model.config)
            return
        config = self._read_config(model.name)
        if config is None:  # without it, the model would be loaded with another one
            model.call = model_control.failed(ServerError(_NO_ANSWER))
            return
        if not model_status.is_same_config(config, model.loaded):
            model.config = config
        model.call = control.unload(model.name)

    def _read_config(self, name: str) -> str | None:
        """Return the config of a model, empty if it is not loaded; None: Triton does not answer."""
        try:
            return self._config(name)
        except OSError:
            return None

    # --- observations ------------------------------------------------------------------------

    def _compare(self, model: _Model) -> None:
        """Detect that a model was loaded or unloaded through Triton's API."""
        status = self._statuses.get(model.name)
        if model.call is not None or self._parts(model.name):
            return
        is_new = model.phase is Phase.NEW
        if status is not None and status.ready:
            model.versions = status.serving
            is_replaced = self._monitor.live_processes(model.name) - model.processes
            if is_replaced or not model.failure or is_new or model.phase is Phase.UNLOADED:
                self._apply(model, healing.ALREADY_LOADED if is_new else healing.USER_LOADED)
        elif status is None or model.is_unloaded(status):
            # Until an unload ends, it is not known which ensembles Triton unloads with that model.
            unloads = [
                other
                for other in self._models.values()
                if other.call and other.phase is not Phase.LOADING
            ]
            if not unloads:
                self._apply(model, healing.USER_UNLOADED)
        elif status.reason and not (is_new and self._control is not None):
            if model.failure and _DEAD in status.reason:
                self._apply(model, healing.RELOAD_DIED, model.failure)
            else:
                self._refuse(model, status.reason)

    def _handle_failure(self, failure: InstanceFailure) -> None:
        model = self._model(failure.identity.model)
        if model.phase is Phase.NEW:
            self._compare(model)  # it may serve already
        if model.call is not None:
            # Processes from before a load had to end anyway.
            if model.phase is Phase.LOADING and failure.identity.pid not in model.processes:
                model.failure = model.failure or failure.reason
                if failure.state is InstanceState.COMPLETING:
                    self._abandon_load(model, model.failure)
        elif failure.state is InstanceState.LOADING:
            # A load through Triton's API: Triton reports its failure, and keeps what serves.
            model.failure = failure.reason
            self._events.append(Event(EventKind.FAILED, model.name, failure.reason))
        elif not model.is_unloaded(self._statuses.get(model.name)):
            transition = healing.DIED
            if self._control is None:
                transition = healing.DIED_UNCONTROLLED
            elif failure.identity.copied and failure.identity.pid not in model.processes_loaded:
                transition = healing.DIED_WITH_FILES
            self._apply(model, transition, failure.reason)

    def _handle_completed(self, model: _Model) -> None:
        call, model.call = model.call, None
        if call is None:
            return  # the load was abandoned
        error = call.exception()
        if model.phase is not Phase.LOADING:
            if error is not None and self._is_ready(model.name):
                self._apply(model, healing.UNLOAD_FAILED, str(error))
            model.dependents |= {
                name
                for name, other in self._models.items()
                if other.phase is Phase.SERVING and other.is_unloaded(self._statuses.get(name))
            }
            return
        is_first = not model.attempts
        reason = model.failure or model_status.public_reason(str(error))
        if error is None:
            model.loaded = self._read_config(model.name) or ""
            model.processes_loaded = self._monitor.live_processes(model.name)
        if error is None and not model.failure:
            self._apply(model, healing.LOADED if is_first else healing.RELOADED)
        elif isinstance(error, LoadTimeoutError):
            self._abandon_load(model, f"its load {error}")
        elif error is None:
            self._apply(model, healing.DIED, reason)
        elif model.failure or _DEAD in reason or not is_first:
            self._apply(model, healing.LOAD_FAILED, reason)
        else:
            self._refuse(model, str(error))

    def _load_ensembles(self) -> None:
        """Load ensembles whose parts serve again, unless Triton has loaded them with the last."""
        for name, model in self._models.items():
            parts = self._parts(name)
            if parts and all(part.phase is Phase.SERVING for part in parts):
                for part in parts:
                    part.dependents.remove(name)
                if not self._is_ready(name):
                    self._apply(model, healing.PARTS_SERVE)

    def _refuse(self, model: _Model, reason: str) -> None:
        if self._apply(model, healing.REFUSED, reason):
            model.reason = model_status.public_reason(reason)

    def _abandon_load(self, model: _Model, reason: str) -> None:
        model.call = None
        self._apply(model, healing.STUCK, f"{reason}; {_STUCK}")

    def _report_warnings(self, model: _Model) -> None:
        """Report the warnings of a load once: after READY, or when other instances replace it."""
        reported = self._monitor.warnings(model.name) if model.phase is Phase.SERVING else []
        warnings = [model_status.cause(model.name, text) for text in reported]
        for text in warnings:
            if text not in model.warnings:
                self._events.append(Event(EventKind.WARNING, model.name, text))
        model.warnings = warnings

    def _check_deadlines(self, model: _Model) -> None:
        """Start a load that is due, and kill the processes of one that takes too long."""
        now, limit = self._clock(), self._load_seconds
        if model.phase is Phase.DOWN and model.call is None:
            survivors = self._monitor.live_processes(model.name)
            if survivors and now >= model.since + _IDLE_S:
                self._monitor.kill(model.name, InstanceState.IDLE)
            if now >= model.due and (not survivors or now >= model.since + _SURVIVORS_S):
                # Triton does not load a model that is READY, even if all its instances are dead.
                if self._is_ready(model.name):
                    self._start(model, Action.UNLOAD)
                else:
                    self._apply(model, healing.DUE)
        elif model.phase is Phase.LOADING and model.call and now - model.called > limit:
            # In every step: other instances of the model may still load, or start to load. The
            # load fails in Triton once they are dead.
            killed = self._monitor.kill(model.name, InstanceState.LOADING)
            if not model.failure:
                model.failure = f"its load took longer than {limit:g} s (--load-timeout)"
                if not killed and not self._kill_forgotten(model, 0):
                    self._abandon_load(model, model.failure)
        elif model.phase is Phase.LOADING and model.call:
            accepted_by = max(model.called, self._loading_at) + _ACCEPTED_S
            if now > accepted_by and self._kill_forgotten(model, _ACCEPTED_S):
                model.failure = model.failure or (
                    f"Triton did not accept it within {_ACCEPTED_S:g} s of its load, as when the"
                    " machine stalled meanwhile"
                )

    def _kill_forgotten(self, model: _Model, seconds: float) -> int:
        """Kill the instances of a model if all of them wait, for this time, for Triton's READY.

        Others are at work, as during Triton's `model_warmup`. A model that is READY may wait for
        another one: Triton locks ensembles with their parts.
        """
        if self._is_ready(model.name) or self._monitor.idle_seconds(model.name) <= seconds:
            return 0
        return self._monitor.kill(model.name, InstanceState.IDLE)

    def _why_not_ready(self, model: _Model) -> str:
        """Return why a model does not serve; empty if it does."""
        for part in self._parts(model.name):
            if part.phase is not Phase.SERVING:
                return f"needs the model '{part.name}', which does not serve"
        if model.phase is Phase.SERVING:
            status = self._statuses.get(model.name)
            # Not ready: the model is being unloaded and loaded again through Triton's API.
            return "" if status is None or status.ready else Phase.LOADING.value
        return f"{model.phase.value}: {model.reason}" if model.reason else model.phase.value

    def _is_ready(self, name: str) -> bool:
        return name in self._statuses and self._statuses[name].ready

    def _parts(self, name: str) -> list[_Model]:
        """Return the models with which Triton unloaded this ensemble."""
        return [model for model in self._models.values() if name in model.dependents]
