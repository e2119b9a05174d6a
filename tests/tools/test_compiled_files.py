"""The facts of compiled files; tests/cli/test_compiled.py exports and imports the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_py_backend.tools import compiled_files


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC version:  11.4",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95  Release\n", "580.95"),
        ("", "unknown"),
    ],
)
def test_driver(tmp_path: Path, text: str, version: str) -> None:
    """The driver's version is that of the kernel module; without such a file it is unknown."""
    path = tmp_path / "version"
    path.write_text(text)
    assert compiled_files._driver(path) == version
    assert compiled_files._driver(tmp_path / "none") == "unknown"
