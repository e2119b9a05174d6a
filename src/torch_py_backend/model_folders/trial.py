"""Complete the config of a model folder, and load its model without a server.

Imports no torch: the model's code runs in child processes.
"""

from __future__ import annotations

import math
from pathlib import Path

from torch_py_backend.autocomplete import completion
from torch_py_backend.config import conflicts, pbtxt, repository
from torch_py_backend.config.pbtxt import Document, JsonObject
from torch_py_backend.processes import child_process

_TIMEOUT_S = 600.0


def complete(folder: Path, seconds: float = math.inf) -> tuple[str, JsonObject]:
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


def describe(folder: Path, document: Document) -> JsonObject:
    """Return the arguments of a model, as of `autocomplete.schema.describe_arguments`.

    Raises:
        LoadError: the model cannot be loaded.
    """
    task = "torch_py_backend.autocomplete.schema:describe_arguments"
    return _run(task, {"arguments": pbtxt.arguments(folder, "1", document)}, _TIMEOUT_S)


def inspect(
    folder: Path, version: str, document: Document, seconds: float = _TIMEOUT_S
) -> JsonObject:
    """Load and warm up a model, and return the report of `inspection.inspect`.

    Raises:
        LoadError: the model cannot be served; the message says why.
    """
    conflicts.check_for_triton(document)
    sent = {"arguments": pbtxt.arguments(folder, version, document)}
    return _run("torch_py_backend.model_folders.inspection:inspect", sent, seconds)


def _run(task: str, arguments: JsonObject, seconds: float) -> JsonObject:
    result: JsonObject = child_process.run(task, arguments, seconds)
    return result
