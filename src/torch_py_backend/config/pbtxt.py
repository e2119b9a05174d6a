"""Read config.pbtxt with Triton's protobuf, as the JSON that Triton passes to backends."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from torch_py_backend.errors import ConfigError, PlatformError

JsonObject: TypeAlias = dict[str, Any]
# config.pbtxt as Triton passes it to backends, or a part of it.
Document: TypeAlias = Mapping[str, Any]
_BATCH_SIZE = re.compile(r"^[^#\n]*\bmax_batch_size\s*:\s*[1-9]", re.MULTILINE)


def read(folder: Path) -> JsonObject:
    """Return the config of a model folder with Triton's defaults, also without a config.pbtxt."""
    protobuf, text_format, json_format = _protobuf()
    message = protobuf.ModelConfig()
    try:
        text_format.Parse(text(folder), message)
    except text_format.ParseError as error:
        raise _unreadable(error) from None
    if message.name not in ("", folder.name):
        raise ConfigError(f"config.pbtxt is of '{message.name}'", expected=f"'{folder.name}'")
    message.name = folder.name
    document: JsonObject = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for tensor in (*document["input"], *document["output"]):
        # protobuf writes int64 as strings, Triton writes integers.
        tensor["dims"] = [int(size) for size in tensor["dims"]]
        if "reshape" in tensor:
            tensor["reshape"]["shape"] = [int(size) for size in tensor["reshape"]["shape"]]
    # Triton's default, on a machine without a GPU.
    document["instance_group"] = document["instance_group"] or [{"kind": "KIND_CPU", "count": 1}]
    return document


def lines(field: str, value: Any) -> list[str]:
    """Return the lines of config.pbtxt for a field of a document: one for each entry."""
    if value is None:
        return []
    protobuf, text_format, json_format = _protobuf()
    parts: list[Any] = [[entry] for entry in value] if isinstance(value, list) else [value]
    if field == "parameters":
        parts = [{key: entry} for key, entry in value.items()]
    messages = [json_format.ParseDict({field: part}, protobuf.ModelConfig()) for part in parts]
    style = {"as_one_line": True, "as_utf8": True, "use_short_repeated_primitives": True}
    return [text_format.MessageToString(message, **style) for message in messages]


def parameters(options: Mapping[str, object]) -> JsonObject:
    """Return options as the parameters of a document; what is not a str is written as JSON."""
    return {
        key: {"string_value": value if isinstance(value, str) else json.dumps(value)}
        for key, value in options.items()
    }


def model_dims(entry: Document) -> list[int]:
    """Return the dims of an input or output as the model sees it, between Triton's reshapes."""
    reshape = entry.get("reshape")
    dims: list[int] = entry["dims"] if reshape is None else reshape.get("shape", [])
    return dims


def dims_entry(dims: Sequence[int]) -> JsonObject:
    """Return the fields of an input or output with these dims; Triton requires one at least."""
    return {"dims": [*dims]} if dims else {"dims": [1], "reshape": {"shape": []}}


def fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Return whether a shape has these dims, of which -1 is any size."""
    return len(shape) == len(dims) and all(
        dim in (-1, size) for size, dim in zip(shape, dims, strict=True)
    )


def text(folder: Path) -> str:
    """Return the text of config.pbtxt; empty if the file does not exist."""
    path = folder / "config.pbtxt"
    if not path.is_file():
        return ""
    try:
        return path.read_bytes().decode("utf-8")  # without newline translation
    except (UnicodeDecodeError, OSError) as error:
        raise _unreadable(error) from None


def leaves_out_batch_size(folder: Path) -> bool:
    """Return whether config.pbtxt has no max_batch_size above 0; read without Triton's protobuf."""
    content = text(folder)
    return bool(content) and not _BATCH_SIZE.search(content)


def _unreadable(error: Exception) -> ConfigError:
    return ConfigError(f"config.pbtxt cannot be read: {error}", cure="Correct that line.")


def arguments(
    folder: Path,
    version: str,
    document: Document,
) -> dict[str, str]:
    """Return the arguments that Triton passes to `initialize` of the model's first instance."""
    (group, *_) = document.get("instance_group") or [{}]
    kind = group.get("kind", "KIND_AUTO").removeprefix("KIND_")
    return {
        "model_config": json.dumps(document),
        "model_name": document["name"],
        "model_repository": str(folder.absolute()),
        "model_version": version,
        "model_instance_name": f"{document['name']}_0_0",
        "model_instance_kind": "CPU" if kind == "AUTO" else kind,
        "model_instance_device_id": str((group.get("gpus") or [0])[0]),
    }


def _protobuf() -> tuple[ModuleType, ModuleType, ModuleType]:
    try:
        from google.protobuf import json_format, text_format  # noqa: PLC0415
        from tritonclient.grpc import model_config_pb2  # noqa: PLC0415
    except ImportError as error:
        raise PlatformError(
            f"config.pbtxt cannot be read without Triton's protobuf: {error}",
            cure="pip install 'torch-py-backend[serve]' or tritonclient[grpc].",
        ) from None
    return model_config_pb2, text_format, json_format
