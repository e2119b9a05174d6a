"""What config.pbtxt leaves out is filled in from the model; what it says stays, or is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_py_backend.artifacts import stream_detection
from torch_py_backend.config import options
from torch_py_backend.errors import ConfigError, shown
from torch_py_backend.processes import child_process


def needed(document: Mapping[str, Any]) -> bool:
    """Whether a config lacks what the model could tell."""
    return any(
        not document.get(role)
        or any(
            entry.get("data_type", "TYPE_INVALID") == "TYPE_INVALID" or not entry.get("dims")
            for entry in document[role]
        )
        for role in ("input", "output")
    )


def decide(document: dict[str, Any], version_folder: Path) -> bool:
    """Whether a complete config had to be made decoupled: it says nothing, and the source yields.

    Without loading the model, which would cost every load seconds. What only a loaded model tells
    is refused when it is loaded.
    """
    path = version_folder / (document.get("default_model_filename") or "model.py")
    parameters = document.get("parameters", {})
    if (
        "model_transaction_policy" in document
        or path.suffix != ".py"
        or "MODEL_FACTORY" in parameters
    ):
        return False
    named, method = (
        parameters.get(key, {}).get("string_value") for key in ("MODEL_CLASS", "METHOD")
    )
    if not stream_detection.in_source(path, named=named, method=method):
        return False
    document["model_transaction_policy"] = {"decoupled": True}
    return True


def complete(
    arguments: Mapping[str, str], document: dict[str, Any], seconds: float = math.inf
) -> None:
    """Fill a config's inputs, outputs, max_batch_size and decoupling in place, by trying the model.

    Args:
        arguments: what Triton passes to `initialize`, with `document` as its model_config.
        document: the config, as Triton's JSON has it.
        seconds: how long that may take, where it is less than AUTO_COMPLETE_TIMEOUT_S.

    Raises:
        LoadError: the model cannot be loaded, does not tell its schema, or contradicts the config.
    """
    fill(arguments["model_name"], document, describe(arguments, document, seconds))


def describe(
    arguments: Mapping[str, str], document: Mapping[str, Any], seconds: float = math.inf
) -> dict[str, Any]:
    """What the model tells of itself; the arguments are those of `complete`.

    Raises:
        LoadError: the model cannot be loaded, or does not tell its schema.
    """
    model = arguments["model_name"]
    _refuse_ragged_batches(model, document)
    settings = options.parse(model, document.get("parameters", {}))
    schema: dict[str, Any] = child_process.run(
        model,
        "torch_py_backend.autocomplete.schema:describe",
        {"arguments": dict(arguments)},
        min(seconds, settings.auto_complete_timeout_s),
    )
    return schema


def fill(model: str, document: dict[str, Any], schema: dict[str, Any]) -> None:
    """Put what the model tells of itself into a config, where that leaves it out.

    Raises:
        ConfigError: the config contradicts it.
    """
    wished = document.get("max_batch_size", 0)
    # Where the inputs are written down, so is whether they are batched.
    if not wished and not document.get("input"):
        document["max_batch_size"] = schema["max_batch_size"]
    elif bool(wished) != bool(schema["max_batch_size"]):
        _refit(schema, batched=bool(wished))
    if schema["decoupled"]:
        document.setdefault("model_transaction_policy", {"decoupled": True})
    for role in ("input", "output"):
        written = document.get(role, [])
        # States and controls of sequences are listed there, and Triton refuses them here.
        kept = schema.get("kept", ())
        sent = [one for one in schema[role] if written or one["name"] not in kept]
        document[role] = _merge(model, role, written, sent)


def _refuse_ragged_batches(model: str, document: Mapping[str, Any]) -> None:
    for key in ("batch_input", "batch_output"):
        if document.get(key):
            raise ConfigError(
                model,
                f"config.pbtxt has {key} and lacks inputs or outputs, and the model does not tell"
                " their dims: it takes ragged inputs in one dimension",
                expected="data_type and dims of each input and output",
                cure="Write them out.",
            )


def _refit(schema: dict[str, Any], *, batched: bool) -> None:
    """The model's dims with or without a batch dimension, as the config has it."""
    for entry in (*schema["input"], *schema["output"]):
        shape = entry.pop("reshape", {"shape": entry["dims"]})["shape"]
        shape = shape[1:] if batched else [-1, *shape]
        entry.update({"dims": shape} if shape else {"dims": [1], "reshape": {"shape": []}})


def _merge(
    model: str, role: str, written: list[dict[str, Any]], told: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    if not written:
        return told
    by_name = {entry["name"]: entry for entry in told}
    for number, entry in enumerate(told):
        by_name.setdefault(f"{role.upper()}__{number}", entry)
        by_name.setdefault(f"{role}__{number}", entry)
    for entry in written:
        if entry.get("dims") and entry.get("data_type", "TYPE_INVALID") != "TYPE_INVALID":
            continue  # complete; what contradicts the model is found when it is bound
        match = by_name.get(entry["name"])
        if match is None:
            raise ConfigError(
                model,
                f"{role} '{entry['name']}' lacks data_type or dims, and the model has no such"
                f" {role}",
                expected=f"names among {shown(by_name)}",
            )
        _fill(model, role, entry, match)
    return written


def _fill(model: str, role: str, entry: dict[str, Any], match: Mapping[str, Any]) -> None:
    given = entry.get("data_type", "TYPE_INVALID")
    if given not in ("TYPE_INVALID", match["data_type"]):
        raise ConfigError(
            model,
            f"{role} '{entry['name']}' is {given} in config.pbtxt",
            expected=f"{match['data_type']}, as the model has it",
        )
    entry["data_type"] = match["data_type"]
    if not entry.get("dims"):
        entry |= {key: match[key] for key in ("dims", "reshape") if key in match}
