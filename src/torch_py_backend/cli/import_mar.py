"""`torch-py-backend import-mar`: make a model folder from a TorchServe archive."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torch_py_backend.artifacts.discovery import ARCHIVE
from torch_py_backend.config import pbtxt
from torch_py_backend.errors import (
    ArchiveError,
    BackendError,
    InstallError,
    PlatformError,
    printable,
)
from torch_py_backend.tools import model_folder
from torch_py_backend.torchserve import mar_archive, migration
from torch_py_backend.torchserve.manifest import Manifest
from torch_py_backend.torchserve.mar_archive import Limits
from torch_py_backend.torchserve.migration import Migration

# An example is a file with the name of an input.
_INPUT = re.compile(r"[A-Za-z_]\w*")
_DEFAULT = Limits()


def import_mar(
    archive: Annotated[
        Path, typer.Argument(help="A .mar or .tar.gz file, or a folder, of torch-model-archiver.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="The model folder to make; by default the archive's model name, in this folder."
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="A field of a request, may be repeated; by default body or data, as the handler's"
            " source has it.",
        ),
    ] = None,
    content_type: Annotated[
        str,
        typer.Option(help="What clients have sent as Content-Type, if the handler is to see JSON."),
    ] = "",
    example: Annotated[
        Path | None,
        typer.Option(help="A file with a request's body, to try and warm up the model."),
    ] = None,
    max_gigabytes: Annotated[
        float, typer.Option(min=0.001, help="Largest size of the unpacked archive.")
    ] = _DEFAULT.gigabytes,
    max_files: Annotated[
        int, typer.Option(min=1, help="Largest number of files in it.")
    ] = _DEFAULT.files,
) -> None:
    """Make a model folder from a TorchServe archive, and load it once, which runs its handler."""
    if not archive.exists():
        raise InstallError(f"{archive} is not there; expected an archive of torch-model-archiver.")
    if example is not None and not example.is_file():
        raise InstallError(f"--example is {example}, which is not a file.")
    fields = tuple(inputs or ())
    if len(set(fields)) < len(fields) or not all(map(_INPUT.fullmatch, fields)):
        raise ArchiveError("--input", f"it is {', '.join(fields)}", expected="names, each once")
    parent, name = Path.cwd(), ""
    if output is not None:  # checked before gigabytes are unpacked
        parent, name = output.absolute().parent.resolve(), output.absolute().name
        _refuse_name(name, parent)
    failure = f"cannot import {archive.name} into {parent}"
    with model_folder.scratch_folder(parent, failure) as scratch:
        unpacked = scratch / ARCHIVE
        mar_archive.unpack(archive, unpacked, Limits(max_gigabytes, max_files))
        manifest = Manifest.read(unpacked, archive.name)
        name = name or manifest.model_name
        _refuse_name(name, parent)
        result = migration.migrate(
            name,
            manifest,
            inputs=fields,
            content_type=content_type,
            example=example is not None,
        )
        version = scratch / name / "1"
        version.mkdir(parents=True)
        unpacked.rename(version / ARCHIVE)
        if example is not None:
            bodies = version / "example_inputs"
            bodies.mkdir()
            shutil.copyfile(example, bodies / result.inputs[0])
        (version.parent / "config.pbtxt").write_text(result.config, encoding="utf-8")
        version.parent.rename(parent / name)
    _report(parent / name, result)


def _refuse_name(name: str, parent: Path) -> None:
    if not model_folder.NAME.fullmatch(name):
        raise InstallError(
            f"the model's name is '{printable(name)}'; expected letters, digits, _, -, . and"
            " blanks. Give another one with --output."
        )
    if os.path.lexists(parent / name):
        raise InstallError(f"{parent / name} exists already; give another folder with --output.")


def _report(folder: Path, result: Migration) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    console.print(f"made {folder}")
    for line in result.converted:
        console.print(f"  {printable(line)}")
    if result.not_converted:
        console.print("not taken over, and noted in config.pbtxt:")
    for line in result.not_converted:
        console.print(f"  {printable(line)}")
    try:
        model_folder.inspect(folder, "1", pbtxt.read(folder))
    except PlatformError as error:
        console.print(f"not tried: {error}")
    except BackendError as error:
        console.print(f"does not load yet: {error}")
    else:
        command = shlex.join(["torch-py-backend", "serve", str(folder.parent)])
        console.print(f"loads; next: {command}")
