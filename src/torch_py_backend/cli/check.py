"""`torch-py-backend check`: load and warm up models without a server, and say what is wrong."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from torch_py_backend.artifacts import repository
from torch_py_backend.autocomplete import completion
from torch_py_backend.config import pbtxt
from torch_py_backend.errors import BackendError, ConfigError, ServerError
from torch_py_backend.processes import child_process
from torch_py_backend.server import preflight

# A frame of a traceback: its file, line, function, and the source of the line.
_FRAME = re.compile(r'^ +File "(.+)", line (\d+), in (.+)(?:\n +(.+))?', re.MULTILINE)


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
        raise ServerError(f"{path} is not a folder; expected a model or a model repository.")
    folders = repository.models(path.resolve())
    # Standard output is JSON alone. What is not a terminal shows no status.
    console = Console(stderr=as_json, soft_wrap=True, highlight=False, emoji=False)
    reports: list[dict[str, Any]] = []
    with console.status("") as status:
        for number, folder in enumerate(folders, 1):
            status.update(f"trying {escape(folder.name)} ({number} of {len(folders)})")
            reports.append(_report(folder, timeout, traceback=traceback))
            if not as_json:
                _print_model(console, reports[-1])
    problems = list(preflight.environment())
    if not folders:
        problems.append(f"{path} holds no models; expected folders with a config.pbtxt.")
    if as_json:
        typer.echo(json.dumps({"environment": problems, "models": reports}, indent=2))
    else:
        _print_problems(console, problems)
    failed = problems or any("error" in report for report in reports)
    raise typer.Exit(1 if failed else 0)


def _report(folder: Path, timeout: float, *, traceback: bool) -> dict[str, Any]:
    notes = list(preflight.folder(folder))
    end = time.monotonic() + timeout
    try:
        document = pbtxt.read(folder)
        other = preflight.other_backend(folder, document)
        if other:
            return {"model": folder.name, "skipped": other}
        if document["name"] != folder.name:
            raise ConfigError(
                folder.name,
                f"config.pbtxt names the model '{document['name']}'",
                expected="the folder's name; Triton refuses another",
            )
        preflight.execution_environment(folder, document)
        version = repository.latest(folder)
        filled = completion.needed(document)
        if filled:
            given = pbtxt.arguments(folder, version, document)
            completion.complete(given, document, timeout)
        else:
            completion.decide(document, folder / version)
        given = pbtxt.arguments(folder, version, document)
        report: dict[str, Any] = child_process.run(
            folder.name,
            "torch_py_backend.tools.inspection:inspect",
            {"arguments": given},
            max(0.0, round(end - time.monotonic(), 1)),
        )
    except BackendError as error:
        report = {"model": folder.name, "error": str(error), "notes": notes}
        report["at"] = _own_frame(folder, error.traceback)
        return report | ({"traceback": error.traceback} if traceback else {})
    if filled:
        notes.append("config.pbtxt leaves out inputs or outputs; they were told by the model.")
    if report["hooks"]:
        notes.extend(preflight.waits(document))
    return {"model": folder.name, "version": version, "notes": notes, **report}


def _own_frame(folder: Path, traceback: str) -> str:
    """Return the innermost frame in a file of the model's folder, or an empty string."""
    own = [one for one in _FRAME.findall(traceback) if Path(one[0]).is_relative_to(folder)]
    if not own:
        return ""
    file, line, function, source = own[-1]
    return f"{file}:{line} in {function}" + (f": {source}" if source else "")


def _print_problems(console: Console, problems: list[str]) -> None:
    for problem in problems:
        console.print(f"[red]PROBLEM[/] {escape(problem)}")
    if not problems:
        console.print("[green]OK[/]      this machine can run the server")


def _print_model(console: Console, report: Mapping[str, Any]) -> None:
    if "skipped" in report:
        served = escape(f"{report['model']}: served by {report['skipped']}")
        console.print(f"[yellow]SKIPPED[/] {served}")
        return
    if "error" in report:
        console.print(f"[red]FAILED[/]  {escape(report['error'])}")
        if report["at"]:
            console.print(f"        {'at':9}{escape(report['at'])}")
        if "traceback" in report:
            console.print(escape(report["traceback"]))
    else:
        rows = report["max_batch_size"] or "no batching"
        console.print(f"[green]OK[/]      {escape(report['model'])} {report['version']}")
        for label, value in (
            ("artifact", report["artifact"]),
            ("weights", report["weights"]),
            ("takes", report["signature"]),
            *((("hooks", report["hooks"]),) if report["hooks"] else ()),
            ("inputs", ", ".join(report["inputs"])),
            *((("bound", report["binding"]),) if report["binding"] else ()),
            ("outputs", ", ".join(report["outputs"])),
            ("batch", f"at most {rows}" if report["max_batch_size"] else rows),
            ("options", json.dumps(report["options"]) if report["options"] else "defaults"),
        ):
            console.print(f"        {label:9}{escape(str(value))}")
    for note in (*report["notes"], *report.get("warnings", ())):
        console.print(f"        [yellow]note[/]     {escape(note)}")
