"""Which file is the model, of what kind, and what lies beside it: from names and zip members.

Nothing here imports torch, unpickles, or runs code of the model.
"""

from __future__ import annotations

import enum
import io
import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path

from torch_py_backend.config import ModelConfig
from torch_py_backend.errors import ArtifactError, ConfigError


class Kind(enum.Enum):
    """What an artifact is."""

    TORCHSCRIPT = "TorchScript"
    MODULE = "Python source and weights"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model file and what belongs to it.

    Attributes:
        kind: what the file is.
        path: the file.
        weights: the weights beside a MODULE's source; None where there are none.
        weightless: the config says that there are none (`WEIGHTS: "none"`).
    """

    kind: Kind
    path: Path
    weights: Path | None = None
    weightless: bool = False


_WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth")
_DEFAULTS = ("model.py", "model.pt")
# Enough of a pickle to meet the classes that it names; a bound against absurd files.
_PICKLE_BYTES = 1 << 20


def find(config: ModelConfig) -> Artifact:
    """The artifact in the version folder.

    In this order: `default_model_filename`, model.py, model.pt. A state_dict with a source of
    the same stem beside it belongs to that source.

    Raises:
        ArtifactError: there is no such file, or it is nothing that can be served.
        ConfigError: WEIGHTS names a file outside the model's folder.
    """
    path = _model_file(config)
    if path.suffix == ".py":
        return _module(config, path)
    found = describe(path)
    source = path.with_suffix(".py")
    if found is Content.STATE_DICT and source.is_file():
        return _module(config, source)
    if found is not Content.TORCHSCRIPT:
        raise ArtifactError(
            config.name,
            f"{path.name} is {found.value}",
            expected="TorchScript, or a model.py that defines the module",
            cure=_cure(found, path),
        )
    return Artifact(Kind.TORCHSCRIPT, path)


class Content(enum.Enum):
    """What the bytes of a file turn out to be."""

    TORCHSCRIPT = "TorchScript"
    STATE_DICT = "a state_dict: weights without code"
    PICKLED_MODULE = "a pickle of a whole module"
    EMPTY = "empty"
    TRUNCATED = "a truncated or damaged zip archive"
    UNKNOWN = "not a file that torch.save or torch.jit.save wrote"


def _cure(found: Content, path: Path) -> str:
    source = f"{path.stem}.py beside it"
    if found is Content.STATE_DICT:
        return f"Put the class that it belongs to in {source}."
    if found is Content.PICKLED_MODULE:
        return (
            "Pickles can run any code and are not loaded. Save module.state_dict() instead and"
            f" put the class in {source}, or save TorchScript."
        )
    return "Write it again with torch.jit.save, or copy it again."


def describe(path: Path) -> Content:
    """What a `.pt` file is, told from its first bytes and its zip members."""
    with path.open("rb") as file:
        head = file.read(4)
        if not head:
            return Content.EMPTY
        if head.startswith(b"\x80"):  # a pickle's first opcode: torch.save before torch 1.6
            return _describe_pickle(head + file.read(_PICKLE_BYTES))
    if not head.startswith(b"PK"):
        return Content.UNKNOWN
    try:
        with zipfile.ZipFile(path) as archive:
            return _describe_archive(archive)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, OSError):
        return Content.TRUNCATED


def _describe_archive(archive: zipfile.ZipFile) -> Content:
    members = archive.namelist()
    if any("/code/" in name or name.endswith("/constants.pkl") for name in members):
        return Content.TORCHSCRIPT
    pickles = [name for name in members if name.endswith("data.pkl")]
    if not pickles:
        return Content.UNKNOWN
    with archive.open(pickles[0]) as file:
        return _describe_pickle(file.read(_PICKLE_BYTES))


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


def _model_file(config: ModelConfig) -> Path:
    folder = config.version_folder
    names = _candidates(config.default_model_filename)
    for name in names:
        if (folder / name).is_file():
            return folder / name
    present = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    raise ArtifactError(
        config.name,
        f"version {config.version} holds {', '.join(present) or 'no files'}",
        expected=" or ".join(names),
        cure="Put the model there, or name its file with default_model_filename.",
    )


def _candidates(named: str | None) -> tuple[str, ...]:
    if named is None:
        return _DEFAULTS
    # Triton itself fills in model.pt for `platform: "pytorch_libtorch"`, whatever lies there.
    return ("model.pt", "model.py") if named == "model.pt" else (named,)


def _module(config: ModelConfig, source: Path) -> Artifact:
    wished = config.options.weights
    if wished is not None and wished.lower() == "none":
        return Artifact(Kind.MODULE, source, weightless=True)
    weights = _named_weights(config, wished) if wished else _weights_beside(config, source)
    return Artifact(Kind.MODULE, source, weights)


def _named_weights(config: ModelConfig, name: str) -> Path:
    path = config.version_folder / name
    if not path.resolve().is_relative_to(config.folder.resolve()):
        raise ConfigError(
            config.name, f"WEIGHTS is '{name}'", expected="a file in the model's own folder"
        )
    if not path.is_file():
        raise ArtifactError(
            config.name,
            f"WEIGHTS is '{name}', and version {config.version} has no such file",
            cure="Correct the name, or use `none` when the module needs no weights.",
        )
    return path


def _weights_beside(config: ModelConfig, source: Path) -> Path | None:
    beside = [source.with_suffix(suffix) for suffix in _WEIGHT_SUFFIXES]
    present = [path for path in beside if path.is_file()]
    if len(present) > 1:
        raise ArtifactError(
            config.name,
            f"version {config.version} holds {' and '.join(path.name for path in present)}",
            expected="one file of weights",
            cure="Remove the others, or name the one to use with the parameter WEIGHTS.",
        )
    return present[0] if present else None
