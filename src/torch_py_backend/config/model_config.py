"""Triton's JSON and arguments become frozen objects: ModelConfig, TensorSpec."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from torch_py_backend.config import batch_io, dtypes, options, sequence_config
from torch_py_backend.config.batch_io import BatchInput, BatchOutput
from torch_py_backend.config.options import Options
from torch_py_backend.config.sequence_config import Sequencing, State
from torch_py_backend.errors import ConfigError


class Origin(enum.Enum):
    """Who sends an input, or takes an output."""

    CLIENT = "client"
    CONTROL = "control"  # Triton's scheduler of sequences
    STATE = "state"  # the step before, or the next one


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the config says of one input or output.

    Attributes:
        name: the tensor's name in requests.
        dtype: its element type.
        dims: its shape as the model sees it (after Triton's `reshape`), without the batch
            dimension; -1 is any size.
        optional: a request may leave it out.
        ragged: Triton batches requests that differ in its shape.
        origin: who sends or takes it.
        reshaped: the config has a `reshape`: Triton gives it another shape than `dims`.
    """

    name: str
    dtype: dtypes.DType
    dims: tuple[int, ...]
    optional: bool = False
    ragged: bool = False
    origin: Origin = Origin.CLIENT
    reshaped: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.dtype.triton} [{', '.join(map(str, self.dims))}]"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One instance's view of its model.

    Attributes:
        name: the model's name.
        folder: the model's folder; `version_folder` is where the artifact lies.
        version: the version, the name of a folder.
        instance: the name of this instance.
        kind: `CPU`, `GPU` or `MODEL` (instance_group's KIND_).
        device_id: the GPU's ordinal for kind `GPU`.
        instances: how many processes serve this model on this machine.
        max_batch_size: rows in a batch at most; 0: the model has no batch dimension.
        default_model_filename: the artifact that the config names, if it does.
        python_runtime: whether it was written for the Python runtime of Triton's PyTorch backend.
        sequencing: what it says of sequences; None: each request stands for itself.
        decoupled: whether a request may have any number of responses.
        batch_inputs: inputs that are made of the shapes of others.
        batch_outputs: outputs that are split by the shapes of inputs.
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
    sequencing: Sequencing | None = None
    decoupled: bool = False
    batch_inputs: tuple[BatchInput, ...] = ()
    batch_outputs: tuple[BatchOutput, ...] = ()

    @property
    def concatenates(self) -> bool:
        """Whether ragged inputs lie in one dimension, as Triton's backends in C++ have them."""
        return bool(self.batch_inputs or self.batch_outputs)

    @property
    def version_folder(self) -> Path:
        return self.folder / self.version

    @property
    def states(self) -> tuple[State, ...]:
        """What is kept between the requests of a sequence."""
        return self.sequencing.states if self.sequencing is not None else ()

    @property
    def carried(self) -> tuple[State, ...]:
        """The states of which config.pbtxt says nothing but their names."""
        return tuple(state for state in self.states if state.dtype is None)


def parse(args: Mapping[str, str], *, complete: bool = True) -> ModelConfig:
    """The arguments of Triton's `initialize` as a ModelConfig.

    Args:
        args: Triton's arguments.
        complete: whether inputs and outputs must be there.

    Raises:
        ConfigError: the config asks for what a Python-based backend cannot give, or lacks
            inputs or outputs.
        OptionError: a parameter's value is not accepted.
    """
    document = json.loads(args["model_config"])
    name = args["model_name"]
    _refuse_unsupported(name, document)
    wished = options.parse(name, document.get("parameters", {}))
    sequencing = sequence_config.parse(name, document, wished.state)
    inputs = _specs(name, "input", document) if complete else ()
    outputs = _specs(name, "output", document) if complete else ()
    kept = sequencing.states if sequencing is not None else ()
    parsed = ModelConfig(
        name=name,
        folder=Path(args["model_repository"]).absolute(),
        version=args["model_version"],
        instance=args["model_instance_name"],
        kind=args["model_instance_kind"],
        device_id=int(args["model_instance_device_id"]),
        instances=_instances(document),
        max_batch_size=document["max_batch_size"],
        inputs=(*inputs, *_state_inputs(kept)) if complete else (),
        outputs=(*outputs, *_state_outputs(name, kept, outputs)) if complete else (),
        default_model_filename=_filename(name, document),
        python_runtime=_for_python_runtime(document),
        options=wished,
        sequencing=sequencing,
        decoupled=_is_decoupled(document),
        batch_inputs=batch_io.parse_inputs(name, document) if complete else (),
        batch_outputs=batch_io.parse_outputs(name, document) if complete else (),
    )
    if complete:
        refuse_contradictions(parsed)
    return parsed


def written_inputs(args: Mapping[str, str]) -> tuple[TensorSpec, ...]:
    """The inputs that a config lists; none where one of them lacks its type or dims.

    Raises:
        ConfigError: one has a type that does not exist.
    """
    entries = json.loads(args["model_config"]).get("input", [])
    whole = all(
        entry.get("data_type", "TYPE_INVALID") != "TYPE_INVALID" and entry.get("dims")
        for entry in entries
    )
    return tuple(_spec(args["model_name"], "input", entry) for entry in entries) if whole else ()


def refuse_contradictions(config: ModelConfig) -> None:
    """Refuse options that do not go with each other, or with the rest of the config.

    Raises:
        ConfigError: two of them contradict each other.
    """
    wished, most = config.options, config.max_batch_size
    largest = max(wished.batch_buckets or (0,))
    contradictions = (
        (
            {"bf16", "fp16"} <= set(wished.optimize),
            "OPTIMIZE asks for bf16 and fp16",
            "They exclude each other; keep one.",
        ),
        (
            "cuda_graphs" in wished.optimize and config.kind != "GPU",
            f"OPTIMIZE asks for cuda_graphs, and the instance is KIND_{config.kind}",
            "Use KIND_GPU, or take cuda_graphs out.",
        ),
        (
            "cuda_graphs" in wished.optimize and not most,
            "OPTIMIZE asks for cuda_graphs, and max_batch_size is 0",
            "A graph is captured for each bucket of rows: set max_batch_size.",
        ),
        (
            bool(wished.batch_buckets) and not most,
            "BATCH_BUCKETS is set, and max_batch_size is 0",
            "Set max_batch_size, or take BATCH_BUCKETS out.",
        ),
        (
            largest > most,
            f"BATCH_BUCKETS holds {largest}, and max_batch_size is {most}",
            "Raise max_batch_size, or take the bucket out.",
        ),
        (
            wished.watch_weights and bool(wished.enable_weight_sharing) and config.kind != "CPU",
            "WATCH_WEIGHTS is set, and ENABLE_WEIGHT_SHARING holds the weights on the GPU once",
            "What one instance swapped, another would see in mid-batch: take one of them out.",
        ),
        (
            bool(wished.pad) and any(-1 in state.dims for state in config.states),
            "PAD is set, and a state of sequence_batching has dims of -1",
            "What is padding in a state is not known: give the state fixed dims, or take PAD out.",
        ),
        (
            wished.sequence_memory_mb is not None and not config.states,
            "SEQUENCE_MEMORY_MB is set, and no state is kept",
            "Add state to sequence_batching or set STATE, or take SEQUENCE_MEMORY_MB out.",
        ),
        (
            wished.profile_batches is not None and wished.profile_dir is None,
            "PROFILE_BATCHES is set, and PROFILE_DIR is not",
            "Set PROFILE_DIR to the folder that traces go to, or take PROFILE_BATCHES out.",
        ),
        (
            wished.profile_dir is not None and not Path(wished.profile_dir).is_absolute(),
            f"PROFILE_DIR is '{wished.profile_dir}'",
            "Give an absolute path: an instance's working directory is Triton's affair.",
        ),
        (
            bool(wished.pad) and not most,
            "PAD is set, and max_batch_size is 0",
            "Requests are padded to share a batch: set max_batch_size, or take PAD out.",
        ),
        *(
            (config.decoupled and found, problem, cure)
            for found, problem, cure in _of_streams(config)
        ),
        *(
            (config.concatenates and found, problem, cure)
            for found, problem, cure in _of_ragged_batches(config)
        ),
        *_of_several_devices(config),
    )
    for found, problem, cure in contradictions:
        if found:
            raise ConfigError(config.name, problem, cure=cure)


def _of_streams(config: ModelConfig) -> Iterator[tuple[bool, str, str]]:
    """What does not go with streams: whether the config has it, in words, and what to do."""
    wished = config.options
    for key, value in (("PAD", wished.pad), ("BATCH_BUCKETS", wished.batch_buckets)):
        cure = f"Each request is a stream of its own: take {key} out."
        yield bool(value), f"{key} is set, and the model is decoupled", cure
    compiled = wished.torch_compile_optional_parameters is not None
    yield (
        compiled and not (wished.torch_compile_optional_parameters or {}).get("disable"),
        "TORCH_COMPILE_OPTIONAL_PARAMETERS is set, and the model is decoupled",
        "What goes on between two responses is no graph: call torch.compile within the model.",
    )
    for name in ("freeze", "cuda_graphs"):
        yield (
            name in wished.optimize,
            f"OPTIMIZE asks for {name}, and the model is decoupled",
            f"What goes on between two responses is no graph: take {name} out.",
        )
    yield (
        config.kind != "CPU" and bool(wished.enable_weight_sharing),
        "ENABLE_WEIGHT_SHARING holds the weights on the GPU once, and the model is decoupled",
        "Their owner may leave in the middle of a stream: take it out.",
    )


def _of_ragged_batches(config: ModelConfig) -> Iterator[tuple[bool, str, str]]:
    """As `_of_streams`, for models with batch_input or batch_output."""
    wished = config.options
    role = "batch_input" if config.batch_inputs else "batch_output"
    states = {state.output for state in config.states}
    for key, found in (
        ("PAD", bool(wished.pad)),
        ("BATCH_BUCKETS", bool(wished.batch_buckets)),
        ("OPTIMIZE's cuda_graphs", "cuda_graphs" in wished.optimize),
        (
            "TORCH_COMPILE_OPTIONAL_PARAMETERS with dynamic: false",
            (wished.torch_compile_optional_parameters or {}).get("dynamic") is False,
        ),
        ("model_transaction_policy { decoupled: true }", config.decoupled),
        (
            "a state that batch_output names",
            any(one.name in states for one in config.batch_outputs),
        ),
    ):
        cure = f"Take one of the two out: sizes differ from batch to batch with {role}."
        yield found, f"config.pbtxt has {role} and {key}", cure


def _of_several_devices(config: ModelConfig) -> Iterator[tuple[bool, str, str]]:
    """As `_of_streams`, for models that are spread over devices."""
    wished, kind = config.options, config.kind
    mapped = wished.device_map is not None
    yield (
        mapped and kind != "MODEL",
        f"DEVICE_MAP is set, and the instance is KIND_{kind}",
        "Use KIND_MODEL, or take DEVICE_MAP out.",
    )
    unfit = [one for one in wished.optimize if one != "channels_last"]
    compiles = wished.torch_compile_optional_parameters
    for other, is_set in (
        ("model_transaction_policy { decoupled: true }", config.decoupled),
        (
            "TORCH_COMPILE_OPTIONAL_PARAMETERS",
            compiles is not None and not compiles.get("disable"),
        ),
        (f"OPTIMIZE's {', '.join(unfit)}", bool(unfit)),
        ('ENABLE_WEIGHT_SHARING "true"', bool(wished.enable_weight_sharing)),
    ):
        cure = "They do not go together: take one of them out."
        yield mapped and is_set, f"DEVICE_MAP is set, and so is {other}", cure


def _is_decoupled(document: Mapping[str, Any]) -> bool:
    return bool(document.get("model_transaction_policy", {}).get("decoupled"))


def _refuse_unsupported(model: str, document: Mapping[str, Any]) -> None:
    """What loads without an error in Triton, and then corrupts data or does nothing."""
    if _is_decoupled(document) and document.get("sequence_batching"):
        raise ConfigError(
            model,
            "sequence_batching is set, and the model is decoupled",
            cure="A stream keeps what it needs between its responses by itself: take one of the two"
            " out of config.pbtxt.",
        )
    if document.get("cc_model_filenames"):
        raise ConfigError(
            model,
            "cc_model_filenames has no effect in a Python-based backend",
            cure="Take cc_model_filenames out of config.pbtxt.",
        )


def _specs(model: str, role: str, document: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    entries = document.get(role, [])
    if not entries:
        raise ConfigError(
            model,
            f"config.pbtxt lists no {role}",
            expected=f"at least one {role} with name, data_type and dims",
        )
    return tuple(_spec(model, role, entry) for entry in entries)


def _spec(model: str, role: str, entry: Mapping[str, Any]) -> TensorSpec:
    name = entry["name"]
    dtype = dtypes.from_config(entry["data_type"])
    if dtype is None:
        raise ConfigError(
            model,
            f"{role} '{name}' has data_type {entry['data_type']}",
            expected="one of " + ", ".join(known.config for known in dtypes.TABLE),
        )
    # Triton reshapes before the backend sees an input and after it made an output.
    reshape = entry.get("reshape")
    dims = entry["dims"] if reshape is None else reshape.get("shape", [])
    return TensorSpec(
        name,
        dtype,
        tuple(dims),
        bool(entry.get("optional")),
        bool(entry.get("allow_ragged_batch")),
        reshaped=reshape is not None,
    )


def _state_inputs(kept: Iterable[State]) -> Iterator[TensorSpec]:
    for state in kept:
        if state.dtype is not None:
            yield TensorSpec(state.input, state.dtype, state.dims, origin=Origin.STATE)


def _state_outputs(
    model: str, kept: Iterable[State], listed: Iterable[TensorSpec]
) -> Iterator[TensorSpec]:
    """What clients do not see; a state that the config lists as an output is there already."""
    known = {spec.name: spec for spec in listed}
    for state in kept:
        if state.dtype is None:
            continue
        spec = TensorSpec(state.output, state.dtype, state.dims, origin=Origin.STATE)
        if state.output not in known:
            yield spec
        elif str(known[state.output]) != str(spec):
            raise ConfigError(
                model,
                f"the output {known[state.output]} is a state, too",
                expected=f"{spec}, as in sequence_batching",
            )


def _for_python_runtime(document: Mapping[str, Any]) -> bool:
    """Whether another name than ours asks for a model.py.

    `runtime` says nothing: Triton writes "model.py" there for every Python-based backend.
    """
    return document.get("backend") == "pytorch" or document.get("platform") == "pytorch"


def _instances(document: Mapping[str, Any]) -> int:
    groups = document.get("instance_group", [])
    counts = [int(group["count"]) * max(1, len(group.get("gpus", []))) for group in groups]
    return max(1, sum(counts))


def _filename(model: str, document: Mapping[str, Any]) -> str | None:
    name: str = document.get("default_model_filename", "")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ConfigError(
            model,
            f"default_model_filename is '{name}'",
            expected="a file in the version folder",
        )
    return name or None
