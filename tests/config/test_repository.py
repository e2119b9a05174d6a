from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from torch_py_backend.config import repository


def _lay_out(root: Path, *entries: str) -> Path:
    """Create folders for entries that end with a slash, else files."""
    root.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        path = root / entry
        (path if entry.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not entry.endswith("/"):
            path.write_text("")
    return root


_REPOSITORIES = [
    (("a/config.pbtxt", "b/config.pbtxt"), ["a", "b"]),
    (("b/1/", "a/2/"), ["a", "b"]),
    (("a/1/", "notes.txt", "docs/text.md", "b/latest/"), ["a"]),
    (("ü [x]/1/", "a b/1/"), ["a b", "ü [x]"]),
    (("a/0/", "b/-1/", "c/1.5/", "d/v1/", "e/1"), []),
    (("config.pbtxt", "1/", "2/config.pbtxt"), ["."]),  # it is a model itself
    (("1/model.pt",), ["."]),
]


@pytest.mark.parametrize(("entries", "expected"), _REPOSITORIES)
def test_a_path_is_a_model_or_its_folders_are_searched(
    entries: tuple[str, ...], expected: list[str], tmp_path: Path
) -> None:
    root = _lay_out(tmp_path / "repository", *entries)
    assert repository.models(root) == [root / name for name in expected]
    if expected != ["."]:  # tests/cli has the errors of `serve`
        assert list(repository.by_name(root, expected)) == expected


def test_versions(tmp_path: Path) -> None:
    """Versions are folders named by numbers above 0, in numeric order; the last is served."""
    folder = _lay_out(tmp_path / "digits", "10/", "9/", "2/model.pt", "0/", "-3/", "x/", "3")
    assert repository.versions(folder) == ["2", "9", "10"]
    assert repository.latest(folder, {}) == "10"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_unreadable_folder_counts_as_a_model_and_hides_no_others() -> None:
    with tempfile.TemporaryDirectory() as name:  # tmp_path lies behind a folder of root's own
        root = _lay_out(Path(name), "a/1/", "closed/1/")
        root.chmod(0o755)
        (root / "closed").chmod(0)
        os.seteuid(65534)
        try:
            models = repository.models(root)
        finally:
            os.seteuid(0)
    assert [folder.name for folder in models] == ["a", "closed"]
