"""A server's models kept serving: Triton, its instances, the clock and the threads are fakes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest

from torch_py_backend.errors import ServerError
from torch_py_backend.processes.instance_status import Identity, State
from torch_py_backend.server.instances import Fall
from torch_py_backend.server.model_control import TooLongError
from torch_py_backend.server.supervision import Event, Kind, Plan, Supervisor
from torch_py_backend.server.tritonserver import ModelState

_READY, _GONE = "READY", "UNLOADED"


class House:
    """Triton, its instances and a clock; and the supervisor that looks after them."""

    def __init__(self, *models: str, restarts: int = 3, heals: bool = True) -> None:
        self.models = dict.fromkeys(models, "")
        self.ensembles: dict[str, str] = {}
        self.failed_versions: dict[str, str] = {}
        self.pids: dict[str, int] = {}
        self.falls: list[Fall] = []
        self.refusals: dict[str, ServerError] = {}
        self.calls: list[str] = []
        self.killed: list[str] = []
        self.events: list[Event] = []
        self.now = 0.0
        self.waiting: list[Callable[[], None]] | None = None
        self.answers = True
        self._last = 100
        self.supervisor = Supervisor(
            self.index,
            self,
            self if heals else None,
            Plan(restarts, load_seconds=100),
            self.events.append,
            clock=lambda: self.now,
            spawn=self.spawn,
        )

    def spawn(self, work: Callable[[], None]) -> None:
        """A thread: done at once, or when the test says so."""
        if self.waiting is None:
            work()
        else:
            self.waiting.append(work)

    # --- Triton ---

    def index(self) -> Sequence[ModelState]:
        if not self.answers:
            raise OSError("refused")
        return [
            ModelState(
                name,
                "1" if told else "",
                told == _READY,
                {_READY: "", _GONE: "unloaded"}.get(told, told),
                unloaded=told == _GONE,
            )
            for name, told in self.models.items()
        ] + [
            ModelState(name, "2", ready=False, reason=reason)
            for name, reason in self.failed_versions.items()
        ]

    def load(self, model: str, seconds: float) -> None:
        self.calls.append(f"load {model}")
        if model in self.refusals:
            self.models[model] = str(self.refusals[model])
            raise self.refusals[model]
        self.start(model)

    def start(self, model: str) -> None:
        """Triton has loaded it, whoever asked."""
        self.models[model] = _READY
        self._last += 1
        self.pids[model] = self._last

    def unload(self, model: str) -> None:
        self.calls.append(f"unload {model}")
        self.models[model] = _GONE
        self.pids.pop(model, None)
        for ensemble, part in self.ensembles.items():
            if part == model:
                self.models[ensemble] = _GONE

    # --- instances ---

    def look(self) -> list[Fall]:
        falls, self.falls = self.falls, []
        return falls

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def wake(self) -> None:
        """Nobody sleeps in a test."""

    def alive(self, model: str) -> set[int]:
        return {self.pids[model]} if model in self.pids else set()

    def end(self, model: str, state: State) -> int:
        self.killed.append(model)
        return 1 if model in self.pids else 0

    def die(self, model: str, reason: str = "was killed", *, completing: bool = False) -> None:
        """An instance of it dies; Triton goes on to call it READY."""
        pid = self.pids.pop(model, 1)
        self.falls.append(Fall(Identity(pid, model, "1", f"{model}_0", None), reason, completing))

    def die_loading(self, model: str, reason: str) -> None:
        """An instance that was being loaded dies; those that serve are others."""
        identity = Identity(1, model, "1", f"{model}_0", None)
        self.falls.append(Fall(identity, reason, loading=True))

    # --- the test's ---

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.supervisor.step()

    def until(self, seconds: float) -> None:
        while self.now < seconds:
            self.step()

    def told(self) -> list[tuple[str, str]]:
        told = [(one.kind.value, one.model) for one in self.events]
        self.events.clear()
        return told

    def why_not(self) -> dict[str, str]:
        return {name: why for name, why in self.supervisor.snapshot.models.items() if why}


def _serving(*models: str, restarts: int = 3) -> House:
    """A house whose models serve."""
    house = House(*models, restarts=restarts)
    house.supervisor.load(models)
    house.step(2)
    house.events.clear()
    house.calls.clear()
    assert house.why_not() == {}
    return house


def test_models_are_loaded() -> None:
    """Every model is loaded, and one that refuses is told and left alone."""
    house = House("a", "b")
    house.refusals["b"] = ServerError(
        "load failed for model 'b': version 1 is at UNAVAILABLE"
        " state: Internal: no /srv/models/b/1/model.py;\n\nAt:\n  x"
    )
    house.supervisor.load(["a", "b"])
    assert not house.supervisor.settled
    house.step()
    assert house.supervisor.settled
    assert house.told() == [("READY", "a 1"), ("FAILED", "b 1")]
    assert house.why_not() == {"b": "stays down: no model.py"}
    house.until(200)
    assert house.calls == ["load a", "load b"]


def test_one_that_dies_is_healed() -> None:
    """Unload, load, and it serves again; the other model is not touched."""
    house = _serving("a", "b")
    house.die("a", "instance a_0 was ended by SIGKILL")
    house.waiting = []
    house.step()
    (unload,) = house.waiting
    house.waiting.clear()
    assert house.why_not() == {"a": "is down: instance a_0 was ended by SIGKILL"}
    assert "loading it again now (attempt 1 of 3)" in house.events[0].text
    unload()
    house.step()
    (load,) = house.waiting
    assert "a" in house.why_not()
    load()
    house.step()
    assert house.calls == ["unload a", "load a"]
    assert house.why_not() == {}
    assert house.told() == [("DOWN", "a"), ("READY", "a 1")]


def test_instances_that_live_end_first() -> None:
    """A model's other instances give their memory back before new ones take theirs."""
    house = _serving("a")
    house.die("a")
    taken = house.unload

    def unload(model: str) -> None:
        taken(model)
        house.pids["a"] = 7  # still finishing a request

    house.unload = unload  # type: ignore[method-assign]
    house.step(3)
    assert house.calls == ["unload a"]
    assert house.killed == []
    house.until(house.now + 1)
    assert set(house.killed) == {"a"}
    assert house.calls == ["unload a"]
    house.pids.clear()
    house.step(2)
    assert house.calls == ["unload a", "load a"]


def test_instances_that_do_not_end_do_not_block() -> None:
    """After a while the model is loaded all the same."""
    house = _serving("a")
    house.die("a")
    house.supervisor._watch = _Stays(house)
    house.step()
    assert "load a" not in house.calls
    house.until(house.now + 11)
    assert "load a" in house.calls


@dataclasses.dataclass
class _Stays:
    """Instances that never end."""

    house: House

    def look(self) -> list[Fall]:
        return self.house.look()

    def wait(self, seconds: float) -> None:
        self.house.wait(seconds)

    def wake(self) -> None:
        self.house.wake()

    def alive(self, model: str) -> set[int]:
        return {5}

    def end(self, model: str, state: State) -> int:
        return 0


def test_a_crash_loop_at_start_up() -> None:
    """A model that dies in each load is tried again, later and later, and then given up."""
    house = House("a", "b", restarts=2)
    house.refusals["a"] = ServerError("Stub process 'a_0' is not healthy.")
    house.supervisor.load(["a", "b"])
    house.step()
    assert house.supervisor.settled
    assert house.why_not().keys() == {"a"}
    house.until(30)
    assert house.calls == ["load a", "load b", "load a", "load a"]
    assert house.told() == [("DOWN", "a"), ("READY", "b 1"), ("DOWN", "a"), ("GIVEN UP", "a")]
    assert house.why_not() == {
        "a": "stays down: ServerError: Stub process 'a_0' is not healthy"
    } or (house.why_not() == {"a": "stays down: Stub process 'a_0' is not healthy"})


def test_one_that_dies_again_and_again() -> None:
    """It is taken out of service when it is given up, and serves once somebody loads it."""
    house = _serving("a", restarts=1)
    house.die("a")
    house.step(3)
    house.die("a")
    house.step(3)
    assert house.calls == ["unload a", "load a", "unload a"]
    assert house.told() == [("DOWN", "a"), ("READY", "a 1"), ("GIVEN UP", "a")]
    house.until(house.now + 100)
    assert house.calls[3:] == []
    house.start("a")
    house.until(house.now + 1)
    assert house.why_not() == {}
    assert house.told() == [("READY", "a 1")]


def test_a_death_during_a_load_that_succeeds() -> None:
    """An instance died, just after Triton called the model READY: it is healed, not believed."""
    house = House("a")
    house.waiting = []
    house.supervisor.load(["a"])
    house.waiting.pop()()
    house.die("a")
    house.step()
    assert house.told() == [("DOWN", "a")]
    house.waiting.pop()()
    house.step()
    house.waiting.pop()()
    house.step()
    assert house.told() == [("READY", "a 1")]
    assert house.calls == ["load a", "unload a", "load a"]


def test_a_healing_load_that_is_refused_is_tried_again() -> None:
    """What loaded once may load again: a GPU's memory is free a little later."""
    house = _serving("a")
    house.die("a")
    house.refusals["a"] = ServerError("out of memory")
    house.step(3)
    assert [kind for kind, _ in house.told()] == ["DOWN", "DOWN"]
    house.refusals.clear()
    house.until(house.now + 3)
    assert house.told() == [("READY", "a 1")]


def test_an_unload_that_fails() -> None:
    """Triton would not load what it calls READY, dead as it is: it is unloaded first, or fails."""
    house = _serving("a", restarts=2)
    house.die("a")
    unload, refused = house.unload, ServerError("no")

    def refuse(model: str) -> None:
        raise refused

    house.unload = refuse  # type: ignore[method-assign]
    house.step(3)
    assert house.why_not().keys() == {"a"}
    assert "load a" not in house.calls
    house.unload = unload  # type: ignore[method-assign]
    house.until(house.now + 3)
    assert house.calls == ["unload a", "load a"]
    assert house.why_not() == {}


def test_users_may_unload_and_load() -> None:
    """What a user unloads is not healed and not missed; what a user loads is watched."""
    house = _serving("a", "b")
    house.unload("a")
    house.until(house.now + 1)
    assert house.told() == [("RELEASED", "a")]
    assert house.supervisor.snapshot.models == {"b": ""}
    house.start("a")
    house.start("c")
    house.until(house.now + 1)
    assert house.told() == [("READY", "a 1"), ("READY", "c 1")]
    house.calls.clear()
    for name in ("a", "c"):
        house.die(name)
    house.step(4)
    assert sorted(house.calls) == ["load a", "load c", "unload a", "unload c"]


def test_users_may_unload_a_model_one_of_whose_versions_failed() -> None:
    """Triton goes on to report the failure; the model was unloaded all the same."""
    house = _serving("a")
    house.failed_versions["a"] = "no such file"
    house.until(house.now + 1)
    assert house.told() == []
    house.unload("a")
    house.until(house.now + 1)
    assert house.told() == [("RELEASED", "a")]
    assert house.supervisor.snapshot.models == {}


@pytest.mark.parametrize("failed", [False, True], ids=["one version", "another failed before"])
def test_a_death_while_a_user_unloads(failed: bool) -> None:
    """Triton kills what does not end in time; the user's wish stands."""
    house = _serving("a")
    if failed:
        house.failed_versions["a"] = "no such file"
        house.until(house.now + 1)
    house.models["a"] = _GONE
    house.die("a")
    house.until(house.now + 2)
    assert house.calls == []
    assert house.told() == [("RELEASED", "a")]


def test_a_reload_that_fails() -> None:
    """A user's load that Triton refuses, with nothing left to serve, is told."""
    house = _serving("a")
    house.models["a"] = "no such file"
    house.until(house.now + 1)
    assert house.told() == [("FAILED", "a 1")]
    assert house.why_not() == {"a": "stays down: no such file"}


@pytest.mark.parametrize("cascades", [True, False])
def test_an_ensemble_falls_and_stands_with_its_part(cascades: bool) -> None:
    """Triton unloads it along with the model: nobody's wish, so it is there again afterwards."""
    house = _serving("a", "e")
    house.ensembles["e"] = "a"
    house.die("a")
    house.waiting = []
    house.step()
    house.waiting.pop()()
    house.step()
    assert house.why_not()["e"] == "needs the model 'a', which does not serve"
    if cascades:
        house.models["e"] = _READY
    house.waiting.pop()()
    house.step(4)
    assert house.calls == ["unload a", "load a"] + ([] if cascades else ["load e"])
    assert house.why_not() == {}
    assert house.told() == [("DOWN", "a"), ("READY", "a 1")]


def test_a_load_that_takes_too_long() -> None:
    """Its process is ended, Triton then fails the load, and it is tried again."""
    house = House("a", "b")
    house.waiting = []
    house.supervisor.load(["a", "b"])
    load, other = house.waiting
    house.waiting = None
    other()
    house.pids["a"] = 5
    house.until(101)
    assert set(house.killed) == {"a"}
    assert house.why_not().keys() == {"a"}
    house.refusals["a"] = ServerError("Stub process 'a_0' is not healthy.")
    load()
    house.refusals.clear()
    house.pids.clear()
    house.step(3)
    assert house.told() == [("READY", "b 1"), ("DOWN", "a"), ("READY", "a 1")]


def test_a_load_one_of_whose_instances_died() -> None:
    """The others have the same limit: they are ended, too."""
    house = House("a")
    house.waiting = []
    house.supervisor.load(["a"])
    house.pids["a"] = 5
    house.die_loading("a", "was killed")
    house.until(99)
    assert house.killed == []
    house.until(101)
    assert set(house.killed) == {"a"}


def test_a_failed_reload_of_a_model_that_serves() -> None:
    """An instance of a load through Triton's API died: what Triton keeps serving is kept."""
    house = _serving("a")
    house.die_loading("a", "took longer than 100 s (--load-timeout)")
    house.until(house.now + 2)
    assert house.told() == [("FAILED", "a")]
    assert house.calls == []
    assert house.why_not() == {}


def test_a_load_through_triton_s_api() -> None:
    """Until it has ended, the model is not ready; if it dies, the reason is that of the death."""
    house = _serving("a")
    house.models["a"] = ""  # Triton's LOADING
    house.until(house.now + 2)
    assert house.why_not() == {"a": "is being loaded"}
    house.die_loading("a", "took longer than 100 s (--load-timeout)")
    house.step()
    house.models["a"] = "Stub process 'a_0' is not healthy."
    house.until(house.now + 2)
    assert house.told() == [("FAILED", "a")]
    assert house.why_not() == {"a": "stays down: took longer than 100 s (--load-timeout)"}
    assert house.calls == []
    house.start("a")
    house.until(house.now + 2)
    assert house.why_not() == {}


def test_a_load_that_nothing_ends() -> None:
    """Triton waits for a process that is gone: the model is given up, and the reason says why."""
    house = House("a", "b")
    house.waiting = []
    house.supervisor.load(["a", "b"])
    house.waiting[1]()
    house.until(101)
    assert house.told() == [("READY", "b 1"), ("GIVEN UP", "a")]
    assert "took longer than 100 s (--load-timeout)" in house.why_not()["a"]
    assert "only a new server can load it" in house.why_not()["a"]
    assert house.supervisor.settled


def test_a_death_that_triton_does_not_notice() -> None:
    """What completes a config died: the model is given up at once, not after the time limit."""
    house = House("a")
    house.waiting = []
    house.supervisor.load(["a"])
    house.die("a", "what completes its config was ended by SIGKILL", completing=True)
    house.step()
    assert house.told() == [("GIVEN UP", "a")]
    assert "was ended by SIGKILL; Triton waits for it for ever" in house.why_not()["a"]
    house.refusals["a"] = TooLongError("it took longer than 130 s")
    house.waiting.pop()()
    house.step()
    assert house.told() == []


def test_triton_alone_controls_its_models() -> None:
    """In other control modes nothing is loaded or unloaded, and the truth is told all the same."""
    house = House("a", "b", "c", heals=False)
    house.start("a")
    house.models["b"] = "no such file"
    house.models["c"] = _GONE
    house.step()
    assert house.told() == [("READY", "a 1"), ("FAILED", "b 1")]
    assert house.supervisor.snapshot.models.keys() == {"a", "b"}
    house.die("a")
    house.until(house.now + 100)
    assert house.told() == [("GIVEN UP", "a")]
    assert house.why_not()["a"] == "stays down: was killed"
    assert house.calls == []
    house.start("a")
    house.until(house.now + 1)
    assert house.told() == [("READY", "a 1")]


def test_a_server_that_does_not_answer() -> None:
    """Nothing is ready then, and nothing is taken for unloaded."""
    house = _serving("a")
    house.answers = False
    house.until(house.now + 1)
    assert house.supervisor.snapshot.problem == "tritonserver does not answer"
    house.answers = True
    house.until(house.now + 1)
    assert house.supervisor.snapshot.problem == ""
    assert house.told() == []


def test_a_fall_of_nobody() -> None:
    """An instance of a model that somebody else loads is Triton's to report."""
    house = _serving("a")
    house.die("unknown")
    house.step(3)
    assert house.told() == []
    house.die_loading("unknown", "took longer than 100 s (--load-timeout)")
    house.step(3)
    assert house.told() == [("FAILED", "unknown")]
    assert house.calls == []


def test_before_the_first_step_nothing_is_ready() -> None:
    """Who asks early is told so."""
    assert House("a").supervisor.snapshot.problem == "the server is being started"


def test_the_kinds_are_words_of_their_own() -> None:
    """What is printed in the first column fits it."""
    assert all(len(kind.value) <= 8 for kind in Kind)
