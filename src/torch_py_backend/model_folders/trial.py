"""Read the config of a model folder, and load its model without a server.

Imports no torch: the model's code runs in child processes.
"""

from __future__ import annotations

from pathlib import Path

from torch_py_backend.autocomplete import completion
from torch_py_backend.config import conflicts, pbtxt, repository
from torch_py_backend.config.pbtxt import Document, JsonObject
from torch_py_backend.processes import child_process


def read(folder: Path) -> tuple[str, JsonObject]:
    """Return the latest version that is served, and the config, which may be incomplete.

    Raises:
        LoadError: the config cannot be read, or Triton refuses it.
    """
    document = pbtxt.read(folder)
    conflicts.check_for_triton(document)
    specific = document.get("version_policy", {}).get("specific", {})
    return repository.latest(folder, specific.get("versions", ())), document


def inspect(
    folder: Path,
    version: str,
    document: Document,
    reference: Path | None = None,
    seconds: float = completion.LIMIT_S,
) -> JsonObject:
    """Complete a config as a server does, try the model, and return `inspection.inspect`'s report.

    Raises:
        LoadError: the model cannot be served, or differs from the reference.
    """
    task = "torch_py_backend.model_folders.inspection:inspect"
    sent = {
        "arguments": pbtxt.arguments(folder, version, document),
        "reference": reference and str(reference),
    }
    report: JsonObject = child_process.run(task, sent, seconds)
    return report
