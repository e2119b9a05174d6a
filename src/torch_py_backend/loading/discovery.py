"""Find the model file, its type, its weights and its hooks.

Reads names, first bytes and zip members. Does not import torch, unpickle, or run code of the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, ConfigError


class ArtifactType(enum.Enum):
    """The type of an artifact."""

    TORCHSCRIPT = "TorchScript"
    MODULE = "Python source and weights"
    EXPORTED = "a torch.export program"
    AOTI = "an AOTInductor package"
    FACTORY = "a factory of an installed package"

    @property
    def has_weights_apart(self) -> bool:
        """Whether the weights are in a file of their own, and the artifact is Python code."""
        return self in (ArtifactType.MODULE, ArtifactType.FACTORY)


class NoModel(enum.Enum):
    """The type of a file that is no model."""

    WEIGHTS = "weights without code, or a pickled module"
    UNKNOWN = "not a PyTorch file, such as a git-lfs pointer, or a damaged one"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model file and the files that belong to it.

    Attributes:
        kind: the type of the file.
        path: the file; for a FACTORY the version folder.
        weights: the weights file of a MODULE or a FACTORY; None: it has no such file.
        hooks: hooks.py, whose class `Hooks` runs around forward(); None: the model has no hooks.
    """

    kind: ArtifactType
    path: Path
    weights: Path | None = None
    hooks: Path | None = None

    @property
    def source(self) -> Path | None:
        """The file that may register what a complete artifact needs, and is imported before it."""
        path = self.path.with_name("model.py")
        return path if path.is_file() and not self.kind.has_weights_apart else None

    def weight_files(self) -> list[Path]:
        """Return the files of its weights, an index before its shards."""
        if self.weights is not None:
            return [self.weights, *shard_files(self.weights).values()]
        if self.path.is_dir():  # a factory may read any of its files
            return sorted(path for path in self.path.rglob("*") if path.is_file())
        return [self.path] if self.path.is_file() else []


HOOKS = "hooks.py"
"""The name of the file of hooks in a version folder."""
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".pt", ".pth")
"""The suffixes of weights files that are found by their stem."""
# Bases of classes that programs take and return.
_CONTAINERS = {b"NamedTuple", b"OrderedDict", b"dict", b"ModelOutput"}
_DEFAULTS = ("model.py", "model.pt", "model.pt2")


def find(config: ModelConfig) -> Artifact:
    """Return the artifact in the version folder.

    The order is: MODEL_FACTORY of a package, `default_model_filename`, model.py, model.pt,
    model.pt2. A state_dict belongs to the source file with the same stem, if there is one. If
    model.py defines no module, and there is a complete model.pt or model.pt2, then this file is the
    model; model.py is imported before it.

    Raises:
        ArtifactError: there is no such file, or it cannot be served.
        ConfigError: an option names a file outside the model's folder.
    """
    folder, name = config.version_folder, config.options.weights or ""
    if ":" in (config.options.model_factory or ""):
        artifact, stem = Artifact(ArtifactType.FACTORY, folder), folder / "model"
    else:
        artifact = of_file(_model_file(config))
        stem = artifact.path.with_suffix("")
    weights = None
    if artifact.kind.has_weights_apart and not name:
        weights = weights_beside(stem)
    elif artifact.kind.has_weights_apart and name.lower() != "none":
        check_inside(config, "WEIGHTS", name)  # in the version folder, or in the model's
        weights = folder / name
    hooks = folder / HOOKS
    hooks_file = hooks if hooks.is_file() else None
    return dataclasses.replace(artifact, weights=weights, hooks=hooks_file)


def of_file(path: Path) -> Artifact:
    """Return the artifact of a model's file, without weights; ArtifactError for other files."""
    source = path.with_suffix(".py")
    kind = ArtifactType.MODULE if path == source else file_type(path)
    if kind is NoModel.WEIGHTS and source.is_file():
        kind, path = ArtifactType.MODULE, source
    if isinstance(kind, ArtifactType):
        return Artifact(kind, path)
    cure = (
        f"Save module.state_dict(), not the module, and put its class in {source.name} beside it."
    )
    raise ArtifactError(
        f"{path.name} is {kind.value}",
        expected="TorchScript, a torch.export program, an AOTInductor package or Python source",
        cure=cure if kind is NoModel.WEIGHTS else "",
    )


def defines_module(source: Path) -> bool:
    """Return whether a source file may define a module: a class whose base is no container."""
    bases = re.findall(rb"^\s*class\s+\w+\s*\(([^)]+)\)", source.read_bytes(), re.MULTILINE)
    names = re.findall(rb"\w+(?=\s*(?:,|\[|$))", b",".join(bases))
    return not _CONTAINERS.issuperset(names)


def _model_file(config: ModelConfig) -> Path:
    folder, name = config.version_folder, config.default_model_filename
    names: tuple[str, ...] = _DEFAULTS if name is None else (name,)
    if name == "model.pt":
        # Triton sets it for `platform: "pytorch_libtorch"`, even if there is no such file.
        names = ("model.pt", "model.py", "model.pt2")
    elif name is not None and name not in _DEFAULTS:
        # A default name may be a link to a store of models.
        check_inside(config, "default_model_filename", name)
    present = [path for name in names if (path := folder / name).is_file()]
    if not present:
        files = sorted(path.name for path in folder.glob("*") if path.exists())
        raise ArtifactError(
            f"version {config.version} holds {', '.join(files) or 'no files'}",
            expected=" or ".join(names),
            cure="Put the model there, or name its file with default_model_filename.",
        )
    first, *others = present
    selected = config.options.model_class or config.options.model_factory
    if first.suffix == ".py" and not (selected or defines_module(first)):
        # It is not the model if there is a model without further files.
        complete = (path for path in others if isinstance(file_type(path), ArtifactType))
        return next(complete, first)
    return first


def weights_beside(stem: Path) -> Path | None:
    """Return the weights file with a path and any suffix; ArtifactError if there are several."""
    paths = (stem.with_name(stem.name + suffix) for suffix in WEIGHT_SUFFIXES)
    present = [path for path in paths if path.is_file()]
    if len(present) > 1:
        raise ArtifactError(
            f"its folder holds {' and '.join(path.name for path in present)}",
            expected="one file of weights",
            cure="Remove the others, or name the one to use with the parameter WEIGHTS.",
        )
    return present[0] if present else None


def check_inside(
    config: ModelConfig,
    option: str,
    name: str,
    folder: Path | None = None,
) -> None:
    """Raise ConfigError if the file name in an option leads out of the model's folder.

    The name is relative to `folder`; None: the version folder.
    """
    path = (folder or config.version_folder) / name
    if not is_inside(path, config.folder, config.version_folder):
        raise ConfigError(f"{option} is '{name}'", expected="a file in the model's own folder")


def is_inside(path: Path, *folders: Path) -> bool:
    """Return whether a path is valid and, with its links followed, in one of these folders."""
    try:
        target = path.resolve()
        target.is_file()  # raises what a later access would raise
        return any(target.is_relative_to(folder.resolve()) for folder in folders)
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, a loop of links
        return False


def shard_files(weights: Path) -> dict[str, Path]:
    """Return the existing files that an index names, by name; loading reports an invalid index."""
    with contextlib.suppress(Exception):  # it is no index
        names = shard_names(weights) if weights.suffix == ".json" else []
        return {name: path for name in names if (path := weights.parent / name).is_file()}
    return {}


def shard_names(index: Path) -> list[str]:
    """Return the files that Hugging Face's index names; raise if it is not an index."""
    return sorted({*json.loads(index.read_bytes())["weight_map"].values()})


# The members of zip archives, behind the name of the archive.
_MEMBERS: Mapping[str, ArtifactType | NoModel] = {
    "data/aotinductor/": ArtifactType.AOTI,
    "models/": ArtifactType.EXPORTED,
    "code/": ArtifactType.TORCHSCRIPT,
    "constants.pkl": ArtifactType.TORCHSCRIPT,
    "data.pkl": NoModel.WEIGHTS,
}


def file_type(path: Path) -> ArtifactType | NoModel:
    """Return the type of a file from its first bytes and the names of its zip members."""
    with path.open("rb") as file:
        head = file.read(9)
    # A pickle, as torch.save wrote it before 1.6; safetensors: a length of 8 bytes, then JSON.
    if head.startswith(b"\x80") or head.endswith(b"{"):
        return NoModel.WEIGHTS
    with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:  # damaged, or none
        members = [name.partition("/")[2] for name in archive.namelist()]
        for start, content in _MEMBERS.items():
            if any(member.startswith(start) for member in members):
                return content
    return NoModel.UNKNOWN


def can_be_mapped(weights: Path) -> bool:
    """Return whether torch.load can map a file: compressed entries would be read as values."""
    with contextlib.suppress(Exception), zipfile.ZipFile(weights) as archive:  # older than 1.6
        return all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
    return False


def aoti_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of an AOTInductor package about its target; empty if it has none."""
    with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:  # loading it reports
        for name in archive.namelist():
            if "/data/aotinductor/" in name and name.endswith("_metadata.json"):
                return {key: str(value) for key, value in json.loads(archive.read(name)).items()}
    return {}


def is_cuda_package(path: Path) -> bool:
    """Return whether a file is an AOTInductor package for a CUDA device."""
    return aoti_metadata(path).get("AOTI_DEVICE_KEY") == "cuda"
