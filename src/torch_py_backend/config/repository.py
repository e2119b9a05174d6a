"""Find the models of a model repository on disk, and their versions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch_py_backend.config.pbtxt import Document
from torch_py_backend.errors import ConfigError, ToolError, join_names


def models(path: Path) -> list[Path]:
    """Return the model folders of a path: the path itself, or the models in it."""
    if _is_model(path):
        return [path]
    return sorted(folder for folder in path.iterdir() if folder.is_dir() and _is_model(folder))


def by_name(path: Path, required: Iterable[str] = ()) -> dict[str, Path]:
    """Return a repository's model folders by name; raise ToolError if a required one is missing."""
    folders = {folder.name: folder for folder in models(path.resolve())}
    if path.resolve() in folders.values():
        raise ToolError(
            f"{path} is a model; expected the repository that holds it: {path.resolve().parent}."
        )
    for name in required:
        if name not in folders:
            names = ", ".join(folders) or "none"
            raise ToolError(f"{path} has no model '{name}'; its models: {names}.")
    return folders


def _is_model(folder: Path) -> bool:
    try:
        return (folder / "config.pbtxt").is_file() or bool(versions(folder))
    except PermissionError:
        return True  # accessing it later reports the error


def versions(folder: Path) -> list[str]:
    """Return the versions of a model, oldest first: folders whose names are numbers above 0."""
    names = [path.name for path in folder.iterdir() if path.is_dir() and path.name.isdecimal()]
    return sorted((name for name in names if int(name) > 0), key=int)


def latest(
    folder: Path,
    document: Document,
) -> str:
    """Return the newest version of a model that its config serves; raise ConfigError for none."""
    served = document.get("version_policy", {}).get("specific", {}).get("versions", ())
    numbers = [number for number in versions(folder) if not served or number in served]
    if not numbers:
        raise ConfigError(
            "the model folder has no version that is served",
            expected=f"a folder named {join_names(served) or 1} with the model file in it",
        )
    return numbers[-1]
