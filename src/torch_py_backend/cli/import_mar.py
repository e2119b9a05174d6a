"""`torch-py-backend import-mar`: a model folder made from a TorchServe archive."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
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
from torch_py_backend.processes import child_process
from torch_py_backend.torchserve import mar_archive, migration
from torch_py_backend.torchserve.mar_archive import Limits
from torch_py_backend.torchserve.migration import Migration, Wishes

_TIMEOUT_S = 600.0
_NAME = re.compile(r"[\w-][\w.\- ]*")
# Inputs are files, too, where an example lies beside the model.
_INPUT = re.compile(r"[A-Za-z_]\w*")
_DEFAULT = Limits()


def import_mar(
    archive: Annotated[
        Path, typer.Argument(help="A .mar or .tar.gz file, or a folder, of torch-model-archiver.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="The model folder to make; by default the archive's model name, here."),
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
        typer.Option(help="A file with a request's body, to try and to warm up the model with."),
    ] = None,
    max_gigabytes: Annotated[
        float, typer.Option(min=0.001, help="How large the archive may be, unpacked.")
    ] = _DEFAULT.gigabytes,
    max_files: Annotated[
        int, typer.Option(min=1, help="How many files it may hold.")
    ] = _DEFAULT.files,
) -> None:
    """Make a model folder from a TorchServe archive, and load it once, which runs its handler."""
    if not archive.exists():
        raise InstallError(f"{archive} is not there; expected an archive of torch-model-archiver.")
    if example is not None and not example.is_file():
        raise InstallError(f"--example is {example}, which is not a file.")
    wishes = Wishes(_fields(inputs or []), content_type, example is not None)
    parent = (output.absolute().parent if output is not None else Path.cwd()).resolve()
    if output is not None:  # before gigabytes are unpacked
        _refuse_name(output.absolute().name, parent)
    try:
        # Made complete beside its place: a server that watches the repository sees it whole.
        with _there(parent), tempfile.TemporaryDirectory(prefix=".import-mar-", dir=parent) as room:
            unpacked = Path(room) / ARCHIVE
            mar_archive.unpack(archive, unpacked, Limits(max_gigabytes, max_files))
            manifest = mar_archive.read_manifest(unpacked, archive.name)
            name = output.absolute().name if output is not None else manifest.model_name
            _refuse_name(name, parent)
            made = migration.migrate(archive.name, name, unpacked, manifest, wishes)
            folder = _lay_out(Path(room) / name, unpacked, made, example)
            folder.rename(parent / name)
    except OSError as error:
        raise InstallError(f"cannot import {archive.name} into {parent}: {error}") from error
    _print(parent / name, made)


@contextlib.contextmanager
def _there(folder: Path) -> Iterator[None]:
    """The folder exists; what was made for that goes again, where nothing comes of it."""
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for one in made:
            with contextlib.suppress(OSError):
                one.rmdir()
        raise


def _fields(inputs: list[str]) -> tuple[str, ...]:
    odd = [name for name in inputs if not _INPUT.fullmatch(name)]
    if odd or len(set(inputs)) < len(inputs):
        raise ArchiveError("--input", f"it is {', '.join(inputs)}", expected="names, each once")
    return tuple(inputs)


def _refuse_name(name: str, parent: Path) -> None:
    if not _NAME.fullmatch(name):
        raise InstallError(
            f"the model's name is '{printable(name)}'; expected letters, digits, _, -, . and"
            " blanks. Give another one with --output."
        )
    if os.path.lexists(parent / name):
        raise InstallError(f"{parent / name} exists already; give another folder with --output.")


def _lay_out(folder: Path, unpacked: Path, made: Migration, example: Path | None) -> Path:
    version = folder / "1"
    version.mkdir(parents=True)
    unpacked.rename(version / ARCHIVE)
    if example is not None:
        bodies = version / "example_inputs"
        bodies.mkdir()
        shutil.copyfile(example, bodies / made.inputs[0])
    (folder / "config.pbtxt").write_text(made.config, encoding="utf-8")
    return folder


def _print(folder: Path, made: Migration) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    console.print(f"made {folder}")
    for line in made.taken:
        console.print(f"  {printable(line)}")
    if made.left:
        console.print("not taken over, and noted in config.pbtxt:")
    for line in made.left:
        console.print(f"  {printable(line)}")
    console.print(_checked(folder))


def _checked(folder: Path) -> str:
    """Whether the folder that was made can be served."""
    try:
        document = pbtxt.read(folder)
        given = pbtxt.arguments(folder, "1", document)
        child_process.run(
            folder.name,
            "torch_py_backend.tools.inspection:inspect",
            {"arguments": given},
            _TIMEOUT_S,
        )
    except PlatformError as error:
        return f"not tried: {error}"
    except BackendError as error:
        return f"does not load yet: {error}"
    return f"loads; next: {shlex.join(['torch-py-backend', 'serve', str(folder.parent)])}"
