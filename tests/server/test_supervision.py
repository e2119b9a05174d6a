"""A server's models kept serving: Triton, its instances, the clock and the threads are fakes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest

from torch_py_backend.errors import ServerError
from torch_py_backend.processes.instance_status import Identity, InstanceState
from torch_py_backend.server.healing import EventKind
from torch_py_backend.server.instances import InstanceFailure
from torch_py_backend.server.model_control import LoadTimeoutError
from torch_py_backend.server.supervision import Event, Supervisor
from torch_py_backend.server.tritonserver import ModelState

_READY, _GONE = "READY", "UNLOADED"


class FakeServer:
    """Triton, its instances and a clock; and the supervisor that looks after them."""

    def __init__(self, *models: str, restarts: int = 3, controls: bool = True) -> None:
        self.models = dict.fromkeys(models, "")
        self.ensembles: dict[str, str] = {}
        self.failed_versions: dict[str, str] = {}
        self.pids: dict[str, int] = {}
        self.failures: list[InstanceFailure] = []
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
            self if controls else None,
            self.events.append,
            restarts=restarts,
            load_seconds=100,
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

    def check(self) -> list[InstanceFailure]:
        failures, self.failures = self.failures, []
        return failures

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def wake(self) -> None:
        """Nobody sleeps in a test."""

    def live_processes(self, model: str) -> set[int]:
        return {self.pids[model]} if model in self.pids else set()

    def kill(self, model: str, state: InstanceState) -> int:
        self.killed.append(model)
        return 1 if model in self.pids else 0

    def die(self, model: str, reason: str = "was killed", *, completing: bool = False) -> None:
        """An instance of it dies; Triton goes on to call it READY."""
        pid = self.pids.pop(model, 1)
        self.failures.append(
            InstanceFailure(Identity(pid, model, "1", f"{model}_0", None), reason, completing)
        )

    def die_loading(self, model: str, reason: str) -> None:
        """An instance that was being loaded dies; those that serve are others."""
        identity = Identity(1, model, "1", f"{model}_0", None)
        self.failures.append(InstanceFailure(identity, reason, loading=True))

    # --- the test's ---

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.supervisor.step()

    def until(self, seconds: float) -> None:
        while self.now < seconds:
            self.step()

    def take_events(self) -> list[tuple[str, str]]:
        told = [(one.kind.value, one.model) for one in self.events]
        self.events.clear()
        return told

    def not_ready(self) -> dict[str, str]:
        return {name: why for name, why in self.supervisor.snapshot.models.items() if why}


def _serving(*models: str, restarts: int = 3) -> FakeServer:
    """A server whose models serve."""
    server = FakeServer(*models, restarts=restarts)
    server.supervisor.load(models)
    server.step(2)
    server.events.clear()
    server.calls.clear()
    assert server.not_ready() == {}
    return server


def test_models_are_loaded() -> None:
    """Every model is loaded, and one that refuses is told and left alone."""
    server = FakeServer("a", "b")
    server.refusals["b"] = ServerError(
        "load failed for model 'b': version 1 is at UNAVAILABLE"
        " state: Internal: no /srv/models/b/1/model.py;\n\nAt:\n  x"
    )
    server.supervisor.load(["a", "b"])
    assert not server.supervisor.initial_loads_done
    server.step()
    assert server.supervisor.initial_loads_done
    assert server.take_events() == [("READY", "a 1"), ("FAILED", "b 1")]
    assert server.not_ready() == {"b": "stays down: no model.py"}
    server.until(200)
    assert server.calls == ["load a", "load b"]


def test_one_that_dies_is_healed() -> None:
    """Unload, load, and it serves again; the other model is not touched."""
    server = _serving("a", "b")
    server.die("a", "instance a_0 was ended by SIGKILL")
    server.waiting = []
    server.step()
    (unload,) = server.waiting
    server.waiting.clear()
    assert server.not_ready() == {"a": "is down: instance a_0 was ended by SIGKILL"}
    assert "loading it again now (attempt 1 of 3)" in server.events[0].text
    unload()
    server.step()
    (load,) = server.waiting
    assert "a" in server.not_ready()
    load()
    server.step()
    assert server.calls == ["unload a", "load a"]
    assert server.not_ready() == {}
    assert server.take_events() == [("DOWN", "a"), ("READY", "a 1")]


def test_instances_that_live_end_first() -> None:
    """A model's other instances give their memory back before new ones take theirs."""
    server = _serving("a")
    server.die("a")
    taken = server.unload

    def unload(model: str) -> None:
        taken(model)
        server.pids["a"] = 7  # still finishing a request

    server.unload = unload  # type: ignore[method-assign]
    server.step(3)
    assert server.calls == ["unload a"]
    assert server.killed == []
    server.until(server.now + 1)
    assert set(server.killed) == {"a"}
    assert server.calls == ["unload a"]
    server.pids.clear()
    server.step(2)
    assert server.calls == ["unload a", "load a"]


def test_instances_that_do_not_end_do_not_block() -> None:
    """After a while the model is loaded all the same."""
    server = _serving("a")
    server.die("a")
    server.supervisor._monitor = _Stays(server)
    server.step()
    assert "load a" not in server.calls
    server.until(server.now + 11)
    assert "load a" in server.calls


@dataclasses.dataclass
class _Stays:
    """Instances that never end."""

    server: FakeServer

    def check(self) -> list[InstanceFailure]:
        return self.server.check()

    def wait(self, seconds: float) -> None:
        self.server.wait(seconds)

    def wake(self) -> None:
        self.server.wake()

    def live_processes(self, model: str) -> set[int]:
        return {5}

    def kill(self, model: str, state: InstanceState) -> int:
        return 0


def test_a_crash_loop_at_start_up() -> None:
    """A model that dies in each load is tried again, later and later, and then given up."""
    server = FakeServer("a", "b", restarts=2)
    server.refusals["a"] = ServerError("Stub process 'a_0' is not healthy.")
    server.supervisor.load(["a", "b"])
    server.step()
    assert server.supervisor.initial_loads_done
    assert server.not_ready().keys() == {"a"}
    server.until(30)
    assert server.calls == ["load a", "load b", "load a", "load a"]
    assert server.take_events() == [
        ("DOWN", "a"),
        ("READY", "b 1"),
        ("DOWN", "a"),
        ("GIVEN UP", "a"),
    ]
    assert server.not_ready() == {
        "a": "stays down: ServerError: Stub process 'a_0' is not healthy"
    } or (server.not_ready() == {"a": "stays down: Stub process 'a_0' is not healthy"})


def test_one_that_dies_again_and_again() -> None:
    """It is taken out of service when it is given up, and serves once somebody loads it."""
    server = _serving("a", restarts=1)
    server.die("a")
    server.step(3)
    server.die("a")
    server.step(3)
    assert server.calls == ["unload a", "load a", "unload a"]
    assert server.take_events() == [("DOWN", "a"), ("READY", "a 1"), ("GIVEN UP", "a")]
    server.until(server.now + 100)
    assert server.calls[3:] == []
    server.start("a")
    server.until(server.now + 1)
    assert server.not_ready() == {}
    assert server.take_events() == [("READY", "a 1")]


def test_a_death_during_a_load_that_succeeds() -> None:
    """An instance died, just after Triton called the model READY: it is healed, not believed."""
    server = FakeServer("a")
    server.waiting = []
    server.supervisor.load(["a"])
    server.waiting.pop()()
    server.die("a")
    server.step()
    assert server.take_events() == [("DOWN", "a")]
    server.waiting.pop()()
    server.step()
    server.waiting.pop()()
    server.step()
    assert server.take_events() == [("READY", "a 1")]
    assert server.calls == ["load a", "unload a", "load a"]


def test_a_healing_load_that_is_refused_is_tried_again() -> None:
    """What loaded once may load again: a GPU's memory is free a little later."""
    server = _serving("a")
    server.die("a")
    server.refusals["a"] = ServerError("out of memory")
    server.step(3)
    assert [kind for kind, _ in server.take_events()] == ["DOWN", "DOWN"]
    server.refusals.clear()
    server.until(server.now + 3)
    assert server.take_events() == [("READY", "a 1")]


def test_an_unload_that_fails() -> None:
    """Triton would not load what it calls READY, dead as it is: it is unloaded first, or fails."""
    server = _serving("a", restarts=2)
    server.die("a")
    unload, refused = server.unload, ServerError("no")

    def refuse(model: str) -> None:
        raise refused

    server.unload = refuse  # type: ignore[method-assign]
    server.step(3)
    assert server.not_ready().keys() == {"a"}
    assert "load a" not in server.calls
    server.unload = unload  # type: ignore[method-assign]
    server.until(server.now + 3)
    assert server.calls == ["unload a", "load a"]
    assert server.not_ready() == {}


def test_users_may_unload_and_load() -> None:
    """What a user unloads is not healed and not missed; what a user loads is watched."""
    server = _serving("a", "b")
    server.unload("a")
    server.until(server.now + 1)
    assert server.take_events() == [("RELEASED", "a")]
    assert server.supervisor.snapshot.models == {"b": ""}
    server.start("a")
    server.start("c")
    server.until(server.now + 1)
    assert server.take_events() == [("READY", "a 1"), ("READY", "c 1")]
    server.calls.clear()
    for name in ("a", "c"):
        server.die(name)
    server.step(4)
    assert sorted(server.calls) == ["load a", "load c", "unload a", "unload c"]


def test_users_may_unload_a_model_one_of_whose_versions_failed() -> None:
    """Triton goes on to report the failure; the model was unloaded all the same."""
    server = _serving("a")
    server.failed_versions["a"] = "no such file"
    server.until(server.now + 1)
    assert server.take_events() == []
    server.unload("a")
    server.until(server.now + 1)
    assert server.take_events() == [("RELEASED", "a")]
    assert server.supervisor.snapshot.models == {}


@pytest.mark.parametrize("failed", [False, True], ids=["one version", "another failed before"])
def test_a_death_while_a_user_unloads(failed: bool) -> None:
    """Triton kills what does not end in time; the user's wish stands."""
    server = _serving("a")
    if failed:
        server.failed_versions["a"] = "no such file"
        server.until(server.now + 1)
    server.models["a"] = _GONE
    server.die("a")
    server.until(server.now + 2)
    assert server.calls == []
    assert server.take_events() == [("RELEASED", "a")]


def test_a_reload_that_fails() -> None:
    """A user's load that Triton refuses, with nothing left to serve, is told."""
    server = _serving("a")
    server.models["a"] = "no such file"
    server.until(server.now + 1)
    assert server.take_events() == [("FAILED", "a 1")]
    assert server.not_ready() == {"a": "stays down: no such file"}


@pytest.mark.parametrize("cascades", [True, False])
def test_an_ensemble_falls_and_stands_with_its_part(cascades: bool) -> None:
    """Triton unloads it along with the model: nobody's wish, so it is there again afterwards."""
    server = _serving("a", "e")
    server.ensembles["e"] = "a"
    server.die("a")
    server.waiting = []
    server.step()
    server.waiting.pop()()
    server.step()
    assert server.not_ready()["e"] == "needs the model 'a', which does not serve"
    if cascades:
        server.models["e"] = _READY
    server.waiting.pop()()
    server.step(4)
    assert server.calls == ["unload a", "load a"] + ([] if cascades else ["load e"])
    assert server.not_ready() == {}
    assert server.take_events() == [("DOWN", "a"), ("READY", "a 1")]


def test_a_load_that_takes_too_long() -> None:
    """Its process is ended, Triton then fails the load, and it is tried again."""
    server = FakeServer("a", "b")
    server.waiting = []
    server.supervisor.load(["a", "b"])
    load, other = server.waiting
    server.waiting = None
    other()
    server.pids["a"] = 5
    server.until(101)
    assert set(server.killed) == {"a"}
    assert server.not_ready().keys() == {"a"}
    server.refusals["a"] = ServerError("Stub process 'a_0' is not healthy.")
    load()
    server.refusals.clear()
    server.pids.clear()
    server.step(3)
    assert server.take_events() == [("READY", "b 1"), ("DOWN", "a"), ("READY", "a 1")]


def test_a_load_one_of_whose_instances_died() -> None:
    """The others have the same limit: they are ended, too."""
    server = FakeServer("a")
    server.waiting = []
    server.supervisor.load(["a"])
    server.pids["a"] = 5
    server.die_loading("a", "was killed")
    server.until(99)
    assert server.killed == []
    server.until(101)
    assert set(server.killed) == {"a"}


def test_a_failed_reload_of_a_model_that_serves() -> None:
    """An instance of a load through Triton's API died: what Triton keeps serving is kept."""
    server = _serving("a")
    server.die_loading("a", "took longer than 100 s (--load-timeout)")
    server.until(server.now + 2)
    assert server.take_events() == [("FAILED", "a")]
    assert server.calls == []
    assert server.not_ready() == {}


def test_a_load_through_triton_s_api() -> None:
    """Until it has ended, the model is not ready; if it dies, the reason is that of the death."""
    server = _serving("a")
    server.models["a"] = ""  # Triton's LOADING
    server.until(server.now + 2)
    assert server.not_ready() == {"a": "is being loaded"}
    server.die_loading("a", "took longer than 100 s (--load-timeout)")
    server.step()
    server.models["a"] = "Stub process 'a_0' is not healthy."
    server.until(server.now + 2)
    assert server.take_events() == [("FAILED", "a")]
    assert server.not_ready() == {"a": "stays down: took longer than 100 s (--load-timeout)"}
    assert server.calls == []
    server.start("a")
    server.until(server.now + 2)
    assert server.not_ready() == {}


def test_a_load_that_nothing_ends() -> None:
    """Triton waits for a process that is gone: the model is given up, and the reason says why."""
    server = FakeServer("a", "b")
    server.waiting = []
    server.supervisor.load(["a", "b"])
    server.waiting[1]()
    server.until(101)
    assert server.take_events() == [("READY", "b 1"), ("GIVEN UP", "a")]
    assert "took longer than 100 s (--load-timeout)" in server.not_ready()["a"]
    assert "only a new server can load it" in server.not_ready()["a"]
    assert server.supervisor.initial_loads_done


def test_a_death_that_triton_does_not_notice() -> None:
    """What completes a config died: the model is given up at once, not after the time limit."""
    server = FakeServer("a")
    server.waiting = []
    server.supervisor.load(["a"])
    server.die("a", "the process that completes its config was ended by SIGKILL", completing=True)
    server.step()
    assert server.take_events() == [("GIVEN UP", "a")]
    assert "was ended by SIGKILL; Triton never stops waiting for it" in server.not_ready()["a"]
    server.refusals["a"] = LoadTimeoutError("it took longer than 130 s")
    server.waiting.pop()()
    server.step()
    assert server.take_events() == []


def test_triton_alone_controls_its_models() -> None:
    """In other control modes nothing is loaded or unloaded, and the truth is told all the same."""
    server = FakeServer("a", "b", "c", controls=False)
    server.start("a")
    server.models["b"] = "no such file"
    server.models["c"] = _GONE
    server.step()
    assert server.take_events() == [("READY", "a 1"), ("FAILED", "b 1")]
    assert server.supervisor.snapshot.models.keys() == {"a", "b"}
    server.die("a")
    server.until(server.now + 100)
    assert server.take_events() == [("GIVEN UP", "a")]
    assert server.not_ready()["a"] == "stays down: was killed"
    assert server.calls == []
    server.start("a")
    server.until(server.now + 1)
    assert server.take_events() == [("READY", "a 1")]


def test_a_server_that_does_not_answer() -> None:
    """Nothing is ready then, and nothing is taken for unloaded."""
    server = _serving("a")
    server.answers = False
    server.until(server.now + 1)
    assert server.supervisor.snapshot.problem == "tritonserver does not answer"
    server.answers = True
    server.until(server.now + 1)
    assert server.supervisor.snapshot.problem == ""
    assert server.take_events() == []


def test_a_fall_of_nobody() -> None:
    """An instance of a model that somebody else loads is Triton's to report."""
    server = _serving("a")
    server.die("unknown")
    server.step(3)
    assert server.take_events() == []
    server.die_loading("unknown", "took longer than 100 s (--load-timeout)")
    server.step(3)
    assert server.take_events() == [("FAILED", "unknown")]
    assert server.calls == []


def test_before_the_first_step_nothing_is_ready() -> None:
    """Who asks early is told so."""
    assert FakeServer("a").supervisor.snapshot.problem == "the server is being started"


def test_the_kinds_are_words_of_their_own() -> None:
    """What is printed in the first column fits it."""
    assert all(len(kind.value) <= 8 for kind in EventKind)
