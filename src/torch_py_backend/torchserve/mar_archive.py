"""Unpacks TorchServe archives within limits, and reads their manifests and settings.

An archive of torch-model-archiver is a zip file (.mar), a tar file (.tar.gz) or a folder. Its code
is not run. Names that lead out of it, links, and contents above the limits are refused; sizes that
the archive declares are not trusted.
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
from torch_py_backend.artifacts.file_types import FileType
from torch_py_backend.errors import ArchiveError, join_names, summarize

MANIFEST = Path("MAR-INF", "MANIFEST.json")
# Handlers of TorchServe that are supported here.
HANDLERS = (
    "base_handler",
    "image_classifier",
    "image_segmenter",
    "object_detector",
    "text_classifier",
)

_CHUNK_BYTES = 1 << 20
_GIGABYTE = 1 << 30
# Files that are read whole: the manifest and settings.
_TEXT_BYTES = 1 << 20
# The most values in settings.
_VALUES = 100_000
_LONGEST_NAME = 255
# The deepest path: code that walks through folders is recursive.
_DEEPEST = 32
_RUNTIMES = ("python", "python3")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an unpacked archive."""

    gigabytes: float = 10
    files: int = 10_000


class _Member(NamedTuple):
    """A file or folder in an archive.

    Attributes:
        name: its name.
        size: its declared size.
        open: opens the file; None: it is a folder.
    """

    name: str
    size: int = 0
    open: Callable[[], IO[bytes] | io.FileIO] | None = None


# --- unpacking -------------------------------------------------------------------------------


def unpack(archive: Path, folder: Path, limits: Limits) -> None:
    """Unpack an archive into a new folder.

    Raises:
        ArchiveError: it is damaged, malicious or too large, or not a TorchServe archive.
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
    """Return the folder of the manifest: the top, or the only folder there, as in tar files."""
    tops = list(scratch.iterdir()) if scratch.is_dir() else []
    for folder in (scratch, *tops) if len(tops) == 1 else (scratch,):
        if (folder / MANIFEST).is_file():
            return folder
    content = file_types.file_type(archive) if archive.is_file() else FileType.UNKNOWN
    also = f"; it is {content.value}" if content in _MODELS else ""
    raise ArchiveError(
        archive.name,
        f"it holds no {MANIFEST}{also}",
        expected="what torch-model-archiver wrote",
        cure="Make a model folder of it with `torch-py-backend init`." if also else "",
    )


_MODELS = (FileType.TORCHSCRIPT, FileType.EXPORTED, FileType.AOTI)
# Exceptions for damaged files, beside OSError. RecursionError: tarfile is recursive for chains of
# headers.
_DAMAGE_ERRORS = (
    *(zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError),
    *(NotImplementedError, RecursionError, ValueError, UnicodeError),
)


@contextlib.contextmanager
def _members(archive: Path) -> Iterator[Iterator[_Member]]:
    try:
        with _opened(archive) as members:
            yield members
    except file_types.DirectoryTooLargeError:
        raise ArchiveError(
            archive.name, "its list of files, or one name in it, is longer than any archive's"
        ) from None
    except _DAMAGE_ERRORS as error:
        raise ArchiveError(
            archive.name,
            f"it is damaged: {summarize(error)}",
            cure="Copy it again, or make it anew.",
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
        f"it is {file_types.file_type(archive).value}",
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
    with file_types.BoundedFile(path) as file, zipfile.ZipFile(file) as archive:
        yield _zip_files(path, archive)


def _zip_files(path: Path, archive: zipfile.ZipFile) -> Iterator[_Member]:
    for entry in archive.infolist():
        if entry.is_dir():
            yield _Member(entry.filename)
            continue
        # zipfile cuts a name at a zero byte, which may hide the rest of it.
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
    except OSError as error:  # its declared offset is before the beginning of the file
        raise zipfile.BadZipFile(f"{entry.filename}: {error.strerror}") from error


class _Inflated(gzip.GzipFile):
    """A gzip file with a limit for each read, because tarfile trusts the sizes in headers."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _CHUNK_BYTES:
            raise file_types.DirectoryTooLargeError
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
    """Return a name as a path, after checking that it stays within the archive."""
    path = PurePosixPath(name)
    leads_out = path.is_absolute() or ".." in path.parts or not path.parts
    unusual = not name.isprintable() or "\\" in name
    long = len(path.parts) > _DEEPEST
    if (
        leads_out
        or unusual
        or long
        or any(len(part.encode()) > _LONGEST_NAME for part in path.parts)
    ):
        raise ArchiveError(
            archive,
            f"it holds the name '{name[:_LONGEST_NAME]}'",
            expected=f"names that stay within the archive, in at most {_DEEPEST - 1} folders",
            cure="Nothing of it is kept; do not trust its source.",
        )
    return path


class _Writer:
    """Writes members into a folder and enforces the limits."""

    def __init__(self, archive: str, folder: Path, limits: Limits) -> None:
        self._archive = archive
        self._folder = folder
        self._limits = limits
        self._bytes_left = int(limits.gigabytes * _GIGABYTE)
        self._files: set[PurePosixPath] = set()
        self._folders: set[PurePosixPath] = set()
        self._folder_entries = 0

    def write(self, member: _Member) -> None:
        """Write a file. Folders are only counted here, and created for their files."""
        if member.open is None:
            self._folder_entries += 1
            self._check_count(self._folder_entries, "folders")
            return
        path = _safe(self._archive, member.name)
        self._check_duplicate(path)
        self._files.add(path)
        self._folders.update(path.parents)
        self._check_count(len(self._files), "files")
        self._check_size(member.size)
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with member.open() as source, target.open("xb") as written:
            while chunk := source.read(_CHUNK_BYTES):
                self._bytes_left -= len(chunk)
                self._check_size(0)
                written.write(chunk)

    def _check_count(self, count: int, what: str) -> None:
        if count > self._limits.files:
            raise ArchiveError(
                self._archive,
                f"it holds more than {self._limits.files} {what}",
                cure="Allow more with --max-files, if you trust it.",
            )

    def _check_duplicate(self, path: PurePosixPath) -> None:
        parents = self._files.intersection(path.parents)
        if path in self._files or path in self._folders or parents:
            raise ArchiveError(
                self._archive, f"it holds {path} twice", cure="Make the archive anew."
            )

    def _check_size(self, size: int) -> None:
        if size > self._bytes_left or self._bytes_left < 0:
            raise ArchiveError(
                self._archive,
                f"unpacked, it is larger than {self._limits.gigabytes:g} GB",
                cure="Allow more with --max-gigabytes, if you trust it.",
            )


# --- manifest and settings ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of MAR-INF/MANIFEST.json.

    Attributes:
        model_name: the name of the model.
        handler: a file or module of the archive, or a handler of TorchServe; with `:function`, a
            function in it.
        serialized_file: the weights or the program.
        model_file: the source of the module for the weights.
        requirements_file: the required packages.
        config_file: settings in YAML.
        vocabulary: the numbers of tokens, for a text handler.
        document: the whole JSON object.
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
        """The name of the handler's function, which the module may lack."""
        return self.handler.partition(":")[2] or "handle"


def read_manifest(folder: Path, archive: str) -> Manifest:
    """Read the manifest of an unpacked archive.

    Args:
        folder: the folder of the archive.
        archive: its name in messages.

    Raises:
        ArchiveError: there is no manifest, or its model cannot be served.
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
    _check_handler(archive, folder, manifest)
    return manifest


def _json(path: Path, archive: str) -> dict[str, Any]:
    try:
        if path.stat().st_size > _TEXT_BYTES:
            raise ArchiveError(archive, f"{MANIFEST} is larger than a manifest")
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ArchiveError(archive, f"it holds no {MANIFEST}") from None
    except (ValueError, RecursionError) as error:
        raise ArchiveError(archive, f"{MANIFEST} is no JSON: {summarize(error)}") from None
    if not isinstance(document, dict):
        raise ArchiveError(archive, f"{MANIFEST} is no JSON object")
    return document


def _text(archive: str, model: Mapping[str, Any], key: str) -> str:
    value = model.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ArchiveError(archive, f"{MANIFEST} has no text for '{key}'")
    return value.strip()


def _file(archive: str, folder: Path, model: Mapping[str, Any], key: str) -> str:
    """Return the file that a manifest names; empty: it names none."""
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
    """Return whether the archive contains a module of this name."""
    return (folder / f"{module}.py").is_file() or (folder / module / "__init__.py").is_file()


def _check_handler(archive: str, folder: Path, manifest: Manifest) -> None:
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
            expected=f"a file {name}.py in it, or one of {join_names(HANDLERS)}",
            cure=_CURES.get(name, ""),
        )


_CURES = {
    "vllm_handler": "Triton's vLLM backend serves such models.",
    "trt_llm_handler": "Triton's TensorRT-LLM backend serves such models.",
    "dali_image_classifier": "Triton's DALI backend reads images on the GPU.",
}


def read_settings(folder: Path, manifest: Manifest, archive: str) -> dict[str, Any]:
    """Return the settings in the archive's model-config.yaml; empty: there is none.

    Raises:
        ArchiveError: it cannot be read.
    """
    if not manifest.config_file:
        return {}
    try:
        import yaml  # noqa: PLC0415  needed only for archives with settings
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
        _check_value_count(archive, path.name, yaml.compose(text, yaml.SafeLoader))
        document = yaml.safe_load(text)
    except ArchiveError:
        raise
    except Exception as error:  # int(), datetime() and others parse its values
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ArchiveError(archive, f"{path.name} cannot be read: {reason}") from None
    if not isinstance(document, dict | None):
        raise ArchiveError(
            archive, f"{path.name} holds a {type(document).__name__}", expected="keys and values"
        )
    return document or {}


def _check_value_count(archive: str, file: str, root: Any) -> None:
    """Raise an error if settings have too many values.

    With nested references, a kilobyte of YAML can stand for values that fill any memory.

    Args:
        archive: the name of the archive in messages.
        file: the name of the file.
        root: the nodes that PyYAML composes, from which it would construct the values.
    """
    pending, count = [root] if root is not None else [], 0
    while pending:
        value = pending.pop().value
        count += 1
        if isinstance(value, list):  # of nodes, or of pairs of nodes
            for node in value:
                pending += node if isinstance(node, tuple) else (node,)
        if count + len(pending) > _VALUES:
            raise ArchiveError(
                archive,
                f"{file} stands for more than {_VALUES} values",
                expected="settings that do not repeat themselves by reference",
            )
