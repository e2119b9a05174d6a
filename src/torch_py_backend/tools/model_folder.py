"""Model folders: written for `init` and `save_model`, completed from the model, and tried.

Imports no torch: the model's code runs in child processes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_py_backend.autocomplete import completion
from torch_py_backend.config import conflicts, model_config, pbtxt, repository
from torch_py_backend.config.pbtxt import Document, JsonObject
from torch_py_backend.errors import BackendError, LoadError, ToolError, join_names
from torch_py_backend.loading import file_types
from torch_py_backend.processes import child_process
from torch_py_backend.tools import artifact_files, config_text
from torch_py_backend.tools.artifact_files import EXAMPLE, ArtifactFiles

NAME = re.compile(r"[\w-][\w.\- ]*")
"""Names that a model folder may have."""
_TIMEOUT_S = 600.0
_SIGNATURE = "autocomplete.schema:describe_arguments"
# The number of rows in the call that shows whether the model takes batches.
_BATCH_SIZE = 8
# With this parameter a model loads without its weights: names and shapes do not depend on them.
_WITHOUT_WEIGHTS = {"WEIGHTS": {"string_value": "none"}}


@dataclass(slots=True)
class FolderReport:
    """The state of a model folder that was written.

    Attributes:
        lines: the description of the model, to print.
        loads: whether the model loads and runs.
        missing: the arguments whose types and sizes are unknown; `--input` can give them.
    """

    lines: list[str]
    loads: bool = False
    missing: Sequence[Document] = ()


@dataclass(frozen=True, slots=True)
class SavedModule:
    """What is known of a model whose module is in memory.

    Attributes:
        max_batch_size: that of the config.
        instances: the number of instances; on a GPU, of each GPU.
        on_gpu: whether the instances run on GPUs.
        reference: a file with the module's own outputs for the example; None: they are not
            compared.
    """

    max_batch_size: int
    instances: int
    on_gpu: bool
    reference: Path | None


def refuse_target(target: Path, linked: Sequence[Path], *, force: bool) -> None:
    """Raise an error if the target exists and may not be replaced.

    With `force`, a model folder with version 1 alone is, unless `linked` files are in it.

    Raises:
        ToolError: something else exists there, or `force` is not set.
    """
    if not os.path.lexists(target):
        return
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
    if any(path.is_relative_to(target.resolve()) for path in linked):
        raise ToolError(f"--link would link to files in {target}, which --force replaces.")


def create(
    target: Path,
    artifact: ArtifactFiles,
    inputs: Sequence[Document],
    *,
    transfer: Callable[[Path, Path], object] = shutil.copyfile,
    saved: SavedModule | None = None,
) -> FolderReport:
    """Write a model folder, complete its config from the model, and load the model once.

    A folder at the target is replaced when the new one is complete.

    Args:
        target: the model folder.
        artifact: the files to serve.
        inputs: the inputs, as entries of config.pbtxt; empty: they come from the model.
        transfer: copies, links or moves a file to a path.
        saved: what is known of the model, whose answers are then compared; None: nothing.

    Raises:
        ToolError: the folder cannot be written.
        LoadError: the model of `saved` does not load, or its answers differ. Nothing is written.
    """
    with scratch_folder(target.parent, f"cannot make {target}") as scratch:
        folder = scratch / target.name
        for name, source in artifact.files.items():
            path = folder / "1" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            transfer(source, path)
        document = pbtxt.read(folder)
        document["input"] = list(inputs)
        document["parameters"] = {
            key: {"string_value": value} for key, value in artifact.parameters.items()
        }
        if saved is None:
            report = _configure(folder, artifact, document)
        else:
            report = _configure_saved(folder, artifact, document, saved)
        if os.path.lexists(target):
            target.rename(scratch / "replaced")
        folder.rename(target)
    return report


@contextlib.contextmanager
def scratch_folder(repository: Path, failure: str) -> Iterator[Path]:
    """Make a temporary folder in a repository, in which a model folder is written.

    It is moved when it is complete: a server that watches the repository never sees a part of it.
    If the repository is created and stays empty, it is removed again, with its parents.

    Raises:
        ToolError: the block raised an OSError; `failure` says what could not be done.
    """
    created: list[Path] = []
    try:
        created += [path for path in (repository, *repository.parents) if not path.exists()]
        repository.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".scratch-", dir=repository) as scratch:
            yield Path(scratch)
    except OSError as error:
        raise ToolError(f"{failure}: {error}") from error
    finally:
        for folder in created:
            with contextlib.suppress(OSError):  # it has the model
                folder.rmdir()


def completed(folder: Path, seconds: float = math.inf) -> tuple[str, JsonObject]:
    """Return the latest version that is served, and the config, completed as by a server.

    Raises:
        LoadError: the config cannot be read or completed, or Triton refuses it.
    """
    document = pbtxt.read(folder)
    conflicts.check_for_triton(document)
    specific = document.get("version_policy", {}).get("specific", {})
    version = repository.latest(folder, specific.get("versions", ()))
    if completion.is_incomplete(document):
        completion.complete(pbtxt.arguments(folder, version, document), document, seconds)
    return version, document


def inspect(
    folder: Path,
    version: str,
    document: Document,
    seconds: float = _TIMEOUT_S,
    reference: Path | None = None,
) -> JsonObject:
    """Load and warm up a model in a child process, and return the report of `trial.inspect`.

    Raises:
        LoadError: the model cannot be served, or its outputs differ from those in the file
            `reference`; the message says why.
    """
    conflicts.check_for_triton(document)
    path = None if reference is None else str(reference)
    return _run("tools.trial:inspect", folder, version, document, seconds, reference=path)


def _run(
    task: str,
    folder: Path,
    version: str,
    document: Document,
    seconds: float = _TIMEOUT_S,
    **options: object,
) -> JsonObject:
    """Run a function of this package on a model in a child process, and return its result.

    Its first parameter is `arguments`, those of `initialize`; `options` are the others.
    """
    sent = {"arguments": pbtxt.arguments(folder, version, document), **options}
    result: JsonObject = child_process.run(f"torch_py_backend.{task}", sent, seconds)
    return result


# --- the config of a new folder --------------------------------------------------------------


def _configure_saved(
    folder: Path, artifact: ArtifactFiles, document: JsonObject, saved: SavedModule
) -> FolderReport:
    """Write the config.pbtxt of a saved module, load the model with it, and compare its answers."""
    document["max_batch_size"] = saved.max_batch_size
    document["output"] = []
    completion.complete(pbtxt.arguments(folder, "1", document), document)
    kind = "KIND_GPU" if saved.on_gpu else "KIND_CPU"
    document["instance_group"] = [{"kind": kind, "count": saved.instances}]
    document = _write(folder, artifact, document, {})
    inspection = inspect(folder, "1", document, reference=saved.reference)
    return FolderReport(_notes(inspection), loads=True)


def _configure(folder: Path, artifact: ArtifactFiles, document: JsonObject) -> FolderReport:
    """Write config.pbtxt, as complete as the model allows, and load the model with it."""
    report = FolderReport([f"{artifact.title} is {artifact.description}"])
    given = document["input"]
    if artifact.pretrained_config:
        _add_pretrained(folder, artifact, document)
    elif others := list(artifact.files)[1:]:
        report.lines.append(f"with {join_names(others)}")
    configured = dict(document["parameters"])
    if artifact.lacks_weights:
        document["parameters"] |= _WITHOUT_WEIGHTS
    signature: Document = {}
    try:
        _complete(folder, document)
        report.lines += _description(folder, document)
    except BackendError as error:
        signature = _report_gaps(folder, document, error, report)
        document["input"] = given  # those of `_add_pretrained` are not what the model takes
    document["parameters"] = configured
    if file_types.is_cuda_package(folder / "1" / next(iter(artifact.files))):
        document["instance_group"] = [{"kind": "KIND_GPU", "count": 1}]
    if document["max_batch_size"]:
        document.update(artifact.settings)
    document = _write(folder, artifact, document, signature)
    if completion.is_incomplete(document):
        return report
    try:
        inspection = inspect(folder, "1", document)
    except LoadError as error:
        report.lines.append(f"does not load: {error}")
    else:
        report.lines += [*_notes(inspection), "loads and runs"]
        report.loads = True
    return report


def _write(
    folder: Path, artifact: ArtifactFiles, document: Document, signature: Document
) -> JsonObject:
    """Write config.pbtxt, and return what Triton reads from it."""
    text = config_text.text(document, artifact.description, signature)
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")
    return pbtxt.read(folder)


def _notes(inspection: Document) -> list[str]:
    return [f"note     {warning}" for warning in inspection["warnings"]]


def _description(folder: Path, document: Document) -> list[str]:
    """Return the lines on a complete config, in the format of `check`."""
    config = model_config.parse(pbtxt.arguments(folder, "1", document))
    rows = config.max_batch_size
    return [
        f"inputs   {', '.join(map(str, config.inputs))}",
        f"outputs  {', '.join(map(str, config.outputs))}",
        f"batch    {f'at most {rows}' if rows else 'none; each request is one call'}",
    ]


def _add_pretrained(folder: Path, artifact: ArtifactFiles, document: JsonObject) -> None:
    """Add what is known of the inputs and the constructor of a transformers model."""
    arguments: Sequence[str] = ()
    with contextlib.suppress(LoadError):  # `_complete` raises the same error
        arguments = _run(_SIGNATURE, folder, "1", document)["arguments"]
    if kwargs := artifact_files.pretrained_kwargs(arguments):
        document["parameters"]["MODEL_KWARGS"] = {"string_value": json.dumps(kwargs)}
    if not document["input"] and EXAMPLE not in artifact.files:
        document["input"] = artifact_files.pretrained_inputs(artifact.pretrained_config, arguments)


def _complete(folder: Path, document: JsonObject) -> None:
    """Complete a config from the model.

    Where the inputs are known, the model is first called with a batch: if it takes several rows
    and returns as many, the model has a batch dimension.
    """

    def describe(rows: int) -> JsonObject:
        settings = {**document, "max_batch_size": rows}
        return completion.describe(pbtxt.arguments(folder, "1", settings), settings)

    if not document["input"]:
        completion.fill(document, describe(0))
        return
    refusals = []
    for rows in (_BATCH_SIZE, 0):
        try:
            schema = describe(rows)
        except BackendError as error:
            refusals.append(error)
            continue
        if schema["max_batch_size"] or not rows:
            document["max_batch_size"] = min(rows, schema["max_batch_size"])
            completion.fill(document, schema)
            return
    raise refusals[0]


def _report_gaps(
    folder: Path, document: Document, error: BackendError, report: FolderReport
) -> Document:
    """Report the gaps of a config that could not be completed; return the model's signature."""
    try:
        signature = _run(_SIGNATURE, folder, "1", document)
    except LoadError as refusal:
        report.lines.append(f"does not load: {refusal}")
        return {}
    has_example = (folder / "1" / EXAMPLE).exists() or any(
        b"def example_inputs" in source.read_bytes() for source in (folder / "1").glob("*.py")
    )
    reason = str(error)
    if not document["input"] and not has_example:
        report.missing = signature["inputs"]
        names = join_names(argument["name"] for argument in report.missing)
        reason = f"the types and sizes of {names} are not known"
    report.lines += [f"takes    {signature['signature']}", f"not complete: {reason}"]
    return signature
