"""The other processes of an instance: they answer, they are missed, they leave."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import children
import living
import parallel
import psutil
import pytest

from torch_py_backend import workers
from torch_py_backend.errors import WorkerError
from torch_py_backend.workers import Workers


@pytest.fixture(autouse=True)
def tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets workers find `worker_tasks`."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setattr(workers, "_LEAVE_S", 60.0)


@pytest.fixture
def started() -> Iterator[list[Workers]]:
    """Ends what a test has started."""
    all_of_them: list[Workers] = []
    yield all_of_them
    for one in all_of_them:
        one.end()


def start(started: list[Workers], task: str, count: int = 2) -> Workers:
    started.append(Workers("digits", f"worker_tasks:{task}", count))
    return started[-1]


def test_workers_answer(started: list[Workers]) -> None:
    """A message is for all of them or there is one for each; answers come in their order."""
    group = start(started, "echo")
    group.tell([b"all"])
    assert group.answers(60) == ["all", "all"]
    group.tell([b"one", b"other"])
    assert group.answers(60) == ["one", "other"]


def test_large_message(started: list[Workers]) -> None:
    """What is told may be larger than a socket's buffer."""
    group = start(started, "counts", 1)
    group.tell([bytes(5_000_000)])
    assert group.answers(60) == ["5000000"]


def test_workers_leave(started: list[Workers]) -> None:
    """At the end of their sockets they leave by themselves; to end them twice is no error."""
    group = start(started, "echo")
    group.tell([b"x"])
    group.answers(60)
    processes = [psutil.Process(one) for one in group.processes]
    group.end()
    group.end()
    assert living.left(processes) == []
    assert [one.process.returncode for one in group._workers] == [0, 0]


def test_a_worker_that_does_not_leave(
    started: list[Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed after a while."""
    monkeypatch.setattr(workers, "_LEAVE_S", 0.1)
    group = start(started, "stubborn", 1)
    assert group.answers(60) == ["here"]
    group.end()
    assert group._workers[0].process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("exits", "worker 1 has ended with exit code 7"),
        ("raises", "worker 1 has ended with exit code 1"),
        ("missing", "worker 1 has ended with exit code 1"),
    ],
)
def test_a_worker_that_ends(task: str, says: str, started: list[Workers]) -> None:
    """Whoever waits for it is told how it ended, at once."""
    group = start(started, task, 1)
    with pytest.raises(WorkerError, match=says):
        group.answers(60)


def test_a_worker_that_is_killed(started: list[Workers]) -> None:
    """Its signal is named, and the others are ended with it."""
    group = start(started, "echo")
    group.tell([b"x"])
    group.answers(60)
    os.kill(group.processes[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match="worker 2 has ended with signal SIGKILL") as raised:
        group.answers(60)
    assert group.lost is raised.value
    assert raised.value.code == "UNAVAILABLE"
    assert group._workers[0].process.wait(60) == -signal.SIGKILL
    with pytest.raises(WorkerError, match="worker 2"):
        group.tell([b"x"])


def test_last_words(started: list[Workers]) -> None:
    """What a worker has said before it ended is told with its end."""
    group = start(started, "complains", 1)
    group._workers[0].process.wait(60)
    with pytest.raises(WorkerError, match="has ended with exit code 7, after it cannot"):
        group.tell([b"x"])


def test_the_first_refusal(started: list[Workers]) -> None:
    """For who has not answered yet nobody waits; what agrees is no refusal."""
    group = start(started, "says")
    group.tell([b"", b"no"])
    assert group.refusal(60) == "no"
    group.tell([b"later", b"not me"])
    assert group.refusal(60) == "not me"
    group.kill()


def test_no_refusal(started: list[Workers]) -> None:
    """All have agreed."""
    group = start(started, "says")
    group.tell([b"", b""])
    assert group.refusal(60) == ""


def _refuses() -> None:
    raise ValueError("not here")


def test_work_with_all_workers(started: list[Workers]) -> None:
    """It ends as it would without them: done, or with its own error."""
    group = start(started, "echo")
    done: list[bool] = []
    assert group.accompany(lambda: done.append(True)) == ""
    assert done == [True]
    with pytest.raises(ValueError, match="not here"):
        group.accompany(_refuses)
    assert group.lost is None


def _wait(event: threading.Event) -> None:
    event.wait()


def test_work_that_a_worker_leaves(started: list[Workers]) -> None:
    """It is given up, whatever it waits for; the others are ended."""
    group = start(started, "says")
    forever = threading.Event()
    os.kill(group.processes[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match="worker 2 has ended with signal SIGKILL"):
        group.accompany(lambda: _wait(forever))
    assert group._workers[0].process.wait(60) == -signal.SIGKILL
    forever.set()


def test_work_that_a_worker_refuses(started: list[Workers]) -> None:
    """It is given up, and what the worker has said is the reason."""
    group = start(started, "complains", 1)
    forever = threading.Event()
    assert group.accompany(lambda: _wait(forever)) == "it cannot"
    forever.set()


def test_a_worker_that_does_not_answer(started: list[Workers]) -> None:
    """Who waits, waits no longer than was said."""
    group = start(started, "silent", 1)
    with pytest.raises(WorkerError, match=r"worker 1 has not answered for 0\.05 seconds"):
        group.answers(0.05)


def test_a_worker_that_dies_unseen(started: list[Workers]) -> None:
    """Between two calls a thread notices it, and says so once."""
    group = start(started, "echo")
    told: list[WorkerError] = []
    heard = threading.Event()

    def lost(error: WorkerError) -> None:
        told.append(error)
        heard.set()

    group.watch(lost)
    os.kill(group.processes[0], signal.SIGKILL)
    assert heard.wait(60)
    group.end()
    assert [str(one) for one in told] == [str(group.lost)]
    assert "worker 1 has ended with signal SIGKILL" in str(told[0])


def test_a_call_tells_its_own_loss(started: list[Workers]) -> None:
    """What a call has met, the thread does not tell again."""
    group = start(started, "echo", 1)
    told: list[WorkerError] = []
    with group.turn:
        group.watch(told.append)
        os.kill(group.processes[0], signal.SIGKILL)
        with pytest.raises(WorkerError):
            group.answers(60)
    assert group._watcher is not None
    group._watcher.join(60)
    assert told == []


_STUCK = """
import time
from torch_py_backend import workers

workers.GRACE_S = 0.1
group = workers.Workers("digits", "worker_tasks:exits", 1)
with group.turn:
    group.watch(print)
    time.sleep(600)
"""


def test_a_call_that_is_stuck(tmp_path: Path) -> None:
    """A call that waits for a dead worker where nothing wakes it: the process exits."""
    with children.starting(tmp_path) as begin:
        assert begin(_STUCK).process.wait(120) == os.EX_SOFTWARE


_PARENT = """
from torch_py_backend import workers

group = workers.Workers("digits", "worker_tasks:silent", 2)
print(*group.processes, flush=True)
input()
"""


def test_workers_end_with_who_started_them(tmp_path: Path) -> None:
    """However that ends."""
    with children.starting(tmp_path) as begin:
        child = begin(_PARENT)
        processes = [psutil.Process(int(one)) for one in child.hear().split()]
        deadline = time.monotonic() + 60
        while {*parallel.workers(child.pid)} != {*processes}:  # they may be about to run
            assert time.monotonic() < deadline
            time.sleep(0.01)
        child.kill()
    assert living.all_end(processes)


def test_a_worker_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were started are ended."""
    made: list[Connection] = []
    begin = workers._started

    def second_fails(number: int, task: str) -> workers._Worker:
        if number == 2:
            raise OSError("no more processes")
        worker = begin(number, task)
        made.append(worker.connection)
        return worker

    monkeypatch.setattr(workers, "_started", second_fails)
    with pytest.raises(OSError, match="no more processes"):
        Workers("digits", "worker_tasks:echo", 2)
    assert [one.closed for one in made] == [True]
