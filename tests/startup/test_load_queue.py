"""The queue of loads."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import build
import pytest
import safetensors.torch
import torch
from children import Start

from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.errors import PlatformError
from torch_py_backend.startup import load_queue
from torch_py_backend.startup.load_queue import Ticket

_MIB = 1 << 20
_SMALL = Ticket("digits_0_0", 8, 1)
# Prints when it waits and when it loads; loads until it gets a line.
_LOADER = """
import build
from torch_py_backend.startup import load_queue
import sys
print("waits", flush=True)
ticket = load_queue.Ticket(sys.argv[1], 1, 1)
with load_queue.acquire(build.config(), ticket):
    print("loads", flush=True)
    input()
print("done", flush=True)
"""

Join: TypeAlias = "Callable[..., Callable[..., list[str]]]"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process's temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """Join a queue beside a hundred bytes of free memory; the result begins to load."""
    monkeypatch.setattr(load_queue, "available_memory", lambda: 100)
    names = itertools.count()
    with contextlib.ExitStack() as stack:

        def join(*memory: Any, most: int = 8) -> Callable[..., list[str]]:
            ticket = Ticket(f"digits_{next(names)}", most, *(memory or [1]))
            path = stack.enter_context(load_queue.join(tmp_path, ticket))
            return lambda device_free=0: load_queue.begin(path, ticket, device_free)

        yield join


def test_a_ticket_is_complete_when_others_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written under the lock of the queue: who joins later must not begin first."""
    locked = []

    def write(ticket: Ticket, path: Path) -> None:
        with (path.parent / "lock").open("rb") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked.append(path)

    monkeypatch.setattr(load_queue, "_LOCK", "lock")
    monkeypatch.setattr(Ticket, "write", write)
    with load_queue.join(tmp_path, _SMALL) as path:
        assert locked == [path]
    assert not path.exists()


# --- one after another -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        pytest.param((8, 50), (8, 50), False, id="fits"),
        pytest.param((8, 50), (8, 51), True, id="exceeds the memory"),
        pytest.param((8, 200, 90, 0), (8, 1), True, id="the first exceeds it alone"),
        pytest.param((1, 1), (8, 1), True, id="the first permits no other"),
        pytest.param((8, 1), (1, 1), True, id="the second permits no other"),
        pytest.param((8, 1, 30, 0), (8, 1, 40, 0), False, id="fits the GPU"),
        pytest.param((8, 1, 30, 0), (8, 1, 41, 0), True, id="exceeds the GPU"),
        pytest.param((8, 1, 30, 1), (8, 1, 41, 0), False, id="on different GPUs"),
        pytest.param((8, 1), (8, 1, 71, 0), True, id="exceeds a GPU alone"),
        pytest.param((8, 1, 99, 0), (8, 1), False, id="a CPU beside a GPU"),
    ],
)
def test_a_second_loader(
    first: tuple[int, ...], second: tuple[int, ...], waits: bool, join: Join
) -> None:
    """A second loader waits if both exceed a limit; the first never waits.

    The GPU has 70 free bytes.
    """
    assert join(*first[1:], most=first[0])(70) == []
    assert join(*second[1:], most=second[0])(70) == (["digits_0"] if waits else [])


def test_order_of_the_queue(tmp_path: Path, join: Join) -> None:
    """A small load does not overtake a large one that waits, which begins first."""
    ticket = Ticket("loader", 8, 90)
    with load_queue.join(tmp_path, ticket) as path:
        assert load_queue.begin(path, ticket, 0) == []
        large, small = join(90), join(20)
        assert large() == ["loader"]
        assert small() == ["loader", "digits_0"]
    assert small() == ["digits_0"]
    assert large() == []
    assert small() == ["digits_0"]


def test_several_loaders(join: Join) -> None:
    """All claims are added up, and the lowest limit applies."""
    assert [join(30, most=4)() for _ in range(3)] == [[], [], []]
    assert join(30, most=4)() == ["digits_0", "digits_1", "digits_2"]


def test_tickets_of_dead_processes(tmp_path: Path, join: Join) -> None:
    """The ticket of a killed loader is removed, whatever it contains."""
    (tmp_path / "000000000001.ticket").write_bytes(b'{"instance": "x')
    assert join(most=1)() == []
    assert [path.name for path in tmp_path.glob("*.ticket")] == ["000000000002.ticket"]


# --- with processes --------------------------------------------------------------------------


def test_killed_loaders(start: Start, tmp_path: Path) -> None:
    """Loaders that are killed, waiting and loading, do not block the others."""
    loaders = []
    for place in range(4):
        loaders.append(start(_LOADER, place))
        while len(_tickets(tmp_path)) != place + 1:
            pass
    loading, waiting, *others = loaders
    assert [loading.hear(), loading.hear()] == ["waits", "loads"]
    waiting.kill()
    loading.kill()
    for loader in others:
        assert [loader.hear(), loader.hear()] == ["waits", "loads"]
        assert loader.ask() == "done"
    assert not any(tmp_path.glob("*/servers/*"))


def _tickets(folder: Path) -> list[dict[str, Any]]:
    tickets = []
    for path in sorted(folder.glob("*/servers/*/loading/*.ticket")):
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            tickets.append(json.loads(path.read_bytes()))
    return tickets


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# --- turns -----------------------------------------------------------------------------------


def test_nothing_remains(temporary: Path) -> None:
    """A load, also a failed one, leaves no file in the server's folder and no descriptor."""
    before = _descriptors()
    with load_queue.acquire(build.config(), _SMALL):
        assert _tickets(temporary)[0]["loads"]
    with pytest.raises(ValueError, match="broken"), load_queue.acquire(build.config(), _SMALL):
        raise ValueError("broken")
    assert not any(temporary.glob("*/servers/*"))
    assert _descriptors() == before


def test_waiting_is_logged(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line names the instances that a loader waits for."""
    monkeypatch.setattr(load_queue, "_PATIENCE_S", 0)
    answers = iter([["resnet_0_0", "bert_0_1"]] * 3 + [[]])
    monkeypatch.setattr(load_queue, "begin", lambda *_: next(answers))
    with caplog.at_level(logging.INFO), load_queue.acquire(build.config(), _SMALL):
        pass
    assert [record.getMessage() for record in caplog.records] == [
        "model 'digits' waits to load for resnet_0_0, bert_0_1."
    ]


def test_no_server_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the server's folder a model loads with a warning; with PARALLEL_LOADS it fails."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with load_queue.acquire(build.config(), _SMALL):
        assert "without waiting" in caplog.text
    with (
        pytest.raises(PlatformError, match="TMPDIR"),
        load_queue.acquire(build.config(parallel_loads=2), _SMALL),
    ):
        pass


# --- what a load takes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_gpu", "options", "host", "device"),
    [
        (False, {}, 0, None),
        (False, {"enable_weight_sharing": False}, 1, None),
        (False, {"optimize": ("bf16",)}, 1, None),
        (False, {"optimize": ("freeze",)}, 2, None),
        (True, {"optimize": ("freeze",)}, 1, 2),
    ],
)
def test_memory_of_a_load(
    on_gpu: bool, options: dict[str, Any], host: int, device: int | None, tmp_path: Path
) -> None:
    """It is a constant and the files, twice if frozen; weights that are mapped need none."""
    path = build.write(tmp_path, "model.py", b"x" * _MIB)
    weights = path.with_name("model.safetensors")
    safetensors.torch.save_file({"weight": torch.ones(_MIB)}, weights)
    size, constant = _MIB + weights.stat().st_size, load_queue._CONSTANT
    artifact = Artifact(ArtifactType.MODULE, path, weights)
    config = build.config(tmp_path, device_id=1, parallel_loads=3, **options)
    expected = Ticket("digits_0_0", 3, host * size + constant)
    if device is not None:
        expected = dataclasses.replace(expected, device=device * size + constant, gpu=1)
    assert load_queue.ticket(config, artifact, on_gpu=on_gpu) == expected


# --- memory ----------------------------------------------------------------------------------

_V1 = {
    "memory.limit_in_bytes": "1000",
    "memory.usage_in_bytes": "400",
    "memory.stat": "cache 90\ntotal_active_file 20\ntotal_inactive_file 30\n",
}
_V2 = {
    "memory.max": "1000",
    "memory.current": "400",
    "memory.stat": "active_file 20\ninactive_file 30\nfile 90\n",
}


@pytest.mark.parametrize(
    ("own", "folders", "expected"),
    [
        ("0::/\n", {}, 2048),
        ("0::/\n", {"": _V2}, 650),
        ("0::/\n", {"": _V2 | {"memory.max": "max\n"}}, 2048),
        ("0::/\n", {"": _V2 | {"memory.max": "100"}}, 0),
        ("0::/a.slice/b\n", {"a.slice/b": _V2}, 650),
        ("0::/a.slice/b\n", {"a.slice": _V2, "a.slice/b": _V2 | {"memory.max": "1500"}}, 650),
        ("0::/../elsewhere\n", {"": _V2}, 650),
        ("4:memory:/x\n0::/\n", {"memory/x": _V1}, 650),
        ("4:memory:/x\n0::/\n", {"memory": _V1}, 650),
        ("4:cpu,memory:/x\n", {"memory/x": _V1 | {"memory.limit_in_bytes": "9" * 18}}, 2048),
        ("3:cpu:/x\n", {"memory/x": _V1}, 2048),
        (None, {"": _V2}, 2048),
    ],
)
def test_available(
    own: str | None, folders: dict[str, dict[str, str]], expected: int, tmp_path: Path
) -> None:
    """The lowest of the machine's memory and of all limits counts, without cached files."""
    meminfo = build.write(tmp_path, "meminfo", "MemTotal: 9 kB\nMemAvailable:       2 kB\n")
    if own is not None:
        build.write(tmp_path, "own", own)
    cgroup = tmp_path / "1" / "cgroup"
    for folder, files in folders.items():
        for name, text in files.items():
            (cgroup / folder).mkdir(parents=True, exist_ok=True)
            (cgroup / folder / name).write_text(text)
    assert load_queue.available_memory(meminfo, tmp_path / "1" / "own", cgroup) == expected
    assert load_queue.available_memory() > 0


def test_full_disk(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a full disk a model loads at once with a warning, and leaves no ticket."""

    def fail(ticket: object, path: Path) -> None:
        path.write_bytes(b"")
        raise OSError(28, "No space left on device")

    before = _descriptors()
    monkeypatch.setattr(Ticket, "write", fail)
    with load_queue.acquire(build.config(), _SMALL):
        assert "loads without waiting for others: " in caplog.text
        assert "No space left on device" in caplog.text
        assert not _tickets(temporary)
    assert _descriptors() == before
    assert not any(temporary.glob("*/servers/*"))


@pytest.mark.parametrize("content", [b"", b'{"instance": "x_0_0", "memory": 1}', b"[]"])
def test_unreadable_ticket(content: bytes, temporary: Path) -> None:
    """A ticket that a full disk truncated, or another version wrote, is ignored."""
    with load_queue.acquire(build.config(), _SMALL):
        (path,) = temporary.glob("*/servers/*/loading/*.ticket")
        path.write_bytes(content)
        with load_queue.acquire(build.config(), _SMALL):
            pass
