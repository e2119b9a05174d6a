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
    seconds: float = completion.LIMIT_S,
    **more: object,
) -> JsonObject:
    """Try a model in a child process, and return the report of `inspection.inspect`.

    Args:
        folder: the model folder.
        version: the version to try.
        document: the config, which may lack inputs and outputs.
        seconds: the time limit.
        more: further arguments of `inspection.inspect`, as JSON.

    Raises:
        LoadError: the model cannot be served, or differs from the reference.
    """
    report: JsonObject = child_process.run(
        "torch_py_backend.model_folders.inspection:inspect",
        {"arguments": pbtxt.arguments(folder, version, document), **more},
        seconds,
    )
    return report
