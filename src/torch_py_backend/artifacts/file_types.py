"""What the bytes of a file turn out to be, and what to do with a file that is no model.

Told from first bytes, zip members and the names in pickles: nothing is loaded, unpickled or run,
and no more is read than a bounded part.
"""

from __future__ import annotations

import enum
import io
import json
import pickletools
import zipfile
from pathlib import Path

# Enough of a pickle to meet the classes that it names; a bound against absurd files.
_PICKLE_BYTES = 1 << 20
_METADATA_BYTES = 1 << 16
_INFLATION = 100
# A zip's list of members: 100,000 tensors have less. It is read at once, and becomes objects.
_LISTED_BYTES = 1 << 24


class Content(enum.Enum):
    """What a file is."""

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
    CROWDED = "a zip archive whose list of members is longer than any model's"
    BOMB = "a zip archive that inflates to a hundred times its size"
    UNKNOWN = "not a file that torch.save, torch.jit.save or torch.export.save wrote"


def cure(found: Content, path: Path) -> str:
    """What to do with a file that is not what it should be."""
    source = f"{path.stem}.py beside it"
    if found in (Content.STATE_DICT, Content.SAFETENSORS):
        return f"Put the class that it belongs to in {source}."
    if found is Content.PICKLED_MODULE:
        return (
            "Pickles can run any code and are not loaded. Save module.state_dict() instead and"
            f" put the class in {source}, or save TorchScript or a torch.export program."
        )
    return _CURES.get(found, "Write it again with torch.jit.save, or copy it again.")


_CURES = {
    Content.ONNX: "Triton's onnxruntime backend serves it; here, export the PyTorch model.",
    Content.TENSORFLOW: "This backend serves PyTorch models; convert it first.",
    Content.HTML: "Download it again; the page may say why that failed.",
    Content.GIT_LFS: "Fetch the file with `git lfs pull`.",
    Content.COMPRESSED: "Unpack it, and put the model file itself here.",
    Content.BOMB: "Load it with torch.load and write it again with torch.save.",
}

# What a file begins with.
_MAGIC = (
    (b"version https://git-lfs", Content.GIT_LFS),
    (b"\x1f\x8b", Content.COMPRESSED),
    (b"BZh", Content.COMPRESSED),
    (b"\xfd7zXZ", Content.COMPRESSED),
    (b"(\xb5/\xfd", Content.COMPRESSED),
    (b"\x89HDF", Content.TENSORFLOW),
    (b"\x93NUMPY", Content.NUMPY),
)
_HTML = (b"<!doctype html", b"<html", b"<?xml")


def describe(path: Path) -> Content:
    """What a file is, told from its first bytes and its zip members."""
    with path.open("rb") as file:
        head = file.read(64)
        if head.startswith(b"\x80"):  # a pickle's first opcode: torch.save before torch 1.6
            return _describe_pickle(head + file.read(_PICKLE_BYTES))
    if not head:
        return Content.EMPTY
    if not head.startswith(b"PK"):
        return _describe_head(path, head)
    try:
        with Bounded(path) as bounded, zipfile.ZipFile(bounded) as archive:
            return _describe_archive(archive)
    except CrowdedError:
        return Content.CROWDED
    except Exception:  # zipfile, zlib, lzma and bz2 have each errors of their own
        return Content.TRUNCATED


class CrowdedError(Exception):
    """A zip's list of members is absurd."""


class Bounded(io.FileIO):
    """A file that is read in pieces of a bounded size: a zip itself says how long its list is."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > _LISTED_BYTES:
            raise CrowdedError
        return super().read(size) or b""


def _describe_head(path: Path, head: bytes) -> Content:
    for magic, content in _MAGIC:
        if head.startswith(magic):
            return content
    if head.lstrip().lower().startswith(_HTML):
        return Content.HTML
    if path.suffix == ".onnx" or b"onnx" in head or (head[:1] == b"\x08" and b"pytorch" in head):
        return Content.ONNX
    if path.name == "saved_model.pb":
        return Content.TENSORFLOW
    # Eight bytes with the length of a header in JSON.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return Content.SAFETENSORS
    return Content.UNKNOWN


def _describe_archive(archive: zipfile.ZipFile) -> Content:
    members = archive.namelist()
    if any("/data/aotinductor/" in name for name in members):
        return Content.AOTI
    if any(_is_program(name) for name in members):
        return Content.EXPORTED
    if any("/code/" in name or name.endswith("/constants.pkl") for name in members):
        return Content.TORCHSCRIPT
    if any(name.endswith(("keras_metadata.pb", "model.weights.h5")) for name in members):
        return Content.TENSORFLOW
    return _describe_saved(archive)


def _describe_saved(archive: zipfile.ZipFile) -> Content:
    """What torch.save wrote."""
    pickles = [name for name in archive.namelist() if name.endswith("data.pkl")]
    if not pickles:
        return Content.UNKNOWN
    entries = archive.infolist()
    # torch.save compresses nothing; tools that pack its files again do, to half their size or so.
    if sum(one.file_size for one in entries) > _INFLATION * sum(
        one.compress_size for one in entries
    ):
        return Content.BOMB
    with archive.open(pickles[0]) as file:
        return _describe_pickle(file.read(_PICKLE_BYTES))


def _is_program(name: str) -> bool:
    """torch.export's member, in the archives of torch 2.7 and later, and of those before."""
    return ("/models/" in name and name.endswith(".json")) or name.endswith(
        "serialized_exported_program.json"
    )


def unmappable(weights: Path) -> str:
    """Why the tensors of a file of weights cannot be used where they lie; empty where they can.

    Raises:
        OSError, zipfile.BadZipFile: it cannot be read.
    """
    if weights.suffix in (".safetensors", ".json"):
        return ""
    with weights.open("rb") as file:
        if file.read(2) != b"PK":
            return f"{weights.name} is no zip archive: torch older than 1.6 wrote it"
    with zipfile.ZipFile(weights) as archive:
        if any(one.compress_type != zipfile.ZIP_STORED for one in archive.infolist()):
            return f"the entries of {weights.name} are compressed"
    return ""


def aoti_metadata(path: Path) -> dict[str, str]:
    """What an AOTInductor package says that it was built for; empty where it does not say."""
    try:
        with Bounded(path) as bounded, zipfile.ZipFile(bounded) as archive:
            for name in archive.namelist():
                if "/data/aotinductor/" in name and name.endswith("_metadata.json"):
                    with archive.open(name) as file:
                        return _texts(file.read(_METADATA_BYTES))
    except Exception:  # it is damaged, which loading it will say
        return {}
    return {}


def built_for_gpu(path: Path) -> bool:
    """Whether a file is an AOTInductor package that was built for a CUDA device."""
    return aoti_metadata(path).get("AOTI_DEVICE_KEY") == "cuda"


# What `shards` raises for a file that is no index.
NO_INDEX = (ValueError, LookupError, AttributeError, TypeError, RecursionError)


def shards(index: Path) -> list[str]:
    """The files that Hugging Face's `model.safetensors.index.json` names.

    Raises:
        ValueError, LookupError, AttributeError, TypeError, RecursionError: it is no such index
            (`NO_INDEX`).
    """
    names = set(json.loads(index.read_bytes())["weight_map"].values())
    if not all(isinstance(name, str) for name in names):
        raise TypeError("a file's name is no text")
    return sorted(names)


def _texts(written: bytes) -> dict[str, str]:
    """The texts of a JSON object, by their names."""
    try:
        document = json.loads(written)
    except (ValueError, RecursionError):
        return {}
    entries = document.items() if isinstance(document, dict) else ()
    return {name: value for name, value in entries if isinstance(value, str)}


def _describe_pickle(pickled: bytes) -> Content:
    foreign = any(
        name.startswith(_CODE) or name.split(".")[0] not in _DATA for name in _named(pickled)
    )
    return Content.PICKLED_MODULE if foreign else Content.STATE_DICT


# The packages that pickled tensors and containers name, and what within torch is code all the same.
_DATA = {"torch", "collections", "numpy", "builtins", "__builtin__", "_codecs"}
_CODE = ("torch.nn.modules.", "torch.fx.", "torch.jit.")


def _named(pickled: bytes) -> set[str]:
    """The classes and functions that a pickle would call; nothing is called."""
    named: set[str] = set()
    stream = io.BytesIO(pickled)
    try:
        # Files older than torch 1.6 are several pickles in a row.
        while stream.tell() < len(pickled):
            _collect_names(stream, named)
    except (ValueError, LookupError):  # cut off by the bound, or raw data after the pickles
        pass
    return named


def _collect_names(stream: io.BytesIO, named: set[str]) -> None:
    strings: list[str] = []
    memo: dict[int, str] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name == "GLOBAL":  # protocol 2, torch.save's own: "module name"
            named.add(str(argument).replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL":  # protocol 4: the two strings before it
            named.add(".".join(strings[-2:]))
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = strings[-1] if strings else ""
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            strings.append(memo.get(int(str(argument)), ""))
        elif isinstance(argument, str):
            strings.append(argument)
