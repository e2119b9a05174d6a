from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from command_line import run
from supervised import PORTS

from torch_py_backend import __version__
from torch_py_backend.__main__ import main


def test_version() -> None:
    assert run("--version").stdout == f"torch-py-backend {__version__}\n"


def test_without_a_package_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_py_backend.cli", None)
    with pytest.raises(SystemExit, match=r"^the command line needs torch_py_backend.cli: pip inst"):
        main()


def test_names_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    (tmp_path / "→").mkdir()
    (tmp_path / "→" / "config.pbtxt").write_text('backend: "python"')
    terminal = io.TextIOWrapper(io.BytesIO(), "latin-1")
    run("check", str(tmp_path), terminal=terminal)
    terminal.seek(0)
    assert terminal.read().startswith("SKIPPED \\u2192: served by python\n")


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("serve /no/such/repository", "No such file or directory: '/no/such/repository'"),
        ("serve models/net", "models/net is a model; expected the repository that holds it: "),
        ("serve empty", "empty holds no models; expected folders with a config.pbtxt."),
        ("serve . --tritonserver=/no/server", "there is no /no/server; expected a tritonserver"),
        ("serve models -- --load-model=m", "has no model 'm'; its models: net"),
        ("install --backend-dir=/no/backends", "/no/backends is not a folder; expected the"),
        ("check /no/[extra]/[/x]", "No such file or directory: '/no/[extra]/[/x]'"),
        ("init /no/such/model.pt", "No such file or directory: '/no/such/model.pt'"),
        ("tune /no/model", "No such file or directory: '/no/model'"),
        # names of earlier versions
        ("bench models net", "bench was removed. Use perf_analyzer"),
        ("serve models --poll=5", "--poll was removed. "),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(command: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "models" / "net" / "1").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    name, *arguments = command.split()
    ports = PORTS if name == "serve" else ()
    done = run(name, *ports, *arguments, cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert done.stderr.startswith("error: ")
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
