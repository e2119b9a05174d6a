"""`torch-py-backend import-mar`: a whole model folder, or one sentence and nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import archives
import pytest

from torch_py_backend.config import pbtxt

_APP = "from torch_py_backend.cli import app; app()"


def _run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _APP, "import-mar", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=os.environ | {"COLUMNS": "200", "TERM": "dumb"},
    )


def _tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


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
    files = {f"1/model.mar/{one}" for one in archives.eager()}
    found = {one for one in _tree(tmp_path / "net") if (tmp_path / "net" / one).is_file()}
    assert found == {"config.pbtxt", *files}
    assert pbtxt.read(tmp_path / "net")["name"] == "net"
    plain = tmp_path / "plain"
    plain.mkdir()
    assert (tmp_path / "net").stat().st_mode == plain.stat().st_mode


def test_everything_asked_for(tmp_path: Path) -> None:
    """The folder, the fields, the type of bodies, an example: all from the command line."""
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
    assert [one["name"] for one in document["input"]] == ["data", "more"]
    assert document["parameters"]["MODEL_KWARGS"]["string_value"] == json.dumps(
        {"content_type": "text/plain"}
    )
    assert (folder / "1" / "example_inputs" / "data").read_text() == "[1, 2]"


def test_what_is_left_out_is_listed(tmp_path: Path) -> None:
    """On the screen, and in the folder."""
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
    for part in ("startupTimeout 300: Triton waits", "requirements.txt: install it"):
        assert part in done.stdout
        assert f"# - {part}" in written


def test_no_commands_for_a_terminal(tmp_path: Path) -> None:
    """What an archive says of itself is shown as text, whatever it is."""
    named = {**archives.eager(), archives.MANIFEST: archives.manifest("\x1b[2J.py")}
    archives.write(tmp_path / "handler.mar", named)
    settings = {
        **archives.eager(),
        "c.yaml": '"\\e[2J": 1\n',
        archives.MANIFEST: archives.manifest(
            serializedFile="model.pt", modelFile="model.py", configFile="c.yaml"
        ),
    }
    archives.write(tmp_path / "settings.mar", settings)
    for name, said in (("handler", "handler is '?[2J.py'"), ("settings", "?[2J: for the handler")):
        done = _run(f"{name}.mar", cwd=tmp_path)
        assert said in done.stdout + done.stderr
        assert "\x1b" not in done.stdout + done.stderr


def test_an_archive_that_does_not_load(tmp_path: Path) -> None:
    """The folder is made, to be worked on, and the reason is there."""
    archives.write(tmp_path / "net.mar", {**archives.eager(), "handler.py": "import gone_missing"})
    done = _run("net.mar", cwd=tmp_path)
    assert done.returncode == 0
    assert "gone_missing is not installed here" in done.stdout
    assert "does not load yet: model 'net': the handler handler.py fails at line 1" in done.stdout
    assert (tmp_path / "net" / "config.pbtxt").is_file()


def _occupied(folder: Path) -> None:
    archives.write(folder / "net.mar", archives.eager())
    (folder / "net").mkdir()


def _hostile(folder: Path) -> None:
    archives.write(folder / "net.mar", {**archives.eager(), "../evil": "x"})


def _good(folder: Path) -> None:
    archives.write(folder / "net.mar", archives.eager())


@pytest.mark.parametrize(
    ("prepare", "arguments", "says"),
    [
        (lambda folder: None, ["net.mar"], "net.mar is not there; expected an archive"),
        (lambda folder: (folder / "net.mar").write_bytes(b"<html>"), ["net.mar"], "an HTML page"),
        (_hostile, ["net.mar"], "net.mar: it holds the name '../evil'"),
        (_occupied, ["net.mar"], "exists already; give another folder with --output."),
        (_good, ["net.mar", "--output=models/.hidden"], "the model's name is '.hidden'"),
        (_hostile, ["net.mar", "--output=a/b/net"], "net.mar: it holds the name '../evil'"),
        (_good, ["net.mar", "--output=/dev/null/net"], "cannot import net.mar into /dev/null"),
        (_good, ["net.mar", "--input=../x"], "--input: it is ../x; expected names"),
        (_good, ["net.mar", "--input=a", "--input=a"], "--input: it is a, a; expected names"),
        (_good, ["net.mar", "--example=none"], "--example is none, which is not a file"),
        (_good, ["net.mar", "--max-files=2"], "more than 2 files"),
        (_good, ["net.mar", "--max-gigabytes=0.000001"], ""),
        (
            lambda folder: archives.write(folder / "net.mar", {"x": "y"}),
            ["net.mar"],
            "it holds no MAR-INF/MANIFEST.json",
        ),
    ],
)
def test_nothing_is_made(
    tmp_path: Path, prepare: Callable[[Path], object], arguments: list[str], says: str
) -> None:
    """One sentence, exit code 1 (or 2, for what no option takes), and the folder as it was."""
    inside = tmp_path / "inside"
    inside.mkdir()
    prepare(inside)
    before = _tree(tmp_path)
    done = _run(*arguments, cwd=inside)
    assert done.returncode == (1 if says else 2)
    assert "Traceback" not in done.stderr
    if says:
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        assert says in done.stderr
    assert _tree(tmp_path) == before
