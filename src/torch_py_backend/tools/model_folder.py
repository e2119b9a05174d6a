"""A model folder with a commented config.pbtxt, written for `init` and `save_model`.

What the config lacks is completed from the model.

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

from torch_py_backend.artifacts import file_types, repository
from torch_py_backend.autocomplete import completion
from torch_py_backend.config import dtypes, pbtxt
from torch_py_backend.config.pbtxt import Document, JsonObject
from torch_py_backend.errors import BackendError, InstallError, LoadError, join_names
from torch_py_backend.processes import child_process
from torch_py_backend.tools import artifact_files
from torch_py_backend.tools.artifact_files import EXAMPLE, ArtifactFiles

NAME = re.compile(r"[\w-][\w.\- ]*")
"""Names that a model folder may have."""
_TIMEOUT_S = 600.0
# The number of rows in the call that shows whether the model takes batches.
_BATCH_SIZE = 8
_INPUTS_ON_GPU = pbtxt.parameter("FORCE_CPU_ONLY_INPUT_TENSORS", "no")


@dataclass(slots=True)
class FolderReport:
    """The state of a model folder that was written.

    Attributes:
        lines: the description of the model, to print.
        loads: whether the model loads and runs.
        missing: the arguments whose types and sizes are unknown; `--input` can give them.
        weights: the name of the weights file that is missing; empty: weights are not the problem.
    """

    lines: list[str]
    loads: bool = False
    missing: Sequence[Document] = ()
    weights: str = ""


@dataclass(frozen=True, slots=True)
class SavedModule:
    """What is known of a model whose module is in memory.

    Attributes:
        max_batch_size: that of the config.
        instances: the number of instances; on a GPU, of each GPU.
        on_gpu: whether the instances run on GPUs.
        outputs: entries of config.pbtxt; empty: they come from the model.
        reference: returns the file with the module's own outputs for the example, from the model's
            folder and its completed config.
    """

    max_batch_size: int
    instances: int
    on_gpu: bool
    outputs: Sequence[Document]
    reference: Callable[[Path, JsonObject], Path]


def refuse_target(target: Path, linked: Sequence[Path], *, force: bool) -> None:
    """Raise an error if the target exists and may not be replaced.

    Args:
        target: the model folder to write.
        linked: the files that the folder will link to.
        force: replace a model folder that holds version 1 only.

    Raises:
        InstallError: something else exists there, or `force` is not set.
    """
    if not os.path.lexists(target):
        return
    if not force:
        raise InstallError(
            f"{target} exists already; choose another name, or replace it with --force (in Python:"
            " overwrite=True)."
        )
    is_model = not target.is_symlink() and (target / "config.pbtxt").is_file()
    if not is_model or repository.versions(target) not in ([], ["1"]):
        raise InstallError(
            f"{target} is not a model folder with the version 1 alone, and no other is replaced;"
            " choose another name."
        )
    if any(path.is_relative_to(target.resolve()) for path in linked):
        raise InstallError(f"--link would link to files in {target}, which --force replaces.")


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
        InstallError: the folder cannot be written.
        LoadError: the model of `saved` does not load, or its answers differ. Nothing is written.
    """
    with scratch_folder(target.parent, f"cannot make {target}") as scratch:
        folder = scratch / target.name
        for name, source in artifact.files.items():
            path = folder / "1" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            transfer(source, path)
        report = _write_config(folder, artifact, inputs, saved)
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
        InstallError: the block raised an OSError; `failure` says what could not be done.
    """
    created: list[Path] = []
    try:
        created += [path for path in (repository, *repository.parents) if not path.exists()]
        repository.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".scratch-", dir=repository) as scratch:
            yield Path(scratch)
    except OSError as error:
        raise InstallError(f"{failure}: {error}") from error
    finally:
        for folder in created:
            with contextlib.suppress(OSError):  # it has the model
                folder.rmdir()


def completed(folder: Path, seconds: float = math.inf) -> tuple[str, JsonObject]:
    """Return the latest version and the config of a model, completed as by a server.

    Raises:
        LoadError: the config cannot be read or completed.
    """
    document = pbtxt.read(folder)
    version = repository.latest(folder)
    if completion.is_incomplete(document):
        completion.complete(pbtxt.arguments(folder, version, document), document, seconds)
    else:
        completion.set_decoupled(document, folder / version)
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
    arguments: JsonObject = {"arguments": pbtxt.arguments(folder, version, document)}
    if reference is not None:
        arguments["reference"] = str(reference)
    task = "torch_py_backend.tools.trial:inspect"
    report: JsonObject = child_process.run(folder.name, task, arguments, seconds)
    return report


def _write_config(
    folder: Path, artifact: ArtifactFiles, inputs: Sequence[Document], saved: SavedModule | None
) -> FolderReport:
    """Write config.pbtxt, as complete as the model allows, and load the model with it."""
    document = pbtxt.read(folder)
    document["input"] = list(inputs)
    document["parameters"] = {
        key: {"string_value": value} for key, value in artifact.parameters.items()
    }
    report = FolderReport([f"{artifact.title} is {artifact.description}"])
    others = list(artifact.files)[1:]
    if artifact.pretrained_config and saved is None:
        arguments: Sequence[str] = ()
        with contextlib.suppress(LoadError):  # `_complete` raises the same error
            arguments = _signature(folder, document)["arguments"]
        if kwargs := artifact_files.pretrained_kwargs(arguments):
            document["parameters"]["MODEL_KWARGS"] = {"string_value": json.dumps(kwargs)}
        if not document["input"] and EXAMPLE not in artifact.files:
            document["input"] = artifact_files.pretrained_inputs(
                artifact.pretrained_config, arguments
            )
    elif others:
        report.lines.append(f"with {join_names(others)}")
    signature: Document = {}
    try:
        load_document = _weightless(document) if artifact.lacks_weights else document
        _complete(folder, document, load_document, saved)
    except BackendError as error:
        if saved is not None:
            raise
        signature = _report_gaps(folder, artifact, document, error, report)
    else:
        rows = document["max_batch_size"]
        batch = f"at most {rows}" if rows else "none; each request is one call"
        report.lines += [_tensor_line(role, document) for role in ("input", "output")]
        report.lines.append(f"batch    {batch}")
    text = "\n".join(_config_lines(folder, artifact, document, signature, saved)) + "\n"
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")
    if not completion.is_incomplete(document):
        _load(folder, artifact, report, saved)
    return report


def _signature(folder: Path, document: Document) -> JsonObject:
    """Return the signature of the model's function.

    Raises:
        LoadError: the model does not load.
    """
    arguments = {"arguments": pbtxt.arguments(folder, "1", document)}
    task = "torch_py_backend.autocomplete.schema:describe_arguments"
    signature: JsonObject = child_process.run(folder.name, task, arguments, _TIMEOUT_S)
    return signature


def _weightless(document: Document) -> JsonObject:
    """Return a config with which a model loads without weights: names and shapes need none."""
    parameters = {**document["parameters"], "WEIGHTS": {"string_value": "none"}}
    return {**document, "parameters": parameters}


def _complete(
    folder: Path, document: JsonObject, load_document: JsonObject, saved: SavedModule | None
) -> None:
    """Complete a config from the model.

    Where the inputs are known, the model is first called with a batch: if it takes several rows
    and returns as many, the model has a batch dimension.

    Args:
        folder: the model's folder.
        document: the config to complete, in place.
        load_document: the config to load the model with.
        saved: what is known of the model.
    """

    def describe(rows: int) -> JsonObject:
        settings = {**load_document, "max_batch_size": rows}
        return completion.describe(pbtxt.arguments(folder, "1", settings), settings)

    if saved is not None:
        document["max_batch_size"] = saved.max_batch_size
        document["output"] = list(saved.outputs)
        completion.fill(folder.name, document, describe(saved.max_batch_size))
        return
    if not document["input"]:
        completion.fill(folder.name, document, describe(0))
        return
    rows, refusal = _BATCH_SIZE, None
    try:
        schema = describe(rows)
    except BackendError as error:
        schema, refusal = {"max_batch_size": 0}, error
    if not schema["max_batch_size"]:
        rows = 0
        try:
            schema = describe(rows)
        except BackendError as error:
            raise refusal or error from None
    document["max_batch_size"] = min(rows, schema["max_batch_size"]) if rows else 0
    completion.fill(folder.name, document, schema)


def _report_gaps(
    folder: Path,
    artifact: ArtifactFiles,
    document: Document,
    error: BackendError,
    report: FolderReport,
) -> Document:
    """Report the gaps of a config that could not be completed; return the model's signature."""
    problems = []
    signature: Document = {}
    try:
        signature = _signature(folder, document)
    except LoadError as refusal:
        problems.append(f"does not load: {refusal}")
        if artifact.lacks_weights:  # if it loads without weights, they are the problem
            with contextlib.suppress(LoadError):
                signature = _signature(folder, _weightless(document))
                report.weights = artifact.weights_name
    if signature:
        source = folder / "1" / "model.py"
        has_example = (folder / "1" / EXAMPLE).exists() or (
            source.is_file() and b"def example_inputs" in source.read_bytes()
        )
        reason = str(error)
        if not document["input"] and not has_example:
            report.missing = signature["inputs"]
            names = join_names(argument["name"] for argument in report.missing)
            reason = f"the types and sizes of {names} are not known"
        report.lines += [f"takes    {signature['signature']}", f"not complete: {reason}"]
    report.lines += problems
    return signature


def _load(
    folder: Path, artifact: ArtifactFiles, report: FolderReport, saved: SavedModule | None
) -> None:
    """Load the model, and report the result."""
    document = pbtxt.read(folder)
    reference = None if saved is None else saved.reference(folder, document)
    try:
        inspection = inspect(folder, "1", document, reference=reference)
    except LoadError as error:
        if saved is not None:
            raise
        report.lines.append(f"does not load: {error}")
        if artifact.lacks_weights:  # the config was completed without them
            try:
                completion.describe(pbtxt.arguments(folder, "1", document), document)
            except LoadError:
                report.weights = artifact.weights_name
    else:
        report.lines += [f"note     {warning}" for warning in inspection["warnings"]]
        report.lines.append("loads and runs")
        report.loads = True


def _tensor_line(role: str, document: Document) -> str:
    """Return one line with the inputs or outputs, in the format of `check`."""
    tensors = []
    for entry in document[role]:
        dtype = dtypes.parse(document["name"], entry["name"], entry["data_type"])
        dims = ", ".join(map(str, pbtxt.model_dims(entry)))
        tensors.append(f"{entry['name']} {dtype.triton} [{dims}]")
    return f"{role + 's':9}{', '.join(tensors)}"


# --- the text of config.pbtxt ----------------------------------------------------------------


def _config_lines(
    folder: Path,
    artifact: ArtifactFiles,
    document: Document,
    signature: Document,
    saved: SavedModule | None,
) -> Iterator[str]:
    """Yield a config.pbtxt with a comment on each field."""
    yield f"# {folder.name}: {artifact.description}, served by PyTorch."
    yield 'backend: "pytorch_py"'
    yield ""
    if not completion.is_incomplete(document) or document["input"]:
        yield "# The largest number of rows in one call of the model; 0: requests are not batched."
        yield f"max_batch_size: {document['max_batch_size']}"
    else:
        yield "# The largest number of rows in one call of the model. If you write inputs below,"
        yield "# write this, too; 0: the model has no batch dimension. An example makes both"
        yield "# unnecessary."
        yield f"# max_batch_size: {_BATCH_SIZE}"
    if document.get("model_transaction_policy", {}).get("decoupled"):
        yield "# A request has any number of responses: one for each value that the model yields."
        yield "model_transaction_policy { decoupled: true }"
    elif document["max_batch_size"] > 0:
        yield "# Requests that wait at the same time become one call."
        yield "dynamic_batching { }"
    yield ""
    yield from _tensors("input", document, signature)
    yield ""
    yield from _tensors("output", document, {})
    yield ""
    yield "# Copies of the model, each in a process of its own. KIND_GPU: one on every GPU."
    model_file = folder / "1" / next(iter(artifact.files))
    on_gpu = file_types.is_cuda_package(model_file) if saved is None else saved.on_gpu
    count = 1 if saved is None else saved.instances
    yield f"instance_group [{{ kind: KIND_{'GPU' if on_gpu else 'CPU'} count: {count} }}]"
    yield "# With KIND_GPU, inputs that are on the GPU already stay there:"
    yield f"{'' if on_gpu else '# '}{_INPUTS_ON_GPU}"
    for key, entry in document["parameters"].items():
        yield pbtxt.parameter(key, entry["string_value"])


_COMMENTS = {
    "input": "# What a client sends; dims without the batch dimension, -1 is any size.",
    "output": "# What a client receives.",
}


def _tensors(role: str, document: Document, signature: Document) -> Iterator[str]:
    if document[role]:
        yield _COMMENTS[role]
        yield f"{role} ["
        yield ",\n".join(f"  {_tensor(entry)}" for entry in document[role])
        yield "]"
        return
    if signature:
        yield f"# {signature['signature']}"
    for argument in signature.get("inputs") or [{"name": "…"}]:
        yield f"# {role} [{_tensor(argument)}]"


def _tensor(entry: Document) -> str:
    """Return the message of an input or output; unknown fields have a placeholder."""
    dims = entry.get("dims", ["…"])
    fields = [
        f"name: {pbtxt.quote(entry['name'])}",
        f"data_type: {entry.get('data_type', 'TYPE_FP32')}",
        f"dims: [ {', '.join(map(str, dims))} ]",
    ]
    if "reshape" in entry:
        sizes = ", ".join(map(str, entry["reshape"]["shape"]))
        fields.append(f"reshape {{ shape: [ {sizes} ] }}")
    if entry.get("optional"):
        fields.append("optional: true")
    return f"{{ {' '.join(fields)} }}"
