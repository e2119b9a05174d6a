import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from torch_py_backend.loading import mapped_files
from torch_py_backend.weights import file_leases

SIZE = 3 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(SIZE))
    return path


def mapped(path: Path) -> Tensor:
    storage: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=SIZE)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def write_over(path: Path) -> None:
    path.write_bytes(bytes(SIZE))


def cut_short(path: Path) -> None:
    os.truncate(path, 0)


def another_process(path: Path) -> None:
    code = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_bytes(b'new')"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)


def descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("write", [write_over, cut_short, another_process])
def test_file_is_written_over(
    write: Callable[[Path], None], file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The old bytes stay at the same addresses, and the log says what to do instead."""
    weights = mapped(file)
    expected, address = file.read_bytes(), weights.data_ptr()
    guard = file_leases.Guard("digits", [file], mapped_files.measure([weights]).ranges)
    with caplog.at_level(logging.WARNING):
        write(file)
    assert weights.numpy().tobytes() == expected
    assert weights.data_ptr() == address
    assert file.read_bytes() != expected
    assert "weights.bin is being written over in place" in caplog.text
    assert "renaming" in caplog.text
    assert mapped_files.measure([weights]).shared == 0
    guard.close()


def test_replacing_and_removing_a_file_costs_no_copy(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that is replaced or removed keeps its pages; a closed guard leaves nothing."""
    weights, before = mapped(file), descriptors()
    expected = file.read_bytes()
    guard = file_leases.Guard("digits", [file], mapped_files.measure([weights]).ranges)
    other = file.with_name("other.bin")
    other.write_bytes(bytes(SIZE))
    other.replace(file)
    file.unlink()
    guard.close()
    guard.close()
    assert not guard._thread.is_alive()
    assert descriptors() == before
    assert weights.numpy().tobytes() == expected
    assert mapped_files.measure([weights]).shared == SIZE
    assert not caplog.records


def test_one_of_several_files(tmp_path: Path) -> None:
    """The weights of all shards are copied when one is written over; the others stay leased."""
    paths = [tmp_path / "1.bin", tmp_path / "2.bin"]
    for path in paths:
        path.write_bytes(os.urandom(SIZE))
    expected = [path.read_bytes() for path in paths]
    weights = [mapped(path) for path in paths]
    guard = file_leases.Guard("digits", paths, mapped_files.measure(weights).ranges)
    for path in paths:
        cut_short(path)
    assert [tensor.numpy().tobytes() for tensor in weights] == expected
    guard.close()


def test_file_without_a_lease(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing over a file without a lease is logged as an error."""
    messages = []
    monkeypatch.setattr(file_leases, "_POLL_S", 0.01)
    monkeypatch.setattr(
        file_leases.log, "error", lambda *words: messages.append(words[0] % words[1:])
    )
    with file.open("r+b"):  # the kernel grants no lease while a file is open for writing
        guard = file_leases.Guard("digits", [file], ())
        os.utime(file, ns=(1, 1))
        guard._thread.join(timeout=30)
    assert not guard._thread.is_alive()
    (message,) = messages
    assert "weights.bin was written over in place" in message
    guard.close()


def test_missing_file(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that was removed since it was mapped is logged; the others are protected."""
    guard = file_leases.Guard("digits", [file.parent / "gone.bin", file], ())
    assert [opened.path for opened in guard._files] == [file]
    guard.close()
    (message,) = caplog.messages
    assert "'digits': gone.bin is not protected against being written over in place: No" in message


def test_no_memory_for_a_copy_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing pages without memory for a copy raises an error."""
    monkeypatch.setattr(file_leases, "_CHUNK", 1 << 62)
    with pytest.raises(OSError, match=r"\[Errno"):
        file_leases.copy([(0, 1 << 62)])


def test_failed_copy(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory for a copy, the writer continues and the error is logged."""
    error = OSError(12, "Cannot allocate memory")
    monkeypatch.setattr(file_leases, "copy", mock.Mock(side_effect=error))
    guard = file_leases.Guard("digits", [file], ())
    file.write_bytes(b"new")
    guard.close()
    assert "the old weights cannot be copied" in caplog.text
    assert "load it again" in caplog.text
