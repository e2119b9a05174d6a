"""Parse the arguments of Triton's `initialize` into frozen objects: ModelConfig, TensorSpec."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch_py_backend.config import conflicts, dtypes, options, pbtxt, sequence_config
from torch_py_backend.config.dtypes import DType
from torch_py_backend.config.options import Options
from torch_py_backend.config.pbtxt import Document
from torch_py_backend.config.sequence_config import SequenceConfig, State
from torch_py_backend.errors import ConfigError


class Origin(enum.Enum):
    """The source of an input, or the destination of an output."""

    CLIENT = "client"
    CONTROL = "control"  # Triton's sequence scheduler
    STATE = "state"  # the previous or the next step of the sequence


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of the config.

    Attributes:
        dims: its shape as the model sees it (after Triton's `reshape`), without the batch
            dimension; -1 means any size.
        optional: a request may leave it out.
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
    """An input that is computed from the shapes of another input of the requests.

    Attributes:
        kind: what it contains of these shapes: a name of `enum Kind` in Triton's ModelConfig.
        source: the name of the other input.
    """

    name: str
    kind: str
    dtype: DType
    source: str

    def __str__(self) -> str:
        return f"{self.name} {self.dtype.triton} ({self.kind} of {self.source})"


class BatchOutput(NamedTuple):
    """An output whose values are split among requests by the shapes of the input `source`."""

    name: str
    source: str


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
        response_cache: Triton answers a request with the inputs of an earlier one by itself, if it
            has a cache.
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
    batch_outputs: tuple[BatchOutput, ...] = ()
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
        """The states that are kept between the requests of a sequence."""
        return self.sequencing.states if self.sequencing is not None else ()

    @property
    def keeps_slots(self) -> bool:
        """Whether the model may keep states by the place of a request in the batch."""
        return self.sequencing is not None and self.sequencing.direct and not self.states


def parse(args: Mapping[str, str], *, complete: bool = True) -> ModelConfig:
    """Parse the arguments of Triton's `initialize`, with inputs and outputs if `complete`.

    Raises ConfigError for what is not supported, missing, contradictory or not accepted.
    """
    document = json.loads(args["model_config"])
    if document.get("cc_model_filenames"):
        raise ConfigError("cc_model_filenames is set", cure="Use default_model_filename instead.")
    sequencing = sequence_config.parse(document)
    inputs, outputs = [], []
    if complete:
        inputs, outputs = _specs("input", document), _specs("output", document)
        listed = {spec.name for spec in outputs}
        for state in sequencing.states if sequencing is not None else ():
            inputs.append(TensorSpec(state.input, state.dtype, state.dims, origin=Origin.STATE))
            if state.output not in listed:
                outputs.append(
                    TensorSpec(state.output, state.dtype, state.dims, origin=Origin.STATE)
                )
    # The count of a group is per GPU.
    groups = document.get("instance_group", ())
    instances = []
    for group in groups:
        gpus = group.get("gpus", ())
        instances.append(int(group["count"]) * max(1, len(gpus)))
    config = ModelConfig(
        name=args["model_name"],
        folder=Path(args["model_repository"]).absolute(),
        version=args["model_version"],
        instance=args["model_instance_name"],
        kind=args["model_instance_kind"],
        device_id=int(args["model_instance_device_id"]),
        instances=max(1, sum(instances)),
        max_batch_size=document["max_batch_size"],
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        default_model_filename=document.get("default_model_filename") or None,
        # `runtime` is no evidence: Triton sets it to "model.py" for every Python-based backend.
        python_runtime="pytorch" in (document.get("backend"), document.get("platform")),
        options=options.parse(document.get("parameters", {})),
        sequencing=sequencing,
        decoupled=bool(document.get("model_transaction_policy", {}).get("decoupled")),
        dynamic_batching="dynamic_batching" in document,
        response_cache=bool(document.get("response_cache", {}).get("enable")),
        batch_inputs=tuple(_batch_inputs(document)) if complete else (),
        batch_outputs=tuple(
            BatchOutput(name, entry["source_input"][0])
            for entry in document.get("batch_output", ())
            for name in entry["target_name"]
        )
        if complete
        else (),
        arguments=args,
    )
    if complete:
        conflicts.check(config)
    return config


def listed_inputs(document: Document) -> tuple[TensorSpec, ...]:
    """Return the inputs that a config lists."""
    return tuple(_spec("input", entry) for entry in document.get("input", ()))


def _specs(role: str, document: Document) -> list[TensorSpec]:
    entries = document.get(role)
    if not entries:
        expected = f"at least one {role} with name, data_type and dims"
        raise ConfigError(f"config.pbtxt lists no {role}", expected=expected)
    return [_spec(role, entry) for entry in entries]


def _batch_inputs(document: Document) -> Iterator[BatchInput]:
    """Yield the batch inputs, one for each target; Triton has checked them."""
    for entry in document.get("batch_input", ()):
        dtype = dtypes.parse("batch_input", entry["data_type"])
        for name in entry["target_name"]:
            yield BatchInput(name, entry["kind"], dtype, entry["source_input"][0])


def _spec(role: str, entry: Document) -> TensorSpec:
    return TensorSpec(
        entry["name"],
        dtypes.parse(f"{role} '{entry['name']}'", entry["data_type"]),
        tuple(pbtxt.model_dims(entry)),
        bool(entry.get("optional")),
        bool(entry.get("allow_ragged_batch")),
        reshaped=entry.get("reshape") is not None,
    )
