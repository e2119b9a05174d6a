"""Unpacking archives."""

from __future__ import annotations

import gzip
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import archives
import models
import pytest
import torch

from torch_py_backend.errors import ArchiveError
from torch_py_backend.torchserve import mar_archive
from torch_py_backend.torchserve.mar_archive import Limits

_FILES: archives.Files = {
    "handler.py": "x = 1\n",
    "deep/er/notes.txt": "é",
    "model.bin": bytes(range(256)) * 4000,
    archives.MANIFEST: archives.manifest(),
}


def _tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _expected() -> dict[str, bytes]:
    return {
        name: content.encode() if isinstance(content, str) else content
        for name, content in _FILES.items()
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda path: archives.write(path, _FILES, compression=zipfile.ZIP_DEFLATED),
        lambda path: archives.write_tar(path, _FILES, "./net"),
        lambda path: archives.write_folder(path, _FILES),
    ],
    ids=["mar", "tgz", "no-archive"],
)
def test_all_formats_of_the_archiver(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """All formats of torch-model-archiver unpack to the same files; the source stays as it was."""
    source = make(tmp_path / "net.mar")
    before = {path: path.stat().st_mtime_ns for path in (source, *source.rglob("*"))}
    folder = tmp_path / "out" / "model.mar"
    folder.parent.mkdir()
    mar_archive.unpack(source, folder, Limits())
    assert _tree(folder) == _expected()
    assert [path.name for path in folder.parent.iterdir()] == ["model.mar"]
    assert {path: path.stat().st_mtime_ns for path in (source, *source.rglob("*"))} == before


def test_empty_folders_and_executables(tmp_path: Path) -> None:
    """Entries of folders do not become files, and no file becomes executable."""
    path = tmp_path / "net.mar"
    with zipfile.ZipFile(path, "w") as archive:
        archive.mkdir("empty") if hasattr(archive, "mkdir") else archive.writestr("empty/", "")
        entry = zipfile.ZipInfo("run.sh")
        entry.external_attr = (stat.S_IFREG | 0o4777) << 16
        archive.writestr(entry, "#!/bin/sh\n")
        archive.writestr(archives.MANIFEST, archives.manifest())
    mar_archive.unpack(path, tmp_path / "out", Limits())
    assert sorted(_tree(tmp_path / "out")) == [archives.MANIFEST, "run.sh"]
    assert not (tmp_path / "out" / "run.sh").stat().st_mode & 0o7111


# --- hostile ---------------------------------------------------------------------------------


def _zip(*names: str, **how: int) -> Callable[[Path], object]:
    return lambda path: archives.write(
        path, {**dict.fromkeys(names, "evil"), archives.MANIFEST: archives.manifest()}, **how
    )


def _zip_entry(mode: int) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            entry = zipfile.ZipInfo("special")
            entry.external_attr = mode << 16
            archive.writestr(entry, "/etc/passwd")

    return make


def _encrypted(path: Path) -> None:
    archives.write(path, _FILES)
    content = bytearray(path.read_bytes())
    place = content.index(b"PK\x01\x02")
    content[place + 8] |= 1
    path.write_bytes(content)


def _nul(path: Path) -> None:
    _zip("handler_py_x")(path)
    path.write_bytes(path.read_bytes().replace(b"handler_py_x", b"handler.py\0x"))


def _lying_size(path: Path) -> None:
    """Write an archive that declares ten bytes for a file of a megabyte."""
    archives.write(path, {"big": bytes(1 << 20)}, compression=zipfile.ZIP_DEFLATED)
    content = path.read_bytes()
    place = content.index(b"PK\x01\x02")
    path.write_bytes(content[: place + 24] + struct.pack("<I", 10) + content[place + 28 :])


def _tar(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> Callable[[Path], object]:
    def make(path: Path) -> None:
        with tarfile.open(path, "w:gz") as archive:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, target
            archive.addfile(entry)

    return make


def _tar_sized(size: int) -> Callable[[Path], object]:
    """Return a writer of an archive whose header declares a larger size than the file has."""

    def make(path: Path) -> None:
        entry = tarfile.TarInfo("big")
        entry.size = size
        with gzip.open(path, "wb") as file:
            file.write(entry.tobuf(tarfile.GNU_FORMAT))

    return make


def _tar_long_name(path: Path) -> None:
    """Write an archive with a name of 100 MB, which tarfile would read at once."""
    entry = tarfile.TarInfo("././@LongLink")
    entry.type, entry.size = tarfile.GNUTYPE_LONGNAME, 100 << 20
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(entry.tobuf(tarfile.GNU_FORMAT))
        for _ in range(100):
            file.write(b"a" * (1 << 20))


def _tar_headers(kind: bytes, count: int) -> Callable[[Path], object]:
    """Return a writer of an archive with many headers, which compress to a small file."""

    def make(path: Path) -> None:
        entry = tarfile.TarInfo("deeper")
        content = b"" if kind == tarfile.DIRTYPE else b"12 comment=x".ljust(512, b"\n")
        entry.type, entry.size = kind, len(content)
        with gzip.open(path, "wb", compresslevel=1) as file:
            file.write((entry.tobuf(tarfile.GNU_FORMAT) + content) * count)

    return make


def _truncated(write: Callable[..., Path]) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        write(path, _FILES)
        path.write_bytes(path.read_bytes()[:-200])

    return make


def _twice(path: Path) -> None:
    """Write an archive with two files of the same name."""
    _zip("name1", "name2")(path)
    path.write_bytes(path.read_bytes().replace(b"name2", b"name1"))


def _early_offset(path: Path) -> None:
    """Write an archive with a member that starts before the beginning of the file."""
    _zip("x")(path)
    content = bytearray(path.read_bytes())
    end = content.rindex(b"PK\x05\x06")
    content[end + 16 : end + 20] = struct.pack("<I", 1 << 20)
    path.write_bytes(content)


def _link_in_folder(path: Path) -> None:
    archives.write_folder(path, _FILES)
    (path / "link").symlink_to("/etc/passwd")


_INVALID: dict[str, tuple[Callable[[Path], object], str]] = {
    "dots": (_zip("../evil"), "holds the name '../evil'"),
    "long": (_zip("x" * 300), "holds the name"),
    "absolute": (_zip("/tmp/evil"), "holds the name '/tmp/evil'"),
    "backslash": (_zip("..\\evil"), "holds the name"),
    "newline": (_zip("a\nb"), "holds the name 'a?b'"),
    "zero": (_nul, "holds the name 'handler.py?x'"),
    "deep": (_zip("a/" * 1500 + "x"), "in at most 31 folders"),
    "twice": (_twice, "holds name1 twice"),
    "folder-as-file": (_zip("a/b", "a"), "holds a twice"),
    "file-as-folder": (_zip("a", "a/b"), "holds a/b twice"),
    "file-as-two-folders": (_zip("a", "a/b/c"), "holds a/b/c twice"),
    "link": (_zip_entry(stat.S_IFLNK | 0o777), "is a link"),
    "pipe": (_zip_entry(stat.S_IFIFO), "special file"),
    "encrypted": (_encrypted, "is encrypted, password required"),
    "lzma": (_zip("x", compression=zipfile.ZIP_LZMA), "compressed with method 14"),
    "lying-size": (_lying_size, "damaged"),
    "early-offset": (_early_offset, "damaged"),
    "truncated": (_truncated(archives.write), "damaged"),
    "tar-dots": (_tar("../evil"), "holds the name '../evil'"),
    "tar-link": (_tar("a", tarfile.SYMTYPE, "/etc/passwd"), "is a link"),
    "tar-hard-link": (_tar("a", tarfile.LNKTYPE, "b"), "is a link"),
    "tar-size": (_tar_sized(1 << 60), "larger than 10 GB"),
    "tar-short": (_tar_sized(1 << 20), "damaged"),
    "tar-long-name": (_tar_long_name, "damaged: DirectoryTooLargeError"),
    "tar-pax-chain": (_tar_headers(tarfile.XHDTYPE, 3000), "damaged"),
    "tar-folders": (_tar_headers(tarfile.DIRTYPE, 10_001), "more than 10000 files and folders"),
    "tar-truncated": (_truncated(archives.write_tar), "damaged"),
    "folder-link": (_link_in_folder, "is a link"),
    "empty": (lambda path: path.write_bytes(b""), "it is empty; expected an archive of torch-mod"),
    "model": (
        lambda path: torch.jit.script(models.Negate()).save(path),
        "no MAR-INF/MANIFEST.json; expected what torch-model-archiver wrote. For a model file, use",
    ),
    "two-folders": (lambda path: archives.write(path, {"a/x": "", "b/y": ""}), "holds no MAR-INF"),
}


@pytest.mark.parametrize("name", _INVALID)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_invalid_archives(tmp_path: Path, name: str) -> None:
    """A malicious or damaged archive raises an error, and no files are left."""
    make, message = _INVALID[name]
    make(tmp_path / "net.mar")
    target = tmp_path / "out" / "within" / "model.mar"
    target.parent.mkdir(parents=True)
    with pytest.raises(ArchiveError) as error:
        mar_archive.unpack(tmp_path / "net.mar", target, Limits())
    assert message in str(error.value)
    assert str(error.value).startswith("net.mar: ")
    assert "\n" not in str(error.value)
    assert not target.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"net.mar", "out"}
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize(
    ("write", "limits", "message"),
    [
        (archives.write, Limits(files=3), "more than 3 files and folders. Allow more with --max-f"),
        (archives.write_tar, Limits(gigabytes=0.0005), "larger than 0.0005 GB. Allow more with"),
        (archives.write_folder, Limits(gigabytes=0.0005), "larger than 0.0005 GB"),
    ],
)
def test_limits(tmp_path: Path, write: Callable[..., Path], limits: Limits, message: str) -> None:
    """Archives above a limit raise an error that says how to raise the limit."""
    archive = write(tmp_path / "net.mar", _FILES)
    with pytest.raises(ArchiveError) as error:
        mar_archive.unpack(archive, tmp_path / "out", limits)
    assert message in str(error.value)


def test_an_archive_at_the_limits(tmp_path: Path) -> None:
    """Archives at the limits of files, bytes and folders are unpacked."""
    _zip("a/" * 31 + "x")(tmp_path / "deep.mar")
    mar_archive.unpack(tmp_path / "deep.mar", tmp_path / "deep", Limits(files=2))
    archive = archives.write(tmp_path / "net.mar", _FILES)
    size = sum(map(len, _expected().values()))
    limits = Limits(files=4, gigabytes=(size + 0.5) / (1 << 30))
    mar_archive.unpack(archive, tmp_path / "out", limits)
    assert _tree(tmp_path / "out") == _expected()


def test_zip_bomb(tmp_path: Path) -> None:
    """64 MB of zeros in a small file are refused by their size, before they are written."""
    path = tmp_path / "net.mar"
    archives.write(path, {"zeros": bytes(64 << 20)}, compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 17
    with pytest.raises(ArchiveError, match=r"larger than 0.01 GB"):
        mar_archive.unpack(path, tmp_path / "out", Limits(gigabytes=0.01))
    written = sum(path.stat().st_size for path in tmp_path.rglob("zeros"))
    assert written == 0
