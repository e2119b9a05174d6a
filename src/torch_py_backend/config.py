"""Triton's JSON and arguments become frozen objects: ModelConfig, TensorSpec, Options.

The fields of `Options` are the one table of parameters: name, type, default and a line of
documentation. The README's table and every message about a parameter are made from it.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any

from torch_py_backend import dtypes
from torch_py_backend.errors import ConfigError, OptionError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parser:
    """How a parameter's string becomes a value; `accepted` is what a refusal says."""

    accepted: str
    parse: Callable[[str], Any]


def _boolean(text: str) -> bool:
    value = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
    return value[text.strip().lower()]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError(text)
    return text.strip()


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise TypeError(text)
    return value


_COMPILE_KEYS = ("fullgraph", "dynamic", "backend", "mode", "options", "disable")


def _compile_parameters(text: str) -> dict[str, Any]:
    value = _json_object(text)
    if not value.keys() <= set(_COMPILE_KEYS):
        raise ValueError(text)
    return value


BOOLEAN = Parser("true, on, 1, false, off or 0", _boolean)
POSITIVE = Parser("an integer of at least 1", _positive)
TEXT = Parser("a name", _text)
JSON_OBJECT = Parser("a JSON object", _json_object)
COMPILE_PARAMETERS = Parser(
    f"a JSON object with keys among {', '.join(_COMPILE_KEYS)}", _compile_parameters
)


def _option(
    parser: Parser,
    doc: str,
    *,
    default: Any = None,
    also: tuple[str, ...] = (),
    inert: str = "",
) -> Any:
    """A field of Options. `also`: other keys of the same meaning; `inert`: why it does nothing."""
    facts = {"parser": parser, "doc": doc, "also": also, "inert": inert}
    return field(default=default, metadata=facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The values of config.pbtxt's `parameters`. A field's name in capitals is its key."""

    model_class: str | None = _option(
        TEXT, "The class or function in model.py to serve, when the file defines several."
    )
    model_factory: str | None = _option(
        TEXT, "A function in model.py that is called once, at load, and returns the module."
    )
    model_kwargs: dict[str, Any] | None = _option(
        JSON_OBJECT, "Keyword arguments for the class or the factory."
    )
    weights: str | None = _option(
        TEXT,
        "The weights file in the version folder; `none` serves the module as it is built.",
    )
    num_threads: int | None = _option(
        POSITIVE,
        "Intra-op threads of each instance. Unset: OMP_NUM_THREADS, else the cores this process"
        " may use, divided by the model's instances.",
        also=("INTRA_OP_THREAD_COUNT",),
    )
    num_interop_threads: int | None = _option(
        POSITIVE,
        "Inter-op threads of each instance. Unset: the cores this process may use, divided by"
        " the model's instances.",
        also=("INTER_OP_THREAD_COUNT",),
    )
    torch_compile_optional_parameters: dict[str, Any] | None = _option(
        COMPILE_PARAMETERS,
        "Compile the model with these arguments of `torch.compile`; `{}` takes its defaults."
        " Unset: eager.",
    )
    inference_mode: bool = _option(
        BOOLEAN, "Run under `torch.inference_mode`; false: under `torch.no_grad`.", default=True
    )
    disable_optimized_execution: bool = _option(
        BOOLEAN, "Switch off TorchScript's graph-executor optimisation.", default=False
    )
    enable_jit_executor: bool | None = _option(
        BOOLEAN, "TorchScript's profiling executor. Unset: PyTorch's default."
    )
    enable_jit_profiling: bool | None = _option(
        BOOLEAN, "TorchScript's profiling mode. Unset: PyTorch's default."
    )
    enable_tensor_fuser: bool | None = _option(
        BOOLEAN, "TorchScript's tensor-expression fuser. Unset: PyTorch's default."
    )
    enable_nvfuser: bool | None = _option(
        BOOLEAN,
        "Accepted for LibTorch's sake, without effect.",
        inert="PyTorch no longer has nvFuser",
    )
    disable_cudnn: bool = _option(BOOLEAN, "Switch cuDNN off for this instance.", default=False)
    enable_cache_cleaning: bool = _option(
        BOOLEAN, "Empty the CUDA cache after each execution.", default=False
    )
    enable_weight_sharing: bool | None = _option(
        BOOLEAN,
        "Accepted, without effect yet.",
        inert="instances do not share weights yet",
    )
    warmup: bool = _option(
        BOOLEAN,
        "Run sample batches before READY, so that no request pays for what a first call costs.",
        default=True,
    )
    force_cpu_only_input_tensors: bool = _option(
        BOOLEAN,
        "Triton's own: `false` leaves inputs that are on the GPU there.",
        default=True,
    )
    execution_env_path: str | None = _option(
        TEXT, "Triton's own: a packed Python environment for this model."
    )


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One row of the table of parameters."""

    key: str
    also: tuple[str, ...]
    parser: Parser
    default: Any
    doc: str
    inert: str
    field: str

    @classmethod
    def of(cls, entry: Field[Any]) -> OptionRow:
        facts = entry.metadata
        return cls(
            entry.name.upper(),
            facts["also"],
            facts["parser"],
            entry.default,
            facts["doc"],
            facts["inert"],
            entry.name,
        )


TABLE = tuple(OptionRow.of(entry) for entry in fields(Options))
# Triton's own spelling of a boolean for this one key is yes/no, and Triton reads it itself.
_YES_NO = {"yes": "true", "no": "false"}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the config says of one input or output.

    Attributes:
        name: the tensor's name in requests.
        dtype: its element type.
        dims: its shape as the model sees it (after Triton's `reshape`), without the batch
            dimension; -1 is any size.
    """

    name: str
    dtype: dtypes.DType
    dims: tuple[int, ...]

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
    options: Options

    @property
    def version_folder(self) -> Path:
        return self.folder / self.version


def parse(args: Mapping[str, str]) -> ModelConfig:
    """The arguments of Triton's `initialize` as a ModelConfig.

    Raises:
        ConfigError: the config asks for what a Python-based backend cannot give, or lacks
            inputs or outputs.
        OptionError: a parameter's value is not accepted.
    """
    document = json.loads(args["model_config"])
    name = args["model_name"]
    _refuse_unsupported(name, document)
    return ModelConfig(
        name=name,
        folder=Path(args["model_repository"]).absolute(),
        version=args["model_version"],
        instance=args["model_instance_name"],
        kind=args["model_instance_kind"],
        device_id=int(args["model_instance_device_id"]),
        instances=_instances(document),
        max_batch_size=document["max_batch_size"],
        inputs=_specs(name, "input", document),
        outputs=_specs(name, "output", document),
        default_model_filename=_filename(name, document),
        options=parse_options(name, document.get("parameters", {})),
    )


def parse_options(model: str, parameters: Mapping[str, Mapping[str, str]]) -> Options:
    """Triton's `parameters` as Options; an unknown key is warned about."""
    values: dict[str, Any] = {}
    source: dict[str, str] = {}
    rows = {key: row for row in TABLE for key in (row.key, *row.also)}
    for key, entry in parameters.items():
        row = rows.get(key)
        if row is None:
            _warn_unknown(model, key, list(rows))
            continue
        value = _value(model, row, key, entry.get("string_value", ""))
        if row.inert and value:
            log.warning("model '%s': the parameter %s has no effect: %s.", model, key, row.inert)
        if row.field in values and values[row.field] != value:
            raise ConfigError(
                model,
                f"the parameters {source[row.field]} and {key} contradict each other",
                cure="They mean the same; keep one.",
            )
        values[row.field], source[row.field] = value, key
    return Options(**values)


def _value(model: str, row: OptionRow, key: str, text: str) -> Any:
    if key == "FORCE_CPU_ONLY_INPUT_TENSORS":
        text = _YES_NO.get(text.lower(), text)
    try:
        return row.parser.parse(text)
    except json.JSONDecodeError as error:
        problem = f"{row.parser.accepted} (JSON says: {error})"
        raise OptionError(model, key, text, problem) from None
    except (ValueError, KeyError, TypeError):
        raise OptionError(model, key, text, row.parser.accepted) from None


def _warn_unknown(model: str, key: str, known: list[str]) -> None:
    close = difflib.get_close_matches(key.upper(), known, n=1)
    question = f" Did you mean {close[0]}?" if close else ""
    log.warning("model '%s': the parameter %s is unknown and ignored.%s", model, key, question)


def _refuse_unsupported(model: str, document: Mapping[str, Any]) -> None:
    """What loads without an error in Triton, and then corrupts data or does nothing."""
    refused = {
        "batch_input": "batch_input is for backends written in C++",
        "batch_output": "batch_output is for backends written in C++",
        "cc_model_filenames": "cc_model_filenames has no effect in a Python-based backend",
        "sequence_batching": "sequence_batching is not served yet",
    }
    for key, reason in refused.items():
        if document.get(key):
            raise ConfigError(model, reason, cure=f"Take {key} out of config.pbtxt.")
    if document.get("model_transaction_policy", {}).get("decoupled"):
        raise ConfigError(
            model,
            "decoupled models are not served yet",
            cure="Take model_transaction_policy out of config.pbtxt.",
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
    if dtype is None or dtype.torch is None:
        raise ConfigError(
            model,
            f"{role} '{name}' has data_type {entry['data_type']}",
            expected="one of "
            + ", ".join(known.config for known in dtypes.TABLE if known.torch is not None),
        )
    if entry.get("optional"):
        raise ConfigError(model, f"input '{name}' is optional; optional inputs are not served yet")
    # Triton reshapes before the backend sees an input and after it made an output.
    reshape = entry.get("reshape")
    dims = entry["dims"] if reshape is None else reshape.get("shape", [])
    return TensorSpec(name, dtype, tuple(dims))


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
