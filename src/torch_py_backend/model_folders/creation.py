"""Write a model folder for `init` and `save_model`, whose model loads and runs.

Imports no torch: the model's code runs in child processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch_py_backend.config import pbtxt, repository
from torch_py_backend.config.pbtxt import Document, JsonObject
from torch_py_backend.errors import ToolError
from torch_py_backend.loading import discovery
from torch_py_backend.model_folders import config_text, trial
from torch_py_backend.model_folders.artifact_files import ArtifactFiles


def check_name(name: str) -> None:
    """Raise ToolError for a name that a model folder may not have."""
    if not re.fullmatch(r"[\w-][\w.\- ]*", name):
        raise ToolError(
            f"the model's name is '{name}'; expected letters, digits, _, -, . and blanks, not first"
            " a . or a blank."
        )


def create(
    target: Path,
    artifact: ArtifactFiles,
    inputs: Sequence[Document],
    transfer: Callable[[Path, Path], object] = shutil.copyfile,
    settings: Document = types.MappingProxyType({}),
    *,
    force: bool = False,
) -> JsonObject:
    """Write a model folder with a config that the model completes.

    Args:
        target: the model folder.
        artifact: the files to serve.
        inputs: the inputs, as entries of config.pbtxt; empty: they come from the model.
        transfer: copies or links a file to a path.
        settings: entries of config.pbtxt for a model with a batch dimension.
        force: replace a model folder that is there, as `new_folder` does.

    Returns:
        The report of `inspection.inspect`.

    Raises:
        LoadError: the model does not load and run, and nothing is written.
    """
    with new_folder(target, force=force) as folder:
        for name, source in artifact.files.items():
            path = folder / "1" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            transfer(source, path)
        document = pbtxt.read(folder)
        document["input"] = list(inputs)
        document["parameters"] = pbtxt.parameters(artifact.parameters)
        if discovery.is_cuda_package(folder / "1" / next(iter(artifact.files))):
            document["instance_group"] = [{"kind": "KIND_GPU", "count": 1}]
        new = {"pretrained": artifact.pretrained_config, "settings": dict(settings)}
        report = trial.inspect(folder, "1", document, new=new)
        config_text.write(folder, report)
    return report


@contextlib.contextmanager
def new_folder(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield the path of a model folder to write, which replaces the target when the block ends.

    It is in a temporary folder until then: a server that watches the repository never sees a part
    of it. If the block raises, the target stays as it was.

    Raises:
        ToolError: the folder cannot be written, or something exists there that is not replaced.
            With `force`, a model folder with the version 1 alone is.
    """
    if os.path.lexists(target):
        _refuse(target, force=force)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".scratch-", dir=target.parent) as scratch:
            folder = Path(scratch) / target.name
            yield folder
            if os.path.lexists(target):
                target.rename(Path(scratch) / "replaced")
            folder.rename(target)
    except OSError as error:
        raise ToolError(f"cannot make {target}: {error}") from error


def _refuse(target: Path, *, force: bool) -> None:
    """Raise an error if an existing target may not be replaced; see `new_folder`."""
    if not force:
        raise ToolError(
            f"{target} exists already; choose another name, or replace it with --force (in Python:"
            " overwrite=True)."
        )
    is_model = not target.is_symlink() and (target / "config.pbtxt").is_file()
    if not is_model or repository.versions(target) not in ([], ["1"]):
        raise ToolError(
            f"{target} is not a model folder with the version 1 alone, and no other is replaced;"
            " choose another name."
        )
