"""Find the files that a model.py needs: its weights, and the modules it imports from its folder.

Reads names, JSON and syntax trees; nothing is imported or run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
    for imported in _imported(source, source.parent):
        files |= modules(source.parent, imported)
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


def modules(root: Path, name: tuple[str, ...]) -> dict[str, Path]:
    """Return the files of a module, and of those that it imports from `root`, by relative path."""
    files: dict[str, Path] = {}
    waiting = [*_module_files(root, name)]
    while waiting:
        path = waiting.pop()
        place = path.relative_to(root).as_posix()
        if place not in files:
            files[place] = path
            for imported in _imported(path, root) if path.suffix in SOURCE_SUFFIXES else ():
                waiting += _module_files(root, imported)
    return files


def _imported(path: Path, root: Path) -> Iterator[tuple[str, ...]]:
    """Yield the modules that a file may import, as paths from the root; some may be attributes."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return  # loading it reports the error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = path.relative_to(root).parent.parts
            # A relative import starts from a package.
            package = parts[: len(parts) + 1 - node.level] if node.level else ()
            base = tuple(part for part in (*package, *(node.module or "").split(".")) if part)
            yield base
            yield from ((*base, alias.name) for alias in node.names)


def _module_files(root: Path, name: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files of a module; all files of a package, because it may contain data."""
    for count in range(1, len(name) + 1):
        package = root.joinpath(*name[:count])
        if (package / "__init__.py").is_file():
            for path in sorted(package.rglob("*")):
                parts = path.relative_to(package).parts
                hidden = any(part == "__pycache__" or part.startswith(".") for part in parts)
                if path.is_file() and not hidden:
                    yield path
            return
        for suffix in (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES):
            path = package.with_name(f"{package.name}{suffix}")
            if path.is_file():
                yield path
                return
