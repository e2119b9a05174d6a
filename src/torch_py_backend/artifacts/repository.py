"""A model repository on disk: which folders are models, and which versions they have."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch_py_backend.errors import ConfigError, ServerError, shown


def models(path: Path) -> list[Path]:
    """The model folders of a path: itself, or what lies in it."""
    if _is_model(path):
        return [path]
    return sorted(folder for folder in path.iterdir() if folder.is_dir() and _is_model(folder))


def by_name(path: Path, wanted: Iterable[str] = ()) -> dict[str, Path]:
    """Return a repository's model folders by name.

    Raises:
        ServerError: the path is itself a model, or the repository lacks a model that is wanted.
    """
    folders = {one.name: one for one in models(path.resolve())}
    if path.resolve() in folders.values():
        raise ServerError(
            f"{path} is a model; expected the repository that holds it: {path.resolve().parent}."
        )
    for name in wanted:
        if name not in folders:
            known = ", ".join(folders) or "none"
            raise ServerError(f"{path} has no model '{name}'; its models: {known}.")
    return folders


def _is_model(folder: Path) -> bool:
    try:
        return _has_config(folder) or any(_is_version(folder / name) for name in versions(folder))
    except PermissionError:
        return True  # to be reported, not passed over


def _has_config(folder: Path) -> bool:
    return (folder / "config.pbtxt").is_file()


def _is_version(folder: Path) -> bool:
    """Whether a folder named by a number is a version, and not a model of that name."""
    return not _has_config(folder) and not versions(folder)


def versions(folder: Path) -> list[str]:
    """The versions of a model, oldest first: folders whose names are numbers above 0."""
    names = [one.name for one in folder.iterdir() if one.is_dir() and one.name.isdecimal()]
    return sorted((name for name in names if int(name) > 0), key=int)


def latest(folder: Path) -> str:
    """The version that Triton serves by default.

    Raises:
        ConfigError: there is none, or the folder is a repository and not a model.
    """
    found = versions(folder)
    if not found:
        _refuse_repository(folder)
        raise ConfigError(
            folder.name,
            "the model folder has no versions",
            expected="a folder named 1 with the model file in it",
        )
    return found[-1]


def _refuse_repository(folder: Path) -> None:
    found = [] if _has_config(folder) else models(folder)
    if found:
        raise ConfigError(
            folder.name,
            f"{folder} is a repository; name one of {shown(str(one) for one in found)}",
        )
