"""Parse the arguments of Triton's `initialize` into frozen objects: ModelConfig, TensorSpec."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from torch_py_backend.config import conflicts, dtypes, options, pbtxt
from torch_py_backend.config.dtypes import DType
from torch_py_backend.config.options import Options
from torch_py_backend.config.pbtxt import Document
from torch_py_backend.errors import ConfigError

# Triton's default.
_IDLE_MICROSECONDS = 1_000_000
# The types of START, END and READY by the field that has their values; CORRID has a data_type.
_BOOLEANS = {
    "int32_false_true": "TYPE_INT32",
    "fp32_false_true": "TYPE_FP32",
    "bool_false_true": "TYPE_BOOL",
}


class Origin(enum.Enum):
    """The source of an input, or the destination of an output."""

    CLIENT = "client"
    CONTROL = "control"  # Triton's sequence scheduler
    STATE = "state"  # the previous or the next step of the sequence


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of the config.

    Attributes:
        dims: its shape after Triton's `reshape`, without the batch dimension; -1 means any size.
        ragged: Triton batches requests that differ in its shape.
        reshaped: the config has a `reshape`: its shape in requests differs from `dims`.
    """

    name: str
    dtype: DType
    dims: tuple[int, ...]
    optional: bool = False
    ragged: bool = False
    origin: Origin = Origin.CLIENT
    reshaped: bool = False

    def __str__(self) -> str:
        origin = "" if self.origin is Origin.CLIENT else f" ({self.origin.value})"
        return f"{self.name} {self.dtype.triton} [{', '.join(map(str, self.dims))}]{origin}"


class BatchInput(NamedTuple):
    """An input that is computed from the shapes of another input of the requests, its `source`."""

    name: str
    kind: str  # what it contains of these shapes: a name of `enum Kind` in Triton's ModelConfig
    dtype: DType
    source: str

    def __str__(self) -> str:
        return f"{self.name} {self.dtype.triton} ({self.kind} of {self.source})"


class State(NamedTuple):
    """A tensor that a step of a sequence passes to the next step: an output, and then an input.

    Attributes:
        dims: its shape, without the batch dimension; -1 means any size.
        initial: its shape in the first step.
        file: its bytes in the first step, a file in the folder `initial_state`; None: zeros.
    """

    input: str
    output: str
    dtype: DType
    dims: tuple[int, ...]
    initial: tuple[int, ...]
    file: str | None = None


class SequenceConfig(NamedTuple):
    """The settings of sequence_batching. Triton has checked what it uses itself.

    Attributes:
        idle_s: seconds without a request after which Triton ends a sequence.
        controls: the inputs with which its scheduler signals START, END, READY or CORRID.
        direct: whether each sequence has a place in the batch: the strategy `direct`.
        most: the largest number of sequences that Triton runs on an instance at once.
    """

    idle_s: float
    controls: tuple[TensorSpec, ...]
    states: tuple[State, ...]
    direct: bool
    most: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The config of a model, as one instance has it.

    Attributes:
        kind: `CPU`, `GPU` or `MODEL` (instance_group's KIND_).
        device_id: the GPU's ordinal for kind `GPU`.
        instances: the number of processes that serve this model on this machine.
        max_batch_size: the largest number of rows in a batch; 0: the model has no batch dimension.
        python_runtime: the model was written for the Python runtime of Triton's PyTorch backend.
        sequencing: the sequence settings; None: requests are independent of each other.
        dynamic_batching: Triton forms batches from requests of different clients.
        response_cache: Triton, with a cache, answers a request with the inputs of an earlier one.
        batch_outputs: outputs that are split among requests by the shapes of inputs, by name.
        arguments: the arguments of `initialize` that it was parsed from.
    """

    name: str
    folder: Path
    version: str
    instance: str
    kind: str
    device_id: int
    instances: int
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    default_model_filename: str | None
    python_runtime: bool
    options: Options
    sequencing: SequenceConfig | None = None
    decoupled: bool = False
    dynamic_batching: bool = False
    response_cache: bool = False
    batch_inputs: tuple[BatchInput, ...] = ()
    batch_outputs: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def concatenates(self) -> bool:
        """Whether ragged inputs are concatenated into one dimension, like in C++ backends."""
        return bool(self.batch_inputs or self.batch_outputs)

    @property
    def version_folder(self) -> Path:
        return self.folder / self.version

    @property
    def states(self) -> tuple[State, ...]:
        return self.sequencing.states if self.sequencing is not None else ()

    @property
    def keeps_slots(self) -> bool:
        """Whether the model may keep states by the place of a request in the batch."""
        return self.sequencing is not None and self.sequencing.direct and not self.states


def parse(args: Mapping[str, str], *, complete: bool = True) -> ModelConfig:
    """Parse the arguments of Triton's `initialize`, with inputs and outputs if `complete`."""
    document = json.loads(args["model_config"])
    if document.get("cc_model_filenames"):
        raise ConfigError("cc_model_filenames is set", cure="Use default_model_filename instead.")
    groups = document.get("instance_group", ())
    # The count of a group is per GPU.
    instances = sum((group["count"] or 1) * max(1, len(group.get("gpus", ()))) for group in groups)
    config = ModelConfig(
        name=args["model_name"],
        folder=Path(args["model_repository"]).absolute(),
        version=args["model_version"],
        instance=args["model_instance_name"],
        kind=args["model_instance_kind"],
        device_id=int(args["model_instance_device_id"]),
        instances=max(1, instances),
        max_batch_size=document["max_batch_size"],
        inputs=(),
        outputs=(),
        default_model_filename=document.get("default_model_filename") or None,
        # `runtime` is no evidence: Triton sets it to "model.py" for every Python-based backend.
        python_runtime="pytorch" in (document.get("backend"), document.get("platform")),
        options=options.parse(document.get("parameters", {})),
        sequencing=_sequencing(document),
        decoupled=bool(document.get("model_transaction_policy", {}).get("decoupled")),
        dynamic_batching="dynamic_batching" in document,
        response_cache=bool(document.get("response_cache", {}).get("enable")),
        arguments=args,
    )
    return _complete(config, document) if complete else config


def specs(role: str, document: Document) -> tuple[TensorSpec, ...]:
    """Return what a config lists as `input` or `output`."""
    return tuple(_spec(role, entry) for entry in document.get(role, ()))


def _spec(role: str, entry: Document) -> TensorSpec:
    subject = f"{role} '{entry['name']}'"
    dims = entry["dims"]
    if not dims or any(size < 1 and size != -1 for size in dims):  # as Triton does, for `check`
        expected = "sizes of at least 1, or -1 for any size"
        raise ConfigError(f"{subject} has dims {dims}", expected=expected)
    return TensorSpec(
        entry["name"],
        dtypes.parse(subject, entry["data_type"]),
        tuple(pbtxt.model_dims(entry)),
        bool(entry.get("optional")),
        bool(entry.get("allow_ragged_batch")),
        reshaped=entry.get("reshape") is not None,
    )


def _complete(config: ModelConfig, document: Document) -> ModelConfig:
    inputs = specs("input", document)
    outputs = specs("output", document)
    if not (inputs and outputs):
        raise ConfigError("config.pbtxt lists no inputs, or no outputs")
    listed = {spec.name for spec in outputs}
    for state in config.states:
        tensor = TensorSpec(state.input, state.dtype, state.dims, origin=Origin.STATE)
        inputs += (tensor,)
        if state.output not in listed:
            outputs += (replace(tensor, name=state.output),)
    config = replace(
        config,
        inputs=inputs,
        outputs=outputs,
        batch_inputs=tuple(
            BatchInput(
                name,
                entry["kind"],
                dtypes.parse("batch_input", entry["data_type"]),
                entry["source_input"][0],
            )
            for entry in document.get("batch_input", ())
            for name in entry["target_name"]
        ),
        batch_outputs={
            name: entry["source_input"][0]
            for entry in document.get("batch_output", ())
            for name in entry["target_name"]
        },
    )
    conflicts.check(config)
    return config


def _sequencing(document: Document) -> SequenceConfig | None:
    batching = document.get("sequence_batching")
    if batching is None:
        return None
    if batching.get("iterative_sequence") or batching.get("generative_sequence"):
        raise ConfigError("no Python-based backend supports iterative or generative sequences")
    oldest = batching.get("oldest")
    return SequenceConfig(
        idle_s=int(batching.get("max_sequence_idle_microseconds") or _IDLE_MICROSECONDS) / 1e6,
        controls=tuple(map(_control, batching.get("control_input", ()))),
        states=tuple(map(_state, batching.get("state", ()))),
        direct=oldest is None,
        most=(oldest or {}).get("max_candidate_sequences") or max(1, document["max_batch_size"]),
    )


def _control(entry: Document) -> TensorSpec:
    name = entry["name"]
    (control, *_) = entry["control"]
    listed = control.get("data_type", "")
    data_type = next((_BOOLEANS[key] for key in _BOOLEANS if control.get(key)), listed)
    dtype = dtypes.parse(f"the control input '{name}'", data_type)
    return TensorSpec(name, dtype, (1,), origin=Origin.CONTROL)


def _state(entry: Document) -> State:
    dtype = dtypes.parse(f"the state '{entry['input_name']}'", entry["data_type"])
    # protobuf's JSON has int64 as strings.
    dims = tuple(map(int, entry["dims"]))
    # Without an initial state, Triton leaves the values undefined, and uses 1 for sizes of -1.
    undefined = {"dims": [abs(size) for size in dims]}
    (initial, *_) = entry.get("initial_state") or [undefined]
    shape = tuple(map(int, initial["dims"]))
    names = entry["input_name"], entry["output_name"]
    return State(*names, dtype, dims, shape, initial.get("data_file"))
