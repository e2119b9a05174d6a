from pathlib import Path

import pytest

from torch_py_backend.errors import ToolError
from torch_py_backend.server import Server, serving
from torch_py_backend.server.serving import Reloader


class Fake:
    """The supervisor of a `Reloader`."""

    def __init__(self, path: Path, *names: str) -> None:
        self.begins = True
        self.reloads: list[str] = []
        self.reloader = Reloader(path, names, self.reload)

    def reload(self, model: str) -> bool:
        self.reloads.append(model)
        return self.begins

    def run(self, polls: int) -> list[str]:
        """Poll, and return what was reloaded."""
        self.reloads.clear()
        for _ in range(polls):
            self.reloader.step()
        return list(self.reloads)


@pytest.fixture(autouse=True)
def _polls_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_POLL_S", 0.0)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("digits", "letters"):
        _write(tmp_path / "repository" / name / "1" / "model.py", "1")
        _write(tmp_path / "repository" / name / "config.pbtxt", "")
    (tmp_path / "repository" / "digits" / "notes").symlink_to("gone")
    return tmp_path / "repository"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_changed_model_is_loaded_once_its_files_stay_the_same(repository: Path) -> None:
    """One that is removed stays as it is in Triton."""
    server = Fake(repository)
    assert server.run(3) == []
    for text in ("12", "123", "1234"):
        _write(repository / "digits" / "1" / "model.py", text)
        assert server.run(1) == []
    (repository / "letters").rename(repository.parent / "letters")
    assert server.run(5) == ["digits"]


@pytest.mark.parametrize(
    ("names", "path", "loaded"),
    [
        ((), "shapes/config.pbtxt", ["shapes"]),
        # Models that the server was not told to load are left alone.
        (("digits",), "letters/config.pbtxt", []),
        (("digits",), "digits/config.pbtxt", ["digits"]),
        # What a load or an editor writes is no change.
        ((), "digits/compile_cache/fxgraph/graph", []),
        ((), "digits/1/__pycache__/model.pyc", []),
        ((), "digits/.config.pbtxt.swp", []),
    ],
)
def test_what_is_loaded_after_a_change(
    names: tuple[str, ...], path: str, loaded: list[str], repository: Path
) -> None:
    server = Fake(repository, *names)
    _write(repository / path, "new")
    assert server.run(5) == loaded


def test_a_load_that_cannot_begin_is_tried_again(repository: Path) -> None:
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
    for folder, text in (("first", "a longer one"), ("second", "another")):
        _write(tmp_path / folder / "model.py", text)
        version.unlink()
        version.symlink_to(tmp_path / folder)
        assert fake.run(3) == ["digits"]


def test_both_spellings_of_arguments(tmp_path: Path) -> None:
    words = "--log-verbose 1 --exit-timeout-secs=5 --load-models=c --exit-timeout-secs 7"
    server = Server(tmp_path, arguments=words.split())
    assert serving.take_names(server, allow_empty=True) == []
    assert server.exit_seconds == 7
    assert server.arguments[1:] == ["--log-verbose", "1", "--load-models=c"]


@pytest.mark.parametrize(
    "argument",
    ["--model-control-mode=poll", "--http-port 1", "--http-address=::", "--grpc-use-ssl=true"],
)
def test_arguments_that_serve_itself_uses_are_refused(argument: str, tmp_path: Path) -> None:
    server = Server(tmp_path, arguments=argument.split())
    with pytest.raises(ToolError, match=r"`serve` sets --[mhg]"):
        serving.take_names(server)
