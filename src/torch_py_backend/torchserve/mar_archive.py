"""Unpacks TorchServe archives within limits.

An archive of torch-model-archiver is a zip file (.mar), a tar file (.tar.gz) or a folder. Its code
is not run. Names that lead out of it, links, and contents above the limits are refused; sizes that
the archive declares are not trusted.
"""

from __future__ import annotations

import contextlib
import gzip
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from torch_py_backend.artifacts import file_types
from torch_py_backend.errors import ArchiveError, summarize

MANIFEST = Path("MAR-INF", "MANIFEST.json")
_CHUNK_BYTES = 1 << 20
_GIGABYTE = 1 << 30
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


def safe_path(archive: str, name: str) -> PurePosixPath:
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
        path = safe_path(archive, member.name)
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
