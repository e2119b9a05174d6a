"""The type of a file from its first bytes, zip members and the names in pickles."""

import gzip
import io
import json
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import build
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from torch_py_backend.artifacts import file_types
from torch_py_backend.artifacts.file_types import FileType


class Doubled(nn.Module):
    """A module with a weight, as user code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def save(thing: Any, **options: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(thing(), path, **options)


def script(path: Path) -> None:
    torch.jit.save(torch.jit.script(Doubled()), path)


def trace(path: Path) -> None:
    torch.jit.save(torch.jit.trace(Doubled(), torch.ones(3)), path)


def archive(**members: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as file:
            for name, content in members.items():
                file.writestr(f"model/{name}", content)

    return write


def repacked(path: Path) -> None:
    """Return a state_dict whose archive was unpacked and packed again with another tool."""
    stored = io.BytesIO()
    torch.save({"weight": torch.ones(3)}, stored)
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))


def crowded(path: Path) -> None:
    """Return a zip with a central directory of 17 MiB."""
    length = 17 << 20
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1 << 15, 1 << 15, length, 4, 0)
    path.write_bytes(b"PK\3\4" + bytes(length) + end)


def long_names(path: Path) -> None:
    """Write a zip of members without content whose names take a regular expression minutes."""
    with zipfile.ZipFile(path, "w") as file:
        for number in range(32):
            file.writestr("/models/" * 4000 + "." * 32000 + str(number), b"")


def compressed_in_an_unknown_way(path: Path) -> None:
    """Return a zip archive whose data.pkl has the compression method 99."""
    archive(**{"data.pkl": b"\x80\x02}."})(path)
    content = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        content[content.index(signature) + offset] = 99
    path.write_bytes(content)


def old_program(path: Path) -> None:
    """Return an old exported program, whose members are not in a folder."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("version", "8.2")
        file.writestr("serialized_exported_program.json", "{}")
        file.writestr("serialized_state_dict.pt", b"")


def raw(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def numpy_file(save: Callable[..., Any], array: Any) -> bytes:
    file = io.BytesIO()
    save(file, array)
    return file.getvalue()


def many_keys(path: Path) -> None:
    """Return a state_dict whose pickle is longer than the part that is read."""
    torch.save({f"layer{number:0300d}": torch.zeros(0) for number in range(4000)}, path)


CONTENTS = [
    pytest.param(script, FileType.TORCHSCRIPT, id="torch.jit.script"),
    pytest.param(trace, FileType.TORCHSCRIPT, id="torch.jit.trace"),
    pytest.param(
        archive(**{"data.pkl": b"", "code/__torch__.py": b""}),
        FileType.TORCHSCRIPT,
        id="code alone",
    ),
    pytest.param(
        archive(**{"data.pkl": b"", "constants.pkl": b""}), FileType.TORCHSCRIPT, id="constants"
    ),
    pytest.param(save(lambda: Doubled().state_dict()), FileType.STATE_DICT, id="state_dict"),
    pytest.param(
        save(lambda: Doubled().state_dict(), _use_new_zipfile_serialization=False),
        FileType.STATE_DICT,
        id="legacy state_dict",
    ),
    pytest.param(many_keys, FileType.STATE_DICT, id="state_dict of 4000 keys"),
    pytest.param(
        save(lambda: {"epoch": 3, "state_dict": Doubled().state_dict()}),
        FileType.STATE_DICT,
        id="checkpoint",
    ),
    pytest.param(save(lambda: torch.ones(3)), FileType.STATE_DICT, id="bare tensor"),
    pytest.param(save(Doubled), FileType.PICKLED_MODULE, id="own module"),
    pytest.param(
        save(lambda: nn.Sequential(nn.Linear(2, 2))), FileType.PICKLED_MODULE, id="torch's module"
    ),
    pytest.param(
        save(Doubled, _use_new_zipfile_serialization=False),
        FileType.PICKLED_MODULE,
        id="legacy module",
    ),
    pytest.param(save(Doubled, pickle_protocol=4), FileType.PICKLED_MODULE, id="protocol 4 module"),
    # Its second storage takes the name "torch" from the pickle's memo.
    pytest.param(
        save(lambda: {"a": torch.ones(1), "b": torch.ones(1, dtype=torch.int8)}, pickle_protocol=4),
        FileType.STATE_DICT,
        id="protocol 4 state_dict",
    ),
    pytest.param(raw(b""), FileType.EMPTY, id="empty"),
    pytest.param(
        raw(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"),
        FileType.GIT_LFS,
        id="git-lfs pointer",
    ),
    pytest.param(raw(b"<!DOCTYPE html>\n<html>404"), FileType.HTML, id="HTML"),
    pytest.param(raw(b'<?xml version="1.0"?><Error>'), FileType.HTML, id="XML of an object store"),
    pytest.param(raw(gzip.compress(b"model")), FileType.COMPRESSED, id="gzip"),
    pytest.param(raw(b"(\xb5/\xfd" + bytes(20)), FileType.COMPRESSED, id="zstandard"),
    pytest.param(raw(b"\x89HDF\r\n\x1a\n" + bytes(60)), FileType.TENSORFLOW, id="HDF5"),
    pytest.param(raw(b"\x08\x07\x12\x07pytorch\x1a\x052.1.0"), FileType.ONNX, id="ONNX of torch"),
    pytest.param(raw(b"\x08\x08\x12\x08skl2onnx:"), FileType.ONNX, id="ONNX of others"),
    pytest.param(raw(numpy_file(np.save, np.ones(3))), FileType.NUMPY, id="numpy array"),
    pytest.param(
        archive(**{"variables/x": b"", "keras_metadata.pb": b""}), FileType.TENSORFLOW, id="Keras"
    ),
    pytest.param(
        archive(**{"config.json": b"{}", "model.weights.h5": b""}),
        FileType.TENSORFLOW,
        id="Keras 3",
    ),
    pytest.param(raw(numpy_file(np.savez, np.ones(3))), FileType.UNKNOWN, id="numpy archive"),
    pytest.param(raw(bytes(range(7, 250))), FileType.UNKNOWN, id="random bytes"),
    pytest.param(
        lambda path: safetensors.torch.save_file(Doubled().state_dict(), path),
        FileType.SAFETENSORS,
        id="safetensors",
    ),
    pytest.param(archive(**{"notes.txt": b"hello"}), FileType.UNKNOWN, id="other zip"),
    pytest.param(
        archive(**{"models/model.json": b"{}", "data/weights/weight_0": b""}),
        FileType.EXPORTED,
        id="exported program",
    ),
    pytest.param(
        lambda path: torch.export.save(torch.export.export(Doubled(), (torch.ones(3),)), path),
        FileType.EXPORTED,
        id="torch.export.save",
    ),
    pytest.param(old_program, FileType.EXPORTED, id="exported before torch 2.7"),
    pytest.param(
        archive(
            **{
                "data/aotinductor/model/abc.wrapper.so": b"",
                "data/aotinductor/model/abc_metadata.json": b"{}",
                "version": b"6",
            }
        ),
        FileType.AOTI,
        id="AOTInductor package",
    ),
    pytest.param(
        archive(**{"models/model.json": b"{}", "data/aotinductor/model/abc.so": b""}),
        FileType.AOTI,
        id="package with its program",
    ),
    pytest.param(raw(b"PK\x03\x04" + bytes(60)), FileType.TRUNCATED, id="head of a zip"),
    pytest.param(compressed_in_an_unknown_way, FileType.TRUNCATED, id="unknown compression"),
    pytest.param(repacked, FileType.STATE_DICT, id="compressed again"),
    pytest.param(crowded, FileType.CROWDED, id="absurd list of members"),
    pytest.param(long_names, FileType.UNKNOWN, id="names that take quadratic time to match"),
]


@pytest.mark.parametrize(("write", "content"), CONTENTS)
def test_content(write: Callable[[Path], None], content: FileType, tmp_path: Path) -> None:
    """The type follows from the first bytes and the members, for every way of saving."""
    write(tmp_path / "model.pt")

    assert file_types.file_type(tmp_path / "model.pt") is content


@pytest.mark.parametrize("share", [0.1, 0.999])
@pytest.mark.parametrize("write", [script, save(lambda: Doubled().state_dict())], ids=["jit", "pt"])
def test_truncated_archive(write: Callable[[Path], None], share: float, tmp_path: Path) -> None:
    """An incomplete copy is recognized, wherever it ends."""
    path = tmp_path / "model.pt"
    write(path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    assert file_types.file_type(path) is FileType.TRUNCATED


def test_damaged_pickle(tmp_path: Path) -> None:
    """A flipped byte in the archive's pickle is detected by its checksum."""
    path = tmp_path / "model.pt"
    torch.save(Doubled().state_dict(), path)
    content = bytearray(path.read_bytes())
    content[content.index(b"_rebuild_tensor_v2")] ^= 0xFF
    path.write_bytes(content)

    assert file_types.file_type(path) is FileType.TRUNCATED


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("model.onnx", b"\x08\x03:\x10" + bytes(70), FileType.ONNX),
        ("saved_model.pb", b"\x08\x01\x12\x07", FileType.TENSORFLOW),
    ],
)
def test_type_by_name(name: str, content: bytes, expected: FileType, tmp_path: Path) -> None:
    """An ONNX or TensorFlow file without a recognizable header is recognized by its name."""
    assert file_types.file_type(build.write(tmp_path, name, content)) is expected


def bomb(path: Path, filling: bytes, size: int, compression: int) -> None:
    """Return an archive whose data.pkl has `size` bytes."""
    with (
        zipfile.ZipFile(path, "w", compression) as file,
        file.open("model/data.pkl", "w", force_zip64=True) as member,
    ):
        member.write(b"\x80\x02")
        for _ in range(size // len(filling)):
            member.write(filling)


@pytest.mark.parametrize(
    ("filling", "compression", "expected"),
    [
        (b"\x00", zipfile.ZIP_STORED, FileType.STATE_DICT),
        (b"}", zipfile.ZIP_DEFLATED, FileType.BOMB),
    ],
    ids=["stored", "deflated"],
)
def test_large_pickle_is_read_in_part(
    filling: bytes, compression: int, expected: FileType, tmp_path: Path
) -> None:
    """A pickle is read up to a bound; one with a high compression ratio is not read."""
    bomb(tmp_path / "model.pt", filling * (1 << 20), 64 << 20, compression)
    tracemalloc.start()
    try:
        assert file_types.file_type(tmp_path / "model.pt") is expected
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 32 << 20


@pytest.mark.parametrize(
    ("flags", "method"),
    [(1, None), (0, zipfile.ZIP_DEFLATED), (0, zipfile.ZIP_BZIP2), (0, zipfile.ZIP_LZMA)],
    ids=["encrypted", "damaged deflate", "damaged bzip2", "damaged lzma"],
)
def test_unreadable_members(flags: int, method: int | None, tmp_path: Path) -> None:
    """Members that are encrypted or do not inflate make a damaged archive, not a crash."""
    path = tmp_path / "model.pt"
    archive(**{"data.pkl": bytes(range(256)) * 8})(path)
    content = bytearray(path.read_bytes())
    for signature, flag, kind in ((b"PK\x03\x04", 6, 8), (b"PK\x01\x02", 8, 10)):
        start = content.index(signature)
        content[start + flag] |= flags
        if method is not None:
            content[start + kind] = method
    path.write_bytes(content)

    assert file_types.file_type(path) is FileType.TRUNCATED


# --- what to do --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        (FileType.STATE_DICT, "Put the class that it belongs to in net.py beside it"),
        (FileType.PICKLED_MODULE, "Save module.state_dict() instead and put the class in net.py"),
        (FileType.GIT_LFS, "git lfs pull"),
        (FileType.EMPTY, "copy it again"),
    ],
)
def test_advice(content: FileType, advice: str) -> None:
    """The advice fits the type of file and names the source beside it."""
    assert advice in file_types.advice(content, Path("/models/digits/1/net.pt"))


# --- what a package was built for ------------------------------------------------------------


@pytest.mark.parametrize(
    ("member", "content", "metadata"),
    [
        (
            "aotinductor/model/abc",
            b'{"AOTI_DEVICE_KEY": "cpu", "n": 3}',
            {"AOTI_DEVICE_KEY": "cpu"},
        ),
        ("extra/abc", b'{"a": "b"}', {}),
        ("aotinductor/model/abc", b"{", {}),
        ("aotinductor/model/abc", b"[1]", {}),
        ("aotinductor/model/abc", b"\xff", {}),
        ("aotinductor/model/abc", json.dumps({"note": "x" * (1 << 17)}).encode(), {}),
    ],
    ids=["strings", "another file", "cut off", "list", "not UTF-8", "longer than is read"],
)
def test_metadata_of_a_package(
    member: str, content: bytes, metadata: dict[str, str], tmp_path: Path
) -> None:
    """Metadata names the target machine; without it torch decides whether a package loads."""
    archive(**{f"data/{member}_metadata.json": content})(tmp_path / "model.pt2")

    assert file_types.aoti_metadata(tmp_path / "model.pt2") == metadata
