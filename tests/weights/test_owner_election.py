"""The election of an owner, with real processes."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import Child, Start

from torch_py_backend.weights import owner_election
from torch_py_backend.weights.owner_election import Owner, Sharer

_MEMBER = """
import os, sys, threading, time
from pathlib import Path
from torch_py_backend.weights import owner_election
from torch_py_backend.weights.owner_election import Owner

def die(*_):
    os.kill(os.getpid(), 9)
    time.sleep(60)

owner_election._TIMEOUT_S = 60.0
folder, name, change = Path(sys.argv[1]), sys.argv[2], "".join(sys.argv[3:])
ended = threading.Event()
react = ended.set
exec(change)

def take_part():
    part = owner_election.join(folder, name)
    if isinstance(part, Owner):
        part.offer({"by": name, "more": "x" * 200_000})
        print("owner", flush=True)
    else:
        ended.clear()
        part.watch(react)
        print(part.document["by"], flush=True)
    return part

part = take_part()
for line in sys.stdin:
    if line == "alive\\n":
        print(part.alive(), flush=True)
    elif line == "ended\\n":
        print(ended.wait(), part.alive(), flush=True)
    elif line == "again\\n":
        part.close()
        part = take_part()
    else:
        part.close()
        print("left", flush=True)
"""
# What an owner does wrong at a moment of its life: it is killed.
_STAGES = {
    "with the lock": "owner_election.Owner.__init__ = die",
    "before it listens": "Owner.offer = die",
    "before it accepts": "Owner._serve = die",
    "before it sends": "owner_election._peer = die",
    "while it sends": """
def serve(self, listening, line):
    sharer, _ = listening.accept()
    sharer.sendall(line[:1000])
    die()
Owner._serve = serve
""",
}


def _descriptors(process: int) -> int:
    return sum(1 for _ in Path(f"/proc/{process}/fd").iterdir())


def test_several_at_once(start: Start, tmp_path: Path) -> None:
    """Of processes that start together, one is the owner, and the others get its offer."""
    members = {name: start(_MEMBER, tmp_path, name) for name in "abcde"}
    roles = {name: member.hear() for name, member in members.items()}
    (owner,) = (name for name, role in roles.items() if role == "owner")
    assert {role for name, role in roles.items() if name != owner} == {owner}


@pytest.mark.parametrize("stage", _STAGES)
def test_an_owner_killed(stage: str, start: Start, tmp_path: Path) -> None:
    """If the owner is killed before its offer, another process becomes the owner."""
    killed = start(_MEMBER, tmp_path, "killed", _STAGES[stage])
    lock = tmp_path / "owner.lock"
    while not (lock.exists() and lock.read_bytes()):  # its name, once it holds the lock
        pass
    members = [start(_MEMBER, tmp_path, name) for name in "ab"]
    roles = [member.hear() for member in members]
    assert killed.process.wait() == -9
    assert roles in (["owner", "a"], ["b", "owner"])


def test_an_owner_killed_afterwards(start: Start, tmp_path: Path) -> None:
    """All sharers notice the death of the owner, and one becomes the owner."""
    owner, *sharers = _group(start, tmp_path, "abcd")
    assert {sharer.ask("alive") for sharer in sharers} == {"True"}
    owner.kill()
    assert {sharer.ask("ended") for sharer in sharers} == {"True False"}
    for sharer in sharers:
        sharer.tell("again")
    roles = [sharer.hear() for sharer in sharers]
    assert roles.count("owner") == 1
    assert set(roles) - {"owner"} == {"bcd"[roles.index("owner")]}


def test_owner_closes(start: Start, tmp_path: Path) -> None:
    """The owner notifies the sharers and waits for their callbacks; its process goes on."""
    react = "react = lambda: (time.sleep(0.2), (folder / name).touch(), ended.set())"
    owner, *sharers = _group(start, tmp_path, "abc", react)
    assert owner.ask("leave") == "left"
    assert all((tmp_path / name).exists() for name in "bc")
    assert {sharer.ask("ended") for sharer in sharers} == {"True True"}
    assert not (tmp_path / "offer.socket").exists()
    sharers[0].tell("again")
    assert sharers[0].hear() == "owner"


def test_a_sharer_that_does_not_answer(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner waits for a sharer that hangs until the timeout."""
    monkeypatch.setattr(owner_election, "_TIMEOUT_S", 0.1)
    owner = owner_election.join(tmp_path, "a")
    assert isinstance(owner, Owner)
    owner.offer({"by": "a"})
    hanging = start(_MEMBER, tmp_path, "b")
    hanging.hear()
    os.kill(hanging.pid, 19)
    owner.close()
    os.kill(hanging.pid, 18)


def test_sharers_come_and_go(start: Start, tmp_path: Path) -> None:
    """Sharers that closed or were killed leave no descriptor, neither here nor with the owner."""
    owner = start(_MEMBER, tmp_path, "a")
    owner.hear()
    before = _descriptors(owner.pid)
    killed, sharer = (start(_MEMBER, tmp_path, name) for name in "bc")
    assert [killed.hear(), sharer.hear()] == ["a", "a"]
    killed.kill()
    connected = _descriptors(sharer.pid)
    assert sharer.ask("leave") == "left"
    while _descriptors(sharer.pid) != connected - 2:
        pass
    sharer.ask("again")
    assert _descriptors(sharer.pid) == connected
    assert _descriptors(owner.pid) <= before + 1
    assert owner.ask("leave") == "left"
    # The lock, and the socket that it listened on, are closed as well.
    assert _descriptors(owner.pid) == before - 2


@pytest.mark.parametrize("stale", ["socket", "file", "listening"])
def test_stale_socket(stale: str, tmp_path: Path) -> None:
    """The socket of a killed owner is replaced."""
    path = tmp_path / "offer.socket"
    with socket.socket(socket.AF_UNIX) as killed:
        if stale == "file":
            path.touch()
        else:
            killed.bind(str(path))
        if stale == "listening":
            killed.listen()
    _exchange(tmp_path, {"by": "a"})


def test_a_long_path(tmp_path: Path) -> None:
    """The path of the folder may be longer than the address of a socket."""
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    _exchange(folder, {"a": [1, None, "ü\n"], "b": {"c": 1.5}})


def _exchange(folder: Path, document: dict[str, object]) -> None:
    """Send an offer to a sharer, and close both; a second close does nothing."""
    owner = owner_election.join(folder, "a")
    assert isinstance(owner, Owner)
    owner.offer(document)
    sharer = owner_election.join(folder, "b")
    assert isinstance(sharer, Sharer)
    assert sharer.document == document
    for part in (sharer, sharer, owner, owner):
        part.close()


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that all users may write to."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


_AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@_AS_ROOT
def test_sharer_of_another_user(start: Start, shared_folder: Path) -> None:
    """A process of another user gets no offer, even with access to the folder."""
    start(_MEMBER, shared_folder, "a").hear()
    (shared_folder / "offer.socket").chmod(0o777)
    code = (
        "import os, socket, sys; os.setuid(12345); s = socket.socket(socket.AF_UNIX);"
        " s.connect(sys.argv[1]); print(len(s.recv(9)), flush=True)"
    )
    assert start(code, shared_folder / "offer.socket").hear() == "0"


@pytest.mark.parametrize(
    ("user", "sent"),
    [
        pytest.param(12345, "{}\\n", id="user", marks=_AS_ROOT),
        pytest.param(os.geteuid(), "{}\\nleaving\\n", id="leaving"),
    ],
)
def test_offer_that_is_not_accepted(
    user: int, sent: str, start: Start, shared_folder: Path
) -> None:
    """The offer of another user, or of an owner that closes at once, is not accepted."""
    code = (
        f"import os, socket, sys; os.setuid({user}); s = socket.socket(socket.AF_UNIX);"
        " s.bind(sys.argv[1]); s.listen(); print('listens', flush=True);"
        f" c, _ = s.accept(); c.sendall(b'{sent}'); input()"
    )
    assert start(code, shared_folder / "offer.socket").hear() == "listens"
    assert owner_election.connect(shared_folder) is None


def test_waiting_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line names the owner that is loading."""
    monkeypatch.setattr(owner_election, "_PATIENCE_S", 0)
    owner = owner_election.join(tmp_path, "digits_0_0")
    assert isinstance(owner, Owner)
    waits = iter([owner.close])
    monkeypatch.setattr(time, "sleep", lambda seconds: next(waits)())
    with caplog.at_level("INFO"):
        owner_election.join(tmp_path, "digits_0_1").close()
    assert caplog.messages == ["'digits_0_1' waits until 'digits_0_0' has loaded the weights."]


def _group(start: Start, folder: Path, names: str, change: str = "") -> list[Child]:
    """Start an owner and its sharers."""
    members = []
    for place, name in enumerate(names):
        members.append(start(_MEMBER, folder, name, change if place else ""))
        assert members[-1].hear() == (names[0] if place else "owner")
    return members
