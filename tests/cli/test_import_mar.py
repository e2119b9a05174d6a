"""`import-mar`: a whole model folder, or one line and nothing."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import archives
import command_line
import pytest
from command_line import tree

from torch_py_backend.config import pbtxt
from torch_py_backend.processes import child_process

_run = functools.partial(command_line.run, "import-mar")


@pytest.fixture(autouse=True)
def here(process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the handlers in this process."""
    monkeypatch.setattr(child_process, "run", command_line.here)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (archives.write, "net.mar"),
        (archives.write_tar, "net.tar.gz"),
        (archives.write_folder, "archive"),
    ],
)
def test_a_model_folder(tmp_path: Path, write: Callable[..., Path], name: str) -> None:
    """The folder has a config and the archive's files, and the model was loaded once."""
    write(tmp_path / name, archives.eager())
    done = _run(name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"made {tmp_path / 'net'}"
    assert "  a request's body: input of bytes" in lines
    assert lines[-1] == f"loads; next: torch-py-backend serve {tmp_path}", done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {name, "net"}
    files = {path for path, data in tree(tmp_path / "net").items() if data is not None}
    assert files == {"config.pbtxt", *(f"1/model.mar/{name}" for name in archives.eager())}
    assert pbtxt.read(tmp_path / "net")["name"] == "net"
    plain = tmp_path / "plain"
    plain.mkdir()
    assert (tmp_path / "net").stat().st_mode == plain.stat().st_mode


def test_options(tmp_path: Path) -> None:
    """The folder, the fields, the type of bodies and an example come from the command line."""
    archives.write(tmp_path / "net.mar", archives.eager())
    (tmp_path / "body.json").write_text("[1, 2]")
    done = _run(
        *("net.mar", "--output=models/other", "--input=data", "--input=more"),
        *("--content-type=text/plain", "--example=body.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "models" / "other"
    document = pbtxt.read(folder)
    assert [entry["name"] for entry in document["input"]] == ["data", "more"]
    assert document["parameters"]["MODEL_KWARGS"]["string_value"] == json.dumps(
        {"content_type": "text/plain"}
    )
    assert (folder / "1" / "example_inputs" / "data").read_text() == "[1, 2]"


def test_settings_that_are_not_taken_over_are_listed(tmp_path: Path) -> None:
    """They are printed, and noted in config.pbtxt."""
    files = {
        **archives.eager(),
        "requirements.txt": "einops",
        "c.yaml": "batchSize: 4\nstartupTimeout: 300\n",
        archives.MANIFEST: archives.manifest(
            serializedFile="model.pt",
            modelFile="model.py",
            requirementsFile="requirements.txt",
            configFile="c.yaml",
        ),
    }
    archives.write(tmp_path / "net.mar", files)
    done = _run("net.mar", cwd=tmp_path)
    assert "not taken over, and noted in config.pbtxt:" in done.stdout
    written = (tmp_path / "net" / "config.pbtxt").read_text()
    for part in ("startupTimeout 300: no effect here", "requirements.txt: install it"):
        assert part in done.stdout
        assert f"# - {part}" in written


def test_control_characters_are_not_printed(tmp_path: Path) -> None:
    """The names in an archive cannot hold commands for a terminal."""
    settings = archives.manifest(
        serializedFile="model.pt", modelFile="model.py", configFile="c.yaml"
    )
    handler = {**archives.eager(), archives.MANIFEST: archives.manifest("\x1b[2J.py")}
    yaml = {**archives.eager(), "c.yaml": '"\\e[2J": 1\n', archives.MANIFEST: settings}
    for name, files, text in (
        ("handler", handler, "handler is '?[2J.py'"),
        ("settings", yaml, "?[2J: for the handler"),
    ):
        archives.write(tmp_path / f"{name}.mar", files)
        done = _run(f"{name}.mar", cwd=tmp_path)
        assert text in done.stdout + done.stderr
        assert "\x1b" not in done.stdout + done.stderr


def test_an_archive_that_does_not_load(tmp_path: Path) -> None:
    """The folder is made, and the reason is printed."""
    archives.write(tmp_path / "net.mar", {**archives.eager(), "handler.py": "import gone_missing"})
    done = _run("net.mar", cwd=tmp_path)
    assert done.returncode == 0
    assert "does not load yet: model 'net': the handler handler.py fails at line 1" in done.stdout
    assert (tmp_path / "net" / "config.pbtxt").is_file()


def _archive(**more: str) -> Callable[[Path], object]:
    return lambda path: archives.write(path, {**archives.eager(), **more})


_GOOD = _archive()
_HOSTILE = _archive(**{"../evil": "x"})


@pytest.mark.parametrize(
    ("write", "arguments", "says"),
    [
        (lambda path: None, [], "net.mar is not there; expected an archive"),
        (lambda path: path.write_bytes(b"<html>"), [], "an HTML page"),
        (_HOSTILE, [], "net.mar: it holds the name '../evil'"),
        (_HOSTILE, ["--output=a/b/net"], "net.mar: it holds the name '../evil'"),
        (lambda path: archives.write(path, {"x": "y"}), [], "it holds no MAR-INF/MANIFEST.json"),
        (_GOOD, ["--output=taken"], "exists already; give another folder with --output."),
        (_GOOD, ["--output=models/.hidden"], "the model's name is '.hidden'"),
        (_GOOD, ["--output=/dev/null/net"], "cannot import net.mar into /dev/null"),
        (_GOOD, ["--input=../x"], "--input: it is ../x; expected names"),
        (_GOOD, ["--input=a", "--input=a"], "--input: it is a, a; expected names"),
        (_GOOD, ["--example=none"], "--example is none, which is not a file"),
        (_GOOD, ["--max-files=2"], "more than 2 files"),
    ],
)
def test_nothing_is_made(
    tmp_path: Path, write: Callable[[Path], object], arguments: list[str], says: str
) -> None:
    """What cannot be imported is an error of one line, and the folder stays as it was."""
    inside = tmp_path / "inside"
    (inside / "taken").mkdir(parents=True)
    write(inside / "net.mar")
    before = tree(tmp_path)
    command_line.refuse(says, "import-mar", "net.mar", *arguments, cwd=inside)
    assert tree(tmp_path) == before


def test_a_value_that_an_option_refuses(tmp_path: Path) -> None:
    assert _run("net.mar", "--max-gigabytes=0.000001", cwd=tmp_path).returncode == 2
