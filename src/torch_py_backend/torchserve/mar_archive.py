"""Unpacks TorchServe archives within limits, and reads their manifests and settings.

An archive of torch-model-archiver is a zip file (.mar), a tar file (.tar.gz) or a folder. Its code
is not run. Names that lead out of it, links, and contents above the limits are refused; sizes that
the archive declares are not trusted.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from torch_py_backend.artifacts import file_types
from torch_py_backend.errors import ArchiveError, join_names, summarize

MANIFEST = Path("MAR-INF", "MANIFEST.json")
# Handlers of TorchServe that are supported here.
HANDLERS = (
    "base_handler",
    "image_classifier",
    "image_segmenter",
    "object_detector",
)

# What serves the models of other handlers of TorchServe.
_ALTERNATIVES = {
    "vllm_handler": "Triton's vLLM backend serves such models.",
    "trt_llm_handler": "Triton's TensorRT-LLM backend serves such models.",
    "dali_image_classifier": "Triton's DALI backend reads images on the GPU.",
    "text_classifier": "Serve the model with hooks that call a tokenizer, see docs/hooks.md.",
}
# The keys of a manifest that name files of the archive.
_FILE_KEYS = ("serializedFile", "modelFile", "requirementsFile", "configFile", "sourceVocab")

_CHUNK_BYTES = 1 << 20
_GIGABYTE = 1 << 30
# The manifest and settings are read at once.
_MAX_TEXT_BYTES = 1 << 20
# The most values in settings.
_MAX_VALUES = 100_000
_MAX_NAME_BYTES = 255
# The deepest path: code that walks through folders is recursive.
_MAX_DEPTH = 32
# Exceptions for damaged files, beside OSError. RuntimeError: encrypted members, unknown methods of
# compression, and chains of headers, for which tarfile is recursive.
_DAMAGE_ERRORS = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    RuntimeError,
    ValueError,
    file_types.DirectoryTooLargeError,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an unpacked archive."""

    gigabytes: float = 10
    files: int = 10_000


class _Member(NamedTuple):
    """A file in an archive, open for reading; or a folder, without a file."""

    name: str
    declared_bytes: int = 0
    file: IO[bytes] | None = None


_Members = Generator[_Member, None, None]


# --- unpacking -------------------------------------------------------------------------------


def unpack(archive: Path, folder: Path, limits: Limits) -> None:
    """Unpack an archive into a new folder.

    Raises:
        ArchiveError: it is damaged, malicious or too large, or not a TorchServe archive.
        OSError: the folder cannot be written.
    """
    scratch = folder.with_name(f"{folder.name}-unpacked")
    try:
        with contextlib.closing(_read_members(archive)) as members:
            _write_members(archive.name, scratch, members, limits)
    except _DAMAGE_ERRORS as error:
        raise ArchiveError(
            archive.name,
            f"it is damaged: {summarize(error)}",
            cure="Copy or create it again.",
        ) from error
    # The manifest is at the top, or in the only folder there, as in tar files.
    entries = list(scratch.iterdir()) if scratch.is_dir() else []
    roots = [scratch, *entries] if len(entries) == 1 else [scratch]
    root = next((root for root in roots if (root / MANIFEST).is_file()), None)
    if root is None:
        raise ArchiveError(
            archive.name,
            f"it holds no {MANIFEST}",
            expected="what torch-model-archiver wrote",
            cure="For a model file, use `torch-py-backend init`.",
        )
    root.rename(folder)
    shutil.rmtree(scratch, ignore_errors=True)


def _read_members(archive: Path) -> _Members:
    """Yield the members of an archive; each file is closed when the next one is requested."""
    if archive.is_dir():
        yield from _folder_members(archive)
        return
    with archive.open("rb") as file:
        magic = file.read(4)
    if magic.startswith(b"PK"):
        yield from _zip_members(archive)
    elif magic.startswith(b"\x1f\x8b"):
        yield from _tar_members(archive)
    else:
        raise ArchiveError(
            archive.name,
            f"it is {file_types.file_type(archive).value}",
            expected="an archive of torch-model-archiver: .mar, .tar.gz, or a folder",
        )


def _folder_members(folder: Path) -> _Members:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise _not_a_file(folder, name)
        if path.is_file():
            with path.open("rb") as file:
                yield _Member(name, path.stat().st_size, file)


def _zip_members(path: Path) -> _Members:
    with file_types.BoundedFile(path) as bounded, zipfile.ZipFile(bounded) as archive:
        for entry in archive.infolist():
            # zipfile cuts `filename` at a zero byte, which may hide the rest of the name.
            name = entry.orig_filename
            if entry.is_dir():
                yield _Member(name)
                continue
            if stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG):
                raise _not_a_file(path, name)
            # The other methods inflate any number of bytes for each read.
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ArchiveError(
                    path.name,
                    f"{name} is compressed with method {entry.compress_type}",
                    expected="deflate, or no compression, as torch-model-archiver writes",
                )
            try:
                file = archive.open(entry)
            except OSError as error:  # its declared offset is before the beginning of the file
                raise zipfile.BadZipFile(f"{name}: {error.strerror}") from error
            with file:
                yield _Member(name, entry.file_size, file)


class _Inflated(gzip.GzipFile):
    """A gzip file with a limit for each read, because tarfile trusts the sizes in headers."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _CHUNK_BYTES:
            raise file_types.DirectoryTooLargeError
        return super().read(size)


def _tar_members(path: Path) -> _Members:
    with _Inflated(path) as inflated, tarfile.open(fileobj=inflated, mode="r:") as archive:
        for entry in archive:
            if entry.isdir():
                yield _Member(entry.name)
            elif not entry.isreg() or entry.issparse():
                raise _not_a_file(path, entry.name)
            else:
                yield _Member(entry.name, entry.size, archive.extractfile(entry))


def _not_a_file(archive: Path, name: str) -> ArchiveError:
    return ArchiveError(
        archive.name,
        f"{name[:_MAX_NAME_BYTES]} is a link or a special file",
        expected="plain files and folders",
        cure="Put the file itself into the archive.",
    )


def _safe_path(archive: str, name: str) -> PurePosixPath:
    """Return a name as a path, after checking that it stays within the archive."""
    path = PurePosixPath(name)
    leads_out = path.is_absolute() or ".." in path.parts or not path.parts
    unusual = not name.isprintable() or "\\" in name
    long = any(len(part.encode()) > _MAX_NAME_BYTES for part in path.parts)
    if leads_out or unusual or long or len(path.parts) > _MAX_DEPTH:
        raise ArchiveError(
            archive,
            f"it holds the name '{name[:_MAX_NAME_BYTES]}'",
            expected=f"names that stay within the archive, in at most {_MAX_DEPTH - 1} folders",
            cure="Nothing of it is kept; do not trust its source.",
        )
    return path


def _write_members(archive: str, folder: Path, members: Iterable[_Member], limits: Limits) -> None:
    """Write members into a folder, within the limits. Folders are created for their files only."""
    too_large = ArchiveError(
        archive,
        f"unpacked, it is larger than {limits.gigabytes:g} GB",
        cure="Allow more with --max-gigabytes, if you trust it.",
    )
    bytes_left = int(limits.gigabytes * _GIGABYTE)
    for number, member in enumerate(members):
        if number == limits.files:
            raise ArchiveError(
                archive,
                f"it holds more than {limits.files} files and folders",
                cure="Allow more with --max-files, if you trust it.",
            )
        if member.file is None:
            continue
        path = _safe_path(archive, member.name)
        if member.declared_bytes > bytes_left:
            raise too_large
        try:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            target = (folder / path).open("xb")
        except (FileExistsError, NotADirectoryError):
            raise ArchiveError(
                archive, f"it holds {path} twice", cure="Create the archive again."
            ) from None
        with target:
            while chunk := member.file.read(_CHUNK_BYTES):
                bytes_left -= len(chunk)
                if bytes_left < 0:
                    raise too_large
                target.write(chunk)


# --- manifest and settings -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of MAR-INF/MANIFEST.json.

    Attributes:
        model_name: the name of the model.
        handler: a file or module of the archive, or a handler of TorchServe; with `:function`, a
            function in it.
        requirements_file: the required packages; empty: the manifest names none.
        config_file: settings in YAML; empty: the manifest names none.
        document: the JSON object.
    """

    model_name: str
    handler: str
    requirements_file: str
    config_file: str
    document: Mapping[str, object]

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
    try:
        document = json.loads(_read_text(archive, folder, str(MANIFEST)))
    except (ValueError, RecursionError) as error:
        raise ArchiveError(archive, f"{MANIFEST} is not JSON: {summarize(error)}") from None
    model = document.get("model") if isinstance(document, dict) else None
    if not isinstance(model, dict):
        raise ArchiveError(
            archive,
            f"{MANIFEST} has no object 'model'",
            cure="Of a workflow (.war), import the models, and join them with a Triton ensemble.",
        )
    runtime = str(document.get("runtime", "python"))
    if runtime.lower() not in ("python", "python3"):
        raise ArchiveError(
            archive, f"its runtime is '{runtime}'", expected="a handler written in Python"
        )
    files = {key: str(model.get(key) or "") for key in _FILE_KEYS}
    for key, name in files.items():
        if name and not (folder / _safe_path(archive, name)).is_file():
            raise ArchiveError(
                archive,
                f"{MANIFEST} names the {key} {name}, which the archive does not hold",
                cure="Create the archive again.",
            )
    manifest = Manifest(
        model_name=_text(archive, model, "modelName"),
        handler=_text(archive, model, "handler"),
        requirements_file=files["requirementsFile"],
        config_file=files["configFile"],
        document=document,
    )
    name = manifest.handler_module
    if not name.isidentifier() or not (name in HANDLERS or holds_module(folder, name)):
        raise ArchiveError(
            archive,
            f"its handler is '{manifest.handler}', which it does not hold",
            expected=f"a Python file in it, or one of {join_names(HANDLERS)}",
            cure=_ALTERNATIVES.get(name, ""),
        )
    return manifest


def _read_text(archive: str, folder: Path, name: str) -> bytes:
    path = folder / name
    if not path.is_file():
        raise ArchiveError(archive, f"it holds no {name}")
    if path.stat().st_size > _MAX_TEXT_BYTES:
        raise ArchiveError(
            archive, f"{name} is too large", expected=f"at most {_MAX_TEXT_BYTES} bytes"
        )
    return path.read_bytes()


def _text(archive: str, model: Mapping[str, object], key: str) -> str:
    value = model.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ArchiveError(archive, f"{MANIFEST} has no text for '{key}'")
    return value.strip()


def holds_module(folder: Path, module: str) -> bool:
    """Return whether the archive contains a module of this name."""
    return (folder / f"{module}.py").is_file() or (folder / module / "__init__.py").is_file()


def read_settings(folder: Path, manifest: Manifest, archive: str) -> dict[str, object]:
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
    text = _read_text(archive, folder, manifest.config_file)
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        if root is not None:
            _check_size(root)
        document = yaml.safe_load(text)
    except Exception as error:  # int(), datetime() and others parse its values
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ArchiveError(archive, f"{manifest.config_file} cannot be read: {reason}") from None
    if not isinstance(document, dict | None):
        raise ArchiveError(
            archive,
            f"{manifest.config_file} holds a {type(document).__name__}",
            expected="keys and values",
        )
    return document or {}


def _check_size(root: Any) -> None:
    """Check that at most `_MAX_VALUES` values would be constructed from PyYAML's nodes.

    With nested references, a kilobyte of YAML can stand for values that fill any memory.

    Raises:
        ValueError: there would be more.
    """
    pending, count = [root], 0
    while pending:
        value = pending.pop().value  # a text, nodes, or pairs of nodes
        count += 1
        if count + len(pending) > _MAX_VALUES:
            raise ValueError(f"references expand to more than {_MAX_VALUES} values")
        for node in value if isinstance(value, list) else ():
            pending += node if isinstance(node, tuple) else (node,)
