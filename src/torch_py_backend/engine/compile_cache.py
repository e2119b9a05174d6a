"""The folder of inductor's cache, from which later starts load what the first one has compiled.

Loading the cache runs code from it, so no other user may be able to write to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from torch_py_backend import files
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError, PlatformError, summarize
from torch_py_backend.processes import private_files

log = logging.getLogger(__name__)

_FOLDER = "compile_cache"
# Inductor creates it for its first graph.
_GRAPHS = "fxgraph"


@contextlib.contextmanager
def used(config: ModelConfig) -> Iterator[None]:
    """Set inductor's cache to the model's folder for the code within, which compiles.

    While the folder has no graphs, other instances wait until the code within is done.

    Raises:
        ConfigError: COMPILE_CACHE_DIR is a path outside of the model's folder.
        PlatformError: COMPILE_CACHE_DIR cannot be used.
    """
    from torch._inductor import config as inductor  # noqa: PLC0415  slow to import

    # Inductor keeps them in a folder in /tmp whose name another user can predict, and every start
    # on a new machine would compile them. torch 2.6 has no such option.
    with contextlib.suppress(AttributeError):
        inductor.cpp_cache_precompile_headers = False
    shipped = _resolve(config)
    folder = _choose(config, shipped)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(private_files.turn(config.name))
        if folder != shipped and not (folder / _GRAPHS).exists():
            _copy(shipped, folder)
        if (folder / _GRAPHS).exists():
            stack.close()
        yield


def _resolve(config: ModelConfig) -> Path:
    """Return the configured folder: inside the model's folder, or an absolute path."""
    option = config.options.compile_cache_dir or _FOLDER
    try:
        path = Path(option).expanduser()
        folder = (config.folder / path).resolve()
        allowed = path.is_absolute() or folder.is_relative_to(config.folder.resolve())
    except (OSError, ValueError, RuntimeError):  # a NUL, an unknown user, circular links
        allowed = False
    if not allowed:
        raise ConfigError(
            f"COMPILE_CACHE_DIR is '{option}'",
            expected="a folder in the model's own, or an absolute path",
        )
    return folder


def _choose(config: ModelConfig, folder: Path) -> Path:
    """Return the configured folder, or one of the user's cache if the model's cannot be used."""
    obstacle = _obstacle(folder)
    if not obstacle:
        return folder
    if option := config.options.compile_cache_dir:
        raise PlatformError(
            f"COMPILE_CACHE_DIR is '{option}', which cannot be used: {obstacle}",
            cure="Name a folder that this user can write, and no other.",
        )
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with contextlib.suppress(RuntimeError):  # the user has no home
        home = home.expanduser()
    replacement = home / "torch-py-backend" / _FOLDER / config.name
    if not home.is_absolute() or _obstacle(replacement):
        replacement = private_files.user_folder() / _FOLDER / config.name
        replacement.mkdir(parents=True, exist_ok=True)
    log.warning(
        "compiled code is kept in %s, because %s cannot be used: %s.",
        replacement,
        folder,
        obstacle,
    )
    return replacement


def _obstacle(folder: Path) -> str:
    """Create a folder if it is missing, and return why it cannot be used; empty: it can be."""
    try:
        private_files.create(folder)
        files.check_writable(folder)
        return private_files.tree_risk(folder)
    except OSError as error:
        return summarize(error)


def _copy(shipped: Path, folder: Path) -> None:
    """Copy a cache that was shipped with a model into the folder that takes its place."""
    try:
        if shipped.is_dir() and not private_files.tree_risk(shipped):
            shutil.copytree(shipped, folder, dirs_exist_ok=True)
    except OSError as error:
        log.warning("%s cannot be copied to %s: %s.", shipped, folder, summarize(error))
