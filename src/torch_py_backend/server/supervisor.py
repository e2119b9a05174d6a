"""A supervisor that keeps the models of one server serving: it loads, monitors and reloads them.

One thread calls `step` several times a second and owns all records. A model goes round

    LOADING → SERVING → (an instance fails) DOWN: unloaded → LOADING …

until it serves, is GIVEN_UP (Triton refuses it, or it has failed too often), or is unloaded by a
user. Users may load and unload models through Triton's API, too, whose index is polled: what they
unload is not reloaded, and what they load is monitored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import grpc

from torch_py_backend.errors import ToolError
from torch_py_backend.page.probes import Snapshot
from torch_py_backend.server.client import ModelState, TritonClient, cause
from torch_py_backend.server.instances import InstanceFailure, InstanceMonitor

_INDEX_S = 0.5
# A supervisor whose last step began so long ago has stopped.
_STALE_S = 30.0
_MAX_DELAY_S = 60
# A model that has served for this long may be reloaded as often as at first.
_STABLE_AFTER_S = 60.0
# The time for the other instances of a model to end, before new ones need their memory.
_SURVIVORS_S = 10.0
# Triton 24.10 may never end the other instances of a model if one died during a request. After this
# time the idle ones are killed here; Triton does not send them requests any more.
_IDLE_S = 1.0
# The time for Triton to accept loaded instances, or to fail a load whose process was killed.
# Triton 24.10 gives a load up if the process shows no sign of life for a second, and then waits for
# its end (WaitForStubProcess in stub_launcher.cc).
_TRITON_S = 30.0
_NOT_ACCEPTED = "Triton did not accept it after its load, as when the machine stalled meanwhile"
# A part of Triton's message for a process that has died.
_DEAD = "is not healthy"


class Event(NamedTuple):
    """What happened to a model, for the user."""

    kind: str
    model: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind:<7} {self.model}" + (f": {self.text}" if self.text else "")


class Phase(Enum):
    LOADING = "is being loaded"
    SERVING = "serves"
    DOWN = "is down"
    GIVEN_UP = "stays down"


@dataclass(slots=True)
class ModelRecord:
    """The record of one model. Times are seconds of a monotonic clock.

    Attributes:
        since: when it last started or stopped to serve.
        reason: why it does not serve.
        attempts: how often it was reloaded since it last served for a minute.
        due: when it is reloaded, in the phase DOWN.
        call: a load in progress, also of changed files beside the model that serves, or an unload.
        death: why an instance failed in the load in progress.
        parts: the models that an ensemble consists of.
    """

    name: str
    since: float
    phase: Phase = Phase.DOWN
    reason: str = ""
    attempts: int = 0
    due: float = 0.0
    call: grpc.Future | None = None
    death: str = ""
    parts: frozenset[str] = frozenset()
    warnings: list[str] = field(default_factory=list)


@dataclass
class Supervisor:
    """Keeps the models of one server serving.

    Attributes:
        restarts: how often a model is reloaded, until it has served for a minute.
        load_seconds: the time limit of one load.
    """

    client: TritonClient
    monitor: InstanceMonitor
    on_event: Callable[[Event], None]
    restarts: int
    load_seconds: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._failures: list[InstanceFailure] = []
        self._models: dict[str, ModelRecord] = {}
        self._states: Mapping[str, ModelState] = {}
        self._stepped_at = self._index_due = self.clock()
        self._problem = "the server is being started"

    @property
    def snapshot(self) -> Snapshot:
        """The readiness of all models now, for any thread."""
        reasons = {}
        warnings = {}
        for name, model in sorted(self._models.items()):
            is_serving = model.phase is Phase.SERVING
            # Not ready: the model is being unloaded and loaded again through Triton's API.
            phase = Phase.LOADING if is_serving and not self._state(name).ready else model.phase
            texts = () if phase is Phase.SERVING else (phase.value, model.reason)
            reasons[name] = ": ".join(filter(None, texts))
            warnings[name] = model.warnings
        is_stale = self.clock() - self._stepped_at > _STALE_S
        stale = "the models are no longer monitored" if is_stale else ""
        others = sorted(self._states.keys() - reasons.keys())
        return Snapshot(reasons, self._problem or stale, warnings, others)

    @property
    def initial_loads_done(self) -> bool:
        """Whether the first load of every model has succeeded or failed."""
        return not any(
            model.phase is Phase.LOADING and not model.attempts for model in self._models.values()
        )

    def load(self, names: Sequence[str]) -> None:
        """Start to load models, all at the same time."""
        for name in names:
            model = self._models[name] = ModelRecord(name, self.clock())
            self._begin_load(model)

    def reload(self, name: str, why: str = "") -> bool:
        """Begin to load a model that changed; False: another load is in progress.

        The old one serves until the new one is loaded.
        """
        model = self._models.get(name)
        if model is None or model.phase is Phase.GIVEN_UP:
            self.load([name])
        elif model.phase is Phase.DOWN:
            model.due = self.clock()
        elif model.phase is not Phase.SERVING or model.call is not None:
            return False
        else:
            try:
                model.call = self.client.load(name, self.load_seconds)
            except ToolError as error:  # a name that it cannot have been loaded with from here
                self.on_event(Event("FAILED", name, str(error)))
                return True
        self.on_event(Event("CHANGED", name, why))
        return True

    def step(self) -> None:
        """Process failures, completed calls and due loads."""
        self._stepped_at = self.clock()
        self._failures += self.monitor.check()
        completed = [
            (model, model.call)
            for model in self._models.values()
            if model.call is not None and model.call.done()
        ]
        # Requested last: states from before a load or unload completed are outdated.
        if self._failures or completed or self.clock() >= self._index_due:
            names = {failure.identity.model for failure in self._failures}
            try:
                self._states = self.client.models(names | self.monitor.models_with_instances())
            except OSError:  # a later step handles what has happened
                self._problem = "tritonserver does not answer"
                return
            self._problem = ""
            self._index_due = self.clock() + _INDEX_S
        failures, self._failures = self._failures, []
        for failure in failures:
            self._handle_failure(failure)
        for model, call in completed:
            if model.call is call:  # else a failure has begun an unload
                model.call = None
                self._handle_completed(model, call)
        for name in sorted(self._states.keys() | self._models.keys()):
            self._observe(name)
        for model in self._models.values():
            self._advance(model)

    def _state(self, name: str) -> ModelState:
        return self._states.get(name, ModelState(unloaded=True))

    def _enter(
        self,
        model: ModelRecord,
        phase: Phase,
        reason: str = "",
    ) -> None:
        if not {model.phase, phase} <= {Phase.LOADING, Phase.DOWN}:
            model.since = self.clock()
        model.phase, model.reason, model.death = phase, reason, ""
        if phase is not Phase.SERVING:
            self.monitor.disregard(model.name)  # these processes have to end anyway

    def _serve(self, model: ModelRecord, text: str = "") -> None:
        """Report that a model was loaded, and its warnings; note which models it consists of."""
        if model.attempts and model.phase is not Phase.SERVING:
            text = f"serves again after {self.clock() - model.since:.1f} s"
        steps = self.client.config(model.name).get("ensemble_scheduling", {}).get("step", [])
        model.parts = frozenset(step["model_name"] for step in steps)
        model.warnings = [cause(model.name, text) for text in self.monitor.warnings(model.name)]
        self._enter(model, Phase.SERVING)
        self.on_event(Event("READY", model.name, text))
        for warning in model.warnings:
            self.on_event(Event("WARNING", model.name, warning))

    def _retry(self, model: ModelRecord, reason: str) -> None:
        """Reload a model that failed, after a while, or give it up if it has failed too often."""
        now = self.clock()
        if model.phase is Phase.SERVING and now - model.since >= _STABLE_AFTER_S:
            model.attempts = 0
        if model.attempts >= self.restarts:
            self._give_up(model, "GIVEN UP", f"{reason}; no attempts are left")
            return
        model.attempts += 1
        seconds = min(_MAX_DELAY_S, 2**model.attempts // 4)  # 0, 1, 2, 4 and so on
        model.due = now + seconds
        self._enter(model, Phase.DOWN, reason)
        when = f"in {seconds} s" if seconds else "now"
        attempt = f"attempt {model.attempts} of {self.restarts}"
        self.on_event(Event("DOWN", model.name, f"{reason}; loading it again {when} ({attempt})"))

    def _give_up(self, model: ModelRecord, kind: str, reason: str) -> None:
        """Report that a model stays down; FAILED: another load would fail in the same way."""
        self._enter(model, Phase.GIVEN_UP, reason)
        self.on_event(Event(kind, model.name, reason))

    def _begin_load(self, model: ModelRecord) -> None:
        self._enter(model, Phase.LOADING, model.reason)
        try:
            model.call = self.client.load(model.name, self.load_seconds + _TRITON_S)
        except ToolError as error:
            self._give_up(model, "FAILED", str(error))

    def _handle_completed(
        self,
        model: ModelRecord,
        call: grpc.Future,
    ) -> None:
        error = self.client.failure(model.name, call)
        if model.phase not in (Phase.LOADING, Phase.SERVING):
            # Triton does not load a model that is READY, even if all its instances are dead.
            if error and self._state(model.name).ready:
                model.call = self.client.unload(model.name)
        elif model.phase is Phase.SERVING and error:
            self.on_event(Event("FAILED", model.name, f"{error}; the old one serves on"))
        elif not error and not model.death:
            self._serve(model, "reloaded" if model.phase is Phase.SERVING else "")
        elif call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            reason = f"its load took longer than {self.load_seconds:g} s (--load-timeout)"
            self._give_up(model, "GIVEN UP", reason)
        elif model.death or model.attempts or _DEAD in error:
            self._retry(model, model.death or error)
            if not error:
                model.call = self.client.unload(model.name)
        else:
            self._give_up(model, "FAILED", error)

    def _handle_failure(self, failure: InstanceFailure) -> None:
        name, reason = failure.identity.model, failure.reason
        self._observe(name)  # a user may just have loaded or unloaded it
        model = self._models.get(name)
        if model is not None and model.phase is Phase.LOADING:
            model.death = model.death or reason
        elif failure.in_load:
            # A load through Triton's API; `_observe` notices if nothing serves after it.
            self.on_event(Event("FAILED", name, reason))
        elif model is not None and model.phase is Phase.SERVING:
            if failure.identity.copied:
                reason += "; its files came with a load request: send that again"
                self._give_up(model, "GIVEN UP", reason)
            else:
                self._retry(model, reason)
            model.call = self.client.unload(name)

    def _observe(self, name: str) -> None:
        """Notice that a model was loaded or unloaded through Triton's API, or with its parts."""
        model = self._models.get(name)
        state = self._state(name)
        if model is None:
            if state.ready:
                model = ModelRecord(name, self.clock())
                self._serve(model, "loaded through Triton's API")
                self._models[name] = model  # complete: other threads read it
            return
        if model.call is not None:
            return
        is_serving = model.phase is Phase.SERVING
        if part := self._missing_part(model):
            if is_serving:
                # Triton has unloaded it, and usually loads it with the last of its parts.
                self._enter(model, Phase.DOWN, f"needs the model '{part}', which does not serve")
                model.attempts += 1
        elif state.ready:
            if not is_serving:
                self._serve(model, "loaded through Triton's API")
                model.attempts = 0
        elif is_serving and state.unloaded:
            del self._models[name]
            text = "unloaded through Triton's API; not loaded again"
            self.on_event(Event("RELEASED", name, text))
        elif is_serving and state.reason:
            self._give_up(model, "FAILED", state.reason)

    def _missing_part(self, model: ModelRecord) -> str:
        """Return the part of an ensemble that failed and does not serve again; empty: none."""
        parts = model.parts & self._models.keys()
        missing = (name for name in parts if self._models[name].phase is not Phase.SERVING)
        return next(missing, "")

    def _advance(self, model: ModelRecord) -> None:
        """Start a load that is due, and end one that Triton has forgotten."""
        now = self.clock()
        if model.phase is Phase.DOWN and model.call is None and not self._missing_part(model):
            seconds = now - model.since
            if seconds >= _IDLE_S:
                self.monitor.kill_idle(model.name, left=True)
            is_free = not self.monitor.instances(model.name) or seconds >= _SURVIVORS_S
            if now >= model.due and is_free:
                self._begin_load(model)
        # A model that is READY may wait for another one: Triton locks ensembles with their parts.
        elif (
            model.phase is Phase.LOADING
            and not self._state(model.name).ready
            and self.monitor.idle_seconds(model.name) > _TRITON_S
        ):
            self.monitor.kill_idle(model.name, left=False)  # the load then fails in Triton
            model.death = model.death or _NOT_ACCEPTED
