"""Writes a config.pbtxt for a TorchServe archive and lists settings that have no counterpart.

The manifest, model-config.yaml and the sources are read; no code is imported or run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from torch_py_backend.artifacts import file_types
from torch_py_backend.artifacts.discovery import ARCHIVE
from torch_py_backend.artifacts.file_types import FileType
from torch_py_backend.errors import ArchiveError, join_names, printable
from torch_py_backend.torchserve import handler_lint, mar_archive
from torch_py_backend.torchserve.mar_archive import Manifest

OUTPUT = "output"
# The largest integer in Triton's config.
_LARGEST = (1 << 31) - 1


@dataclass(slots=True)
class Migration:
    """The config of a model folder, with a report for the user.

    Attributes:
        config: the text of config.pbtxt.
        inputs: the names of its inputs.
        converted: TorchServe's settings with their counterparts.
        not_converted: settings without a counterpart, and manual steps.
    """

    config: str = ""
    inputs: tuple[str, ...] = ()
    converted: list[str] = field(default_factory=list)
    not_converted: list[str] = field(default_factory=list)


def migrate(
    archive: str,
    name: str,
    folder: Path,
    manifest: Manifest,
    *,
    inputs: tuple[str, ...] = (),
    content_type: str = "",
    example: bool = False,
) -> Migration:
    """Return the config for an unpacked archive.

    Args:
        archive: the archive's name in messages.
        name: the model's name.
        folder: the folder of the archive.
        manifest: its manifest.
        inputs: the fields of a request; empty: one, with the name in the handler's source.
        content_type: the Content-Type of clients' requests; empty: bytes.
        example: whether there is an example body for the warm-up.

    Raises:
        ArchiveError: the archive cannot be served here, or its settings are invalid.
    """
    settings = _Settings(
        archive, manifest.config_file, mar_archive.read_settings(folder, manifest, archive)
    )
    _check_supported(settings, folder, manifest)
    migration = Migration(inputs=inputs)
    if not migration.inputs:
        field_name = handler_lint.body_field(folder, manifest.handler_module)
        migration.inputs = (field_name or handler_lint.BODY,)
        if field_name is None:
            migration.not_converted.append(
                f"the names of a request's fields: {manifest.handler} does not say which it reads;"
                f" {handler_lint.BODY} is the only input. Others are named with --input."
            )
    lines = [
        f"# {name}: the TorchServe archive {printable(archive)}, answered by its own handler.",
        'backend: "pytorch_py"',
        "",
        *_batching(settings, manifest, migration),
        "",
        *_tensors(migration),
        "",
        *_instances(settings, migration),
        *_parameters(settings, migration, content_type=content_type, example=example),
    ]
    _report_unconverted(settings, folder, manifest, migration)
    if migration.not_converted:
        lines += ["", "# Not taken over from TorchServe:"]
        lines += [f"# - {printable(line)}" for line in migration.not_converted]
    migration.config = "\n".join(lines) + "\n"
    return migration


# --- model-config.yaml -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings in model-config.yaml; values are checked when they are read."""

    archive: str
    file: str
    document: Mapping[str, object]

    def integer(self, key: str, least: int = 1) -> int | None:
        value = self.document.get(key)
        if value is None:
            return None
        if not _is_integer(value, least):
            raise self.error(key, f"an integer of at least {least}")
        return value

    def shown(self, key: str) -> str:
        """Return a value for a message."""
        try:
            return repr(self.document[key])[:80]
        except ValueError:  # Python does not print an integer of more than 4,300 digits
            return "a number of too many digits"

    def error(self, key: str, expected: str) -> ArchiveError:
        return ArchiveError(
            self.archive,
            f"{self.file} says {key}: {self.shown(key)}",
            expected=expected,
            cure=f"Correct {self.file}.",
        )


def _is_integer(value: object, least: int) -> TypeGuard[int]:
    """Return whether a value is an integer that Triton's config can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST


_UNSUPPORTED = {
    "parallelType": "one model on several GPUs",
    "torchrun": "workers started by torchrun",
    "continuousBatching": "continuous batches, whose handlers keep requests over several calls",
    "sequenceBatching": "batches of sequences, whose handlers keep state between requests",
    "asyncCommunication": "handlers that answer later than their call",
}


def _batching(settings: _Settings, manifest: Manifest, migration: Migration) -> list[str]:
    size = settings.integer("batchSize")
    if size is None:
        migration.not_converted.append(
            "batchSize is not in the archive, and max_batch_size is 1. If it was given when the"
            " model was registered, write it into config.pbtxt."
        )
        size = 1
    elif manifest.handler_module == "text_classifier" and size > 1:
        migration.not_converted.append(
            f"batchSize {size}: text_classifier answers one request at a time"
        )
        size = 1
    else:
        migration.converted.append(f"batchSize {size}: max_batch_size: {size}")
    fields = []
    delay = settings.integer("maxBatchDelay", least=0)
    if delay is not None and size > 1:
        fields.append(f"max_queue_delay_microseconds: {delay * 1000}")
        migration.converted.append(f"maxBatchDelay {delay} ms: {fields[-1]}")
    elif delay is not None:
        migration.not_converted.append(
            f"maxBatchDelay {delay}: no request waits for others in batches of one"
        )
    queue = settings.integer("jobQueueSize")
    if queue is not None:
        fields.append(f"default_queue_policy {{ max_queue_size: {queue} }}")
        migration.converted.append(f"jobQueueSize {queue}: {fields[-1]}")
    lines = ["# Requests in one call of the handler at most.", f"max_batch_size: {size}"]
    if size > 1 or fields:
        lines.append(f"dynamic_batching {{ {''.join(f'{field} ' for field in fields)}}}")
    return lines


_KINDS = {"cpu": "KIND_CPU", "gpu": "KIND_GPU"}


def _instances(settings: _Settings, migration: Migration) -> list[str]:
    device = settings.document.get("deviceType")
    kind = _KINDS.get(str(device).lower())
    if device is not None and kind is None:
        raise settings.error("deviceType", " or ".join(_KINDS))
    gpus = settings.document.get("deviceIds") or []
    if not isinstance(gpus, list) or not all(_is_integer(gpu, 0) for gpu in gpus):
        raise settings.error("deviceIds", "a list of GPUs' numbers")
    least, most = settings.integer("minWorkers", least=0), settings.integer("maxWorkers", least=0)
    count = least or most or 1
    if least or most:
        key = "minWorkers" if least else "maxWorkers"
        migration.converted.append(f"{key} {count}: instance_group count")
    if least and most is not None and most > least:
        migration.not_converted.append(
            f"maxWorkers {most}: Triton starts a fixed number of instances; minWorkers is taken"
        )
    fields = [] if kind is None else [f"kind: {kind}"]
    if gpus and kind != "KIND_CPU":
        # TorchServe distributes its workers over the GPUs, Triton starts `count` on each.
        count = math.ceil(count / len(gpus))
        fields = ["kind: KIND_GPU", f"gpus: [ {', '.join(map(str, gpus))} ]"]
    if fields:
        migration.converted.append(f"deviceType, deviceIds: instance_group {' '.join(fields)}")
    where = "." if fields else "; on each GPU, where there are any."
    return [
        f"# Copies of the handler, each in a process of its own{where}",
        f"instance_group [{{ {' '.join([*fields, f'count: {count}'])} }}]",
    ]


def _parameters(
    settings: _Settings, migration: Migration, *, content_type: str, example: bool
) -> list[str]:
    lines = []
    seconds = settings.integer("responseTimeout")
    if seconds is not None:
        milliseconds = str(seconds * 1000)
        lines += [
            "# Where `torch-py-backend serve` watches, an instance that takes longer is replaced.",
            _parameter("EXECUTION_TIMEOUT_MS", milliseconds),
        ]
        migration.converted.append(
            f"responseTimeout {seconds} s: EXECUTION_TIMEOUT_MS {milliseconds}"
        )
    compiled = _compile_parameters(settings, migration)
    if compiled is not None:
        lines += [
            "# How the handler's model is compiled.",
            _parameter("TORCH_COMPILE_OPTIONAL_PARAMETERS", compiled),
        ]
        migration.converted.append(f"pt2: TORCH_COMPILE_OPTIONAL_PARAMETERS {compiled}")
    if content_type:
        lines += [
            "# What the handler takes bodies for: JSON is parsed, text decoded, all else bytes.",
            _parameter("MODEL_KWARGS", json.dumps({"content_type": content_type})),
        ]
    if not example:
        lines += [
            "# There is no body to warm up with: `import-mar --example FILE` puts one here.",
            _parameter("WARMUP", "false"),
        ]
    return lines


def _parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: {json.dumps(value)} }} }}'


_COMPILE_KEYS = ("backend", "mode", "options", "fullgraph", "dynamic")


def _compile_parameters(settings: _Settings, migration: Migration) -> str | None:
    """Return the arguments of torch.compile for `pt2` as JSON; None: the model is not compiled."""
    pt2 = settings.document.get("pt2")
    if pt2 is None:
        return None
    if isinstance(pt2, str):
        return json.dumps({"backend": pt2})
    if not isinstance(pt2, dict):
        raise settings.error("pt2", "the name of a compiler, or its settings")
    if "export" in pt2:
        migration.not_converted.append("pt2's export: the type of a .pt2 package is detected")
        return None
    inner = pt2.get("compile", pt2)
    if not isinstance(inner, dict):
        raise settings.error("pt2", "a compile with its settings")
    if not inner.get("enable", "compile" not in pt2):
        return None
    others = [str(key) for key in inner if key not in (*_COMPILE_KEYS, "enable")]
    if others:
        migration.not_converted.append(
            f"pt2's {join_names(others)}: torch.compile has no such argument"
        )
    try:
        return json.dumps({key: value for key, value in inner.items() if key in _COMPILE_KEYS})
    except (TypeError, ValueError, RecursionError):
        raise settings.error("pt2", "values that JSON can hold") from None


_CONVERTED = {
    *("batchSize", "maxBatchDelay", "jobQueueSize", "minWorkers", "maxWorkers", "deviceType"),
    *("deviceIds", "responseTimeout", "pt2", *_UNSUPPORTED),
}
# Settings of TorchServe without a counterpart. All other keys are the handler's.
_WITHOUT_EFFECT = {
    "startupTimeout": "Triton waits as long as a model loads",
    "parallelLevel": "one process serves one instance",
    "maxRetryTimeoutInSec": "`torch-py-backend serve` loads a model again that died",
    "clientTimeoutInMills": "clients set their own deadlines, which gRPC sends",
    "useJobTicket": "Triton's queue takes what its policy allows",
    "useVenv": "the server's Python runs the handler; EXECUTION_ENV_PATH names another one",
    "maxSequenceJobQueueSize": "requests are not sequences here",
    "sequenceMaxIdleMSec": "requests are not sequences here",
    "sequenceTimeoutMSec": "requests are not sequences here",
    "maxNumSequence": "requests are not sequences here",
}


def _report_unconverted(
    settings: _Settings, folder: Path, manifest: Manifest, migration: Migration
) -> None:
    """List the settings without a counterpart, and the user's next steps."""
    others = [key for key in settings.document if key not in _CONVERTED]
    migration.not_converted += [
        f"{key} {settings.shown(key)}: {_WITHOUT_EFFECT[key]}"
        for key in others
        if key in _WITHOUT_EFFECT
    ]
    handler_settings = [str(key) for key in others if key not in _WITHOUT_EFFECT]
    if handler_settings:
        migration.converted.append(
            f"{join_names(handler_settings)}: for the handler, in context.model_yaml_config"
        )
    if manifest.requirements_file:
        migration.not_converted.append(
            f"{manifest.requirements_file}: install it where the server's Python runs: pip install"
            f" -r 1/{ARCHIVE}/{manifest.requirements_file}"
        )
    if manifest.handler_module == "base_handler" and not (folder / "base_handler.py").is_file():
        migration.not_converted.append(
            "base_handler takes numbers: import with --content-type application/json, and send"
            " them as JSON, a list for each request"
        )
    migration.not_converted += handler_lint.problems(folder)


# --- files -----------------------------------------------------------------------------------


_WEIGHTS = (FileType.STATE_DICT, FileType.SAFETENSORS)


def _check_supported(settings: _Settings, folder: Path, manifest: Manifest) -> None:
    """Check the settings, and the files that a handler of TorchServe loads.

    Other handlers may load any files.

    Raises:
        ArchiveError: the archive cannot be served here.
    """
    problems = [
        f"{settings.file} asks for {key} ({meaning})"
        for key, meaning in _UNSUPPORTED.items()
        if settings.document.get(key)
    ]
    own_handler = mar_archive.holds_module(folder, manifest.handler_module)
    name = manifest.serialized_file
    if not (own_handler or name or manifest.model_file):
        problems.append("the manifest names neither a serializedFile nor a modelFile")
    if name and not own_handler:
        content = file_types.file_type(folder / name)
        if content not in (_WEIGHTS if manifest.model_file else mar_archive.PROGRAMS):
            cure = file_types.advice(content, Path(manifest.model_file or name)).rstrip(".")
            problems.append(f"{name} is {content.value} ({cure})")
    if manifest.handler_module == "text_classifier" and not own_handler:
        vocabulary = manifest.vocabulary or mar_archive.VOCABULARY
        if not (folder / vocabulary).is_file():
            problems.append(f"it holds no {vocabulary}, which text_classifier needs")
        elif file_types.file_type(folder / vocabulary) is not FileType.STATE_DICT:
            problems.append(
                f"{vocabulary} is not a dict of tokens (torchtext's classes are not supported: save"
                " vocab.get_stoi() with torch.save)"
            )
    if problems:
        raise ArchiveError(settings.archive, f"it cannot be served here: {'; '.join(problems)}")


# --- tensors ----------------------------------------------------------------------------------


def _tensors(migration: Migration) -> list[str]:
    inputs = migration.inputs
    several = len(inputs) > 1
    optional = " optional: true" if several else ""
    specs = [
        f"  {{ name: {json.dumps(name)} data_type: TYPE_STRING dims: [ 1 ]{optional} }}"
        for name in inputs
    ]
    migration.converted.append(
        f"a request's {join_names(inputs)}: {'inputs' if several else 'input'} of bytes"
    )
    return [
        "# What TorchServe's clients send: a request's body, or the fields of a form.",
        "input [",
        ",\n".join(specs),
        "]",
        "# What they get: bytes as they are, text as UTF-8, all else as JSON.",
        f'output [{{ name: "{OUTPUT}" data_type: TYPE_STRING dims: [ 1 ] }}]',
    ]
