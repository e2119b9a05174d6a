"""Which file is the model, of what kind, and what lies beside it: from names and zip members.

Nothing here imports torch, unpickles, or runs code of the model.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from torch_py_backend import contents
from torch_py_backend.config import ModelConfig
from torch_py_backend.contents import Content
from torch_py_backend.errors import ArtifactError, ConfigError, brief


class Kind(enum.Enum):
    """What an artifact is."""

    TORCHSCRIPT = "TorchScript"
    MODULE = "Python source and weights"
    EXPORTED = "a torch.export program"
    AOTI = "an AOTInductor package"
    FACTORY = "a factory of an installed package"
    TORCHSERVE = "a TorchServe archive"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model file and what belongs to it.

    Attributes:
        kind: what the file is.
        path: the file; for a FACTORY the version folder, for a TORCHSERVE archive its own.
        weights: the weights beside a MODULE's source or for a FACTORY; None where there are none.
        weightless: the config says that there are none (`WEIGHTS: "none"`).
        fallback: what to serve where an AOTI package does not fit the machine.
    """

    kind: Kind
    path: Path
    weights: Path | None = None
    weightless: bool = False
    fallback: Artifact | None = None

    def files(self) -> list[Path]:
        """The files that hold it: the model, its weights with their shards, its fallback."""
        source = [self.path] if self.weights is not None and self.path.is_file() else []
        return [*source, *self.weight_files(), *(self.fallback.files() if self.fallback else [])]

    def weight_files(self) -> list[Path]:
        """Those of them that hold its weights, an index before its shards."""
        if self.weights is not None:
            return [self.weights, *_shards(self.weights)]
        if self.path.is_dir():  # a factory takes what it needs
            return sorted(path for path in self.path.rglob("*") if path.is_file())
        return [self.path] if self.path.is_file() else []


WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".pt", ".pth")
# A folder, in which a TorchServe archive lies unpacked.
ARCHIVE = "model.mar"
_DEFAULTS = ("model.py", "model.pt", "model.pt2", ARCHIVE)
_KINDS = {
    Content.TORCHSCRIPT: Kind.TORCHSCRIPT,
    Content.EXPORTED: Kind.EXPORTED,
    Content.AOTI: Kind.AOTI,
}


def find(config: ModelConfig) -> Artifact:
    """The artifact in the version folder.

    In this order: MODEL_FACTORY of a package, `default_model_filename`, model.py, model.pt,
    model.pt2, model.mar. A state_dict with a source of the same stem beside it belongs to that
    source.

    Raises:
        ArtifactError: there is no such file, or it is nothing that can be served.
        ConfigError: an option names a file outside the model's folder.
    """
    if ":" in (config.options.model_factory or ""):
        _refuse_fallback(config, Kind.FACTORY)
        return _with_weights(config, Kind.FACTORY, config.version_folder, "model")
    artifact = _describe(config, _model_file(config))
    if config.options.fallback is None:
        return artifact
    _refuse_fallback(config, artifact.kind)
    fallback = _describe(config, _inside(config, "FALLBACK", config.options.fallback))
    return Artifact(Kind.AOTI, artifact.path, fallback=fallback)


def _refuse_fallback(config: ModelConfig, kind: Kind) -> None:
    if config.options.fallback is not None and kind is not Kind.AOTI:
        raise ConfigError(
            config.name,
            f"FALLBACK is set, and the model is {kind.value}",
            expected="an AOTInductor package, the only kind that may not fit a machine",
        )


def _describe(config: ModelConfig, path: Path) -> Artifact:
    if path.suffix == ".mar":
        return _archive(config, path)
    if path.suffix == ".py":
        return _with_weights(config, Kind.MODULE, path, path.stem)
    try:
        found = contents.describe(path)
    except OSError as error:
        raise ArtifactError(config.name, f"{path.name} cannot be read: {brief(error)}") from error
    source = path.with_suffix(".py")
    if found is Content.STATE_DICT and source.is_file():
        return _with_weights(config, Kind.MODULE, source, source.stem)
    if found not in _KINDS:
        raise ArtifactError(
            config.name,
            f"{path.name} is {found.value}",
            expected="TorchScript, a torch.export program, an AOTInductor package, or a model.py"
            " that defines the module",
            cure=contents.cure(found, path),
        )
    return Artifact(_KINDS[found], path)


def _archive(config: ModelConfig, path: Path) -> Artifact:
    if path.is_dir():
        return Artifact(Kind.TORCHSERVE, path)
    raise ArtifactError(
        config.name,
        f"{path.name} is a file",
        expected="the folder that an archive of TorchServe is unpacked into",
        cure="Make a model folder of the archive with `torch-py-backend import-mar`.",
    )


def _model_file(config: ModelConfig) -> Path:
    folder = config.version_folder
    names = _candidates(config.default_model_filename)
    if names[0] not in _DEFAULTS:  # what is looked for anyway may be a link to a store of models
        _refuse_outside(config, "default_model_filename", names[0])
    for name in names:
        if (folder / name).is_file() or (name.endswith(".mar") and (folder / name).is_dir()):
            return folder / name
    entries = folder.iterdir() if folder.is_dir() else ()
    present = sorted(f"{one.name}{'' if one.exists() else ' (a broken link)'}" for one in entries)
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
    return ("model.pt", "model.py", "model.pt2") if named == "model.pt" else (named,)


def _with_weights(config: ModelConfig, kind: Kind, path: Path, stem: str) -> Artifact:
    wished = config.options.weights
    if wished is not None and wished.lower() == "none":
        return Artifact(kind, path, weightless=True)
    folder = path if kind is Kind.FACTORY else path.parent
    weights = _inside(config, "WEIGHTS", wished) if wished else _weights_in(config, folder, stem)
    return Artifact(kind, path, weights)


def _inside(config: ModelConfig, option: str, name: str) -> Path:
    """The file that an option names: in the version folder, and no way out of the model's."""
    _refuse_outside(config, option, name)
    path = config.version_folder / name
    if not path.is_file():
        raise ArtifactError(
            config.name,
            f"{option} is '{name}', and version {config.version} has no such file",
            cure="Correct the name in config.pbtxt.",
        )
    return path


def _refuse_outside(config: ModelConfig, option: str, name: str) -> None:
    """A name that leads out of the model's folder, by itself or by a link, or that is no name."""
    try:
        path = (config.version_folder / name).resolve()
        path.is_file()  # raises what asking for it later would
        folders = (config.folder.resolve(), config.version_folder.resolve())
        inside = any(path.is_relative_to(folder) for folder in folders)
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, links in a circle
        inside = False
    if not inside:
        raise ConfigError(
            config.name, f"{option} is '{name}'", expected="a file in the model's own folder"
        )


def _weights_in(config: ModelConfig, folder: Path, stem: str) -> Path | None:
    beside = [folder / f"{stem}{suffix}" for suffix in WEIGHT_SUFFIXES]
    present = [path for path in beside if path.is_file()]
    if len(present) > 1:
        raise ArtifactError(
            config.name,
            f"version {config.version} holds {' and '.join(path.name for path in present)}",
            expected="one file of weights",
            cure="Remove the others, or name the one to use with the parameter WEIGHTS.",
        )
    return present[0] if present else None


def _shards(weights: Path) -> list[Path]:
    """What an index names, as far as it is there; what is wrong with it is told by the load."""
    if weights.suffix != ".json":
        return []
    try:
        named = contents.shards(weights)
        return [path for name in named if (path := weights.parent / name).is_file()]
    except (OSError, *contents.NO_INDEX):  # a name may be longer than any file's
        return []
