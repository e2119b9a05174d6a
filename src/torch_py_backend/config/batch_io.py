"""batch_input and batch_output of config.pbtxt as frozen objects."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_py_backend.config import dtypes
from torch_py_backend.config.dtypes import DType
from torch_py_backend.errors import ConfigError, join_names

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
        name: its name, which is bound to an argument.
        kind: the function of the shapes.
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
    """An output whose values are split among requests by the shapes of an input.

    Attributes:
        name: the output.
        source: the input.
    """

    name: str
    source: str


def parse_inputs(model: str, document: Mapping[str, Any]) -> tuple[BatchInput, ...]:
    """Return the batch inputs of a config, one for each target.

    Args:
        model: the model's name.
        document: Triton's JSON of config.pbtxt.

    Raises:
        ConfigError: `batch_input` has unknown values, or does not fit the config's inputs.
    """
    known = {kind.value: kind for kind in BatchInputKind}
    parsed = []
    taken = {entry["name"] for entry in document.get("input", ())}
    for entry in document.get("batch_input", ()):
        kind = known.get(entry.get("kind", BatchInputKind.ELEMENT_COUNT.value))
        if kind is None:
            raise ConfigError(
                model, f"batch_input has the kind {entry['kind']}", expected=join_names(known)
            )
        if entry.get("data_type") not in _DATA_TYPES:
            raise ConfigError(
                model,
                f"batch_input {kind.value} has data_type {entry.get('data_type')}",
                expected=" or ".join(_DATA_TYPES),
            )
        dtype = dtypes.from_triton(entry["data_type"].removeprefix("TYPE_"))
        source = _source(model, "batch_input", kind.value, entry, document)
        for name in _targets(model, "batch_input", kind.value, entry):
            if name in taken:
                raise ConfigError(
                    model,
                    f"batch_input {kind.value} makes '{name}', and config.pbtxt has that name as"
                    " an input or a batch_input already",
                    cure="Rename its target_name, and the argument of the model.",
                )
            taken.add(name)
            parsed.append(BatchInput(name, kind, dtype, source))
    return tuple(parsed)


def parse_outputs(model: str, document: Mapping[str, Any]) -> tuple[BatchOutput, ...]:
    """Return the batch outputs of a config, one for each target.

    Args:
        model: the model's name.
        document: Triton's JSON of config.pbtxt.

    Raises:
        ConfigError: `batch_output` has unknown values, or does not fit the config's inputs or
            outputs.
    """
    dims = {entry["name"]: _dims(entry) for entry in document.get("output", ())}
    source_dims = {entry["name"]: _dims(entry) for entry in document.get("input", ())}
    parsed: dict[str, BatchOutput] = {}
    for entry in document.get("batch_output", ()):
        kind = entry.get("kind", _SCATTER)
        if kind != _SCATTER:
            raise ConfigError(model, f"batch_output has the kind {kind}", expected=_SCATTER)
        source = _source(model, "batch_output", kind, entry, document)
        for name in _targets(model, "batch_output", kind, entry):
            if name not in dims or name in parsed:
                problem = "twice" if name in parsed else "which is no output"
                raise ConfigError(
                    model,
                    f"batch_output names '{name}', {problem}",
                    expected=f"names among {join_names(dims)}, each once",
                )
            if -1 in dims[name][len(source_dims[source]) :]:
                raise ConfigError(
                    model,
                    f"batch_output gives '{name}' of dims {dims[name]} the shape of '{source}' of"
                    f" dims {source_dims[source]}",
                    expected="for each dim of -1 one of the input at the same place",
                )
            parsed[name] = BatchOutput(name, source)
    return tuple(parsed.values())


def _dims(entry: Mapping[str, Any]) -> list[int]:
    """Return the dims that the model sees."""
    reshape = entry.get("reshape")
    dims: list[int] = entry["dims"] if reshape is None else reshape.get("shape", [])
    return dims


def _source(
    model: str, role: str, kind: str, entry: Mapping[str, Any], document: Mapping[str, Any]
) -> str:
    """Return the only source input of an entry."""
    inputs = {tensor["name"]: tensor for tensor in document.get("input", ())}
    sources = entry.get("source_input", ())
    if len(sources) != 1:
        raise ConfigError(
            model,
            f"{role} {kind} has {len(sources)} source_input",
            expected="one",
        )
    (source,) = sources
    if source not in inputs:
        raise ConfigError(
            model,
            f"{role} {kind} has the source_input '{source}', which is no input",
            expected=f"one of {join_names(inputs)}",
        )
    if inputs[source].get("optional"):
        raise ConfigError(
            model,
            f"{role} {kind} has the source_input '{source}', which requests may leave out",
            cure=f"Remove optional from '{source}', or choose another input.",
        )
    return str(source)


def _targets(model: str, role: str, kind: str, entry: Mapping[str, Any]) -> list[str]:
    targets: list[str] = entry.get("target_name", [])
    if not targets:
        raise ConfigError(model, f"{role} {kind} has no target_name", expected="at least one")
    return targets
