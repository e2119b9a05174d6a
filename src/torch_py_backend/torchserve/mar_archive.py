"""A TorchServe archive: unpacked within bounds, its manifest and its settings read.

Nothing of it is run. What torch-model-archiver writes is a zip file (.mar), a tar file (.tar.gz) or
a folder; a name that leads out of it, a link, or more than was allowed is refused, whatever the
archive says of itself.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from torch_py_backend.artifacts import file_types
from torch_py_backend.artifacts.file_types import Content
from torch_py_backend.errors import ArchiveError, brief, shown

MANIFEST = Path("MAR-INF", "MANIFEST.json")
# Handlers that TorchServe brings along, and that are served here as well.
HANDLERS = (
    "base_handler",
    "image_classifier",
    "image_segmenter",
    "object_detector",
    "text_classifier",
)

_PART = 1 << 20
_GIGABYTE = 1 << 30
# What is read whole: a manifest, settings. In a tar file: a member's header with its long name.
_TEXT_BYTES = 1 << 20
# Of settings.
_VALUES = 100_000
_LONGEST_NAME = 255
# Folders within each other: what walks through them calls itself for each.
_DEEPEST = 32
_RUNTIMES = ("python", "python3")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much an archive may hold, unpacked."""

    gigabytes: float = 10
    files: int = 10_000


class _Member(NamedTuple):
    """What is in an archive.

    Attributes:
        name: its name.
        size: its size, as the archive tells it.
        open: how to read it; None: it is a folder.
    """

    name: str
    size: int = 0
    open: Callable[[], IO[bytes] | io.FileIO] | None = None


# --- unpacking -------------------------------------------------------------------------------


def unpack(archive: Path, folder: Path, limits: Limits) -> None:
    """Write what the archive holds into a folder that is not there yet.

    Raises:
        ArchiveError: it is damaged, hostile or too large, or no archive of TorchServe.
        OSError: the folder cannot be written.
    """
    scratch = folder.with_name(f"{folder.name}-whole")
    with _members(archive) as members:
        writer = _Writer(archive.name, scratch, limits)
        for member in members:
            writer.write(member)
    _root(archive, scratch).rename(folder)
    shutil.rmtree(scratch, ignore_errors=True)


def _root(archive: Path, scratch: Path) -> Path:
    """Where the manifest is: on top, or in the one folder that a tar file has there."""
    tops = list(scratch.iterdir()) if scratch.is_dir() else []
    for place in (scratch, *tops) if len(tops) == 1 else (scratch,):
        if (place / MANIFEST).is_file():
            return place
    found = file_types.describe(archive) if archive.is_file() else Content.UNKNOWN
    also = f"; it is {found.value}" if found in _MODELS else ""
    raise ArchiveError(
        archive.name,
        f"it holds no {MANIFEST}{also}",
        expected="what torch-model-archiver wrote",
        cure="Make a model folder of it with `torch-py-backend init`." if also else "",
    )


_MODELS = (Content.TORCHSCRIPT, Content.EXPORTED, Content.AOTI)
# What reading a damaged or mistaken archive raises, beside OSError. tarfile calls itself for each
# header that tells of the next one.
_DAMAGES = (
    *(zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError),
    *(NotImplementedError, RecursionError, ValueError, UnicodeError),
)


@contextlib.contextmanager
def _members(archive: Path) -> Iterator[Iterator[_Member]]:
    try:
        with _opened(archive) as members:
            yield members
    except file_types.CrowdedError:
        raise ArchiveError(
            archive.name, "its list of files, or one name in it, is longer than any archive's"
        ) from None
    except _DAMAGES as error:
        raise ArchiveError(
            archive.name, f"it is damaged: {brief(error)}", cure="Copy it again, or make it anew."
        ) from error


def _opened(archive: Path) -> contextlib.AbstractContextManager[Iterator[_Member]]:
    if archive.is_dir():
        return contextlib.nullcontext(_in_folder(archive))
    with archive.open("rb") as file:
        head = file.read(4)
    if head.startswith(b"PK"):
        return _in_zip(archive)
    if head.startswith(b"\x1f\x8b"):
        return _in_tar(archive)
    raise ArchiveError(
        archive.name,
        f"it is {file_types.describe(archive).value}",
        expected="an archive of torch-model-archiver: .mar, .tar.gz, or a folder",
    )


def _in_folder(folder: Path) -> Iterator[_Member]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise _no_file(folder.name, name)
        if path.is_file():
            yield _Member(name, path.stat().st_size, functools.partial(io.FileIO, path))


@contextlib.contextmanager
def _in_zip(path: Path) -> Iterator[Iterator[_Member]]:
    with file_types.Bounded(path) as file, zipfile.ZipFile(file) as archive:
        yield _zip_files(path, archive)


def _zip_files(path: Path, archive: zipfile.ZipFile) -> Iterator[_Member]:
    for entry in archive.infolist():
        if entry.is_dir():
            yield _Member(entry.filename)
            continue
        # zipfile ends a name at a zero byte; who wrote one there meant to hide something.
        _safe(path.name, entry.orig_filename)
        if stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG):
            raise _no_file(path.name, entry.filename)
        if entry.flag_bits & 1:
            raise ArchiveError(
                path.name, f"{entry.filename} is encrypted", cure="Make it without a password."
            )
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ArchiveError(
                path.name,
                f"{entry.filename} is compressed with method {entry.compress_type}",
                expected="deflate, or no compression, as torch-model-archiver writes",
            )
        yield _Member(entry.filename, entry.file_size, functools.partial(_zip_file, archive, entry))


def _zip_file(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> IO[bytes]:
    try:
        return archive.open(entry)
    except OSError as error:  # it is said to begin before the file does
        raise zipfile.BadZipFile(f"{entry.filename}: {error.strerror}") from error


class _Inflated(gzip.GzipFile):
    """A gzip file that is read in pieces of a bounded size: tarfile believes what headers say."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _PART:
            raise file_types.CrowdedError
        return super().read(size)


@contextlib.contextmanager
def _in_tar(path: Path) -> Iterator[Iterator[_Member]]:
    with _Inflated(path) as inflated, tarfile.open(fileobj=inflated, mode="r:") as archive:
        yield _tar_members(path.name, archive)


def _tar_members(name: str, archive: tarfile.TarFile) -> Iterator[_Member]:
    for entry in archive:
        if not (entry.isreg() or entry.isdir()) or entry.issparse():
            raise _no_file(name, entry.name)
        if entry.isdir():
            yield _Member(entry.name)
        else:
            yield _Member(entry.name, entry.size, functools.partial(_tar_file, archive, entry))


def _tar_file(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> IO[bytes]:
    file = archive.extractfile(entry)
    assert file is not None  # noqa: S101  a regular file
    return file


def _no_file(archive: str, name: str) -> ArchiveError:
    return ArchiveError(
        archive,
        f"{name[:_LONGEST_NAME]} is a link or a special file",
        expected="plain files and folders",
        cure="Put the file itself into the archive.",
    )


def _safe(archive: str, name: str) -> PurePosixPath:
    """A name as a path that stays within the archive."""
    path = PurePosixPath(name)
    leads_out = path.is_absolute() or ".." in path.parts or not path.parts
    odd = not name.isprintable() or "\\" in name
    long = len(path.parts) > _DEEPEST
    if leads_out or odd or long or any(len(part.encode()) > _LONGEST_NAME for part in path.parts):
        raise ArchiveError(
            archive,
            f"it holds the name '{name[:_LONGEST_NAME]}'",
            expected=f"names that stay within the archive, in at most {_DEEPEST - 1} folders",
            cure="Nothing of it was kept; do not trust where it came from.",
        )
    return path


class _Writer:
    """Writes members into a folder, and keeps count."""

    def __init__(self, archive: str, folder: Path, limits: Limits) -> None:
        self._archive = archive
        self._folder = folder
        self._limits = limits
        self._room = int(limits.gigabytes * _GIGABYTE)
        self._files: set[PurePosixPath] = set()
        self._folders: set[PurePosixPath] = set()
        self._empty = 0

    def write(self, member: _Member) -> None:
        """Write a file; folders are made for files, and are counted only."""
        if member.open is None:
            self._empty += 1
            self._refuse_many(self._empty, "folders")
            return
        path = _safe(self._archive, member.name)
        self._refuse_twice(path)
        self._files.add(path)
        self._folders.update(path.parents)
        self._refuse_many(len(self._files), "files")
        self._refuse_size(member.size)
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with member.open() as source, target.open("xb") as written:
            while part := source.read(_PART):
                self._room -= len(part)
                self._refuse_size(0)
                written.write(part)

    def _refuse_many(self, count: int, what: str) -> None:
        if count > self._limits.files:
            raise ArchiveError(
                self._archive,
                f"it holds more than {self._limits.files} {what}",
                cure="Allow more with --max-files, if you trust it.",
            )

    def _refuse_twice(self, path: PurePosixPath) -> None:
        parents = self._files.intersection(path.parents)
        if path in self._files or path in self._folders or parents:
            raise ArchiveError(
                self._archive, f"it holds {path} twice", cure="Make the archive anew."
            )

    def _refuse_size(self, size: int) -> None:
        if size > self._room or self._room < 0:
            raise ArchiveError(
                self._archive,
                f"unpacked, it is larger than {self._limits.gigabytes:g} GB",
                cure="Allow more with --max-gigabytes, if you trust it.",
            )


# --- what it says of itself ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Manifest:
    """What MAR-INF/MANIFEST.json says of a model.

    Attributes:
        model_name: its name.
        handler: who answers: a file or a module of the archive, or a handler of TorchServe's; with
            `:function`, that function of it.
        serialized_file: the weights or the program.
        model_file: the source of the module that the weights belong to.
        requirements_file: packages to be installed.
        config_file: settings, in YAML.
        vocabulary: the numbers of tokens, for a handler of texts.
        document: all of it.
    """

    model_name: str
    handler: str
    serialized_file: str
    model_file: str
    requirements_file: str
    config_file: str
    vocabulary: str
    document: Mapping[str, Any]

    @property
    def handler_module(self) -> str:
        """The name of the handler's module."""
        return self.handler.partition(":")[0].rpartition("/")[2].removesuffix(".py")

    @property
    def handler_function(self) -> str:
        """The function of the module that is the handler, if it has one of that name."""
        return self.handler.partition(":")[2] or "handle"


def read_manifest(folder: Path, archive: str) -> Manifest:
    """The manifest of an archive that lies unpacked in a folder.

    Args:
        folder: the folder.
        archive: what it is called in messages.

    Raises:
        ArchiveError: it has none, or one that does not describe a model that can be served.
    """
    document = _json(folder / MANIFEST, archive)
    if "workflow" in document:
        raise ArchiveError(
            archive,
            "it is a workflow",
            expected="a model",
            cure="Import the models that it names, and join them with a Triton ensemble.",
        )
    runtime = str(document.get("runtime", _RUNTIMES[0]))
    if runtime.lower() not in _RUNTIMES:
        raise ArchiveError(
            archive, f"its runtime is '{runtime}'", expected="a handler written in Python"
        )
    model = document.get("model")
    if not isinstance(model, dict):
        raise ArchiveError(archive, f"{MANIFEST} has no object 'model'")
    manifest = Manifest(
        model_name=_text(archive, model, "modelName"),
        handler=_text(archive, model, "handler"),
        serialized_file=_file(archive, folder, model, "serializedFile"),
        model_file=_file(archive, folder, model, "modelFile"),
        requirements_file=_file(archive, folder, model, "requirementsFile"),
        config_file=_file(archive, folder, model, "configFile"),
        vocabulary=_file(archive, folder, model, "sourceVocab"),
        document=document,
    )
    _refuse_handler(archive, folder, manifest)
    return manifest


def _json(path: Path, archive: str) -> dict[str, Any]:
    try:
        if path.stat().st_size > _TEXT_BYTES:
            raise ArchiveError(archive, f"{MANIFEST} is larger than a manifest")
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ArchiveError(archive, f"it holds no {MANIFEST}") from None
    except (ValueError, RecursionError) as error:
        raise ArchiveError(archive, f"{MANIFEST} is no JSON: {brief(error)}") from None
    if not isinstance(document, dict):
        raise ArchiveError(archive, f"{MANIFEST} is no JSON object")
    return document


def _text(archive: str, model: Mapping[str, Any], key: str) -> str:
    value = model.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ArchiveError(archive, f"{MANIFEST} has no text for '{key}'")
    return value.strip()


def _file(archive: str, folder: Path, model: Mapping[str, Any], key: str) -> str:
    """The file that a manifest names; empty where it names none."""
    if model.get(key) in (None, ""):
        return ""
    name = _text(archive, model, key)
    if not (folder / _safe(archive, name)).is_file():
        raise ArchiveError(
            archive,
            f"{MANIFEST} names the {key} {name}, which the archive does not hold",
            cure="Make the archive anew.",
        )
    return name


def holds_module(folder: Path, module: str) -> bool:
    """Whether a module of this name lies in the archive."""
    return (folder / f"{module}.py").is_file() or (folder / module / "__init__.py").is_file()


def _refuse_handler(archive: str, folder: Path, manifest: Manifest) -> None:
    name = manifest.handler_module
    if not name.isidentifier():
        raise ArchiveError(
            archive,
            f"its handler is '{manifest.handler}'",
            expected="a Python file, or the name of a handler",
        )
    if name not in HANDLERS and not holds_module(folder, name):
        raise ArchiveError(
            archive,
            f"its handler is {name}, which it does not hold",
            expected=f"a file {name}.py in it, or one of {shown(HANDLERS)}",
            cure=_CURES.get(name, ""),
        )


_CURES = {
    "vllm_handler": "Triton's vLLM backend serves such models.",
    "trt_llm_handler": "Triton's TensorRT-LLM backend serves such models.",
    "dali_image_classifier": "Triton's DALI backend reads images on the GPU.",
}


def settings(folder: Path, manifest: Manifest, archive: str) -> dict[str, Any]:
    """What the archive's model-config.yaml says; empty where there is none.

    Raises:
        ArchiveError: it cannot be read.
    """
    if not manifest.config_file:
        return {}
    try:
        import yaml  # noqa: PLC0415  only where there is something to be read
    except ImportError as error:
        raise ArchiveError(
            archive,
            f"{manifest.config_file} cannot be read: {error}",
            cure="pip install 'torch-py-backend[torchserve]'.",
        ) from None
    path = folder / manifest.config_file
    if path.stat().st_size > _TEXT_BYTES:
        raise ArchiveError(archive, f"{path.name} is larger than settings are")
    try:
        text = path.read_bytes()
        _refuse_large(archive, path.name, yaml.compose(text, yaml.SafeLoader))
        document = yaml.safe_load(text)
    except ArchiveError:
        raise
    except Exception as error:  # its values are checked by int(), datetime() and others
        said = " ".join(str(error).split()) or type(error).__name__
        raise ArchiveError(archive, f"{path.name} cannot be read: {said}") from None
    if not isinstance(document, dict | None):
        raise ArchiveError(
            archive, f"{path.name} holds a {type(document).__name__}", expected="keys and values"
        )
    return document or {}


def _refuse_large(archive: str, file: str, root: Any) -> None:
    """References to references, written in a kilobyte, are values that fill any memory.

    Args:
        archive: what the archive is called in messages.
        file: the name of the file.
        root: its nodes, as PyYAML composes them, before values are made of them.
    """
    pending, seen = [root] if root is not None else [], 0
    while pending:
        inside = pending.pop().value
        seen += 1
        if isinstance(inside, list):  # of nodes, or of pairs of them
            for one in inside:
                pending += one if isinstance(one, tuple) else (one,)
        if seen + len(pending) > _VALUES:
            raise ArchiveError(
                archive,
                f"{file} stands for more than {_VALUES} values",
                expected="settings that do not repeat themselves by reference",
            )
