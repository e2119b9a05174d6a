"""Models whose files change are reloaded, when the files are complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_py_backend.server.reloading import Reloader


class Fake:
    """The supervisor and the clock of a `Reloader`."""

    def __init__(self, path: Path, *names: str) -> None:
        self.now, self.begins = 0.0, True
        self.reloads: list[tuple[str, str]] = []
        self.reloader = Reloader(path, names, self.reload, clock=lambda: self.now)

    def reload(self, model: str, change: str) -> bool:
        self.reloads.append((model, change))
        return self.begins

    def run(self, seconds: int) -> list[tuple[str, str]]:
        """Let time pass; return what was reloaded."""
        self.reloads.clear()
        for _ in range(5 * seconds):
            self.now += 0.2
            self.reloader.step()
        return list(self.reloads)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("digits", "letters"):
        _write(tmp_path / "repository" / name / "1" / "model.py", "1")
        _write(tmp_path / "repository" / name / "config.pbtxt", "")
    return tmp_path / "repository"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("names", [(), ("digits",)])
def test_a_changed_file(names: tuple[str, ...], repository: Path) -> None:
    """Only its model is loaded, once, and only once the file stays the same.

    Models that the server was not told to load are left alone.
    """
    server = Fake(repository, *names)
    assert server.run(3) == []
    if names:
        _write(repository / "letters" / "config.pbtxt", "changed")
    for text in ("12", "123", "1234"):
        _write(repository / "digits" / "1" / "model.py", text)
        assert server.run(1) == []
    assert server.run(5) == [("digits", "1/model.py")]


@pytest.mark.parametrize(
    "name",
    [
        "compile_cache/fxgraph/graph",
        "1/__pycache__/model.pyc",
        ".config.pbtxt.swp",
        "config.pbtxt~",
    ],
)
def test_files_that_are_not_the_models(name: str, repository: Path) -> None:
    """What a load or an editor writes is no change."""
    server = Fake(repository)
    _write(repository / "digits" / name, "new")
    assert server.run(5) == []


def test_a_new_model(repository: Path) -> None:
    """A model that is added is loaded; one that is removed stays as it is in Triton."""
    server = Fake(repository)
    for number in range(5):
        _write(repository / "shapes" / "1" / f"part{number}.py", "")
    _write(repository / "shapes" / "config.pbtxt", "")
    (repository / "letters").rename(repository.parent / "letters")
    assert server.run(5) == [("shapes", "added")]
    for number in range(5):
        _write(repository / "shapes" / "1" / f"part{number}.py", "1")
    names = ", ".join(f"1/part{number}.py" for number in range(5))
    assert server.run(5) == [("shapes", names)]


def test_a_load_that_cannot_begin(repository: Path) -> None:
    """It is tried again, as when the model is being loaded."""
    server = Fake(repository)
    _write(repository / "digits" / "1" / "model.py", "12")
    server.begins = False
    assert len(server.run(5)) > 1
    server.begins = True
    assert len(server.run(5)) == 1


def test_version_folders_that_are_links(repository: Path, tmp_path: Path) -> None:
    """Changes behind the link are seen, and so is a link to another folder."""
    version = repository / "digits" / "1"
    version.rename(tmp_path / "first")
    version.symlink_to(tmp_path / "first")
    fake = Fake(repository)
    _write(tmp_path / "first" / "model.py", "a longer one")
    assert fake.run(3) == [("digits", "1/model.py")]
    _write(tmp_path / "second" / "model.py", "another")
    version.unlink()
    version.symlink_to(tmp_path / "second")
    assert fake.run(3) == [("digits", "1/model.py")]
