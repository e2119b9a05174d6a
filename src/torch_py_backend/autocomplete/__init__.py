"""Completes what config.pbtxt lacks by runs of the model in a child process; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from torch_py_backend.config.pbtxt import Document, JsonObject
from torch_py_backend.processes import child_process

LIMIT_S = 600  # seconds to try a model


def is_incomplete(document: Document) -> bool:
    """Return whether a config lists no inputs or no outputs."""
    return not (document.get("input") and document.get("output"))


def complete(arguments: Mapping[str, str], document: JsonObject) -> None:
    """Fill in the inputs, outputs and max_batch_size of a config in place by running the model."""
    task = "torch_py_backend.autocomplete.schema:describe"
    document.update(child_process.run(task, {"arguments": dict(arguments)}, LIMIT_S))
