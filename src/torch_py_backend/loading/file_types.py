"""Determine the type of a file, and advice for files that are not models.

Reads first bytes and zip members. Nothing is loaded, unpickled or run.
"""

from __future__ import annotations

import enum
import json
import zipfile
from collections.abc import Collection
from pathlib import Path

from torch_py_backend.errors import summarize

_HEAD_BYTES = 64
_METADATA_BYTES = 1 << 16

# Suffixes of weights of other frameworks, which `save_pretrained` folders may hold too.
_FOREIGN_SUFFIXES = (".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".gguf")


class FileType(enum.Enum):
    """The type of a file."""

    TORCHSCRIPT = "TorchScript"
    EXPORTED = "a torch.export program"
    AOTI = "an AOTInductor package"
    STATE_DICT = "a state_dict, or a pickled module"
    SAFETENSORS = "safetensors: weights without code"
    GIT_LFS = "a git-lfs pointer, not the file that it stands for"
    UNKNOWN = "not a PyTorch file, or a damaged one"


def advice(content: FileType, path: Path) -> str:
    """Return what to do with a file that cannot be served."""
    cure = _CURES.get(content, "Write it again with torch.jit.save, or copy it again.")
    return cure.format(source=f"{path.stem}.py beside it")


_CURES = {
    FileType.STATE_DICT: "Put the class that it belongs to in {source}. Save module.state_dict():"
    " pickled modules can run any code and are not loaded.",
    FileType.SAFETENSORS: "Put the class that it belongs to in {source}.",
    FileType.GIT_LFS: "Fetch the file with `git lfs pull`.",
}

# The members of zip archives: a part of the name, its end, and the type. No regular expressions, as
# the names come from the file: some take quadratic time.
_MEMBERS = (
    ("/data/aotinductor/", "", FileType.AOTI),
    ("/models/", ".json", FileType.EXPORTED),
    ("", "serialized_exported_program.json", FileType.EXPORTED),  # before torch 2.7
    ("/code/", "", FileType.TORCHSCRIPT),
    ("", "/constants.pkl", FileType.TORCHSCRIPT),
    ("", "data.pkl", FileType.STATE_DICT),
)


def file_type(path: Path) -> FileType:
    """Return the type of a file from its first bytes and the names of its zip members."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(b"\x80"):  # a pickle's first opcode: torch.save before torch 1.6
        return FileType.STATE_DICT
    if head.startswith(b"PK"):
        try:
            with zipfile.ZipFile(path) as archive:
                # A user's own files (`_extra_files`) may have any name.
                names = [name for name in archive.namelist() if "/extra/" not in name]
        except Exception:  # a damaged archive raises nearly anything
            return FileType.UNKNOWN
        for part, suffix, content in _MEMBERS:
            if any(part in name and name.endswith(suffix) for name in names):
                return content
    if head.startswith(b"version https://git-lfs"):
        return FileType.GIT_LFS
    # safetensors: eight bytes with the length of the JSON header.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return FileType.SAFETENSORS
    return FileType.UNKNOWN


def mmap_obstacle(weights: Path) -> str:
    """Return why a weights file cannot be mapped into memory; empty: it can."""
    if weights.suffix in (".safetensors", ".json"):
        return ""
    try:
        with weights.open("rb") as file:
            if file.read(2) != b"PK":
                return f"{weights.name} is not a zip archive: torch older than 1.6 wrote it"
            with zipfile.ZipFile(file) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    return f"the entries of {weights.name} are compressed"
    except Exception:  # damaged or unreadable, which loading it reports
        return f"{weights.name} cannot be read"
    return ""


def aoti_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of an AOTInductor package about its target; empty if it has none."""
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if "/data/aotinductor/" in name and name.endswith("_metadata.json"):
                    with archive.open(name) as file:
                        entries = json.loads(file.read(_METADATA_BYTES)).items()
                    return {key: value for key, value in entries if isinstance(value, str)}
    except Exception:  # damaged, which loading it reports
        return {}
    return {}


def is_cuda_package(path: Path) -> bool:
    """Return whether a file is an AOTInductor package for a CUDA device."""
    return aoti_metadata(path).get("AOTI_DEVICE_KEY") == "cuda"


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each weight in Hugging Face's `model.safetensors.index.json`.

    Raises:
        OSError: the index cannot be read.
        ValueError: it is invalid.
    """
    content = index.read_bytes()
    try:
        names = dict(json.loads(content)["weight_map"].items())
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"it is no index of safetensors: {summarize(error)}") from error
    if not all(isinstance(name, str) for name in names.values()):
        raise ValueError("it names a file that is no string")
    return names


def pretrained_files(names: Collection[str]) -> list[str]:
    """Return the files of a `save_pretrained` folder that PyTorch needs, of those in it.

    A folder of the Hugging Face hub may hold the same weights for other frameworks, and twice for
    PyTorch: as safetensors and pickled.
    """
    has_safetensors = any(name.endswith(".safetensors") for name in names)
    unused = (*_FOREIGN_SUFFIXES, ".bin") if has_safetensors else _FOREIGN_SUFFIXES
    return [name for name in names if not name.endswith(unused) and not name.startswith(".")]
