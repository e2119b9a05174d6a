"""A supervisor that keeps the models of one server serving: it loads, monitors and reloads them.

One thread calls `step` several times a second and owns all records. Loads and unloads are polled. A
model goes round

    LOADING → SERVING → (an instance fails) DOWN: unloaded → LOADING …

until it serves, is GIVEN_UP (Triton refuses it, or it has failed too often), or is unloaded by a
user. The supervisor requests the states of the models from Triton regularly, so that users may load
and unload models through Triton's API, too: it does not reload what they unload, and it monitors
what they load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc

from torch_py_backend.errors import ToolError
from torch_py_backend.page.app import Snapshot
from torch_py_backend.processes.instance_status import InstanceState
from torch_py_backend.server import client as triton
from torch_py_backend.server.client import ModelState, TritonClient
from torch_py_backend.server.instances import InstanceFailure, InstanceMonitor
from torch_py_backend.server.lifecycle import Event, Kind, ModelRecord, Phase

_INDEX_S = 0.5
_MAX_DELAY_S = 60.0
# A model that has served for this long may be reloaded as often as at first.
_STABLE_AFTER_S = 60.0
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
_NOT_ACCEPTED = "Triton did not accept it after its load, as when the machine stalled meanwhile"
# A part of Triton's message for a process that has died.
_DEAD = "is not healthy"
_STAYS_DOWN = "stays down until it is loaded through Triton's API"
_STUCK = "Triton never stops waiting for it: only a new server can load it"


class Supervisor:
    """Keeps the models of one server serving.

    Args:
        restarts: how often a model is reloaded, until it has served for a minute.
        load_seconds: the time limit of one load.

    Attributes:
        snapshot: the readiness of all models after the last step.
    """

    def __init__(
        self,
        client: TritonClient,
        monitor: InstanceMonitor,
        on_event: Callable[[Event], None],
        *,
        restarts: int,
        load_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._monitor = monitor
        self._on_event = on_event
        self._restarts = restarts
        self._load_seconds = load_seconds
        self._clock = clock
        self._took_too_long = f"its load took longer than {load_seconds:g} s (--load-timeout)"
        self._events: list[Event] = []
        self._models: dict[str, ModelRecord] = {}
        self._states: dict[str, ModelState] = {}
        self._index_due = 0.0
        self._loading_at = 0.0  # when an instance of any model was last being loaded
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
            model = self._models[name] = ModelRecord(name, Phase.DOWN, self._clock())
            self._begin_load(model)

    def reload(self, name: str, change: str) -> bool:
        """Begin to load a model whose files changed; the old one serves until it is loaded.

        Returns:
            Whether the load has begun; no: another one is in progress, or due.
        """
        model = self._models.get(name)
        if model is None or model.phase is Phase.GIVEN_UP:
            self.load([name])
        elif model.phase is not Phase.SERVING or model.reload is not None:
            return False
        else:
            model.reload = self._client.load(name, self._load_seconds)
        self._events.append(Event("CHANGED", name, change))
        return True

    def step(self) -> None:
        """Process failures, completed calls and due loads."""
        failures = self._monitor.check()
        if self._monitor.is_loading():
            self._loading_at = self._clock()
        models = list(self._models.values())
        completed = [model for model in models if model.call is not None and model.call.done()]
        problem = ""
        # Requested last: states from before a load or unload completed are outdated.
        if failures or completed or self._clock() >= self._index_due:
            try:
                names = {failure.identity.model for failure in failures}
                names |= self._monitor.models_with_instances()
                self._states = {state.name: state for state in self._client.models(names)}
                self._index_due = self._clock() + _INDEX_S
            except OSError:  # a later step handles what has completed
                problem, completed = "tritonserver does not answer", []
        for failure in failures:
            self._handle_failure(failure)
        for model in completed:
            self._handle_completed(model)
        if not problem:
            for name in sorted(self._states.keys() | self._models.keys()):
                self._observe(name)
        for model in self._models.values():
            self._check_reload(model)
            self._check_deadlines(model)
            self._report_warnings(model)
        self._publish(problem)

    def _publish(self, problem: str) -> None:
        """Update the snapshot, and then report the events of this step.

        A client that sees an event must not get the previous readiness.
        """
        models = {name: self._why_not_ready(model) for name, model in sorted(self._models.items())}
        warnings = {name: model.warnings for name, model in self._models.items() if model.warnings}
        self.snapshot = Snapshot(models, problem, self._clock(), warnings)
        events, self._events = self._events, []
        for event in events:
            self._on_event(event)

    # --- changes of the phase ----------------------------------------------------------------

    def _enter(self, model: ModelRecord, phase: Phase, reason: str = "") -> None:
        if not {model.phase, phase} <= {Phase.LOADING, Phase.DOWN}:
            model.since = self._clock()
        model.phase = phase
        model.reason = model.failure = reason
        model.processes = self._monitor.live_processes(model.name)

    def _report(self, kind: Kind, name: str, text: str = "") -> None:
        text = triton.cause(name, text)
        state = self._states.get(name)
        if state is not None and kind in ("READY", "FAILED"):
            name = f"{name} {state.versions}".strip()
        self._events.append(Event(kind, name, text))

    def _serve(self, model: ModelRecord, config: Mapping[str, Any], cause: str = "") -> None:
        """Note that a model serves, and which models it consists of."""
        seconds = self._clock() - model.since
        self._enter(model, Phase.SERVING)
        text = f"serves again after {seconds:.1f} s" if model.attempts else cause
        self._report("READY", model.name, text)
        steps = config.get("ensemble_scheduling", {}).get("step", [])
        model.parts = frozenset(step["model_name"] for step in steps)

    def _retry(self, model: ModelRecord, reason: str, *, unload: bool) -> None:
        """Reload a model that failed, after a while, or give it up if it has failed too often."""
        now = self._clock()
        if model.phase is Phase.SERVING and now - model.since >= _STABLE_AFTER_S:
            model.attempts = 0
        if model.attempts >= self._restarts:
            times = "once" if model.attempts == 1 else f"{model.attempts} times"
            self._give_up(model, reason, f"; loaded again {times} without success, {_STAYS_DOWN}")
        else:
            model.attempts += 1
            # None before the first attempt, then 1, 2, 4 and so on.
            seconds = min(_MAX_DELAY_S, 1 << model.attempts - 2) if model.attempts > 1 else 0.0
            model.due = now + seconds
            when = f"in {seconds:.0f} s" if seconds else "now"
            self._enter(model, Phase.DOWN, reason)
            attempt = f"attempt {model.attempts} of {self._restarts}"
            self._report("DOWN", model.name, f"{reason}; loading it again {when} ({attempt})")
        if unload:
            self._begin_unload(model)

    def _give_up(self, model: ModelRecord, reason: str, consequence: str = "") -> None:
        self._enter(model, Phase.GIVEN_UP, reason)
        self._report("GIVEN UP", model.name, f"{reason}{consequence}")

    def _refuse(self, model: ModelRecord, reason: str) -> None:
        """Give up a model that Triton refuses: another load would fail in the same way."""
        self._enter(model, Phase.GIVEN_UP, triton.public_reason(model.name, reason))
        model.failure = ""
        self._report("FAILED", model.name, reason)

    # --- loads and unloads -------------------------------------------------------------------

    def _begin_load(self, model: ModelRecord) -> None:
        reason = model.reason
        self._enter(model, Phase.LOADING)
        model.reason = reason
        model.called = self._clock()
        seconds = self._load_seconds + _FAILING_S
        try:
            model.call = self._client.load(model.name, seconds, model.config)
        except ToolError as error:
            self._refuse(model, str(error))

    def _begin_unload(self, model: ModelRecord) -> None:
        config = self._config(model.name)
        if config is None:
            return  # without it, the model would be loaded with another one
        if config and config != model.own_config:
            model.config = config
        model.call = self._client.unload(model.name)

    def _config(self, name: str) -> Mapping[str, Any] | None:
        """Return the config of a model: empty if it is not loaded, None if there is no answer."""
        try:
            return self._client.config(name)
        except OSError:
            return None

    def _handle_completed(self, model: ModelRecord) -> None:
        call = model.call
        if call is None:
            return  # the load was abandoned
        model.call = None
        error = self._client.failure(model.name, call)
        if model.phase is not Phase.LOADING:
            if error and model.phase is Phase.DOWN and self._is_ready(model.name):
                self._retry(model, error, unload=False)
        elif call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._give_up(model, f"{self._took_too_long}; {_STUCK}")
        elif error and not (model.failure or model.attempts or _DEAD in error):
            self._refuse(model, error)
        elif error:
            self._retry(
                model, model.failure or triton.public_reason(model.name, error), unload=False
            )
        else:
            model.own_config = self._config(model.name) or {}
            if model.failure:
                self._retry(model, model.failure, unload=True)
                return
            self._serve(model, model.own_config)

    def _check_reload(self, model: ModelRecord) -> None:
        """Report the end of a load that replaces a model."""
        call = model.reload
        if call is not None and call.done():
            model.reload = None
            error = triton.cause(model.name, self._client.failure(model.name, call))
            self._events.append(
                Event("FAILED" if error else "READY", model.name, error or "reloaded")
            )

    def _check_deadlines(self, model: ModelRecord) -> None:
        """Start a load that is due, and kill the processes of one that takes too long."""
        now = self._clock()
        if model.phase is Phase.DOWN and model.call is None and not self._missing_part(model):
            survivors = self._monitor.live_processes(model.name)
            if survivors and now >= model.since + _IDLE_S:
                self._monitor.kill(model.name, InstanceState.IDLE)
            if now >= model.due and (not survivors or now >= model.since + _SURVIVORS_S):
                # Triton does not load a model that is READY, even if all its instances are dead.
                if self._is_ready(model.name):
                    self._begin_unload(model)
                else:
                    self._begin_load(model)
        # A model that is READY may wait for another one: Triton locks ensembles with their parts.
        elif model.phase is Phase.LOADING and model.call and not self._is_ready(model.name):
            takes_too_long = now - model.called > self._load_seconds
            # Others are at work, as during Triton's `model_warmup`.
            is_forgotten = (
                now > max(model.called, self._loading_at) + _ACCEPTED_S
                and self._monitor.idle_seconds(model.name) > _ACCEPTED_S
            )
            if takes_too_long or is_forgotten:
                # In every step: other instances of the model may still load, or start to load. The
                # load fails in Triton once they are dead.
                self._monitor.kill(model.name, InstanceState.LOADING, InstanceState.IDLE)
                reason = self._took_too_long if takes_too_long else _NOT_ACCEPTED
                model.failure = model.failure or reason

    # --- observations ------------------------------------------------------------------------

    def _observe(self, name: str) -> None:
        """Notice that a model was loaded or unloaded through Triton's API, or with its parts."""
        model = self._models.get(name)
        state = self._states.get(name)
        if model is None:
            if state is None or not state.ready:
                return
            model = self._models[name] = ModelRecord(name, Phase.DOWN, self._clock())
        if model.call is not None:
            return
        if part := self._missing_part(model):
            if model.phase is Phase.SERVING:
                # Triton has unloaded it, and usually loads it with the last of its parts.
                self._enter(model, Phase.DOWN, f"needs the model '{part}', which does not serve")
                model.failure = ""
                model.due = 0.0
                model.attempts += 1
            return
        if state is not None and state.ready:
            model.versions = state.serving
            is_replaced = self._monitor.live_processes(name) - model.processes
            if model.phase is not Phase.SERVING and (is_replaced or not model.failure):
                self._serve(model, self._config(name) or {}, "loaded through Triton's API")
                model.attempts = 0
        elif model.phase is not Phase.SERVING:
            return
        elif model.is_unloaded(state):
            del self._models[name]
            self._report("RELEASED", name, "unloaded through Triton's API; not loaded again")
        elif state is not None and state.reason:
            if model.failure and _DEAD in state.reason:
                self._enter(model, Phase.GIVEN_UP, model.failure)  # which was reported
            else:
                self._refuse(model, state.reason)

    def _missing_part(self, model: ModelRecord) -> str:
        """Return the part of an ensemble that failed and does not serve again; empty: none."""
        for name in model.parts:
            part = self._models.get(name)
            if part is not None and part.phase is not Phase.SERVING:
                return name
        return ""

    def _handle_failure(self, failure: InstanceFailure) -> None:
        name = failure.identity.model
        reason = failure.reason
        if name not in self._models:
            self._observe(name)  # it may serve already
        model = self._models.get(name)
        if model is not None and model.call is not None:
            # Processes from before a load had to end anyway.
            if model.phase is Phase.LOADING and failure.identity.pid not in model.processes:
                model.failure = model.failure or reason
                if failure.state is InstanceState.COMPLETING:
                    model.call = None
                    self._give_up(model, f"{model.failure}; {_STUCK}")
        elif failure.state in (InstanceState.LOADING, InstanceState.COMPLETING):
            # A load through Triton's API: Triton reports its failure, and keeps what serves.
            if model is not None:
                model.failure = reason
            self._events.append(Event("FAILED", name, reason))
        elif (
            model is None
            or model.phase is not Phase.SERVING  # it was reported already, or Triton reports it
            or model.is_unloaded(self._states.get(name))
        ):
            return
        elif failure.identity.copied:
            self._give_up(model, reason, f"; {_STAYS_DOWN}: its files came with the load request")
            self._begin_unload(model)
        else:
            self._retry(model, reason, unload=True)

    def _report_warnings(self, model: ModelRecord) -> None:
        """Report the warnings of a load once: after READY, or when other instances replace it."""
        reported = self._monitor.warnings(model.name) if model.phase is Phase.SERVING else []
        warnings = [triton.cause(model.name, text) for text in reported]
        new = [text for text in warnings if text not in model.warnings]
        self._events += [Event("WARNING", model.name, text) for text in new]
        model.warnings = warnings

    def _why_not_ready(self, model: ModelRecord) -> str:
        """Return why a model does not serve; empty if it does."""
        if model.phase is Phase.SERVING:
            # Not ready: the model is being unloaded and loaded again through Triton's API.
            is_absent = model.name not in self._states
            return "" if is_absent or self._is_ready(model.name) else Phase.LOADING.value
        return f"{model.phase.value}: {model.reason}" if model.reason else model.phase.value

    def _is_ready(self, name: str) -> bool:
        return name in self._states and self._states[name].ready
