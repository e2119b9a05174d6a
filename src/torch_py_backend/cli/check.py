"""`torch-py-backend check`: load and warm up models without a server, and report problems."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from torch_py_backend.config import pbtxt, repository
from torch_py_backend.config.pbtxt import Document, JsonObject
from torch_py_backend.errors import BackendError, ConfigError, ToolError, named
from torch_py_backend.model_folders import creation
from torch_py_backend.processes import child_process
from torch_py_backend.server.installation import TritonInstallation

_COLORS = {"OK": "green", "FAILED": "red", "SKIPPED": "yellow", "PROBLEM": "red"}
_SHARED_MEMORY_BYTES = 256 << 20  # each instance needs 1 MB, and more for larger tensors
# What a config names for this backend: also `pytorch`, and the platforms of LibTorch.
_BACKENDS = ("pytorch_py", "pytorch", "pytorch_libtorch", "torch_aoti")
_JSON_ONLY = ("version", "error", "skipped", "device", "threads", "request", "config")


def check(
    path: Annotated[Path, typer.Argument(help="A model folder or a whole repository.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for each model.")] = 600.0,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Print the traceback of each error.")
    ] = False,
) -> None:
    """Try models without a server: signature, bindings, options, problems and their cure."""
    folders = repository.models(path.resolve() if ".." in path.parts else path.absolute())
    problems = list(machine_problems())
    if not folders:
        problems.append(f"{path} holds no models; expected folders with a config.pbtxt.")
    reports = []
    outcomes = Counter(PROBLEM=len(problems))
    for problem in () if as_json else problems:
        print_report("PROBLEM", problem, {})
    for folder in folders:
        outcome, title, report = _try(folder, timeout, traceback=traceback)
        outcomes[outcome] += 1
        reports.append({"model": folder.name, **report})
        if not as_json:
            print_report(outcome, title, report)
    if as_json:
        typer.echo(json.dumps({"environment": problems, "models": reports}, indent=2))
    else:
        typer.echo(", ".join(f"{outcomes[key]} {key}" for key in _COLORS if outcomes[key]))
    raise typer.Exit(1 if outcomes["FAILED"] or outcomes["PROBLEM"] else 0)


def machine_problems() -> Iterator[str]:
    """Yield the problems of this machine, one sentence each, with their cure."""
    try:
        TritonInstallation()
    except ToolError as error:
        yield str(error)
    size = shutil.disk_usage("/dev/shm").total  # noqa: S108  Triton's regions
    if size < _SHARED_MEMORY_BYTES:
        yield (
            f"the shared memory has {size >> 20} MB, and tensors pass through it; give the"
            " container more (--shm-size=1g)."
        )


def _try(
    folder: Path,
    timeout: float,
    *,
    traceback: bool,
) -> tuple[str, str, JsonObject]:
    """Load a model in a child process; return the outcome, a line on it, and the report."""
    try:
        document = pbtxt.read(folder)
        backend = document["backend"] or document["platform"]
        if backend not in _BACKENDS:
            if backend and "torch" not in backend.lower():
                return "SKIPPED", f"{folder.name}: served by {backend}", {"skipped": backend}
            # The package's name is taken for that of the backend.
            found = f"config.pbtxt names the backend '{backend}'"
            raise ConfigError(found, expected='the line backend: "pytorch_py"')
        version = repository.latest(folder, document)
        arguments = {"arguments": pbtxt.arguments(folder, version, document)}
        report = child_process.run(creation.INSPECT, arguments, timeout)
    except (BackendError, OSError) as raised:
        error = raised if isinstance(raised, BackendError) else ConfigError(str(raised))
        text = named(folder.name, error)
        report = {"error": text}
        if traceback:
            report["traceback"] = error.traceback
        return "FAILED", text, report
    return "OK", f"{folder.name} {version}", {"version": version, **report}


def print_report(outcome: str, title: str, report: Document) -> None:
    typer.echo(f"{typer.style(f'{outcome:7}', fg=_COLORS[outcome])} {title}")
    for key, value in report.items():
        lines = value if isinstance(value, list) else [value]
        if isinstance(value, dict):
            lines = [f"{name} {setting}" for name, setting in value.items()]
        for line in lines:
            if key not in _JSON_ONLY and line != "":
                typer.echo(f"        {key:15}{line}")
