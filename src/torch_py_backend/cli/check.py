"""`torch-py-backend check`: load and warm up models without a server, and report problems."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from torch_py_backend.autocomplete import completion
from torch_py_backend.config import pbtxt, repository
from torch_py_backend.errors import BackendError, ToolError, named
from torch_py_backend.model_folders import trial
from torch_py_backend.server import preflight

_COLORS = {"OK": "green", "FAILED": "red", "SKIPPED": "yellow", "PROBLEM": "red"}


def check(
    path: Annotated[Path, typer.Argument(help="A model folder or a whole repository.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for each model.")] = 600.0,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Print the traceback of each error.")
    ] = False,
) -> None:
    """Try models without a server: signature, bindings, options, problems and their cure."""
    if not path.is_dir():
        raise ToolError(f"{path} is not a folder; expected a model or a model repository.")
    folders = repository.models(path.resolve())
    # With --json, standard output holds nothing but JSON. The status is shown on terminals only.
    console = Console(stderr=as_json, soft_wrap=True, highlight=False, emoji=False)
    reports: list[dict[str, Any]] = []
    with console.status("") as status:
        for number, folder in enumerate(folders, 1):
            status.update(f"trying {escape(folder.name)} ({number} of {len(folders)})")
            reports.append(_check_model(folder, timeout, traceback=traceback))
            if not as_json:
                print_model(console, reports[-1])
    problems = list(preflight.machine_problems())
    if not folders:
        problems.append(f"{path} holds no models; expected folders with a config.pbtxt.")
    outcomes = Counter([*map(_outcome, reports), *("PROBLEM" for _ in problems)])
    if as_json:
        typer.echo(json.dumps({"environment": problems, "models": reports}, indent=2))
    else:
        for problem in problems:
            _print_outcome(console, "PROBLEM", problem)
        console.print(", ".join(f"{outcomes[key]} {key}" for key in _COLORS if outcomes[key]))
    raise typer.Exit(1 if outcomes["FAILED"] or outcomes["PROBLEM"] else 0)


def _check_model(folder: Path, timeout: float, *, traceback: bool) -> dict[str, Any]:
    """Load a model in a child process, and return what `check --json` prints for it."""
    notes = list(preflight.folder_problems(folder))
    try:
        document = pbtxt.read(folder)
        other = preflight.other_backend(folder, document)
        if other:
            return {"model": folder.name, "skipped": other}
        if document["model_warmup"]:
            notes.append("remove model_warmup: tritonserver 24.10 may end if a sample of it fails.")
        if completion.is_incomplete(document):
            notes.append("config.pbtxt leaves out inputs or outputs; they come from the model.")
        version, document = trial.read(folder)
        report = trial.inspect(folder, version, document, seconds=timeout)
    except BackendError as error:
        report = {"model": folder.name, "error": named(folder.name, error), "notes": notes}
        return report | ({"traceback": error.traceback} if traceback else {})
    return {"model": folder.name, "version": version, "notes": notes, **report}


def _outcome(report: Mapping[str, Any]) -> str:
    """Return the word with which a model's lines begin."""
    return "FAILED" if "error" in report else "SKIPPED" if "skipped" in report else "OK"


def _print_outcome(console: Console, outcome: str, text: str) -> None:
    console.print(f"[{_COLORS[outcome]}]{outcome:7}[/] {escape(text)}")


def print_model(console: Console, report: Mapping[str, Any]) -> None:
    """Print what `check` reports of a model; markup is on in the console."""
    outcome, lines = _outcome(report), dict[str, Any]()
    if outcome == "SKIPPED":
        text = f"{report['model']}: served by {report['skipped']}"
    elif outcome == "FAILED":
        text = report["error"]
    else:
        text = f"{report['model']} {report['version']}"
        rows = report["max_batch_size"]
        lines = {
            "artifact": report["artifact"],
            "weights": report["weights"],
            "takes": report["signature"],
            "hooks": report["hooks"],
            "inputs": ", ".join(report["inputs"]),
            "outputs": ", ".join(report["outputs"]),
            "batch": f"at most {rows}" if rows else "no batching",
            "options": json.dumps(report["options"]) if report["options"] else "defaults",
        }
    _print_outcome(console, outcome, text)
    for label, value in lines.items():
        if value:
            console.print(f"        {label:9}{escape(str(value))}")
    if "traceback" in report:
        console.print(escape(report["traceback"]))
    for note in (*report.get("notes", ()), *report.get("warnings", ())):
        console.print(f"        [yellow]note[/]     {escape(note)}")
