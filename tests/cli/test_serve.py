"""`serve`: its arguments, notes and event lines; tests/live/test_serve.py runs servers."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from command_line import refuse

from torch_py_backend.server import server_arguments
from torch_py_backend.server.healing import EventKind
from torch_py_backend.server.supervision import Event

# `cli.serve` is the command; other functions are in the module of the same name.
serve = importlib.import_module("torch_py_backend.cli.serve")


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("models/net", "models/net is a model; expected the repository that holds it: "),
        ("empty", "empty holds no models; expected folders with a config.pbtxt."),
    ],
)
def test_a_folder_that_is_no_repository(folder: str, text: str, tmp_path: Path) -> None:
    """A folder without models is refused before a server starts."""
    (tmp_path / "models" / "net" / "1").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    refuse(text, "serve", folder, cwd=tmp_path)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (Event(EventKind.READY, "m 1"), "[green]READY  [/] m 1"),
        (Event(EventKind.GIVEN_UP, "m", "died"), "[bold red]GIVEN UP[/] m: died"),
        (
            Event(EventKind.FAILED, "m 1", "no [/] in it\n\nAt:\n  /srv/x.py(3): f\n"),
            r"[red]FAILED [/] m 1: no \[/] in it",
        ),
    ],
)
def test_an_event_is_one_line_without_stack_trace(event: Event, line: str) -> None:
    assert serve.format_event(event) == line


@pytest.mark.parametrize(
    ("address", "restricted", "exposed"),
    [
        ("127.0.0.1", "", ""),
        ("0.0.0.0", "", "endpoints model-repository, shared-memory, trace, logging;"),
        ("0.0.0.0", "trace,health", "endpoints model-repository, shared-memory, logging;"),
        ("0.0.0.0", ",".join(server_arguments.SENSITIVE), ""),
    ],
    ids=["loopback", "all", "some", "none"],
)
def test_endpoints_open_to_the_network_are_noted(
    address: str, restricted: str, exposed: str
) -> None:
    """The note names the sensitive endpoints that require no key."""
    arguments = server_arguments.restriction_arguments(restricted, "k", "v") if restricted else []
    note = serve.exposure_note(address, arguments)
    assert bool(note) == bool(exposed)
    assert exposed in note
