"""Find the model file, its type, its weights, its hooks, and the Python files that it imports.

Reads names, first bytes, zip members and syntax trees; without torch, and without running code.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import json
import re
import zipfile
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, ConfigError


class ArtifactType(enum.Enum):
    """The type of a file in a version folder."""

    TORCHSCRIPT = "TorchScript"
    MODULE = "Python source and weights"
    EXPORTED = "a torch.export program"
    AOTI = "an AOTInductor package"
    FACTORY = "a factory of an installed package"
    WEIGHTS = "weights without code, or a pickled module"
    UNKNOWN = "not a PyTorch file, such as a git-lfs pointer, or a damaged one"

    @property
    def has_weights_apart(self) -> bool:
        """Whether the weights are in a file of their own, and the artifact is Python code."""
        return self in (ArtifactType.MODULE, ArtifactType.FACTORY)

    @property
    def is_complete(self) -> bool:
        """Whether a file of this type is a model without further files."""
        return self in (ArtifactType.TORCHSCRIPT, ArtifactType.EXPORTED, ArtifactType.AOTI)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model file and the files that belong to it.

    Attributes:
        path: the file; for a FACTORY the version folder.
        weights: the weights file of a MODULE or a FACTORY; None: it has no such file.
        hooks: hooks.py, whose class `Hooks` runs around forward(); None: the model has no hooks.
    """

    kind: ArtifactType
    path: Path
    weights: Path | None = None
    hooks: Path | None = None

    def weight_files(self) -> list[Path]:
        """Return the files of its weights, an index before its shards."""
        if self.weights is not None:
            return [self.weights, *shard_files(self.weights).values()]
        if self.path.is_dir():  # a factory may read any of its files
            return sorted(path for path in self.path.rglob("*") if path.is_file())
        return [self.path] if self.path.is_file() else []


HOOKS = "hooks.py"
# Of weights files that are found by their stem.
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".pt", ".pth")
# Bases of classes that programs take and return, and of others that are no modules.
_CONTAINERS = {b"NamedTuple", b"OrderedDict", b"dict", b"ModelOutput", b"Enum", b"IntEnum"}
_CONTAINERS |= {b"object", b"ABC", b"Protocol", b"Function", b"Exception", b"ValueError"}
_DEFAULTS = ("model.py", "model.pt", "model.pt2")


def find(config: ModelConfig) -> Artifact:
    """Return the artifact in the version folder.

    The order: MODEL_FACTORY of a package, `default_model_filename`, model.py, model.pt, model.pt2.
    A state_dict belongs to the source file with the same stem, if there is one. A model.py without
    a module comes after a complete model.pt or model.pt2, before which it is imported.
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
        weights = inside(config, "WEIGHTS", folder, name)
    hooks = folder / HOOKS
    return Artifact(artifact.kind, artifact.path, weights, hooks if hooks.is_file() else None)


def of_file(path: Path) -> Artifact:
    """Return the artifact of a model's file, without weights; ArtifactError for other files."""
    source = path.with_suffix(".py")
    kind = ArtifactType.MODULE if path == source else file_type(path)
    if kind is ArtifactType.WEIGHTS and source.is_file():
        kind, path = ArtifactType.MODULE, source
    if kind is ArtifactType.MODULE or kind.is_complete:
        return Artifact(kind, path)
    raise ArtifactError(
        f"{path.name} is {kind.value}",
        expected="TorchScript, a torch.export program, an AOTInductor package, or a state_dict"
        f" beside {source.name}, which defines its class",
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
        inside(config, "default_model_filename", folder, name)
    present = [path for name in names if (path := folder / name).is_file()]
    if not present:
        files = sorted(path.name for path in folder.glob("*") if path.exists())
        listed = ", ".join(files) or "no files"
        raise ArtifactError(
            f"version {config.version} holds {listed}",
            expected=" or ".join(names),
            cure="Put the model there, or name its file with default_model_filename.",
        )
    first, *others = present
    selected = config.options.model_class or config.options.model_factory
    if first.suffix == ".py" and not (selected or defines_module(first)):
        return next((path for path in others if file_type(path).is_complete), first)
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


def inside(
    config: ModelConfig,
    option: str,
    folder: Path,
    name: str,
) -> Path:
    """Return the file that an option names; ConfigError if it is outside the model's folder."""
    path = folder / name
    if not is_inside(path, config.folder, config.version_folder):
        raise ConfigError(f"{option} is '{name}'", expected="a file in the model's own folder")
    return path


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
    names = json.loads(index.read_bytes())["weight_map"].values()
    return sorted(set(names))


# The members of zip archives, behind the name of the archive.
_MEMBERS = {
    "data/aotinductor/": ArtifactType.AOTI,
    "models/": ArtifactType.EXPORTED,
    "code/": ArtifactType.TORCHSCRIPT,
    "constants.pkl": ArtifactType.TORCHSCRIPT,
    "data.pkl": ArtifactType.WEIGHTS,
}


def file_type(path: Path) -> ArtifactType:
    """Return the type of a file from its first bytes and the names of its zip members."""
    with path.open("rb") as file:
        head = file.read(9)
    # A pickle, as torch.save wrote it before 1.6; safetensors: a length of 8 bytes, then JSON.
    if head.startswith(b"\x80") or head.endswith(b"{"):
        return ArtifactType.WEIGHTS
    names = [member.filename.partition("/")[2] for member in members(path)]
    for start, content in _MEMBERS.items():
        if any(name.startswith(start) for name in names):
            return content
    return ArtifactType.UNKNOWN


def members(path: Path) -> list[zipfile.ZipInfo]:
    """Return the members of a ZIP archive; of another file, or a damaged one, none."""
    with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:
        return archive.infolist()
    return []


def aoti_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of an AOTInductor package about its target; empty if it has none."""
    with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:  # loading it reports
        for name in archive.namelist():
            if "/data/aotinductor/" in name and name.endswith("_metadata.json"):
                entries = json.loads(archive.read(name))
                return {key: str(value) for key, value in entries.items()}
    return {}


def is_cuda_package(path: Path) -> bool:
    return aoti_metadata(path).get("AOTI_DEVICE_KEY") == "cuda"


def source_files(source: Path, weights: Path | None = None) -> dict[str, Path]:
    """Return the files of a source file by their names in a version folder, where it is model.py.

    Without `weights`, the weights file with the same stem belongs to it, if there is one.
    """
    files = imported(source.parent, *_imported(source)) | {"model.py": source}
    weights = weights or weights_beside(source.with_suffix(""))
    if weights is not None:
        suffix = weights.name.removeprefix(source.stem)
        if suffix not in WEIGHT_SUFFIXES:
            suffix = ".pt"
        files[f"model{suffix}"] = weights
        shards = shard_files(weights).items()
        files |= {name: shard for name, shard in shards if name == shard.name}
    return files


def imported(root: Path, *names: str) -> dict[str, Path]:
    """Return the files of top-level modules, and of those that they import, by relative path.

    Of a package, these are all files, because it may have data.
    """
    files: dict[str, Path] = {}
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        spec = PathFinder.find_spec(name, [str(root)])
        if spec is None:
            continue
        paths = [Path(spec.origin or "")]
        if spec.submodule_search_locations is not None:
            paths = sorted((root / name).rglob("*" if spec.origin else "*.py"))
        for path in paths:
            place = path.relative_to(root)
            hidden = any(part == "__pycache__" or part.startswith(".") for part in place.parts)
            if path.is_file() and not hidden and place.as_posix() not in files:
                files[place.as_posix()] = path
                waiting += _imported(path)
    return files


def _imported(path: Path) -> set[str]:
    """Return the top-level modules that a source file may import; other files import none."""
    names: list[str] = []
    if path.suffix == ".py":
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # loading it reports
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Import):
                    names += (alias.name for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names.append(node.module or "")
    return {name.partition(".")[0] for name in names}
