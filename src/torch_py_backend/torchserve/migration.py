"""What becomes of a TorchServe archive in Triton: a config.pbtxt, and what is not taken over.

Told from the manifest, from model-config.yaml and from the sources; nothing is imported or run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_py_backend.artifacts import file_types
from torch_py_backend.artifacts.discovery import ARCHIVE
from torch_py_backend.artifacts.file_types import Content
from torch_py_backend.errors import ArchiveError, shown
from torch_py_backend.torchserve import handler_lint, mar_archive
from torch_py_backend.torchserve.mar_archive import Manifest

VOCABULARY = "source_vocab.pt"
OUTPUT = "output"
# Of Triton's integers; and how much of a value of TorchServe's is repeated.
_LARGEST = (1 << 31) - 1
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Wishes:
    """What only the archive's user knows.

    Attributes:
        inputs: the fields of a request; empty: one, as the handler's source names it.
        content_type: what clients have sent as Content-Type; empty: bytes.
        example: whether a body lies beside the model, to warm it up with.
    """

    inputs: tuple[str, ...] = ()
    content_type: str = ""
    example: bool = False


@dataclass(slots=True)
class Migration:
    """A model folder's config, and what its user is to be told.

    Attributes:
        config: the text of config.pbtxt.
        inputs: the names of its inputs.
        taken: settings of TorchServe's, and what became of them.
        left: what is not taken over, or is to be done by hand.
    """

    config: str = ""
    inputs: tuple[str, ...] = ()
    taken: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def migrate(archive: str, name: str, folder: Path, manifest: Manifest, wishes: Wishes) -> Migration:
    """The config of a model for an archive that lies unpacked in a folder.

    Args:
        archive: what the archive is called in messages.
        name: the model's name.
        folder: the folder.
        manifest: its manifest.
        wishes: what the user says.

    Raises:
        ArchiveError: it cannot be served here, or its settings make no sense.
    """
    settings = _Settings(
        archive, manifest.config_file, mar_archive.settings(folder, manifest, archive)
    )
    obstacles = [*_obstacles(settings), *_handler_obstacles(folder, manifest)]
    if obstacles:
        raise ArchiveError(archive, f"it cannot be served here: {'; '.join(obstacles)}")
    made = Migration()
    made.inputs = wishes.inputs or (_body(folder, manifest, made),)
    lines = [
        *_batching(settings, manifest, made),
        "",
        *_tensors(made),
        "",
        *_instances(settings, made),
        *_parameters(settings, wishes, made),
    ]
    _tell_settings(settings, made)
    _tell_files(folder, manifest, made)
    made.left += handler_lint.of(folder)
    made.config = _text(name, archive, lines, made.left)
    return made


def _text(name: str, archive: str, lines: Sequence[str], left: Sequence[str]) -> str:
    head = [
        f"# {name}: the TorchServe archive {_one_line(archive)}, answered by its own handler.",
        'backend: "pytorch_py"',
        "",
    ]
    tail = [f"# - {_one_line(one)}" for one in left]
    heading = ["", "# Not taken over from TorchServe:"] if left else []
    return "\n".join([*head, *lines, *heading, *tail]) + "\n"


def _one_line(text: str) -> str:
    """A comment ends with its line, whatever the archive's settings hold."""
    return "".join(one if one.isprintable() else " " for one in text)


# --- model-config.yaml -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Settings:
    """What model-config.yaml says, each value looked at when it is asked for."""

    archive: str
    file: str
    document: Mapping[str, Any]

    def whole(self, key: str, least: int = 1) -> int | None:
        value = self.document.get(key)
        if value is None:
            return None
        if not _is_whole(value, least):
            raise self.refusal(key, f"an integer of at least {least}")
        number: int = value
        return number

    def refusal(self, key: str, expected: str) -> ArchiveError:
        return ArchiveError(
            self.archive,
            f"{self.file} says {key}: {_brief(self.document[key])}",
            expected=expected,
            cure=f"Correct {self.file}.",
        )


def _brief(value: Any) -> str:
    return _one_line(repr(value))[:_SHOWN]


def _is_whole(value: Any, least: int) -> bool:
    """Whether it is a number that Triton's config can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST


_REFUSED = {
    "parallelType": "one model on several GPUs",
    "torchrun": "workers started by torchrun",
    "continuousBatching": "continuous batches, whose handlers keep requests over several calls",
    "sequenceBatching": "batches of sequences, whose handlers keep state between requests",
    "asyncCommunication": "handlers that answer later than their call",
}


def _obstacles(settings: _Settings) -> Iterator[str]:
    for key, meaning in _REFUSED.items():
        if settings.document.get(key):
            yield f"{settings.file} asks for {key} ({meaning})"


def _batching(settings: _Settings, manifest: Manifest, made: Migration) -> list[str]:
    size = _batch_size(settings, manifest, made)
    delay = settings.whole("maxBatchDelay", least=0)
    queue = settings.whole("jobQueueSize")
    policy = []
    if delay is not None and size > 1:
        policy.append(f"max_queue_delay_microseconds: {delay * 1000}")
        made.taken.append(f"maxBatchDelay {delay} ms: {policy[-1]}")
    elif delay is not None:
        made.left.append(f"maxBatchDelay {delay}: no request waits for others in batches of one")
    if queue is not None:
        policy.append(f"default_queue_policy {{ max_queue_size: {queue} }}")
        made.taken.append(f"jobQueueSize {queue}: {policy[-1]}")
    lines = ["# Requests in one call of the handler at most.", f"max_batch_size: {size}"]
    if size > 1 or policy:
        lines.append(f"dynamic_batching {{ {''.join(f'{one} ' for one in policy)}}}")
    return lines


def _batch_size(settings: _Settings, manifest: Manifest, made: Migration) -> int:
    size = settings.whole("batchSize")
    if size is None:
        made.left.append(
            "batchSize is not in the archive, and max_batch_size is 1. If it was given when the"
            " model was registered, write it into config.pbtxt."
        )
        return 1
    if manifest.handler_module == "text_classifier" and size > 1:
        made.left.append(f"batchSize {size}: text_classifier answers one request at a time")
        return 1
    made.taken.append(f"batchSize {size}: max_batch_size: {size}")
    return size


_KINDS = {"cpu": "KIND_CPU", "gpu": "KIND_GPU"}


def _instances(settings: _Settings, made: Migration) -> list[str]:
    gpus, kind = _gpus(settings), _kind(settings)
    parts = [] if kind is None else [f"kind: {kind}"]
    count = _count(settings, made)
    if gpus and kind != "KIND_CPU":
        # TorchServe deals its workers out to GPUs, Triton starts so many on each.
        count = math.ceil(count / len(gpus))
        parts = ["kind: KIND_GPU", f"gpus: [ {', '.join(map(str, gpus))} ]"]
    if parts:
        made.taken.append(f"deviceType, deviceIds: instance_group {' '.join(parts)}")
    comment = "# Copies of the handler, each in a process of its own"
    where = "." if parts else "; on each GPU, where there are any."
    return [f"{comment}{where}", f"instance_group [{{ {' '.join([*parts, f'count: {count}'])} }}]"]


def _kind(settings: _Settings) -> str | None:
    device = settings.document.get("deviceType")
    if device is None:
        return None
    kind = _KINDS.get(str(device).lower())
    if kind is None:
        raise settings.refusal("deviceType", " or ".join(_KINDS))
    return kind


def _count(settings: _Settings, made: Migration) -> int:
    least, most = settings.whole("minWorkers", least=0), settings.whole("maxWorkers", least=0)
    count = least or most or 1
    if least or most:
        made.taken.append(
            f"{'minWorkers' if least else 'maxWorkers'} {count}: instance_group count"
        )
    if least and most is not None and most > least:
        made.left.append(
            f"maxWorkers {most}: Triton starts a fixed number of instances; minWorkers is taken"
        )
    return count


def _gpus(settings: _Settings) -> list[int]:
    wished = settings.document.get("deviceIds") or []
    if not isinstance(wished, list) or not all(_is_whole(one, 0) for one in wished):
        raise settings.refusal("deviceIds", "a list of GPUs' numbers")
    return wished


def _parameters(settings: _Settings, wishes: Wishes, made: Migration) -> list[str]:
    lines = []
    timeout = settings.whole("responseTimeout")
    if timeout is not None:
        lines += [
            "# Where `torch-py-backend serve` watches, an instance that takes longer is replaced.",
            _parameter("EXECUTION_TIMEOUT_MS", str(timeout * 1000)),
        ]
        made.taken.append(f"responseTimeout {timeout} s: EXECUTION_TIMEOUT_MS {timeout * 1000}")
    compiled = _compile_parameters(settings, made)
    if compiled is not None:
        lines += [
            "# How the handler's model is compiled.",
            _parameter("TORCH_COMPILE_OPTIONAL_PARAMETERS", json.dumps(compiled)),
        ]
        made.taken.append(f"pt2: TORCH_COMPILE_OPTIONAL_PARAMETERS {json.dumps(compiled)}")
    if wishes.content_type:
        lines += [
            "# What the handler takes bodies for: JSON is parsed, text decoded, all else bytes.",
            _parameter("MODEL_KWARGS", json.dumps({"content_type": wishes.content_type})),
        ]
    if not wishes.example:
        lines += [
            "# There is no body to warm up with: `import-mar --example FILE` puts one here.",
            _parameter("WARMUP", "false"),
        ]
    return lines


def _parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: {json.dumps(value)} }} }}'


_COMPILE_KEYS = ("backend", "mode", "options", "fullgraph", "dynamic")


def _compile_parameters(settings: _Settings, made: Migration) -> dict[str, Any] | None:
    """The arguments of torch.compile that `pt2` stands for; None: the model is not compiled."""
    wished = settings.document.get("pt2")
    if wished is None:
        return None
    if isinstance(wished, str):
        return {"backend": wished}
    if not isinstance(wished, dict):
        raise settings.refusal("pt2", "the name of a compiler, or its settings")
    if "export" in wished:
        made.left.append("pt2's export: a .pt2 package is told by what it holds")
        return None
    inner = wished.get("compile", wished)
    if not isinstance(inner, dict):
        raise settings.refusal("pt2", "a compile with its settings")
    if not inner.get("enable", "compile" not in wished):
        return None
    found = {key: value for key, value in inner.items() if key in _COMPILE_KEYS}
    others = [str(key) for key in inner if key not in (*_COMPILE_KEYS, "enable")]
    if others:
        made.left.append(f"pt2's {shown(others)}: torch.compile has no such argument")
    try:
        json.dumps(found)
    except (TypeError, ValueError, RecursionError):
        raise settings.refusal("pt2", "values that JSON can hold") from None
    return found


_TAKEN = {
    *("batchSize", "maxBatchDelay", "jobQueueSize", "minWorkers", "maxWorkers", "deviceType"),
    *("deviceIds", "responseTimeout", "pt2", *_REFUSED),
}
# Of TorchServe's own; what else is in the file is the handler's.
_WITHOUT_EFFECT = {
    "startupTimeout": "Triton waits as long as a model loads",
    "parallelLevel": "one process serves one instance",
    "maxRetryTimeoutInSec": "`torch-py-backend serve` loads a model again that died",
    "clientTimeoutInMills": "a client's deadline is its own; gRPC tells it",
    "useJobTicket": "Triton's queue takes what its policy allows",
    "useVenv": "the server's Python runs the handler; EXECUTION_ENV_PATH names another one",
    "maxSequenceJobQueueSize": "requests are no sequences here",
    "sequenceMaxIdleMSec": "requests are no sequences here",
    "sequenceTimeoutMSec": "requests are no sequences here",
    "maxNumSequence": "requests are no sequences here",
}


def _tell_settings(settings: _Settings, made: Migration) -> None:
    for key in settings.document:
        if key in _WITHOUT_EFFECT:
            value = _brief(settings.document[key])
            made.left.append(f"{key} {value}: {_WITHOUT_EFFECT[key]}")
    own = [
        str(key) for key in settings.document if key not in _TAKEN and key not in _WITHOUT_EFFECT
    ]
    if own:
        made.taken.append(f"{shown(own)}: for the handler, in context.model_yaml_config")


# --- files -----------------------------------------------------------------------------------


def _handler_obstacles(folder: Path, manifest: Manifest) -> Iterator[str]:
    """What a handler of TorchServe's own could not load; others load what they want."""
    if mar_archive.holds_module(folder, manifest.handler_module):
        return
    yield from _model_obstacles(folder, manifest)
    if manifest.handler_module == "text_classifier":
        yield from _vocabulary_obstacles(folder, manifest)


def _model_obstacles(folder: Path, manifest: Manifest) -> Iterator[str]:
    name = manifest.serialized_file
    if not name:
        if not manifest.model_file:
            yield "the manifest names neither a serializedFile nor a modelFile"
        return
    found = file_types.describe(folder / name)
    if manifest.model_file:
        wanted: tuple[Content, ...] = (Content.STATE_DICT, Content.SAFETENSORS)
    else:
        wanted = (Content.TORCHSCRIPT, Content.EXPORTED, Content.AOTI)
    if found not in wanted:
        cure = file_types.cure(found, Path(manifest.model_file or name)).rstrip(".")
        yield f"{name} is {found.value} ({cure})"


def _vocabulary_obstacles(folder: Path, manifest: Manifest) -> Iterator[str]:
    name = manifest.vocabulary or VOCABULARY
    path = folder / name
    if not path.is_file():
        yield f"it holds no {name}, which text_classifier needs"
    elif file_types.describe(path) is not Content.STATE_DICT:
        yield (
            f"{name} is no dict of tokens (torchtext, whose objects it may hold, is not maintained:"
            " save vocab.get_stoi() with torch.save)"
        )


def _tell_files(folder: Path, manifest: Manifest, made: Migration) -> None:
    if manifest.requirements_file:
        made.left.append(
            f"{manifest.requirements_file}: install it where the server's Python runs: pip install"
            f" -r 1/{ARCHIVE}/{manifest.requirements_file}"
        )
    if manifest.handler_module == "base_handler" and not (folder / "base_handler.py").is_file():
        made.left.append(
            "base_handler takes numbers: import with --content-type application/json, and send"
            " them as JSON, a list for each request"
        )


# --- tensors ----------------------------------------------------------------------------------


def _body(folder: Path, manifest: Manifest, made: Migration) -> str:
    """What the handler calls the body of a request."""
    read = handler_lint.body(folder, manifest.handler_module)
    if read is None:
        made.left.append(
            f"the names of a request's fields: {manifest.handler} does not say which it reads;"
            f" {handler_lint.BODY} is the only input. Others are named with --input."
        )
    return read or handler_lint.BODY


def _tensors(made: Migration) -> list[str]:
    inputs = made.inputs
    several = len(inputs) > 1
    optional = " optional: true" if several else ""
    specs = [
        f"  {{ name: {json.dumps(name)} data_type: TYPE_STRING dims: [ 1 ]{optional} }}"
        for name in inputs
    ]
    made.taken.append(f"a request's {shown(inputs)}: {'inputs' if several else 'input'} of bytes")
    return [
        "# What TorchServe's clients send: a request's body, or the fields of a form.",
        "input [",
        ",\n".join(specs),
        "]",
        "# What they get: bytes as they are, text as UTF-8, all else as JSON.",
        f'output [{{ name: "{OUTPUT}" data_type: TYPE_STRING dims: [ 1 ] }}]',
    ]
