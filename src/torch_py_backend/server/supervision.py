"""The models of one server, kept serving: loaded, watched, taken through unload and load again.

One thread calls `step`, and owns every record. Triton is asked for the states of its models now
and then, so that users may load and unload through its API, too: what they unload is not healed,
what they load is watched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from torch_py_backend.processes.instance_status import State
from torch_py_backend.server import model_status
from torch_py_backend.server.healing import Phase, Recovery
from torch_py_backend.server.instances import Fall
from torch_py_backend.server.model_control import TooLongError
from torch_py_backend.server.model_status import View
from torch_py_backend.server.pending_operations import Control, Operations, Work
from torch_py_backend.server.tritonserver import ModelState

_LOOK_S = 0.2
_INDEX_S = 0.5
# Instances that did not die end in order, before the next ones need their memory.
_SURVIVORS_S = 10.0
# Triton of 24.10 may never end those of a model with a dead instance that had a request: after this
# time whoever is idle is ended here. Triton sends them no requests any more.
_IDLE_S = 1.0
# What a load gets to fail in Triton, once its process has been ended.
_FAILING_S = 30.0
# Triton's own words for a process that is gone.
_DEAD = "is not healthy"


class Kind(Enum):
    READY = "READY"
    FAILED = "FAILED"
    DOWN = "DOWN"
    GIVEN_UP = "GIVEN UP"
    RELEASED = "RELEASED"


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to a model, and what is done about it."""

    kind: Kind
    model: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How it stands, for other threads.

    Attributes:
        models: those that should serve, and why they do not; an empty reason: they do.
        problem: what concerns all of them.
        at: when, in the clock's seconds.
    """

    models: Mapping[str, str] = field(default_factory=dict)
    problem: str = "the server is being started"
    at: float = 0.0


class Watch(Protocol):
    """Who is seen of a server: see `instances.Watch`."""

    def look(self) -> list[Fall]: ...

    def wait(self, seconds: float) -> None: ...

    def wake(self) -> None: ...

    def alive(self, model: str) -> set[int]: ...

    def end(self, model: str, state: State) -> int: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How far healing goes.

    Attributes:
        restarts: how often a model is loaded again, until it has served for a minute.
        load_seconds: how long one load may take.
    """

    restarts: int
    load_seconds: float


@dataclass(slots=True)
class _Model:
    """What is known of one model.

    Attributes:
        recovery: what it does, and what is done about it.
        work: the load or unload that is on its way.
        first: its first load has not ended yet.
        processes: who was seen of it when the last load began.
        fell: why the load that is on its way, or just done, is no good.
        down_since: when it fell.
        dependents: ensembles that Triton unloaded together with it.
        versions: those that served when it last served.
    """

    recovery: Recovery
    work: Work | None = None
    first: bool = True
    processes: set[int] = field(default_factory=set)
    fell: str = ""
    down_since: float = 0.0
    dependents: set[str] = field(default_factory=set)
    versions: frozenset[str] = frozenset()

    def withdrawn(self, view: View | None) -> bool:
        """Whether it was unloaded; Triton goes on to report versions that had failed before."""
        if view is None or view.unloaded:
            return True
        return bool(self.versions) and self.versions <= view.withdrawn


class Supervisor:
    """Keeps the models of one server serving.

    Args:
        states: Triton's states of its models.
        watch: the server's instances.
        control: loads and unloads; None: Triton does that by itself, and nothing is healed.
        plan: how far healing goes.
        tell: takes the events.
        clock: seconds that only grow.
        spawn: runs a function in a thread of its own.
    """

    def __init__(
        self,
        states: Callable[[], Sequence[ModelState]],
        watch: Watch,
        control: Control | None,
        plan: Plan,
        tell: Callable[[Event], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        spawn: Callable[[Callable[[], None]], None],
    ) -> None:
        self._states, self._watch = states, watch
        self._plan, self._announce, self._clock = plan, tell, clock
        self._operations = (
            Operations(states, control, spawn, watch.wake) if control is not None else None
        )
        self._events: list[Event] = []
        self._models: dict[str, _Model] = {}
        self._index_due = 0.0
        self._views: dict[str, View] = {}
        self.snapshot = Snapshot()

    @property
    def heals(self) -> bool:
        """Whether models are loaded and unloaded here, and not by Triton alone."""
        return self._operations is not None

    @property
    def settled(self) -> bool:
        """Whether the first load of every model has ended, one way or the other."""
        return not any(one.first for one in self._models.values())

    def load(self, names: Sequence[str]) -> None:
        """Load these models, all at the same time."""
        for name in names:
            self._models[name] = _Model(Recovery(self._plan.restarts))
            self._start_load(name)

    def step(self) -> None:
        """Wait a little, see what happened, and do what is due."""
        self._watch.wait(_LOOK_S)
        falls = self._watch.look()
        done = self._operations.ended() if self._operations is not None else []
        # Asked afterwards: what Triton said before a load or unload ended is no news.
        problem = self._ask(now=bool(falls or done))
        for fall in falls:
            self._take_fall(fall)
        for one in done:
            self._take_done(one)
        if not problem:
            for name in sorted(self._views.keys() | self._models.keys()):
                self._compare(name)
        self._start_due()
        self._end_overdue()
        self._publish(problem)
        # Whoever reads of a death, and asks, must not be told what was before.
        events, self._events = self._events, []
        for event in events:
            self._announce(event)

    # --- what Triton says ----------------------------------------------------------------------

    def _ask(self, *, now: bool) -> str:
        """Take Triton's states if it is time; why they cannot be had."""
        if now or self._clock() >= self._index_due:
            try:
                self._views = model_status.views(self._states())
            except OSError:
                return "tritonserver does not answer"
            self._index_due = self._clock() + _INDEX_S
        return ""

    def _compare(self, name: str) -> None:
        """See what others did to a model: it was loaded, or unloaded, and not by us."""
        view, model = self._views.get(name), self._models.get(name)
        if model is None:
            self._adopt(name, view)
            return
        if model.work is not None or self._blocker(name):
            return
        ready = view is not None and view.ready
        phase = model.recovery.phase
        if view is not None and view.ready:
            model.versions = view.serving
        if phase is Phase.SERVING and not ready:
            if view is None or model.withdrawn(view):
                model.recovery.released()
                self._tell(Kind.RELEASED, name, "unloaded by somebody; not loaded again")
            elif model.fell and _DEAD in view.reason:  # told when the process was ended
                model.recovery.refused(model.fell)
            elif view.reason:
                self._refuse(name, view.reason)
        elif phase is not Phase.SERVING and ready and self._renewed(name):
            model.fell = ""
            model.recovery.served(self._clock())
            self._tell(Kind.READY, self._label(name), "loaded by somebody")

    def _adopt(self, name: str, view: View | None) -> None:
        """A model that we did not load."""
        if view is None or not (view.ready or (view.reason and self._operations is None)):
            return
        model = self._models[name] = _Model(Recovery(self._plan.restarts), first=False)
        if view.ready:
            model.recovery.served(self._clock())
            self._tell(Kind.READY, self._label(name))
        elif not view.unloaded:
            self._refuse(name, view.reason)
        else:
            model.recovery.released()

    def _renewed(self, name: str) -> bool:
        """Whether a model that Triton calls READY is another than the one that fell."""
        model = self._models[name]
        if model.recovery.phase is Phase.RELEASED or not model.fell:
            return True
        return bool(self._watch.alive(name) - model.processes)

    def _blocker(self, name: str) -> str:
        """The model that Triton took this ensemble down with; empty: none."""
        for other, model in self._models.items():
            if name in model.dependents and model.recovery.phase is not Phase.SERVING:
                return other
        return ""

    # --- what happens --------------------------------------------------------------------------

    def _take_fall(self, fall: Fall) -> None:
        name, pid = fall.identity.model, fall.identity.pid
        model = self._models.get(name)
        if model is None:
            self._adopt(name, self._views.get(name))
            model = self._models.get(name)
        if model is None:
            if fall.loading:
                self._tell(Kind.FAILED, name, fall.reason)
            return  # somebody else's load, who is told by Triton
        if model.work is not None:
            if not model.work.loads or pid in model.processes:
                return  # of those that were to end anyway
            model.fell = model.fell or fall.reason
            if fall.completing:
                self._abandon(name, model.fell)
            return
        if fall.loading:
            # A load through Triton's API: Triton reports its failure, and keeps what serves.
            model.fell = fall.reason
            self._tell(Kind.FAILED, name, fall.reason)
            return
        view = self._views.get(name)
        if (
            view is not None
            and not model.withdrawn(view)
            and model.recovery.phase
            in (
                Phase.SERVING,
                Phase.RELEASED,
            )
        ):
            self._bring_down(name, fall.reason)

    def _bring_down(self, name: str, reason: str) -> None:
        """A model fell: take it out of service, and plan when it is loaded again."""
        model, now = self._models[name], self._clock()
        if model.recovery.phase is Phase.SERVING:
            model.down_since = now
        model.first = False
        model.processes, model.fell = self._watch.alive(name), reason
        if self._operations is None:
            model.recovery.refused(reason)
            self._tell(Kind.GIVEN_UP, name, f"{reason}; Triton alone controls its models")
            return
        model.recovery.fell(now, reason)
        self._tell_down(name)
        model.work = self._operations.unload(name, now)

    def _tell(self, kind: Kind, model: str, text: str = "") -> None:
        self._events.append(Event(kind, model, text))

    def _tell_down(self, name: str) -> None:
        recovery = self._models[name].recovery
        if recovery.phase is Phase.GIVEN_UP:
            text = f"{recovery.reason}; loaded again {_times(recovery.attempts)} in vain"
            self._tell(Kind.GIVEN_UP, name, f"{text}, stays down until somebody loads it")
            return
        wait = recovery.due - self._clock()
        when = "now" if wait <= 0 else f"in {wait:.0f} s"
        attempt = f"attempt {recovery.attempts} of {recovery.restarts}"
        self._tell(Kind.DOWN, name, f"{recovery.reason}; loading it again {when} ({attempt})")

    def _refuse(self, name: str, reason: str) -> None:
        self._models[name].recovery.refused(model_status.sentence(reason))
        self._tell(Kind.FAILED, self._label(name), reason)

    def _abandon(self, name: str, reason: str) -> None:
        """A load that Triton will never end."""
        model = self._models[name]
        model.work, model.first = None, False
        model.fell, model.processes = reason, self._watch.alive(name)
        text = f"{reason}; Triton waits for it for ever: only a new server can load it"
        model.recovery.refused(text)
        self._tell(Kind.GIVEN_UP, name, text)

    # --- loading and unloading -----------------------------------------------------------------

    def _start_due(self) -> None:
        now = self._clock()
        for name, model in self._models.items():
            if model.recovery.phase is not Phase.DOWN or model.work is not None:
                continue
            survivors = self._watch.alive(name)
            if survivors and now >= model.down_since + _IDLE_S:
                self._watch.end(name, State.IDLE)
            if now >= model.recovery.due and (
                not survivors or now >= model.down_since + _SURVIVORS_S
            ):
                model.recovery.try_again()
                self._start_load(name)

    def _start_load(self, name: str) -> None:
        model = self._models[name]
        model.processes, model.fell = self._watch.alive(name), ""
        assert self._operations is not None  # noqa: S101  nothing is loaded without
        model.work = self._operations.load(
            name,
            self._clock(),
            self._plan.load_seconds + _FAILING_S,
            sorted(model.dependents),
            again=model.recovery.attempts > 0,
        )

    def _take_done(self, done: Work) -> None:
        name, model = done.model, self._models[done.model]
        if model.work is not done:
            return  # abandoned
        model.work = None
        if not done.loads:
            model.dependents |= done.dependents
            return
        first, model.first = model.first, False
        if done.error is None and not model.fell:
            self._take_loaded(name, first=first)
            return
        reason = model.fell or model_status.sentence(str(done.error))
        died = bool(model.fell) or _DEAD in reason
        if isinstance(done.error, TooLongError):
            self._abandon(name, f"its load {done.error}")
        elif done.error is None:
            self._bring_down(name, reason)
        elif died or not first:
            model.processes, model.fell = self._watch.alive(name), reason
            model.recovery.fell(self._clock(), reason)
            self._tell_down(name)
        else:
            # The same files give the same refusal.
            self._refuse(name, str(done.error))

    def _take_loaded(self, name: str, *, first: bool) -> None:
        model, now = self._models[name], self._clock()
        model.recovery.served(now)
        for dependent in model.dependents & self._models.keys():
            self._models[dependent].recovery.served(now)
        model.dependents.clear()
        text = "" if first else f"serves again after {now - model.down_since:.1f} s"
        self._tell(Kind.READY, self._label(name), text)

    def _end_overdue(self) -> None:
        """Loads that take too long fail once their processes are ended."""
        for name, model in self._models.items():
            work = model.work
            if work is None or not work.loads:
                continue
            if self._clock() - work.started > self._plan.load_seconds:
                # Not once only: another instance of it may have died, or may start to load now.
                ended = self._watch.end(name, State.LOADING)
                if not model.fell:
                    limit = self._plan.load_seconds
                    model.fell = f"its load took longer than {limit:g} s (--load-timeout)"
                    if not ended:
                        self._abandon(name, model.fell)

    # --- what others are told ------------------------------------------------------------------

    def _publish(self, problem: str) -> None:
        models = {
            name: self._why_not(name, model)
            for name, model in sorted(self._models.items())
            if model.recovery.phase is not Phase.RELEASED
        }
        self.snapshot = Snapshot(models, problem, self._clock())

    def _why_not(self, name: str, model: _Model) -> str:
        """Why a model does not serve; empty: it does."""
        blocker = self._blocker(name)
        if blocker:
            return f"needs the model '{blocker}', which does not serve"
        phase, reason = model.recovery.phase, model.recovery.reason
        if phase is Phase.SERVING:
            view = self._views.get(name)
            # Unloaded and loaded again through Triton's API: not served in between.
            return "" if view is None or view.ready else Phase.LOADING.value
        return f"{phase.value}: {reason}" if reason else phase.value

    def _label(self, name: str) -> str:
        view = self._views.get(name)
        return f"{name} {view.versions}".strip() if view else name


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
