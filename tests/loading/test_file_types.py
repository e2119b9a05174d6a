"""The type of a file from its first bytes and zip members."""

import argparse
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import safetensors.torch
import torch
from torch import nn

from torch_py_backend.loading import file_types
from torch_py_backend.loading.file_types import FileType

_Write = Callable[[Path], object]


def save(value: Any, **options: Any) -> _Write:
    return lambda path: torch.save(value, path, **options)


def raw(content: bytes) -> _Write:
    return lambda path: path.write_bytes(content)


def archive(*names: str, **members: bytes) -> _Write:
    """Return a writer of a zip archive; `names` are members without content."""

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as file:
            for name, content in (dict.fromkeys(names, b"") | members).items():
                file.writestr(f"model/{name}", content)

    return write


def repacked(path: Path) -> None:
    """Write a state_dict whose archive was unpacked and packed again with another tool."""
    stored = io.BytesIO()
    torch.save({"weight": torch.ones(3)}, stored)
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))


def long_names(path: Path) -> None:
    """Write a zip of members without content whose names take a regular expression minutes."""
    archive(*("/models/" * 4000 + "." * 32000 + str(number) for number in range(32)))(path)


def old_program(path: Path) -> None:
    """Write an exported program of torch before 2.7, whose members are not in a folder."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("serialized_exported_program.json", "{}")
        file.writestr("serialized_state_dict.pt", b"")


def truncated(write: _Write, share: float) -> _Write:
    def cut(path: Path) -> None:
        write(path)
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    return cut


_MODULE = models.Affine()
_STATE = _MODULE.state_dict()
_LEGACY = {"_use_new_zipfile_serialization": False}


def script(path: Path) -> None:
    torch.jit.save(torch.jit.script(_MODULE), path)


CONTENTS: dict[str, tuple[_Write, FileType]] = {
    "torch.jit.script": (script, FileType.TORCHSCRIPT),
    "code alone": (archive("data.pkl", "code/__torch__.py"), FileType.TORCHSCRIPT),
    "constants": (archive("data.pkl", "constants.pkl"), FileType.TORCHSCRIPT),
    "extra files": (
        lambda path: torch.jit.save(
            torch.jit.script(nn.ReLU()), path, _extra_files={"models/labels.json": "{}"}
        ),
        FileType.TORCHSCRIPT,
    ),
    "state_dict": (save(_STATE), FileType.STATE_DICT),
    "legacy state_dict": (save(_STATE, **_LEGACY), FileType.STATE_DICT),
    "checkpoint": (save({"args": argparse.Namespace(), "model": _STATE}), FileType.STATE_DICT),
    "compressed again": (repacked, FileType.STATE_DICT),
    "module": (save(_MODULE), FileType.STATE_DICT),
    "empty": (raw(b""), FileType.UNKNOWN),
    "git-lfs pointer": (raw(b"version https://git-lfs.github.com/spec/v1\n"), FileType.GIT_LFS),
    "other zip": (archive("notes.txt"), FileType.UNKNOWN),
    "safetensors": (lambda path: safetensors.torch.save_file(_STATE, path), FileType.SAFETENSORS),
    "exported program": (
        lambda path: torch.export.save(torch.export.export(_MODULE, (torch.ones(1, 4),)), path),
        FileType.EXPORTED,
    ),
    "exported before torch 2.7": (old_program, FileType.EXPORTED),
    # A package may hold its program, too.
    "AOTInductor package": (
        archive("models/model.json", "data/aotinductor/model/abc.so"),
        FileType.AOTI,
    ),
    "head of a zip": (raw(b"PK\x03\x04" + bytes(60)), FileType.UNKNOWN),
    "nearly a state_dict": (truncated(save(_STATE), 0.999), FileType.UNKNOWN),
    "names that take quadratic time to match": (long_names, FileType.UNKNOWN),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_content(name: str, tmp_path: Path) -> None:
    """The type follows from the first bytes and the members, for every way of saving."""
    write, content = CONTENTS[name]
    write(tmp_path / "model.pt")
    assert file_types.file_type(tmp_path / "model.pt") is content


_PACKAGE = "data/aotinductor/model/abc_metadata.json"


@pytest.mark.parametrize(
    ("member", "content", "metadata"),
    [
        (_PACKAGE, b'{"AOTI_DEVICE_KEY": "cpu", "n": 3}', {"AOTI_DEVICE_KEY": "cpu"}),
        ("data/extra/abc_metadata.json", b'{"a": "b"}', {}),
        (_PACKAGE, b"[1]", {}),
        (_PACKAGE, json.dumps({"note": "x" * (1 << 17)}).encode(), {}),
    ],
    ids=["strings", "another file", "list", "longer than is read"],
)
def test_metadata_of_a_package(
    member: str, content: bytes, metadata: dict[str, str], tmp_path: Path
) -> None:
    """Metadata names the target machine; without it torch decides whether a package loads."""
    archive(**{member: content})(tmp_path / "model.pt2")
    assert file_types.aoti_metadata(tmp_path / "model.pt2") == metadata
