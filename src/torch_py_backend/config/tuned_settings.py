"""The results of `tune`, stored in the model's folder with one entry per type of machine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
from importlib import metadata
from pathlib import Path

from torch_py_backend import files
from torch_py_backend.config import conflicts, options, threads
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.config.pbtxt import Document, JsonObject
from torch_py_backend.errors import ConfigError, ToolError

log = logging.getLogger(__name__)

FILE = "tuned.json"
_CPUINFO = Path("/proc/cpuinfo")
# Read from the driver: loading a CUDA library takes seconds.
_GPUS = Path("/proc/driver/nvidia/gpus")
# Instruction sets that decide which kernels are used.
_INSTRUCTIONS = re.compile(r"(avx|amx|fma|f16c|vnni|asimd|sve|bf16|i8mm)\w*")


def machine_facts(cpuinfo: Path = _CPUINFO, gpus: Path = _GPUS) -> JsonObject:
    """Return the facts that decide which settings are fast: processor, cores, GPUs, torch."""
    facts = _facts(cpuinfo)
    flags = facts.get("flags", facts.get("Features", "")).split()
    return {
        "processor": facts.get("model name", os.uname().machine),
        "instructions": sorted(flag for flag in flags if _INSTRUCTIONS.match(flag)),
        "cores": threads.available_cores(),
        "gpus": sorted(_facts(path).get("Model", "unknown") for path in gpus.glob("*/information")),
        "torch": metadata.version("torch"),
    }


def _facts(path: Path) -> dict[str, str]:
    """Return the first block of `key : value` lines of a file in /proc."""
    try:
        block = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def fingerprint(of: Document) -> str:
    """Return a short hash of a machine's facts."""
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]


def entries(model_folder: Path) -> JsonObject:
    """Return the results of all machines, by the fingerprint of each.

    Raises:
        ConfigError: tuned.json exists and was not written by `tune`.
    """
    path = model_folder / FILE
    if not path.is_file():
        return {}
    try:
        machines = json.loads(path.read_bytes())["machines"]
        return {name: dict(entry) for name, entry in machines.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable(model_folder.name, error) from None


def read_choice(model_folder: Path, fingerprint: str) -> dict[str, str] | None:
    """Return the parameters that `tune` chose for a machine; None if there are none.

    Raises:
        ConfigError: tuned.json exists and was not written by `tune`.
    """
    entry = entries(model_folder).get(fingerprint, {})
    choice = entry.get("chosen")
    try:
        return None if choice is None else dict(choice["parameters"])
    except (LookupError, ValueError, TypeError) as error:
        raise _unreadable(model_folder.name, error) from None


def apply(settings: ModelConfig) -> ModelConfig:
    """Replace `OPTIMIZE: "auto"` by the settings that `tune` chose for this machine.

    Other options that config.pbtxt sets are not changed.

    Raises:
        ConfigError: tuned.json is damaged, or its settings conflict with the config.
    """
    if settings.options.optimize != ("auto",):
        return settings
    parameters = read_choice(settings.folder, fingerprint(machine_facts()))
    if parameters is None:
        log.warning(
            "model '%s': OPTIMIZE is auto, and %s has no choice for a machine like this one;"
            " nothing is optimized. Run torch-py-backend tune here.",
            settings.name,
            FILE,
        )
        parameters = {}
    choice = options.parse(
        settings.name, {key: {"string_value": value} for key, value in parameters.items()}
    )
    changes = {
        row.field: getattr(choice, row.field)
        for row in options.TABLE
        if row.field == "optimize" or getattr(settings.options, row.field) == row.default
    }
    tuned = dataclasses.replace(settings, options=dataclasses.replace(settings.options, **changes))
    conflicts.check(tuned)
    return tuned


def save(folder: Path, entry: Document) -> Path:
    """Write the results of `entry["machine"]` into tuned.json; those of other machines stay.

    Raises:
        ConfigError: tuned.json exists and was not written by `tune`.
        ToolError: it cannot be written.
    """
    path = folder / FILE
    machines = entries(folder) | {fingerprint(entry["machine"]): entry}
    content = json.dumps({"machines": machines}, indent=2, allow_nan=False).encode()
    try:
        files.replace(path.resolve(), content)
    except OSError as error:
        raise ToolError(f"cannot write {path}: {error.strerror or error}.") from error
    return path


def _unreadable(model: str, error: Exception) -> ConfigError:
    return ConfigError(
        model,
        f"{FILE} cannot be read: {type(error).__name__}: {error}",
        expected="what `torch-py-backend tune` writes",
        cure="Remove it, and tune again.",
    )
