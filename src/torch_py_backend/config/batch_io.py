"""batch_input and batch_output of config.pbtxt as frozen objects."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch_py_backend.config import dtypes, pbtxt
from torch_py_backend.config.conflicts import refuse
from torch_py_backend.config.dtypes import DType
from torch_py_backend.config.pbtxt import Document
from torch_py_backend.errors import join_names


class BatchInputKind(enum.Enum):
    """The function of the source's shapes in a batch that a batch input contains."""

    ELEMENT_COUNT = "BATCH_ELEMENT_COUNT"
    ACCUMULATED_ELEMENT_COUNT = "BATCH_ACCUMULATED_ELEMENT_COUNT"
    ACCUMULATED_ELEMENT_COUNT_WITH_ZERO = "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
    MAX_ELEMENT_COUNT_AS_SHAPE = "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"
    ITEM_SHAPE = "BATCH_ITEM_SHAPE"
    ITEM_SHAPE_FLATTEN = "BATCH_ITEM_SHAPE_FLATTEN"


@dataclass(frozen=True, slots=True)
class BatchInput:
    """An input that is computed from the shapes of another input of the requests.

    Attributes:
        dtype: INT32 or FP32.
        source: the name of the other input.
    """

    name: str
    kind: BatchInputKind
    dtype: DType
    source: str

    def __str__(self) -> str:
        return f"{self.name} {self.dtype.triton} ({self.kind.value} of {self.source})"


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """An output whose values are split among requests by the shapes of the input `source`."""

    name: str
    source: str


def parse_inputs(document: Document) -> tuple[BatchInput, ...]:
    """Return the batch inputs of a config, one for each target; raise ConfigError for others."""
    names = {entry["name"] for entry in document.get("input", ())}
    parsed = []
    for entry in document.get("batch_input", ()):
        kind, source = BatchInputKind(entry["kind"]), _source(entry, document)
        dtype = dtypes.parse(f"batch_input {kind.value}", entry["data_type"])
        for name in entry["target_name"]:
            problem = f"batch_input makes '{name}', which is an input or a batch_input already"
            refuse(name in names, problem, "another target_name, as in the model")
            names.add(name)
            parsed.append(BatchInput(name, kind, dtype, source))
    return tuple(parsed)


def parse_outputs(document: Document) -> tuple[BatchOutput, ...]:
    """Return the batch outputs of a config, one for each target; raise ConfigError for others."""
    dims = {entry["name"]: pbtxt.model_dims(entry) for entry in document.get("output", ())}
    shapes = {entry["name"]: pbtxt.model_dims(entry) for entry in document.get("input", ())}
    parsed = []
    for entry in document.get("batch_output", ()):
        source = _source(entry, document)
        shape = shapes[source]
        for name in entry["target_name"]:
            found = f"batch_output names '{name}', which is no output"
            refuse(name not in dims, found, f"one of {join_names(dims)}")
            refuse(
                -1 in dims[name][len(shape) :],
                f"batch_output gives '{name}' of dims {dims[name]} the shape of '{source}' of dims"
                f" {shape}",
                "for each dim of -1 one of the input at the same place",
            )
            parsed.append(BatchOutput(name, source))
    return tuple(parsed)


def _source(entry: Document, document: Document) -> str:
    """Return the only source_input of an entry, which each request must have."""
    sources = entry["source_input"]
    required = [tensor["name"] for tensor in document["input"] if not tensor.get("optional")]
    refuse(
        len(sources) != 1 or sources[0] not in required,
        f"a batch_input or batch_output has the source_input {join_names(sources) or 'none'}",
        f"one of {join_names(required)}, inputs that are not optional",
    )
    return str(sources[0])
