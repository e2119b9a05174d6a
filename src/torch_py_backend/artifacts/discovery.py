"""Which file is the model, of what kind, and what lies beside it: from names and zip members.

Nothing here imports torch, unpickles, or runs code of the model.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import re
from dataclasses import dataclass
from pathlib import Path

from torch_py_backend.artifacts import file_types
from torch_py_backend.artifacts.file_types import Content
from torch_py_backend.config.model_config import ModelConfig
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
        hooks: the source with the class whose methods run around forward(); None: there is none.
    """

    kind: Kind
    path: Path
    weights: Path | None = None
    weightless: bool = False
    fallback: Artifact | None = None
    hooks: Path | None = None

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
# The class whose methods run around forward(), where no parameter names another; and the methods.
HOOKS = "Hooks"
STAGES = (
    "preprocess",
    "preprocess_batch",
    "collate",
    "inference",
    "forward",
    "postprocess",
    "postprocess_batch",
)
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
    source. A model.py with hooks lends them to a model.pt or model.pt2 that is complete in itself.

    Raises:
        ArtifactError: there is no such file, or it is nothing that can be served.
        ConfigError: an option names a file outside the model's folder.
    """
    artifact = _find(config)
    source = config.version_folder / "model.py"
    if artifact.kind is not Kind.FACTORY:
        source = artifact.path.with_suffix(".py")
    return dataclasses.replace(artifact, hooks=_hooks(config, source))


def _find(config: ModelConfig) -> Artifact:
    if ":" in (config.options.model_factory or ""):
        _refuse_fallback(config, Kind.FACTORY)
        return _with_weights(config, Kind.FACTORY, config.version_folder, "model")
    artifact = _describe(config, _model_file(config))
    if config.options.fallback is None:
        return artifact
    _refuse_fallback(config, artifact.kind)
    fallback = _describe(config, _inside(config, "FALLBACK", config.options.fallback))
    return Artifact(Kind.AOTI, artifact.path, fallback=fallback)


# --- hooks -----------------------------------------------------------------------------------


def _hooks(config: ModelConfig, source: Path) -> Path | None:
    """The source, if the class of the hooks is there."""
    wished = config.options.hooks
    if wished is not None and wished.lower() == "none":
        return None
    if wished is None:
        return source if _defines_hooks(source) else None
    if not source.is_file():
        raise ArtifactError(
            config.name,
            f"HOOKS is '{wished}', and version {config.version} has no {source.name}",
            cure="Put the class there, or take HOOKS out of config.pbtxt.",
        )
    return source


def _defines_hooks(source: Path) -> bool:
    """Whether a file defines a class Hooks that is no module, and has hooks; it is not run."""
    try:
        written = source.read_bytes()
    except OSError:  # there is none; or its import says why it cannot be read
        return False
    try:
        tree = ast.parse(written)
    except (SyntaxError, ValueError, RecursionError):  # what is wrong with it, the import says
        return re.search(rb"^class Hooks\b", written, re.MULTILINE) is not None
    return any(_is_hooks(node) for node in tree.body)


def _is_hooks(node: ast.stmt) -> bool:
    if not isinstance(node, ast.ClassDef) or node.name != HOOKS:
        return False
    bases = [ast.unparse(base) for base in node.bases]
    if any(base.endswith("Module") for base in bases):
        return False
    methods = {
        one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return bool(bases) or not methods.isdisjoint(STAGES)


def _is_model(path: Path) -> bool:
    return path.is_file() or (path.suffix == ".mar" and path.is_dir())


def _lent_to(config: ModelConfig, present: list[Path]) -> Path:
    """The model file among those that are present, the first of which would be taken."""
    options = config.options
    first = present[0]
    named = options.model_class or options.model_factory
    if first.suffix == ".py" and not named and _hooks(config, first) is not None:
        complete = (path for path in present[1:] if _is_complete(path))
        return next(complete, first)
    return first


def _is_complete(path: Path) -> bool:
    try:
        return file_types.describe(path) in _KINDS
    except OSError:
        return False


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
        found = file_types.describe(path)
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
            cure=file_types.cure(found, path),
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
        refuse_outside(config, "default_model_filename", names[0])
    found = [folder / name for name in names if _is_model(folder / name)]
    if found:
        return _lent_to(config, found)
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
    refuse_outside(config, option, name)
    path = config.version_folder / name
    if not path.is_file():
        raise ArtifactError(
            config.name,
            f"{option} is '{name}', and version {config.version} has no such file",
            cure="Correct the name in config.pbtxt.",
        )
    return path


def refuse_outside(config: ModelConfig, option: str, name: str, folder: Path | None = None) -> None:
    """A name that leads out of the model's folder, by itself or by a link, or that is no name.

    Args:
        config: the model's config.
        option: where the name stands.
        name: the name.
        folder: what it is a name in; None: the version's.

    Raises:
        ConfigError: it is one.
    """
    try:
        path = ((folder or config.version_folder) / name).resolve()
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
        named = file_types.shards(weights)
        return [path for name in named if (path := weights.parent / name).is_file()]
    except (OSError, *file_types.NO_INDEX):  # a name may be longer than any file's
        return []
