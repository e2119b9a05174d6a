"""What a model.py needs beside it: its weights, and the modules that it imports from its folder.

Told from names, JSON and syntax trees; nothing is imported or run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from pathlib import Path, PurePosixPath

from torch_py_backend.artifacts import file_types
from torch_py_backend.artifacts.discovery import WEIGHT_SUFFIXES
from torch_py_backend.errors import ArtifactError

_SERVED = "model"


def of_source(model: str, source: Path, weights: Path | None = None) -> dict[str, Path]:
    """The files that belong to a source, by the names that they have where it is model.py.

    Args:
        model: the model's name.
        source: the source.
        weights: its weights; None: what lies beside it under its stem.

    Raises:
        ArtifactError: it is not clear which weights are meant, or a module has model.py's name.
    """
    modules = _modules(source)
    taken = f"{_SERVED}.py"
    if modules.get(taken, source) != source:
        raise ArtifactError(
            model,
            f"{source.name} imports {taken} beside it, whose name is the one that it is served by",
            cure=f"Rename {taken}.",
        )
    if weights is None:
        found = _weights(model, source)
    else:
        suffix = ".safetensors" if weights.suffix == ".safetensors" else ".pt"
        found = {f"{_SERVED}{suffix}": weights}
    return {taken: source, **found, **modules}


# --- weights ---------------------------------------------------------------------------------


def _weights(model: str, source: Path) -> dict[str, Path]:
    present = {
        suffix: path for suffix in WEIGHT_SUFFIXES if (path := source.with_suffix(suffix)).is_file()
    }
    if len(present) > 1:
        names = " and ".join(path.name for path in present.values())
        raise ArtifactError(
            model, f"{names} lie beside {source.name}", expected="one file of weights"
        )
    named = {f"{_SERVED}{suffix}": path for suffix, path in present.items()}
    return {**named, **_shards(present.get(".safetensors.index.json"))}


def _shards(index: Path | None) -> dict[str, Path]:
    """What an index names, under its names; what is missing or damaged is told by the load."""
    if index is None:
        return {}
    try:
        names = file_types.shards(index)
    except file_types.NO_INDEX:
        return {}
    return {
        name: index.parent / name
        for name in names
        if _stays(name) and (index.parent / name).is_file()
    }


def _stays(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


# --- modules ---------------------------------------------------------------------------------


def _modules(source: Path) -> dict[str, Path]:
    """The files that imports lead to, in the source and in what it imports, by their places."""
    root = source.parent
    found: dict[str, Path] = {}
    waiting = [source]
    while waiting:
        for name in _imported(waiting.pop(), root):
            for path in _files(root, name):
                place = path.relative_to(root).as_posix()
                if place not in found and path.suffix in SOURCE_SUFFIXES:
                    waiting.append(path)
                found[place] = path
    return found


def _imported(path: Path, root: Path) -> Iterator[tuple[str, ...]]:
    """The modules that a file may import, as paths from the root; a name may be no module."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return  # the load says what is wrong with it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (*_package(path, root, node.level), *(node.module or "").split("."))
            base = tuple(part for part in base if part)
            yield base
            yield from ((*base, alias.name) for alias in node.names)


def _package(path: Path, root: Path, level: int) -> tuple[str, ...]:
    """The package that a relative import starts from."""
    if level == 0:
        return ()
    parts = path.relative_to(root).parent.parts
    return parts[: len(parts) + 1 - level]


def _files(root: Path, name: tuple[str, ...]) -> Iterator[Path]:
    """The files of a module in the folder: of a package all, for data may lie there, too."""
    folder = root
    for part in name:
        package = folder / part
        if (package / "__init__.py").is_file():
            yield from _of_package(package)
            return
        modules = [folder / f"{part}{suffix}" for suffix in (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES)]
        present = [path for path in modules if path.is_file()]
        if present:
            yield present[0]
            return
        folder = package  # a package without an __init__.py, or nothing


def _of_package(package: Path) -> Iterator[Path]:
    for path in sorted(package.rglob("*")):
        parts = path.relative_to(package).parts
        hidden = any(part == "__pycache__" or part.startswith(".") for part in parts)
        if path.is_file() and not hidden:
            yield path
