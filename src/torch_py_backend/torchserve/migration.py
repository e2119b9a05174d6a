"""Writes a config.pbtxt for a TorchServe archive and lists settings that have no counterpart.

The manifest, model-config.yaml and the handler's source are read; no code is imported or run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from torch_py_backend.artifacts.discovery import ARCHIVE
from torch_py_backend.config import pbtxt
from torch_py_backend.errors import ArchiveError, join_names, printable
from torch_py_backend.torchserve.manifest import Manifest

_CONFIG = """\
# {name}: the TorchServe archive {archive}, answered by its own handler.
backend: "pytorch_py"

# Requests in one call of the handler at most.
{batching}

# What TorchServe's clients send: a request's body, or the fields of a form.
input [
{inputs}
]
# What they get: bytes as they are, text as UTF-8, all else as JSON.
output [{{ name: "output" data_type: TYPE_STRING dims: [ 1 ] }}]

# Copies of the handler, each in a process of its own; for KIND_GPU, on each GPU.
instance_group [{{ {instances} }}]
"""
_UNSUPPORTED = (
    "parallelType",
    "torchrun",
    "continuousBatching",
    "sequenceBatching",
    "asyncCommunication",
)
# All settings of TorchServe; other keys are the handler's.
_KEYS = {
    *("batchSize", "maxBatchDelay", "jobQueueSize", "minWorkers", "maxWorkers", "deviceType"),
    *("deviceIds", "responseTimeout", "pt2", "startupTimeout", "parallelLevel", "useVenv"),
    *("maxRetryTimeoutInSec", "clientTimeoutInMills", "useJobTicket", "maxSequenceJobQueueSize"),
    *("sequenceMaxIdleMSec", "sequenceTimeoutMSec", "maxNumSequence", *_UNSUPPORTED),
}
_KINDS = {"cpu": "KIND_CPU", "gpu": "KIND_GPU"}
_COMPILE_KEYS = ("backend", "mode", "options", "fullgraph", "dynamic")
# The names that `curl -T` and `--data` give to the body of a request.
_BODY_FIELDS = ("body", "data")
# Triton's config has integers of 32 bits.
_MAX_INTEGER = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Migration:
    """The config of a model folder, with a report for the user.

    Attributes:
        config: the text of config.pbtxt.
        inputs: the names of its inputs.
        converted: TorchServe's settings with their counterparts.
        not_converted: settings without a counterpart, and manual steps.
    """

    config: str
    inputs: tuple[str, ...]
    converted: list[str]
    not_converted: list[str]


def migrate(
    name: str,
    manifest: Manifest,
    *,
    inputs: tuple[str, ...] = (),
    content_type: str = "",
    example: bool = False,
) -> Migration:
    """Return the config for an unpacked archive.

    Args:
        name: the model's name.
        manifest: the manifest of the archive.
        inputs: the fields of a request; empty: one, with the name in the handler's source.
        content_type: the Content-Type of clients' requests; empty: bytes.
        example: whether there is an example body for the warm-up.

    Raises:
        ArchiveError: the archive cannot be served here, or its settings are invalid.
    """
    document = manifest.settings()
    settings = _Settings(manifest, document)
    for key in _UNSUPPORTED:
        if document.get(key):
            raise settings.error(key, "none: it is not supported here")
    notes = _manual_steps(settings)
    if not inputs:
        body = _body_field(manifest)
        if body is None:
            notes.append(
                f"the names of a request's fields: {manifest.handler} does not say which it reads;"
                f" {_BODY_FIELDS[0]} is the only input. Others are named with --input."
            )
        inputs = (body or _BODY_FIELDS[0],)
    optional = " optional: true" if len(inputs) > 1 else ""
    config = _CONFIG.format(
        name=name,
        archive=printable(manifest.archive),
        batching=_batching(settings),
        inputs=",\n".join(
            f'  {{ name: "{field}" data_type: TYPE_STRING dims: [ 1 ]{optional} }}'
            for field in inputs
        ),
        instances=_instances(settings),
    )
    config += "".join(
        f"{line}\n" for line in _parameters(settings, content_type=content_type, example=example)
    )
    others = [key for key in document if key not in settings.converted]
    notes += [f"{key} {settings.shown(key)}: no effect here" for key in others if key in _KEYS]
    if notes:
        lines = ["# Not taken over from TorchServe:", *(f"# - {printable(note)}" for note in notes)]
        config += "\n" + "\n".join(lines) + "\n"
    converted = [f"a request's {join_names(inputs)}: input of bytes", *settings.converted.values()]
    converted += [
        f"{key}: for the handler, in context.model_yaml_config"
        for key in others
        if key not in _KEYS
    ]
    return Migration(config, inputs, converted, notes)


def _body_field(manifest: Manifest) -> str | None:
    """Return the key under which a handler reads the body of a request; None: not found."""
    path = manifest.folder / f"{manifest.handler_module}.py"
    if not path.is_file():  # TorchServe's handlers read both
        return _BODY_FIELDS[0]
    keys = re.findall(r"""["'](\w+)["']""", path.read_text(encoding="utf-8", errors="replace"))
    return next((name for name in _BODY_FIELDS if name in keys), None)


def _manual_steps(settings: _Settings) -> list[str]:
    manifest, notes = settings.manifest, []
    if settings.document.get("batchSize") is None:
        notes.append(
            "batchSize is not in the archive, and max_batch_size is 1. If it was given when the"
            " model was registered, write it into config.pbtxt."
        )
    if manifest.requirements_file:
        notes.append(
            f"{manifest.requirements_file}: install it where the server's Python runs: pip install"
            f" -r 1/{ARCHIVE}/{manifest.requirements_file}"
        )
    if manifest.handler_module == "base_handler" and not manifest.handler_is_included:
        notes.append(
            "base_handler takes numbers: import with --content-type application/json, and send"
            " them as JSON, a list for each request"
        )
    return notes


# --- model-config.yaml -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings in model-config.yaml; values are checked when they are read.

    Attributes:
        manifest: the manifest that names the file.
        document: the settings.
        converted: the settings that the config has, by key, with their counterparts.
    """

    manifest: Manifest
    document: Mapping[str, object]
    converted: dict[str, str] = field(default_factory=dict)

    def integer(self, key: str, least: int = 1) -> int | None:
        value = self.document.get(key)
        if value is None:
            return None
        if not _is_integer(value, least):
            raise self.error(key, f"an integer of at least {least}")
        return value

    def convert(self, key: str, counterpart: str) -> str:
        """Report the counterpart of a setting, and return it."""
        if self.document.get(key) is not None:
            self.converted[key] = f"{key} {self.shown(key)}: {counterpart}"
        return counterpart

    def shown(self, key: str) -> str:
        """Return a value for a message."""
        try:
            return repr(self.document[key])[:80]
        except ValueError:  # Python does not print an integer of more than 4,300 digits
            return "a number of too many digits"

    def error(self, key: str, expected: str) -> ArchiveError:
        return ArchiveError(
            self.manifest.archive,
            f"{self.manifest.config_file} says {key}: {self.shown(key)}",
            expected=expected,
            cure=f"Correct {self.manifest.config_file}.",
        )


def _is_integer(value: object, least: int) -> TypeGuard[int]:
    """Return whether a value is an integer that Triton's config can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MAX_INTEGER


def _batching(settings: _Settings) -> str:
    size = settings.integer("batchSize") or 1
    batch_size = settings.convert("batchSize", f"max_batch_size: {size}")
    fields = []
    delay, queue = settings.integer("maxBatchDelay", least=0), settings.integer("jobQueueSize")
    if delay is not None:
        text = f"max_queue_delay_microseconds: {delay * 1000}"
        fields.append(settings.convert("maxBatchDelay", text))
    if queue is not None:
        text = f"default_queue_policy {{ max_queue_size: {queue} }}"
        fields.append(settings.convert("jobQueueSize", text))
    if size == 1 and not fields:
        return batch_size
    return f"{batch_size}\ndynamic_batching {{ {' '.join(fields)} }}"


def _instances(settings: _Settings) -> str:
    device = settings.document.get("deviceType")
    kind = _KINDS.get(str(device).lower())
    if device is not None and kind is None:
        raise settings.error("deviceType", " or ".join(_KINDS))
    gpus = settings.document.get("deviceIds") or []
    if not isinstance(gpus, list) or not all(_is_integer(gpu, 0) for gpu in gpus):
        raise settings.error("deviceIds", "a list of GPUs' numbers")
    least, most = settings.integer("minWorkers", least=0), settings.integer("maxWorkers", least=0)
    count = least or most or 1
    fields = []
    if gpus and kind != "KIND_CPU":
        # TorchServe distributes its workers over the GPUs, Triton starts `count` on each.
        count = math.ceil(count / len(gpus))
        kind = "KIND_GPU"
        fields.append(settings.convert("deviceIds", f"gpus: {gpus}"))
    if kind is not None:
        fields.append(settings.convert("deviceType", f"kind: {kind}"))
    fields.append(settings.convert("minWorkers" if least else "maxWorkers", f"count: {count}"))
    return " ".join(fields)


def _parameters(settings: _Settings, *, content_type: str, example: bool) -> list[str]:
    lines = []
    seconds = settings.integer("responseTimeout")
    if seconds is not None:
        lines.append(pbtxt.parameter("EXECUTION_TIMEOUT_MS", str(seconds * 1000)))
        settings.convert("responseTimeout", f"EXECUTION_TIMEOUT_MS {seconds * 1000}")
    compiled = _compile_parameters(settings)
    if compiled is not None:
        lines.append(pbtxt.parameter("TORCH_COMPILE_OPTIONAL_PARAMETERS", compiled))
        settings.convert("pt2", f"TORCH_COMPILE_OPTIONAL_PARAMETERS {compiled}")
    if content_type:
        lines += [
            "# What the handler takes bodies for: JSON is parsed, text decoded, all else bytes.",
            pbtxt.parameter("MODEL_KWARGS", json.dumps({"content_type": content_type})),
        ]
    if not example:
        lines += [
            "# There is no body to warm up with: `import-mar --example FILE` puts one here.",
            pbtxt.parameter("WARMUP", "false"),
        ]
    return lines


def _compile_parameters(settings: _Settings) -> str | None:
    """Return the arguments of torch.compile for `pt2` as JSON; None: the model is not compiled."""
    pt2 = settings.document.get("pt2")
    if isinstance(pt2, str):
        pt2 = {"backend": pt2}
    # An `export` is the type of the model's file, which is detected.
    if pt2 is None or (isinstance(pt2, dict) and "export" in pt2):
        return None
    options = pt2.get("compile", {"enable": True, **pt2}) if isinstance(pt2, dict) else None
    if not isinstance(options, dict):
        raise settings.error("pt2", "the name of a compiler, or its settings")
    if not options.get("enable"):
        return None
    try:
        return json.dumps({key: value for key, value in options.items() if key in _COMPILE_KEYS})
    except (TypeError, ValueError, RecursionError):
        raise settings.error("pt2", "values that JSON can hold") from None
