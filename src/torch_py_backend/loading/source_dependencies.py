"""Find the files that a model.py needs: its weights, and the modules it imports from its folder.

Reads names, JSON and syntax trees; nothing is imported or run.
"""

from __future__ import annotations

import ast
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from pathlib import Path, PurePosixPath

from torch_py_backend.errors import ArtifactError
from torch_py_backend.loading import discovery


def find(source: Path, weights: Path | None = None) -> dict[str, Path]:
    """Return the files of a source file by their names in a version folder, where it is model.py.

    Without `weights`, the weights file with the same stem belongs to it, if there is one.

    Raises:
        ArtifactError: there are several weights files, or a module has the name model.py.
    """
    files = {"model.py": source}
    for name in _imported(source):
        files |= modules(source.parent, name)
    if files["model.py"] != source:
        raise ArtifactError(
            f"{source.name} imports model.py beside it, and is itself served as model.py",
            cure="Rename model.py.",
        )
    weights = weights or discovery.weights_beside(source.parent, source.stem)
    if weights is not None:
        suffix = weights.name.removeprefix(source.stem)
        known = suffix in discovery.WEIGHT_SUFFIXES
        files[f"model{suffix if known else '.pt'}"] = weights
        for name, shard in discovery.shard_files(weights).items():
            place = PurePosixPath(name)
            if not place.is_absolute() and ".." not in place.parts:
                files[name] = shard
    return files


def modules(root: Path, name: str) -> dict[str, Path]:
    """Return the files of a top-level module, and of those that it imports, by relative path."""
    files: dict[str, Path] = {}
    waiting = [name]
    while waiting:
        for path in _module_files(root, waiting.pop()):
            place = path.relative_to(root).as_posix()
            if place not in files:
                files[place] = path
                waiting += _imported(path)
    return files


def _imported(path: Path) -> set[str]:
    """Return the top-level modules that a source file may import; other files import none."""
    names: set[str] = set()
    if path.suffix not in SOURCE_SUFFIXES:
        return names
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return names  # loading it reports the error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _module_files(root: Path, name: str) -> list[Path]:
    """Return the files of a top-level module; all files of a package, because it may have data."""
    folder = root / name
    is_package = (folder / "__init__.py").is_file()
    for suffix in () if is_package else (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES):
        path = root / f"{name}{suffix}"
        if path.is_file():
            return [path]
    paths = sorted(folder.rglob("*" if is_package else "*.py"))
    return [path for path in paths if path.is_file() and not _is_hidden(path.relative_to(folder))]


def _is_hidden(path: Path) -> bool:
    return any(part == "__pycache__" or part.startswith(".") for part in path.parts)
