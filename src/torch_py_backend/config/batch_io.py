"""batch_input and batch_output of config.pbtxt as frozen objects."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch_py_backend.config import dtypes
from torch_py_backend.config.dtypes import DType
from torch_py_backend.config.pbtxt import Document


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
    """Return the batch inputs of a config, one for each target; Triton has checked them."""
    parsed = []
    for entry in document.get("batch_input", ()):
        kind, (source,) = BatchInputKind(entry["kind"]), entry["source_input"]
        dtype = dtypes.parse(f"batch_input {kind.value}", entry["data_type"])
        parsed += [BatchInput(name, kind, dtype, source) for name in entry["target_name"]]
    return tuple(parsed)


def parse_outputs(document: Document) -> tuple[BatchOutput, ...]:
    """Return the batch outputs of a config, one for each target; Triton has checked them."""
    parsed = []
    for entry in document.get("batch_output", ()):
        (source,) = entry["source_input"]
        parsed += [BatchOutput(name, source) for name in entry["target_name"]]
    return tuple(parsed)
