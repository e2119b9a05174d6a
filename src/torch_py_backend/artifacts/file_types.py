"""Determine the type of a file, and advice for files that are not models.

Reads first bytes, zip members and the names in pickles, up to a bound. Nothing is loaded, unpickled
or run.
"""

from __future__ import annotations

import enum
import io
import json
import pickletools
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path

from torch_py_backend.errors import summarize

# Enough of a pickle to find the classes that it names; a bound for hostile files.
_PICKLE_BYTES = 1 << 20
_METADATA_BYTES = 1 << 16
_INFLATION = 100
# The limit of a zip's central directory, which is read at once; 100,000 tensors have less.
_LISTED_BYTES = 1 << 24

# Suffixes of weights of other frameworks, which `save_pretrained` folders may hold too.
_FOREIGN_SUFFIXES = (".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".gguf")


class FileType(enum.Enum):
    """The type of a file."""

    TORCHSCRIPT = "TorchScript"
    EXPORTED = "a torch.export program"
    AOTI = "an AOTInductor package"
    STATE_DICT = "a state_dict: weights without code"
    PICKLED_MODULE = "a pickle of a whole module"
    SAFETENSORS = "safetensors: weights without code"
    ONNX = "an ONNX model"
    TENSORFLOW = "a TensorFlow or Keras model"
    HTML = "an HTML page, not the file that was to be downloaded"
    GIT_LFS = "a git-lfs pointer, not the file that it stands for"
    COMPRESSED = "a compressed archive"
    NUMPY = "a numpy array"
    EMPTY = "empty"
    TRUNCATED = "a truncated or damaged zip archive"
    BOMB = "a zip archive that inflates to a hundred times its size"
    UNKNOWN = "not a file that torch.save, torch.jit.save or torch.export.save wrote"


def advice(content: FileType, path: Path) -> str:
    """Return what to do with a file that cannot be served."""
    cure = _CURES.get(content, "Write it again with torch.jit.save, or copy it again.")
    return cure.format(source=f"{path.stem}.py beside it")


_CURES = {
    FileType.STATE_DICT: "Put the class that it belongs to in {source}.",
    FileType.SAFETENSORS: "Put the class that it belongs to in {source}.",
    FileType.PICKLED_MODULE: "Pickles can run any code and are not loaded. Save module.state_dict()"
    " instead and put the class in {source}, or save TorchScript or a torch.export program.",
    FileType.ONNX: "Triton's onnxruntime backend serves it; here, export the PyTorch model.",
    FileType.TENSORFLOW: "This backend serves PyTorch models; convert it first.",
    FileType.HTML: "Download it again; the page may say why that failed.",
    FileType.GIT_LFS: "Fetch the file with `git lfs pull`.",
    FileType.COMPRESSED: "Unpack it, and put the model file itself here.",
    FileType.BOMB: "Load it with torch.load and write it again with torch.save.",
}

# The first bytes of files.
_MAGIC = (
    (b"version https://git-lfs", FileType.GIT_LFS),
    (b"\x1f\x8b", FileType.COMPRESSED),
    (b"BZh", FileType.COMPRESSED),
    (b"\xfd7zXZ", FileType.COMPRESSED),
    (b"(\xb5/\xfd", FileType.COMPRESSED),
    (b"\x89HDF", FileType.TENSORFLOW),
    (b"\x93NUMPY", FileType.NUMPY),
)
_HTML = (b"<!doctype html", b"<html", b"<?xml")
# The members of zip archives: a part of the name, its end, and the type. No regular expressions, as
# the names come from the file: some take quadratic time.
_MEMBERS = (
    ("/data/aotinductor/", "", FileType.AOTI),
    ("/models/", ".json", FileType.EXPORTED),
    ("", "serialized_exported_program.json", FileType.EXPORTED),  # before torch 2.7
    ("/code/", "", FileType.TORCHSCRIPT),
    ("", "/constants.pkl", FileType.TORCHSCRIPT),
    ("", "keras_metadata.pb", FileType.TENSORFLOW),
    ("", "model.weights.h5", FileType.TENSORFLOW),
)


def file_type(path: Path) -> FileType:
    """Return the type of a file from its first bytes and its zip members."""
    with path.open("rb") as file:
        head = file.read(64)
        if head.startswith(b"\x80"):  # a pickle's first opcode: torch.save before torch 1.6
            return _pickle_type(head + file.read(_PICKLE_BYTES))
    if not head:
        return FileType.EMPTY
    if not head.startswith(b"PK"):
        return _head_type(path, head)
    try:
        with BoundedFile(path) as bounded, zipfile.ZipFile(bounded) as archive:
            return _archive_type(archive)
    except Exception:  # zipfile, zlib, lzma, bz2 and BoundedFile raise different errors
        return FileType.TRUNCATED


class DirectoryTooLargeError(Exception):
    """The central directory of a zip is too large."""


class BoundedFile(io.FileIO):
    """A file with a limit per read: a zip states the size of its central directory itself."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > _LISTED_BYTES:
            raise DirectoryTooLargeError
        return super().read(size) or b""


def _head_type(path: Path, head: bytes) -> FileType:
    for magic, content in _MAGIC:
        if head.startswith(magic):
            return content
    if head.lstrip().lower().startswith(_HTML):
        return FileType.HTML
    if path.suffix == ".onnx" or b"onnx" in head or (head[:1] == b"\x08" and b"pytorch" in head):
        return FileType.ONNX
    if path.name == "saved_model.pb":
        return FileType.TENSORFLOW
    # safetensors: eight bytes with the length of the JSON header.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return FileType.SAFETENSORS
    return FileType.UNKNOWN


def _archive_type(archive: zipfile.ZipFile) -> FileType:
    # A user's own files (`_extra_files`) may have any name.
    names = [name for name in archive.namelist() if "/extra/" not in name]
    for part, suffix, content in _MEMBERS:
        if any(part in name and name.endswith(suffix) for name in names):
            return content
    pickles = [name for name in names if name.endswith("data.pkl")]
    if not pickles:
        return FileType.UNKNOWN
    # torch.save does not compress. Tools that repack its files reach about half of their size.
    entries = archive.infolist()
    compressed = sum(entry.compress_size for entry in entries)
    if sum(entry.file_size for entry in entries) > _INFLATION * compressed:
        return FileType.BOMB
    with archive.open(pickles[0]) as file:
        return _pickle_type(file.read(_PICKLE_BYTES))


def mmap_obstacle(weights: Path) -> str:
    """Return why a weights file cannot be mapped into memory; empty: it can."""
    if weights.suffix in (".safetensors", ".json"):
        return ""
    try:
        with BoundedFile(weights) as file:
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
        with BoundedFile(path) as bounded, zipfile.ZipFile(bounded) as archive:
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
        if not all(isinstance(name, str) for name in names.values()):
            raise TypeError("a file name is not a string")
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(summarize(error)) from error
    return names


# Packages that pickles of tensors and containers name; and packages of torch that contain code.
_DATA = {"torch", "collections", "numpy", "builtins", "__builtin__", "_codecs"}
_CODE = ("torch.nn.modules.", "torch.fx.", "torch.jit.")


def _pickle_type(pickled: bytes) -> FileType:
    """Return the type after the classes and functions that a pickle names; it is not unpickled."""
    pickles: list[list[str]] = []
    stream = io.BytesIO(pickled)
    try:
        # torch older than 1.6 wrote several pickles in a row.
        while stream.tell() < len(pickled):
            pickles.append([])
            _collect_names(stream, pickles[-1])
    except (ValueError, LookupError):  # cut off at the bound, or data after the pickles
        pass
    return FileType.PICKLED_MODULE if any(map(_holds_code, pickles)) else FileType.STATE_DICT


def _holds_code(names: Sequence[str]) -> bool:
    # A dict, whatever is in it, is a checkpoint: the error of loading it names what is refused.
    is_dict = names[:1] in (["builtins.dict"], ["collections.OrderedDict"])
    return any(
        name.startswith(_CODE) or (name.split(".")[0] not in _DATA and not is_dict)
        for name in names
    )


def _collect_names(stream: io.BytesIO, names: list[str]) -> None:
    strings: list[str] = []
    memo: dict[int, str] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name == "GLOBAL":  # protocol 2, which torch.save uses: "module name"
            names.append(str(argument).replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL":  # protocol 4: the two strings before it
            names.append(".".join(strings[-2:]))
        elif opcode.name == "EMPTY_DICT" and not names:
            names.append("builtins.dict")
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = strings[-1] if strings else ""
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            strings.append(memo.get(int(str(argument)), ""))
        elif isinstance(argument, str):
            strings.append(argument)


def pretrained_files(names: Collection[str]) -> list[str]:
    """Return the files of a `save_pretrained` folder that PyTorch needs, of those in it.

    A folder of the Hugging Face hub may hold the same weights for other frameworks, and twice for
    PyTorch: as safetensors and pickled.
    """
    has_safetensors = any(name.endswith(".safetensors") for name in names)
    unused = (*_FOREIGN_SUFFIXES, ".bin") if has_safetensors else _FOREIGN_SUFFIXES
    return [name for name in names if not name.endswith(unused) and not name.startswith(".")]
