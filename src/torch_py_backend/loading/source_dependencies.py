"""Find the files that a model.py needs: its weights, and the modules it imports from its folder.

Reads names, JSON and syntax trees; nothing is imported or run.
"""

from __future__ import annotations

import ast
import contextlib
from importlib.machinery import PathFinder
from pathlib import Path

from torch_py_backend.errors import ArtifactError
from torch_py_backend.loading import discovery


def find(source: Path, weights: Path | None = None) -> dict[str, Path]:
    """Return the files of a source file by their names in a version folder, where it is model.py.

    Without `weights`, the weights file with the same stem belongs to it, if there is one.

    Raises:
        ArtifactError: there are several weights files, or a module has the name model.py.
    """
    files = {"model.py": source} | modules(source.parent, *_imported(source))
    if files["model.py"] != source:
        raise ArtifactError(
            f"{source.name} imports model.py beside it, and is itself served as model.py",
            cure="Rename model.py.",
        )
    weights = weights or discovery.weights_beside(source.with_suffix(""))
    if weights is not None:
        suffix = weights.name.removeprefix(source.stem)
        files[f"model{suffix if suffix in discovery.WEIGHT_SUFFIXES else '.pt'}"] = weights
        shards = discovery.shard_files(weights).items()
        files |= {name: shard for name, shard in shards if name == shard.name}
    return files


def modules(root: Path, *names: str) -> dict[str, Path]:
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
