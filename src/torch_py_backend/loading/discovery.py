"""Find the model file, its type, its weights and its hooks.

Reads names, first bytes and zip members. Does not import torch, unpickle, or run code of the model.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, ConfigError


class ArtifactType(enum.Enum):
    """The type of an artifact."""

    TORCHSCRIPT = "TorchScript"
    MODULE = "Python source and weights"
    EXPORTED = "a torch.export program"
    AOTI = "an AOTInductor package"
    FACTORY = "a factory of an installed package"


class Misfit(NamedTuple):
    """The type of a file that is no model: a description, and what to do with the file."""

    value: str
    cure: str


WEIGHTS = Misfit(
    "weights without code, or a pickled module",
    "Put the class that it belongs to in {stem}.py beside it. Save module.state_dict(): pickled"
    " modules can run any code and are not loaded.",
)
GIT_LFS = Misfit(
    "a git-lfs pointer, not the file that it stands for", "Fetch the file with `git lfs pull`."
)
UNKNOWN = Misfit(
    "not a PyTorch file, or a damaged one",
    "Write it again with torch.jit.save, or copy it again.",
)


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
        if self.kind in (ArtifactType.MODULE, ArtifactType.FACTORY):
            return None
        paths = (self.path.with_suffix(".py"), self.path.with_name("model.py"))
        return next(filter(Path.is_file, paths), None)

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
_CONTAINERS = {"NamedTuple", "OrderedDict", "dict", "ModelOutput"}
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
    if ":" in (config.options.model_factory or ""):
        artifact = _with_weights(config, ArtifactType.FACTORY, config.version_folder)
    else:
        artifact = _from_file(config, _model_file(config))
    hooks = config.version_folder / HOOKS
    return dataclasses.replace(artifact, hooks=hooks) if hooks.is_file() else artifact


def defines_module(source: Path) -> bool:
    """Return whether a file may define an nn.Module: a class whose base is no container."""
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return True  # loading it reports the error
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    bases = [ast.unparse(base) for node in classes for base in node.bases]
    names = {base.rpartition(".")[2] for base in bases}
    return not names <= _CONTAINERS


def _from_file(config: ModelConfig, path: Path) -> Artifact:
    if path.suffix == ".py":
        return _with_weights(config, ArtifactType.MODULE, path)
    kind = file_type(path)
    if isinstance(kind, ArtifactType):
        return Artifact(kind, path)
    source = path.with_suffix(".py")
    if kind is WEIGHTS and source.is_file():
        return _with_weights(config, ArtifactType.MODULE, source)
    raise misfit_error(path, kind)


def misfit_error(path: Path, kind: Misfit) -> ArtifactError:
    """Return the error about a file that is no model."""
    return ArtifactError(
        f"{path.name} is {kind.value}",
        expected="TorchScript, a torch.export program, an AOTInductor package or Python source",
        cure=kind.cure.format(stem=path.stem),
    )


def _model_file(config: ModelConfig) -> Path:
    folder, options, name = config.version_folder, config.options, config.default_model_filename
    names: tuple[str, ...] = _DEFAULTS if name is None else (name,)
    if name == "model.pt":
        # Triton sets it for `platform: "pytorch_libtorch"`, even if there is no such file.
        names = ("model.pt", "model.py", "model.pt2")
    elif name is not None and name not in _DEFAULTS:
        # A default name may be a link to a store of models.
        check_inside(config, "default_model_filename", name)
    paths = [folder / name for name in names]
    present = [path for path in paths if path.is_file()]
    if not present:
        entries = folder.iterdir() if folder.is_dir() else ()
        others = [path.name + ("" if path.exists() else " (a broken link)") for path in entries]
        raise ArtifactError(
            f"version {config.version} holds {', '.join(sorted(others)) or 'no files'}",
            expected=" or ".join(names),
            cure="Put the model there, or name its file with default_model_filename.",
        )
    first = present[0]
    selected = options.model_class or options.model_factory
    if first.suffix == ".py" and not (selected or options.weights or defines_module(first)):
        # It is not the model if there is a model without further files.
        for path in present[1:]:
            with contextlib.suppress(OSError):
                if isinstance(file_type(path), ArtifactType):
                    return path
    return first


def _with_weights(config: ModelConfig, kind: ArtifactType, path: Path) -> Artifact:
    name = config.options.weights
    if not name:
        is_factory = kind is ArtifactType.FACTORY
        folder, stem = (path, "model") if is_factory else (path.parent, path.stem)
        return Artifact(kind, path, weights_beside(folder, stem))
    if name.lower() == "none":
        return Artifact(kind, path)
    check_inside(config, "WEIGHTS", name)  # in the version folder, or in the model's
    return Artifact(kind, path, config.version_folder / name)


def weights_beside(folder: Path, stem: str) -> Path | None:
    """Return the weights file with this stem in a folder; ArtifactError if there are several."""
    paths = [folder / f"{stem}{suffix}" for suffix in WEIGHT_SUFFIXES]
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
        names = sorted({*weight_map(weights).values()}) if weights.suffix == ".json" else ()
        return {name: path for name in names if (path := weights.parent / name).is_file()}
    return {}


_HEAD_BYTES = 64
# The members of zip archives: a part of the name, its end, and the type.
_MEMBERS = (
    ("/data/aotinductor/", "", ArtifactType.AOTI),
    ("/models/", ".json", ArtifactType.EXPORTED),
    ("/code/", "", ArtifactType.TORCHSCRIPT),
    ("", "/constants.pkl", ArtifactType.TORCHSCRIPT),
    ("", "data.pkl", WEIGHTS),
)


def file_type(path: Path) -> ArtifactType | Misfit:
    """Return the type of a file from its first bytes and the names of its zip members."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(b"\x80"):  # a pickle's first opcode: torch.save before torch 1.6
        return WEIGHTS
    if head.startswith(b"PK"):
        try:
            with zipfile.ZipFile(path) as archive:
                # A user's own files (`_extra_files`) may have any name.
                names = [name for name in archive.namelist() if "/extra/" not in name]
        except Exception:  # a damaged archive raises nearly anything
            return UNKNOWN
        for part, suffix, content in _MEMBERS:
            if any(part in name and name.endswith(suffix) for name in names):
                return content
    if head.startswith(b"version https://git-lfs"):
        return GIT_LFS
    # safetensors: eight bytes with the length of the JSON header.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return WEIGHTS
    return UNKNOWN


def can_be_mapped(weights: Path) -> bool:
    """Return whether torch.load can map a file: compressed entries would be read as values."""
    try:
        with zipfile.ZipFile(weights) as archive:
            return all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
    except Exception:  # written by torch older than 1.6, or damaged, which loading it reports
        return False


def aoti_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of an AOTInductor package about its target; empty if it has none."""
    with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:  # loading it reports
        for name in archive.namelist():
            if "/data/aotinductor/" in name and name.endswith("_metadata.json"):
                entries = json.loads(archive.read(name)).items()
                return {key: value for key, value in entries if isinstance(value, str)}
    return {}


def is_cuda_package(path: Path) -> bool:
    """Return whether a file is an AOTInductor package for a CUDA device."""
    return aoti_metadata(path).get("AOTI_DEVICE_KEY") == "cuda"


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each weight in Hugging Face's index; raise if it is not an index."""
    return dict(json.loads(index.read_bytes())["weight_map"])
