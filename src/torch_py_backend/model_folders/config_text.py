"""A config.pbtxt with a comment on each field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_py_backend.autocomplete import completion
from torch_py_backend.config import pbtxt
from torch_py_backend.config.pbtxt import Document

_INPUTS_ON_GPU = pbtxt.parameter("FORCE_CPU_ONLY_INPUT_TENSORS", "no")


def write(
    folder: Path,
    document: Document,
    description: str,
    signature: str = "",
    required: Sequence[str] = (),
) -> None:
    """Write config.pbtxt, with kind and count of the instance group.

    The model's signature and its required arguments are comments in the place of inputs that the
    config lacks.
    """
    sent = document["input"] or [{"name": name} for name in required or ["…"]]
    sends = "What a client sends; dims without the batch dimension, -1 is any size."
    lines = [*_start(document, description), *_tensors("input", sent, signature or sends)]
    received = document["output"] or [{"name": "…"}]
    lines += _tensors("output", received, "What a client receives.")
    lines += ["", *_settings(document), ""]
    (folder / "config.pbtxt").write_text("\n".join(lines), encoding="utf-8")


def _start(document: Document, description: str) -> Iterator[str]:
    yield f"# {document['name']}: {description}, served by PyTorch."
    yield 'backend: "pytorch_py"'
    yield ""
    if not completion.is_incomplete(document):
        yield "# The largest number of rows in one call of the model; 0: requests are not batched."
        yield f"max_batch_size: {document['max_batch_size']}"
    else:
        yield "# The largest number of rows in one call of the model, to be written together with"
        yield "# the inputs below; 0: the model has no batch dimension. An example makes both"
        yield "# unnecessary."
        yield "# max_batch_size: 8"
    if document["max_batch_size"] > 0:
        yield "# Requests that wait at the same time become one call."
        delay = document.get("dynamic_batching", {}).get("max_queue_delay_microseconds", 0)
        limit = f"max_queue_delay_microseconds: {delay} " if delay else ""
        yield f"dynamic_batching {{ {limit}}}"


def _settings(document: Document) -> Iterator[str]:
    yield "# Copies of the model, each in a process of its own. KIND_GPU: one on every GPU."
    (group,) = document["instance_group"]
    yield f"instance_group [{{ kind: {group['kind']} count: {group['count']} }}]"
    yield "# With KIND_GPU, inputs that are on the GPU already stay there:"
    yield f"{'' if group['kind'] == 'KIND_GPU' else '# '}{_INPUTS_ON_GPU}"
    for key, entry in document["parameters"].items():
        yield pbtxt.parameter(key, entry["string_value"])


def _tensors(role: str, entries: Sequence[Document], comment: str) -> Iterator[str]:
    yield ""
    yield f"# {comment}"
    if all("dims" in entry for entry in entries):
        yield f"{role} ["
        yield ",\n".join(f"  {_tensor(entry)}" for entry in entries)
        yield "]"
    else:
        yield from (f"# {role} [{_tensor(entry)}]" for entry in entries)


def _tensor(entry: Document) -> str:
    """Return the message of an input or output; unknown fields have a placeholder."""
    dims = entry.get("dims", ["…"])
    fields = [
        f"name: {pbtxt.quote(entry['name'])}",
        f"data_type: {entry.get('data_type', 'TYPE_FP32')}",
        f"dims: [ {', '.join(map(str, dims))} ]",
    ]
    if "reshape" in entry:
        sizes = ", ".join(map(str, entry["reshape"]["shape"]))
        fields.append(f"reshape {{ shape: [ {sizes} ] }}")
    if entry.get("optional"):
        fields.append("optional: true")
    return f"{{ {' '.join(fields)} }}"
