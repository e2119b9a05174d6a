"""`torch-py-backend export-compiled` and `import-compiled`: compiled files for other machines."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape

from torch_py_backend.artifacts import repository
from torch_py_backend.config import pbtxt, tuned_settings
from torch_py_backend.errors import ArchiveError, BackendError, InstallError, ServerError, printable
from torch_py_backend.processes import child_process, private_files
from torch_py_backend.server import preflight
from torch_py_backend.tools import model_folder, oci_layout

_PREFIX = "application/vnd.torch-py-backend"
_CONFIG = f"{_PREFIX}.compiled.v1+json"
# The names of `tools.compiled_files` by media types.
_KINDS = {
    f"{_PREFIX}.bundle": "bundle",
    f"{_PREFIX}.aotinductor": "package",
    f"{_PREFIX}.tuned+json": tuned_settings.FILE,
}
_TYPES = {kind: media_type for media_type, kind in _KINDS.items()}
# Files that are read at once.
_MAX_BYTES = {"bundle": 1 << 30, tuned_settings.FILE: 4 << 20}
_TIMEOUT_S = 600.0
_SHOWN = 200
_Path = Annotated[Path, typer.Argument(help="A model folder or a whole repository.")]


def export_compiled(
    path: _Path,
    destination: Annotated[
        Path, typer.Argument(help="The folder to create; an OCI image layout with the tag latest.")
    ],
) -> None:
    """Export what was compiled and tuned here, for machines of the same type."""
    console, failed = _console(), False
    facts: dict[str, object] = {}
    files: list[oci_layout.File] = []
    with contextlib.ExitStack() as stack:
        for folder in _models(path).values():
            try:
                report = _run("find", folder)
                exported = list(_files(folder, report, stack))
            except (BackendError, OSError) as error:
                console.print(f"[red]FAILED[/]   {escape(str(error))}")
                failed = True
                continue
            files += exported
            if exported:
                facts[folder.name] = report["facts"]
                names = ", ".join(file.title.rpartition("/")[2] for file in exported)
                console.print(f"[green]EXPORTED[/] {escape(folder.name)}: {escape(names)}")
            if report.get("missing"):
                left_out = escape(f"{folder.name}: {report['missing']}")
                console.print(f"[yellow]LEFT OUT[/] {left_out}")
        if not files:
            raise ServerError(
                f"{path} has nothing that was compiled or tuned on this machine; run"
                " `torch-py-backend check` or `torch-py-backend tune` first."
            )
        oci_layout.write(destination, _CONFIG, {"models": facts}, files)
    raise typer.Exit(1 if failed else 0)


def _files(
    folder: Path, report: Mapping[str, Any], stack: contextlib.ExitStack
) -> Iterator[oci_layout.File]:
    """Yield the files of a model, with titles as in a repository: `oras pull` restores these."""
    for kind, name in report.get("files", {}).items():
        path = Path(name)
        if kind == "bundle":
            content: IO[bytes] = io.BytesIO(private_files.read(path))
        else:
            content = stack.enter_context(path.open("rb"))
        title = f"{folder.name}/{path.parent.name}/{path.name}"
        yield oci_layout.File(title, _TYPES[kind], content)
    if report.get("tuned"):
        machine = tuned_settings.fingerprint(report["tuned"]["machine"])
        content = io.BytesIO(json.dumps({"machines": {machine: report["tuned"]}}).encode())
        name = tuned_settings.FILE
        yield oci_layout.File(f"{folder.name}/{name}", _TYPES[name], content)


def import_compiled(
    source: Annotated[Path, typer.Argument(help="The folder that export-compiled wrote.")],
    path: _Path,
) -> None:
    """Import what was compiled and tuned for the same models on a machine like this one."""
    folders, console, failed = _models(path), _console(), False
    layout = oci_layout.Layout(source, _CONFIG)
    listed = _listed(layout, source.name)
    parent = path.resolve()
    if parent in folders.values():
        parent = parent.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".import-compiled-", dir=parent) as scratch:
            _extract(layout, listed, folders, Path(scratch))
            for name, model in listed.items():
                try:
                    if name not in folders:
                        raise ServerError(f"{path} has no model '{printable(name)[:_SHOWN]}'.")
                    arguments = {"facts": model.facts, "folder": f"{scratch}/{name}"}
                    report = _run("put", folders[name], arguments)
                    if not report:
                        raise ServerError(f"model '{name}' is served by another backend here.")
                    names = escape(", ".join(report["files"]))
                    console.print(f"[green]IMPORTED[/] {escape(name)}: {names}")
                except BackendError as error:
                    console.print(f"[red]REFUSED[/]  {escape(str(error))}")
                    failed = True
    except OSError as error:
        raise InstallError(f"cannot import {source} into {path}: {error}.") from error
    raise typer.Exit(1 if failed else 0)


class _Model(NamedTuple):
    facts: Mapping[str, object]
    layers: dict[str, oci_layout.Layer]


def _listed(layout: oci_layout.Layout, source: str) -> dict[str, _Model]:
    """Return the models of an export.

    Raises:
        ArchiveError: the manifest lists other files.
    """
    models: dict[str, _Model] = {}
    facts = layout.config.get("models")
    for layer in layout.layers:
        name, kind = layer.title.partition("/")[0], _KINDS.get(layer.media_type, "")
        known = facts.get(name) if isinstance(facts, dict) else None
        model = models.setdefault(name, _Model(known if isinstance(known, dict) else {}, {}))
        if not kind or not model.facts or kind in model.layers:
            raise ArchiveError(
                source,
                f"it lists '{layer.title[:_SHOWN]}' of the type '{layer.media_type[:_SHOWN]}'",
                expected="for each model of its config, the files that export-compiled writes",
                cure="Export it again.",
            )
        if layer.size > _MAX_BYTES.get(kind, layer.size):
            raise ArchiveError(
                source,
                f"'{layer.title[:_SHOWN]}' has {layer.size} bytes",
                expected=f"at most {_MAX_BYTES[kind]}",
            )
        model.layers[kind] = layer
    return models


def _extract(
    layout: oci_layout.Layout,
    listed: Mapping[str, _Model],
    folders: Collection[str],
    scratch: Path,
) -> None:
    """Write the files of the models in the repository into folders with their names."""
    models = {name: model.layers for name, model in listed.items() if name in folders}
    needed = sum(layer.size for layers in models.values() for layer in layers.values())
    free = shutil.disk_usage(scratch).free
    if needed > free:
        raise InstallError(f"the files have {needed} bytes, and {scratch.parent} has {free} free.")
    for name, layers in models.items():
        (scratch / name).mkdir()
        for kind, layer in layers.items():
            layout.extract(layer, scratch / name / kind)


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False, emoji=False)


def _models(path: Path) -> dict[str, Path]:
    if not path.is_dir():
        raise ServerError(f"{path} is not a folder; expected a model or a model repository.")
    return {folder.name: folder for folder in repository.models(path.resolve())}


def _run(task: str, folder: Path, arguments: Mapping[str, object] | None = None) -> Any:
    """Return the report of a function of `tools.compiled_files`; {}: another backend's model."""
    if preflight.other_backend(folder, pbtxt.read(folder)):
        return {}
    version, document = model_folder.completed(folder, _TIMEOUT_S)
    return child_process.run(
        folder.name,
        f"torch_py_backend.tools.compiled_files:{task}",
        {"arguments": pbtxt.arguments(folder, version, document), **(arguments or {})},
        _TIMEOUT_S,
    )
