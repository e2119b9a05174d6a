"""Completes a config from its model. Values in config.pbtxt are kept, or raise an error.

Imports no torch: the model runs in a child process.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch_py_backend.config import pbtxt
from torch_py_backend.config.pbtxt import Document, JsonObject
from torch_py_backend.errors import ConfigError, join_names
from torch_py_backend.processes import child_process

# Seconds to try a model.
LIMIT_S = 600


def is_incomplete(document: Document) -> bool:
    """Return whether a config lacks inputs or outputs, or one of them lacks its type or dims."""
    tensors = document.get("input", []), document.get("output", [])
    return not all(entries and all(map(pbtxt.is_complete, entries)) for entries in tensors)


def complete(arguments: Mapping[str, str], document: JsonObject) -> None:
    """Fill in the inputs, outputs and max_batch_size of a config by running the model.

    Args:
        arguments: the arguments that Triton passes to `initialize`, with `document` as its
            model_config.
        document: the config as Triton's JSON; changed in place.

    Raises:
        LoadError: the model cannot be loaded, its schema cannot be inferred, or it contradicts the
            config.
    """
    task = "torch_py_backend.autocomplete.schema:describe"
    fill(document, child_process.run(task, {"arguments": dict(arguments)}, LIMIT_S))


def fill(document: JsonObject, schema: JsonObject) -> None:
    """Put a model's schema into a config where the config has gaps.

    Raises:
        ConfigError: the config contradicts the schema.
    """
    max_batch_size = document.get("max_batch_size", 0)
    # If the config lists the inputs, its max_batch_size applies, even if it is 0.
    if not max_batch_size and not document.get("input"):
        document["max_batch_size"] = schema["max_batch_size"]
    elif bool(max_batch_size) != bool(schema["max_batch_size"]):
        # Remove the batch dimension of the schema's dims, or add it.
        for entry in (*schema["input"], *schema["output"]):
            shape = entry.pop("reshape", {"shape": entry["dims"]})["shape"]
            shape = shape[1:] if max_batch_size else [-1, *shape]
            entry.update(pbtxt.dims_entry(shape))
    for role in ("input", "output"):
        listed = document.get(role, [])
        if listed:
            _fill_entries(role, listed, schema[role])
        else:
            document[role] = schema[role]


def _fill_entries(role: str, listed: list[JsonObject], inferred: list[JsonObject]) -> None:
    """Fill in the types and dims that a config's inputs or outputs lack, by name or number."""
    by_name = {entry["name"]: entry for entry in inferred}
    for number, entry in enumerate(inferred):
        by_name.setdefault(f"{role.upper()}__{number}", entry)
        by_name.setdefault(f"{role}__{number}", entry)
    for entry in listed:
        if pbtxt.is_complete(entry):
            continue  # compared with the model when it is loaded
        match = by_name.get(entry["name"])
        if match is None:
            raise ConfigError(
                f"{role} '{entry['name']}' lacks data_type or dims, and the model has no such"
                f" {role}",
                expected=f"names among {join_names(by_name)}",
            )
        data_type = entry.get("data_type", pbtxt.NO_TYPE)
        if data_type not in (pbtxt.NO_TYPE, match["data_type"]):
            raise ConfigError(
                f"{role} '{entry['name']}' is {data_type} in config.pbtxt",
                expected=f"{match['data_type']}, as the model has it",
            )
        entry["data_type"] = match["data_type"]
        if not entry.get("dims"):
            entry |= {key: match[key] for key in ("dims", "reshape") if key in match}
