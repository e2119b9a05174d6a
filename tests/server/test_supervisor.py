from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import grpc
import pytest

from torch_py_backend.errors import ToolError
from torch_py_backend.processes.instance_status import Identity
from torch_py_backend.server import client
from torch_py_backend.server.client import ModelState
from torch_py_backend.server.instances import InstanceFailure
from torch_py_backend.server.supervisor import Event, Supervisor

_READY, _UNLOADED = "READY", "unloaded"
_DEAD = ToolError("Stub process 'a_0' is not healthy")
_TIMED_OUT = ToolError("Deadline Exceeded")
_UNSUITABLE = ToolError("a shell would change the name")
_TIMEOUT = "took longer than 100 s (--load-timeout)"
_KILLED = {"a": "is down: was killed"}


@dataclass
class FakeCall:
    """A load or an unload that is in progress until it has a failure, which may be empty."""

    work: Callable[[], str]
    failure: str | None = None

    def complete(self) -> None:
        self.failure = self.work()

    def done(self) -> bool:
        return self.failure is not None

    def code(self) -> grpc.StatusCode:
        is_late = self.failure == str(_TIMED_OUT)
        return grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.OK


class FakeServer:
    """Triton, its instances and a clock, with the supervisor of its models.

    Attributes:
        states: each model's state; another text is the reason of a failure.
        survivors: processes of every model that outlive an unload.
        refusals: errors of loads.
        pending: loads and unloads that the test completes; None: they complete at once.
        warned: the warnings of each model's load.
        limits: the seconds of each load.
        idle_since: since when instances are idle; None: they are loaded or at work.
    """

    def __init__(
        self,
        *models: str,
        restarts: int = 3,
        ensembles: Mapping[str, str] | None = None,
    ) -> None:
        self.states = dict.fromkeys(models, "")
        self.ensembles = ensembles or {}
        self.pids: dict[str, int] = {}
        self.survivors: set[int] = set()
        self.failures: list[InstanceFailure] = []
        self.refusals: dict[str, ToolError] = {}
        self.unlisted: set[str] = set()
        self.calls: list[str] = []
        self.killed: list[tuple[str, bool]] = []
        self.events: list[Event] = []
        self.now = 0.0
        self.pending: list[FakeCall] | None = None
        self.answers = True
        self.refuses_unloads = False
        self.idle_since: float | None = None
        self.warned: dict[str, list[str]] = {}
        self.limits: list[float] = []
        self.disregarded: set[int] = set()
        self._last_pid = 100
        self.supervisor = Supervisor(
            cast("Any", self),
            cast("Any", self),
            self.events.append,
            restarts=restarts,
            load_seconds=100,
            clock=lambda: self.now,
        )

    def models(self, instances: Collection[str]) -> Mapping[str, ModelState]:
        if not self.answers:
            raise OSError("refused")
        versions = [
            {"name": name, "state": state, "reason": state}
            for name, state in self.states.items()
            if name not in self.unlisted or (state == _READY and name in instances)
        ]
        return client.states(versions)

    def config(self, model: str) -> Mapping[str, Any]:
        if not self.answers:
            raise OSError("refused")
        if self.states.get(model) != _READY:
            return {}
        steps = [{"model_name": self.ensembles.get(model, "")}]
        return {"ensemble_scheduling": {"step": steps}}

    def load(self, model: str, seconds: float) -> FakeCall:
        if self.refusals.get(model) is _UNSUITABLE:
            raise _UNSUITABLE
        self.limits.append(seconds)

        def work() -> str:
            self.calls.append(f"load {model}")
            if model in self.refusals:
                self.states[model] = str(self.refusals[model])
                return self.states[model]
            self.start(model)
            return ""

        return self._begin(work)

    def failure(self, _model: str, call: FakeCall) -> str:
        assert call.failure is not None
        return call.failure

    def unload(self, model: str) -> FakeCall:
        def work() -> str:
            self.calls.append(f"unload {model}")
            if self.refuses_unloads:
                return "no"
            self.withdraw(model)
            return ""

        return self._begin(work)

    def _begin(self, work: Callable[[], str]) -> FakeCall:
        call = FakeCall(work)
        if self.pending is None:
            call.complete()
        else:
            self.pending.append(call)
        return call

    def start(self, model: str) -> None:
        """Load a model, for the supervisor or for a user; so does `withdraw`."""
        self.states[model] = _READY
        self._last_pid += 1
        self.pids[model] = self._last_pid

    def withdraw(self, model: str) -> None:
        for name in (model, *(name for name, part in self.ensembles.items() if part == model)):
            self.states[name] = _UNLOADED
            self.pids.pop(name, None)

    def check(self) -> list[InstanceFailure]:
        failures, self.failures = self.failures, []
        return failures

    def idle_seconds(self, model: str) -> float:
        return 0.0 if self.idle_since is None else self.now - self.idle_since

    def warnings(self, model: str) -> list[str]:
        return self.warned.get(model, [])

    def models_with_instances(self) -> set[str]:
        return set(self.pids)

    def instances(self, model: str) -> set[int]:
        return ({self.pids[model]} if model in self.pids else set()) | self.survivors

    def disregard(self, model: str) -> None:
        self.disregarded = self.instances(model)

    def kill_idle(self, model: str, *, left: bool) -> None:
        self.killed.append((model, left))

    def die(
        self, model: str, reason: str = "was killed", *, in_load: bool = False, copied: bool = False
    ) -> None:
        """End an instance; Triton's state stays."""
        pid = 1 if in_load else self.pids.pop(model, 1)
        identity = Identity(pid, model, f"{model}_0", None, copied=copied)
        self.failures.append(InstanceFailure(identity, reason, in_load))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += 0.1
            self.supervisor.step()

    def after(self, seconds: float, *expected: Any, **not_ready: Any) -> None:
        self.step(round(seconds / 0.1))
        self.expect(*expected, **not_ready)

    def expect(
        self, events: str = "", calls: str = "", not_ready: Mapping[str, str] | None = None
    ) -> None:
        """Check the events and calls since the last check, and why models do not serve now."""
        reasons = {name: why for name, why in self.supervisor.snapshot.models.items() if why}
        reported = ", ".join(f"{event.kind} {event.model}" for event in self.events)
        assert (reported, ", ".join(self.calls)) == (events, calls)
        assert reasons == (not_ready or {})
        self.events.clear()
        self.calls.clear()


def _serving(*models: str, **options: Any) -> FakeServer:
    server = FakeServer(*models, **options)
    server.supervisor.load(models)
    server.step(2)
    events, calls = ([f"{what} {model}" for model in models] for what in ("READY", "load"))
    server.expect(", ".join(events), ", ".join(calls))
    return server


def _loading() -> tuple[FakeServer, FakeCall]:
    """Return a server whose model `a` is being loaded, in process 5, and that load."""
    server = FakeServer("a")
    server.pending = []
    server.supervisor.load(["a"])
    load = server.pending.pop()
    server.pending = None
    server.pids["a"] = 5
    return server, load


def test_a_model_that_is_refused_is_not_loaded_again() -> None:
    server = FakeServer("a", "b", "c", "d")
    assert server.supervisor.snapshot.problem == "the server is being started"
    server.refusals["c"] = _UNSUITABLE
    server.refusals["b"] = ToolError("no /srv/b/model.py")
    server.supervisor.load(["a", "b", "c"])
    assert not server.supervisor.initial_loads_done
    server.step()
    assert server.supervisor.initial_loads_done
    assert server.events[1].text == ""
    why = {"b": "stays down: no /srv/b/model.py", "c": f"stays down: {_UNSUITABLE}"}
    server.expect("FAILED c, READY a, FAILED b", "load a, load b", why)
    server.after(200, not_ready=why)
    assert server.supervisor.snapshot.problem == ""
    assert server.supervisor.snapshot.others == ["d"]


def test_the_load_after_a_death_waits_for_the_unload_and_ten_seconds_for_survivors() -> None:
    """Triton does not load a dead model that it reports as READY.

    Idle survivors are killed after a second; their death is no failure of the load that has begun.
    """
    server = _serving("a")
    server.die("a")
    server.survivors = {5}
    server.refuses_unloads = True
    server.after(0.3, "DOWN a", "unload a, unload a, unload a", _KILLED)
    server.refuses_unloads = False
    assert server.killed == []
    server.after(9, "", "unload a", _KILLED)
    assert set(server.killed) == {("a", True)}
    server.after(2, "READY a", "load a")
    assert server.disregarded == {5}


def test_a_crash_loop_has_growing_delays() -> None:
    server = FakeServer("a", "b", restarts=9)
    server.refusals["a"] = _DEAD
    server.supervisor.load(["a", "b"])
    server.step()
    assert server.supervisor.initial_loads_done
    again = {"a": f"is being loaded: {_DEAD}"}
    assert server.events[0].text == f"{_DEAD}; loading it again now (attempt 1 of 9)"
    server.expect("DOWN a, READY b", "load a, load b, load a", again)
    server.step(2500)
    texts = [event.text for event in server.events]
    delays = ["in 1 s", "in 2 s", "in 4 s", "in 8 s", "in 16 s", "in 32 s", *["in 60 s"] * 2]
    for attempt, (text, delay) in enumerate(zip(texts, delays, strict=False), 2):
        assert text.endswith(f"; loading it again {delay} (attempt {attempt} of 9)")
    assert texts[-1] == f"{_DEAD}; no attempts are left"
    assert len(texts) == len(delays) + 1


@pytest.mark.parametrize(("seconds", "event"), [(59, "GIVEN UP"), (61, "DOWN")])
def test_a_model_that_has_served_for_a_minute_is_reloaded_as_at_first(
    seconds: int, event: str
) -> None:
    server = _serving("a", restarts=1)
    server.die("a")
    server.step(3 + 10 * seconds)
    server.events.clear()
    server.die("a")
    server.step()
    assert server.events[0].kind == event


def test_a_death_during_a_load_that_succeeds() -> None:
    """Triton reports the model as READY, but it is loaded again."""
    server = FakeServer("a")
    server.pending = []
    server.now = 1000.0
    server.supervisor.load(["a"])
    server.pending.pop().complete()
    server.die("a")
    for _ in range(2):
        server.step()
        server.pending.pop().complete()
    server.step()
    assert server.events[-1].text == "serves again after 0.3 s"
    server.expect("DOWN a, READY a", "load a, unload a, load a")


def test_an_ensemble_that_triton_does_not_load_with_its_part() -> None:
    server = _serving("a", "e", ensembles={"e": "a"})
    server.die("a")
    server.pending = []
    server.step()
    server.pending.pop().complete()
    server.step()
    needs = {
        "a": "is being loaded: was killed",
        "e": "is down: needs the model 'a', which does not serve",
    }
    server.expect("DOWN a", "unload a", needs)
    server.pending.pop().complete()
    server.pending = None
    server.after(0.4, "READY a, READY e", "load a, load e")
    server.withdraw("a")
    server.after(1, "RELEASED a, RELEASED e")


def test_models_that_die_together() -> None:
    """A refusal after a death is not final: a GPU's memory is freed meanwhile."""
    server = _serving("a", "b")
    server.refusals["b"] = ToolError("out of memory")
    for name in "ab":
        server.die(name)
    server.step(3)
    calls = "unload a, unload b, load a, load b"
    down = {"b": "is down: out of memory"}
    server.expect("DOWN a, DOWN b, READY a, DOWN b", calls, down)
    server.refusals.clear()
    server.after(3, "READY b", "load b")


@pytest.mark.parametrize("during", ["unload", "load"])
def test_a_server_that_does_not_answer_during_a_reload(during: str) -> None:
    server = _serving("a", "e", ensembles={"e": "a"})
    server.pending = []
    server.die("a")
    server.step()
    for operation in ("unload", "load", "again", "ensemble"):
        server.answers = operation != during
        for call in server.pending:
            call.complete()
        server.pending.clear()
        server.step(20)
        server.answers = True
        server.step(20)
    server.expect("DOWN a, READY a, READY e", "unload a, load a, load e")


@pytest.mark.parametrize("dies", [False, True])
def test_a_model_that_a_user_unloads_stays_unloaded(dies: bool) -> None:
    server = _serving("a")
    server.states["a"] = _UNLOADED
    if dies:
        server.die("a")
    server.after(2, "RELEASED a")
    assert server.supervisor.snapshot.models == {}


def test_a_death_while_triton_does_not_answer() -> None:
    """The snapshot shows that, and a supervisor that has stopped."""
    server = _serving("a")
    server.die("a")
    server.answers = False
    server.step(2)
    assert server.supervisor.snapshot.problem == "tritonserver does not answer"
    server.answers = True
    server.after(9, "DOWN a, READY a", "unload a, load a")
    assert server.supervisor.snapshot.problem == ""
    server.now += 31  # without a step
    assert server.supervisor.snapshot.problem == "the models are no longer monitored"


@pytest.mark.parametrize("listed", [True, False])
def test_a_model_that_a_user_loaded_with_files(listed: bool) -> None:
    """It is not healed with other files. Its death is reported, too, if it was not seen before."""
    server = _serving("a")
    server.unlisted = set() if listed else {"b"}
    server.start("b")
    server.die("b", copied=True)
    why = "stays down: was killed; its files came with a load request: send that again"
    server.after(0.2, "READY b, GIVEN UP b", "unload b", {"b": why})
    server.start("b")
    for unloads in (False, True):
        server.after(1, "READY b")
        assert server.supervisor.snapshot.models == {"a": "", "b": ""}
        if unloads:
            server.withdraw("b")
            server.after(1, "RELEASED b")
            continue
        server.die("b", copied=True)
        server.after(100, "GIVEN UP b", "unload b", {"b": why})
        server.start("b")


def test_a_user_s_load_that_dies() -> None:
    """A version that serves goes on, else Triton's reason counts."""
    server = _serving("a")
    server.die("a", _TIMEOUT, in_load=True)
    server.after(2, "FAILED a")
    server.states["a"] = ""  # Triton's LOADING
    server.after(2, not_ready={"a": "is being loaded"})
    server.die("a", _TIMEOUT, in_load=True)
    server.step()
    server.states["a"] = str(_DEAD)
    server.after(2, "FAILED a, FAILED a", "", {"a": f"stays down: {_DEAD}"})
    server.start("a")
    server.after(2, "READY a")


def test_reloads_of_changed_files() -> None:
    """A model that is being loaded is not loaded once more; one that was given up is.

    One with a name that cannot be loaded again serves on.
    """
    server = _serving("a")
    server.refusals["a"] = _UNSUITABLE
    assert server.supervisor.reload("a")
    assert server.events[-1].text == str(_UNSUITABLE)
    server.after(1, "FAILED a")
    server.refusals.clear()
    server.pending = []
    assert server.supervisor.reload("a", "on request")
    assert not server.supervisor.reload("a")
    assert str(server.events[-1]) == "CHANGED a: on request"
    server.after(0.1, "CHANGED a")
    server.pending.pop().complete()
    server.after(0.1, "READY a", "load a")
    server.pending = None
    server.refusals["b"] = ToolError("no")
    server.states["b"] = ""
    for event, not_ready in (("FAILED b", {"b": "stays down: no"}), ("READY b", {})):
        assert server.supervisor.reload("b")
        server.after(1, f"CHANGED b, {event}", "load b", not_ready)
        server.refusals.clear()
    # Triton has time to accept what it loads, but for a new version beside one that serves.
    assert server.limits == [130, 100, 130, 130]
    server.refusals["a"] = _DEAD
    server.die("a")
    server.after(0.5, "DOWN a, DOWN a", "unload a, load a", {"a": f"is down: {_DEAD}"})
    server.refusals.clear()
    assert server.supervisor.reload("a")  # at once, not when it is due
    server.after(0.2, "CHANGED a, READY a", "load a")


def test_warnings_are_those_of_the_last_load() -> None:
    server = FakeServer("a")
    server.warned["a"] = ["model 'a': NUM_TREADS is unknown.", "slow"]
    server.supervisor.load(["a"])
    server.step()
    assert server.supervisor.snapshot.warnings == {"a": ["NUM_TREADS is unknown", "slow"]}
    assert [event.text for event in server.events] == ["", "NUM_TREADS is unknown", "slow"]
    server.expect("READY a, WARNING a, WARNING a", "load a")
    server.warned.clear()
    assert server.supervisor.reload("a")
    server.after(1, "CHANGED a, READY a", "load a")
    assert server.supervisor.snapshot.warnings == {"a": []}


@pytest.mark.parametrize(
    ("idle_since", "state", "killed"),
    [(10.0, "", True), (10.0, _READY, False), (None, "", False)],
    ids=["forgotten", "ready", "busy"],
)
def test_a_load_whose_instances_wait(idle_since: float | None, state: str, killed: bool) -> None:
    """Triton has forgotten them after 30 s, unless it has accepted them or they work."""
    server, load = _loading()
    server.states["a"], server.idle_since = state, idle_since
    server.step(390)
    assert server.killed == []
    server.step(20)
    assert set(server.killed) == ({("a", False)} if killed else set())
    if killed:
        server.idle_since = None
        server.refusals["a"] = _DEAD
        load.complete()
        server.refusals.clear()
        server.pids.clear()
        server.step(3)
        assert "did not accept it after its load" in server.events[0].text
        server.expect("DOWN a, READY a", "load a, load a")


def test_a_load_that_never_ends() -> None:
    """Triton waits for a process that is gone."""
    server, load = _loading()
    server.pids.clear()
    server.after(130, not_ready={"a": "is being loaded"})
    server.refusals["a"] = _TIMED_OUT
    load.complete()
    server.after(0.1, "GIVEN UP a", "load a", {"a": f"stays down: its load {_TIMEOUT}"})
    assert server.supervisor.initial_loads_done
