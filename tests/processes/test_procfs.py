"""What the kernel reports about processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_py_backend.processes import procfs


@pytest.mark.parametrize(
    ("membership", "file", "contents", "frozen"),
    [
        ("0::/a/b\n", "a/b/cgroup.events", "populated 1\nfrozen 1\n", True),
        ("0::/a/b\n", "unified/a/b/cgroup.events", "populated 1\nfrozen 1\n", True),
        ("0::/a/b\n", "a/b/cgroup.events", "populated 1\nfrozen 0\n", False),
        ("6:freezer:/a\n0::/\n", "freezer/a/freezer.state", "FROZEN\n", True),
        ("6:freezer:/a\n7:name=systemd:/x:y\n", "freezer/a/freezer.state", "THAWED\n", False),
        ("", "unknown", "", False),
    ],
    ids=["v2", "v2 beside v1", "v2, runs", "v1", "v1, runs", "gone"],
)
def test_frozen_cgroups(
    membership: str,
    file: str,
    contents: str,
    frozen: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frozen process is stopped, though its state is "sleeping"; the files are the kernel's."""
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(contents)
    read = procfs._read_text
    monkeypatch.setattr(procfs, "_CGROUPS", tmp_path)
    monkeypatch.setattr(
        procfs,
        "_read_text",
        lambda path: membership if path == Path("/proc/17/cgroup") else read(path),
    )
    assert procfs.is_stopped(17) is frozen
