"""batch_input and batch_output of config.pbtxt as frozen objects."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch_py_backend.config import dtypes, pbtxt
from torch_py_backend.config.conflicts import refuse
from torch_py_backend.config.dtypes import DType
from torch_py_backend.config.pbtxt import Document
from torch_py_backend.errors import join_names

# The types that Triton's core accepts.
_DATA_TYPES = ("TYPE_INT32", "TYPE_FP32")
_SCATTER = "BATCH_SCATTER_WITH_INPUT_SHAPE"


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
    kinds = [kind.value for kind in BatchInputKind]
    names = {entry["name"] for entry in document.get("input", ())}
    parsed = []
    for entry in document.get("batch_input", ()):
        kind = entry.get("kind", BatchInputKind.ELEMENT_COUNT.value)
        subject, data_type = f"batch_input {kind}", entry.get("data_type")
        refuse(kind not in kinds, f"batch_input has the kind {kind}", join_names(kinds))
        known = data_type in _DATA_TYPES
        refuse(not known, f"{subject} has data_type {data_type}", " or ".join(_DATA_TYPES))
        dtype = dtypes.parse(subject, data_type)
        source, targets = _source_and_targets(subject, entry, document)
        for name in targets:
            problem = f"{subject} makes '{name}', which is an input or a batch_input already"
            refuse(name in names, problem, "another target_name, as in the model")
            names.add(name)
            parsed.append(BatchInput(name, BatchInputKind(kind), dtype, source))
    return tuple(parsed)


def parse_outputs(document: Document) -> tuple[BatchOutput, ...]:
    """Return the batch outputs of a config, one for each target; raise ConfigError for others."""
    dims = {entry["name"]: pbtxt.model_dims(entry) for entry in document.get("output", ())}
    source_dims = {entry["name"]: pbtxt.model_dims(entry) for entry in document.get("input", ())}
    parsed: dict[str, BatchOutput] = {}
    for entry in document.get("batch_output", ()):
        kind = entry.get("kind", _SCATTER)
        refuse(kind != _SCATTER, f"batch_output has the kind {kind}", _SCATTER)
        source, targets = _source_and_targets(f"batch_output {kind}", entry, document)
        shape = source_dims[source]
        outputs = f"names among {join_names(dims)}, each once"
        for name in targets:
            refuse(name in parsed, f"batch_output names '{name}', twice", outputs)
            refuse(name not in dims, f"batch_output names '{name}', which is no output", outputs)
            refuse(
                -1 in dims[name][len(shape) :],
                f"batch_output gives '{name}' of dims {dims[name]} the shape of '{source}' of dims"
                f" {shape}",
                "for each dim of -1 one of the input at the same place",
            )
            parsed[name] = BatchOutput(name, source)
    return tuple(parsed.values())


def _source_and_targets(subject: str, entry: Document, document: Document) -> tuple[str, list[str]]:
    """Return the only source_input of an entry, and its target_name."""
    inputs = {tensor["name"]: tensor for tensor in document.get("input", ())}
    sources, targets = entry.get("source_input", ()), entry.get("target_name", [])
    refuse(len(sources) != 1, f"{subject} has {len(sources)} source_input", "one")
    source = str(sources[0])
    problem = f"{subject} has the source_input '{source}', which"
    refuse(source not in inputs, f"{problem} is no input", f"one of {join_names(inputs)}")
    optional = bool(inputs[source].get("optional"))
    refuse(optional, f"{problem} requests may leave out", "an input that is not optional")
    refuse(not targets, f"{subject} has no target_name", "at least one")
    return source, targets
