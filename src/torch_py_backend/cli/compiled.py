"""`torch-py-backend export-compiled` and `import-compiled`: compiled files for other machines."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from torch_py_backend.artifacts import repository
from torch_py_backend.config import pbtxt
from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.errors import BackendError, ServerError, printable
from torch_py_backend.server import preflight
from torch_py_backend.tools import compiled_folder, model_folder

_TIMEOUT_S = 600.0
_MAX_CHARACTERS = 200
_Path = Annotated[Path, typer.Argument(help="A model folder or a whole repository.")]


def export_compiled(
    path: _Path,
    destination: Annotated[Path, typer.Argument(help="The folder to create.")],
) -> None:
    """Export what was compiled and tuned here, for machines of the same type."""
    console, failed = _console(), False
    beside = {}
    with compiled_folder.created(destination) as export:
        for folder in _models(path).values():
            name, target = escape(folder.name), export / folder.name
            try:
                report = _run("export", folder, target=str(target))
            except (BackendError, OSError) as error:
                shutil.rmtree(target, ignore_errors=True)
                console.print(f"[red]FAILED[/]   {escape(str(error))}")
                failed = True
                continue
            if report.get("files"):
                beside[folder.name] = report["beside"]
                console.print(f"[green]EXPORTED[/] {name}: {escape(', '.join(report['files']))}")
            if report.get("missing"):
                console.print(f"[yellow]LEFT OUT[/] {name}: {escape(report['missing'])}")
        if not beside:
            raise ServerError(
                f"{path} has nothing that was compiled or tuned on this machine; run"
                " `torch-py-backend check` or `torch-py-backend tune` first."
            )
        compiled_folder.write_manifest(export, beside)
    raise typer.Exit(1 if failed else 0)


def import_compiled(
    source: Annotated[Path, typer.Argument(help="The folder that export-compiled wrote.")],
    path: _Path,
) -> None:
    """Import what was compiled and tuned for the same models on a machine like this one."""
    folders, console, failed = _models(path), _console(), False
    for name, beside in compiled_folder.read(source).items():
        try:
            if name not in folders:
                raise ServerError(f"{path} has no model '{printable(name)[:_MAX_CHARACTERS]}'.")
            export = str(source.absolute() / name)
            report = _run("put", folders[name], source=export, beside=beside)
            if not report:
                raise ServerError(f"model '{name}' is served by another backend here.")
            names = escape(", ".join(report["files"]))
            console.print(f"[green]IMPORTED[/] {escape(name)}: {names}")
        except BackendError as error:
            console.print(f"[red]REFUSED[/]  {escape(str(error))}")
            failed = True
    raise typer.Exit(1 if failed else 0)


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False, emoji=False)


def _models(path: Path) -> dict[str, Path]:
    if not path.is_dir():
        raise ServerError(f"{path} is not a folder; expected a model or a model repository.")
    return {folder.name: folder for folder in repository.models(path.resolve())}


def _run(task: str, folder: Path, **options: object) -> JsonObject:
    """Return the report of a function of `tools.compiled_files`; {}: another backend's model."""
    if preflight.other_backend(folder, pbtxt.read(folder)):
        return {}
    version, document = model_folder.completed(folder, _TIMEOUT_S)
    return model_folder.run(f"tools.compiled_files:{task}", folder, version, document, **options)
