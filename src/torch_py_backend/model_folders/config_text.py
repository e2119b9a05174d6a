"""A config.pbtxt with a comment on each field."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch_py_backend.config import pbtxt
from torch_py_backend.config.pbtxt import Document

_INPUTS_ON_GPU = pbtxt.parameter("FORCE_CPU_ONLY_INPUT_TENSORS", "no")


def write(folder: Path, report: Document) -> None:
    """Write config.pbtxt, from the report of `inspection.inspect` on the model."""
    document, description = report["config"], report["artifact"].partition(": ")[2]
    lines = [
        f"# {document['name']}: {description}, served by PyTorch.",
        'backend: "pytorch_py"',
        "",
        "# The largest number of rows in one call of the model; 0: requests are not batched.",
        f"max_batch_size: {document['max_batch_size']}",
    ]
    if document["max_batch_size"] > 0:
        delay = document.get("dynamic_batching", {}).get("max_queue_delay_microseconds", 0)
        limit = f"max_queue_delay_microseconds: {delay} " if delay else ""
        lines += [
            "# Requests that wait at the same time become one call.",
            f"dynamic_batching {{ {limit}}}",
        ]
    lines += [
        "",
        "# What a client sends; dims without the batch dimension, -1 is any size.",
        *_tensors("input", document["input"]),
        "",
        "# What a client receives.",
        *_tensors("output", document["output"]),
    ]
    (group,) = document["instance_group"]
    lines += [
        "",
        "# Copies of the model, each in a process of its own. KIND_GPU: one on every GPU.",
        f"instance_group [{{ kind: {group['kind']} count: {group['count']} }}]",
    ]
    if group["kind"] == "KIND_GPU":
        lines += ["# Inputs that are on the GPU already stay there.", _INPUTS_ON_GPU]
    options = document["parameters"].items()
    lines += [pbtxt.parameter(key, entry["string_value"]) for key, entry in options]
    (folder / "config.pbtxt").write_text("\n".join([*lines, ""]), encoding="utf-8")


def _tensors(role: str, entries: Sequence[Document]) -> list[str]:
    return [f"{role} [", ",\n".join(f"  {_tensor(entry)}" for entry in entries), "]"]


def _tensor(entry: Document) -> str:
    """Return the message of an input or output."""
    fields = [
        f"name: {pbtxt.quote(entry['name'])}",
        f"data_type: {entry['data_type']}",
        f"dims: [ {', '.join(map(str, entry['dims']))} ]",
    ]
    if "reshape" in entry:
        sizes = ", ".join(map(str, entry["reshape"]["shape"]))
        fields.append(f"reshape {{ shape: [ {sizes} ] }}")
    if entry.get("optional"):
        fields.append("optional: true")
    return f"{{ {' '.join(fields)} }}"
