"""Write a model folder for `init` and `save_model`, and complete its config from the model.

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
from dataclasses import dataclass
from pathlib import Path

from torch_py_backend.autocomplete import completion
from torch_py_backend.config import model_config, pbtxt, repository
from torch_py_backend.config.pbtxt import Document, JsonObject
from torch_py_backend.errors import LoadError, ToolError, join_names
from torch_py_backend.loading import discovery
from torch_py_backend.model_folders import config_text
from torch_py_backend.model_folders.artifact_files import EXAMPLE, ArtifactFiles
from torch_py_backend.processes import child_process

NAME = re.compile(r"[\w-][\w.\- ]*")
"""Names that a model folder may have."""


@dataclass(slots=True)
class FolderReport:
    """The model in a folder that was written: its description, and whether it loads and runs.

    `missing` are the arguments whose types and sizes are unknown; `--input` can give them.
    """

    lines: list[str]
    loads: bool = False
    missing: Sequence[str] = ()


def create(
    target: Path,
    artifact: ArtifactFiles,
    inputs: Sequence[Document],
    transfer: Callable[[Path, Path], object] = shutil.copyfile,
    settings: Document = types.MappingProxyType({}),
    *,
    force: bool = False,
) -> FolderReport:
    """Write a model folder, complete its config from the model, and load the model once.

    Args:
        target: the model folder.
        artifact: the files to serve.
        inputs: the inputs, as entries of config.pbtxt; empty: they come from the model.
        transfer: copies or links a file to a path.
        settings: entries of config.pbtxt for a model with a batch dimension.
        force: replace a model folder that is there, as `new_folder` does.
    """
    with new_folder(target, force=force) as folder:
        for name, source in artifact.files.items():
            path = folder / "1" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            transfer(source, path)
        document = pbtxt.read(folder)
        document["input"] = list(inputs)
        document["parameters"] = pbtxt.parameters(artifact.parameters)
        return _configure(folder, artifact, document, settings)


@contextlib.contextmanager
def new_folder(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield the path of a model folder to write, which replaces the target when the block ends.

    It is in a temporary folder until then: a server that watches the repository never sees a part
    of it. If the block raises, the target stays as it was; a repository that was created for it is
    removed again, with its parents.

    Raises:
        ToolError: the folder cannot be written, or something exists there that is not replaced.
            With `force`, a model folder with the version 1 alone is.
    """
    if os.path.lexists(target):
        _refuse(target, force=force)
    created: list[Path] = []
    repository = target.parent
    try:
        created += [path for path in (repository, *repository.parents) if not path.exists()]
        repository.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".scratch-", dir=repository) as scratch:
            folder = Path(scratch) / target.name
            yield folder
            if os.path.lexists(target):
                target.rename(Path(scratch) / "replaced")
            folder.rename(target)
    except OSError as error:
        raise ToolError(f"cannot make {target}: {error}") from error
    finally:
        for path in created:
            with contextlib.suppress(OSError):  # it has the model
                path.rmdir()


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


def _configure(
    folder: Path, artifact: ArtifactFiles, document: JsonObject, settings: Document
) -> FolderReport:
    """Write config.pbtxt, as complete as the model allows, and load the model with it."""
    report = FolderReport([f"{artifact.title} is {artifact.description}"])
    lines = report.lines
    if not artifact.pretrained_config and (others := list(artifact.files)[1:]):
        lines.append(f"with {join_names(others)}")
    result: JsonObject = {"config": document}
    try:
        result = child_process.run(
            "torch_py_backend.model_folders.inspection:configure",
            {
                "arguments": pbtxt.arguments(folder, "1", document),
                "pretrained": artifact.pretrained_config,
                "settings": dict(settings),  # a mappingproxy is no JSON
            },
            completion.LIMIT_S,
        )
    except LoadError as error:
        result["refusal"] = str(error)
    document = result["config"]
    if discovery.is_cuda_package(folder / "1" / next(iter(artifact.files))):
        document["instance_group"] = [{"kind": "KIND_GPU", "count": 1}]
    signature, required = result.get("signature", ""), result.get("required", ())
    config_text.write(folder, document, artifact.description, signature, required)
    if not completion.is_incomplete(document):
        lines += _description(folder, document)
    if "gap" in result:
        lines.append(f"takes    {signature}")
        gap = result["gap"]
        if not document["input"] and not _has_example(folder / "1"):
            report.missing = required
            gap = f"the types and sizes of {join_names(required)} are not known"
        lines.append(f"not complete: {gap}")
    elif "refusal" in result:
        lines.append(f"does not load: {result['refusal']}")
    else:
        lines += [f"note     {warning}" for warning in result["warnings"]]
        lines.append("loads and runs")
        report.loads = True
    return report


def _description(folder: Path, document: Document) -> list[str]:
    """Return the lines on a complete config, in the format of `check`."""
    config = model_config.parse(pbtxt.arguments(folder, "1", document))
    rows = config.max_batch_size
    return [
        f"inputs   {', '.join(map(str, config.inputs))}",
        f"outputs  {', '.join(map(str, config.outputs))}",
        f"batch    {f'at most {rows}' if rows else 'none; each request is one call'}",
    ]


def _has_example(version: Path) -> bool:
    return (version / EXAMPLE).exists() or any(
        b"def example_inputs" in source.read_bytes() for source in version.glob("*.py")
    )
