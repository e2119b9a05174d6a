"""`torch-py-backend check`: load and warm up models without a server, and report problems."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from torch_py_backend.config import execution_env, pbtxt, repository
from torch_py_backend.config.pbtxt import Document, JsonObject
from torch_py_backend.errors import BackendError, ConfigError, ToolError, named
from torch_py_backend.model_folders import creation
from torch_py_backend.processes import child_process
from torch_py_backend.server.installation import TritonInstallation

_COLORS = {"OK": "green", "FAILED": "red", "SKIPPED": "yellow", "PROBLEM": "red"}
# Each instance needs a region of 1 MB, and more for larger tensors.
_SHARED_MEMORY_BYTES = 256 << 20
# What a config names for this backend: `pytorch` if it is installed under that name, or the
# platforms of LibTorch.
_BACKENDS = ("pytorch_py", "pytorch", "pytorch_libtorch", "torch_aoti")


def check(
    path: Annotated[Path, typer.Argument(help="A model folder or a whole repository.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for each model.")] = 600.0,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Print the traceback of each error.")
    ] = False,
) -> None:
    """Try models without a server: signature, bindings, options, problems and their cure."""
    folders = repository.models(path.resolve())
    # With --json, standard output holds nothing but JSON. The status is shown on terminals only.
    console = Console(stderr=as_json, soft_wrap=True, highlight=False, emoji=False)
    problems = list(machine_problems())
    if not folders:
        problems.append(f"{path} holds no models; expected folders with a config.pbtxt.")
    for problem in problems if not as_json else ():
        _print_outcome(console, "PROBLEM", problem)
    outcomes = Counter(PROBLEM=len(problems))
    reports = []
    with console.status("") as status:
        for number, folder in enumerate(folders, 1):
            status.update(f"trying {escape(folder.name)} ({number} of {len(folders)})")
            outcome, report = _check_model(folder, timeout, traceback=traceback)
            outcomes[outcome] += 1
            reports.append(report)
            if not as_json:
                print_model(console, outcome, report)
    if as_json:
        typer.echo(json.dumps({"environment": problems, "models": reports}, indent=2))
    else:
        console.print(", ".join(f"{outcomes[key]} {key}" for key in _COLORS if outcomes[key]))
    raise typer.Exit(1 if outcomes["FAILED"] or outcomes["PROBLEM"] else 0)


def machine_problems() -> Iterator[str]:
    """Yield the problems of this machine, one sentence each, with their cure."""
    try:
        TritonInstallation().environment()
    except ToolError as error:
        yield str(error)
    size = shutil.disk_usage("/dev/shm").total  # noqa: S108  Triton's regions
    if size < _SHARED_MEMORY_BYTES:
        yield (
            f"the shared memory has {size >> 20} MB, and tensors pass through it; give the"
            " container more (--shm-size=1g)."
        )


def _check_model(
    folder: Path,
    timeout: float,
    *,
    traceback: bool,
) -> tuple[str, JsonObject]:
    """Load a model in a child process; return the outcome, and what `check --json` prints."""
    notes = []
    try:
        document = pbtxt.read(folder)
        if other := _other_backend(document):
            return "SKIPPED", {"model": folder.name, "skipped": other}
        if execution_env.environment_path(document):
            notes.append(
                f"{execution_env.KEY} names an environment; here the model is tried without it,"
                f" with the packages of {sys.prefix}."
            )
        version = repository.latest(folder, document)
        arguments = {"arguments": pbtxt.arguments(folder, version, document)}
        report = child_process.run(creation.INSPECT, arguments, timeout)
    except (BackendError, OSError) as error:
        known = error if isinstance(error, BackendError) else ConfigError(str(error))
        report = {"model": folder.name, "error": named(folder.name, known), "notes": notes}
        if traceback:
            report["traceback"] = known.traceback
        return "FAILED", report
    return "OK", {"model": folder.name, "version": version, "notes": notes, **report}


def _other_backend(document: Document) -> str:
    """Return the other backend or platform that a config names; empty for this backend.

    Raises:
        ConfigError: the config names neither, or the name of this backend in another spelling.
    """
    name = str(document["backend"] or document["platform"])
    if name in _BACKENDS:
        return ""
    # The package's name is taken for that of the backend.
    if not name or name.lower().replace("-", "_") in (*_BACKENDS, "torch_py_backend"):
        found = f"config.pbtxt names the backend '{name}'"
        raise ConfigError(found, expected='the line backend: "pytorch_py"')
    return name


def _print_outcome(console: Console, outcome: str, text: str) -> None:
    color = _COLORS[outcome]
    console.print(f"[{color}]{outcome:7}[/] {escape(text)}")


def print_model(console: Console, outcome: str, report: Document) -> None:
    """Print what `check` reports of a model; markup is on in the console."""
    lines = {}
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
            "compiled": report["compiled"],
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
