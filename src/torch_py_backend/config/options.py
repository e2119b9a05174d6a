"""The parameters of config.pbtxt: one table with name, parser, default and documentation.

The fields of `Options` are the table. The table in docs/options.md and the messages about
parameters are generated from it.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from torch_py_backend.errors import ConfigError, OptionError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parser:
    """A conversion of a string to a value; `accepted` describes valid strings in messages."""

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


def _fraction(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise ValueError(text)
    return number


FATAL_ACTIONS = ("exit", "stay")


def _fatal_action(text: str) -> str:
    action = text.strip().lower()
    if action not in FATAL_ACTIONS:
        raise ValueError(text)
    return action


def _count(text: str) -> int | None:
    number = int(text)
    return number if number > 0 else None


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


_FLOATING = ("FP16", "BF16", "FP32", "FP64")


def _floating(text: str) -> str:
    name = text.strip().upper().removeprefix("TYPE_")
    if name not in _FLOATING:
        raise ValueError(text)
    return name


OPTIMIZATIONS = ("freeze", "channels_last", "bf16", "fp16", "cuda_graphs")


def _optimizations(text: str) -> tuple[str, ...]:
    names = tuple(sorted({name.strip().lower() for name in text.split(",")}))
    if names == ("none",):
        return ()
    if names != ("auto",) and not set(names) <= set(OPTIMIZATIONS):
        raise ValueError(text)
    return names


def _buckets(text: str) -> tuple[int, ...] | None:
    keyword = text.strip().lower()
    if keyword in ("auto", "none"):
        return None if keyword == "auto" else ()
    return tuple(sorted({_positive(size) for size in text.split(",")}))


_PAD_KEYS = {"value", "side", "multiple_of", "mask", "outputs"}


def _pad(text: str) -> dict[str, dict[str, Any]]:
    inputs = _json_object(text)
    for padding in inputs.values():
        if not isinstance(padding, dict) or not padding.keys() <= _PAD_KEYS:
            raise TypeError(text)
        multiple, outputs = padding.get("multiple_of", 1), padding.get("outputs", [])
        valid = (
            padding.get("side", "right") in ("left", "right")
            and isinstance(padding.get("value", 0), bool | int | float)
            and isinstance(multiple, int)
            and multiple >= 1
            and isinstance(padding.get("mask", ""), str)
            and isinstance(outputs, list)
            and all(isinstance(name, str) for name in outputs)
        )
        if not valid:
            raise ValueError(text)
    return inputs


_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise if a name occurs twice, where `json` keeps the last one."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError(pairs)
    return entries


def _device(value: Any) -> str:
    """Return a device as torch names it; a number is the ordinal of a GPU."""
    if type(value) is int and value >= 0:
        return f"cuda:{value}"
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise ValueError(value)
    return "cuda:0" if value == "cuda" else value


def parse_device_map(text: str) -> dict[str, str]:
    """Parse a device map in JSON.

    Raises:
        ValueError, TypeError: the text is not a device map.
    """
    value = json.loads(text, object_pairs_hook=_distinct)
    if not isinstance(value, dict) or not value:
        raise TypeError(text)
    return {name: _device(device) for name, device in value.items()}


def _device_map(text: str) -> dict[str, str] | str:
    name = _text(text)
    return name if name.endswith(".json") else parse_device_map(text)


def _state_paths(text: str) -> dict[str, str]:
    value = _json_object(text)
    if not value or not all(isinstance(path, str) and path and key for key, path in value.items()):
        raise TypeError(text)
    return value


BOOLEAN = Parser("true, on, 1, false, off or 0", _boolean)
# Triton itself reads this parameter in ModelState() and accepts only these two strings:
# https://github.com/triton-inference-server/python_backend/blob/main/src/python_be.cc
YES_NO = Parser("yes or no", {"yes": True, "no": False}.__getitem__)
POSITIVE = Parser("an integer of at least 1", _positive)
FRACTION = Parser("a number above 0, at most 1", _fraction)
COUNT = Parser("an integer; 0 or less leaves it unset", _count)
TEXT = Parser("a name", _text)
FLOATING = Parser("FP16, BF16, FP32 or FP64", _floating)
JSON_OBJECT = Parser("a JSON object", _json_object)
OPTIMIZE = Parser(f"none, auto, or some of {', '.join(OPTIMIZATIONS)}", _optimizations)
BUCKETS = Parser("auto, none, or row counts such as 1,2,4,8", _buckets)
FATAL_ACTION = Parser(" or ".join(FATAL_ACTIONS), _fatal_action)
PAD = Parser(
    "a JSON object of inputs, each with some of value (a number), side (left or right),"
    " multiple_of (an integer of at least 1), mask (an input's name), outputs (names)",
    _pad,
)
STATE = Parser(
    "a JSON object from inputs of forward() to parts of its result",
    _state_paths,
)
DEVICES = "cpu, cuda:0, or the number of a GPU"
DEVICE_MAP = Parser(
    f"a JSON object from each module once to its device ({DEVICES}), or the .json file that holds"
    " one",
    _device_map,
)
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
    """Return a field of Options.

    Args:
        parser: the parser of the value.
        doc: the text in docs/options.md.
        default: the value if the parameter is not set.
        also: other keys of the same option.
        inert: why the option has no effect.
    """
    facts = {"parser": parser, "doc": doc, "also": also, "inert": inert}
    return field(default=default, metadata=facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The values of `parameters` in config.pbtxt. The key of a field is its name in capitals."""

    model_class: str | None = _option(
        TEXT, "The class or function in model.py to serve, when the file defines several."
    )
    model_factory: str | None = _option(
        TEXT,
        "A callable that returns the module; it is called once, at load: a function in model.py, or"
        " `package.module:callable`. A class with `from_pretrained` receives the version folder.",
    )
    model_kwargs: dict[str, Any] | None = _option(
        JSON_OBJECT,
        "Keyword arguments for the class or the factory. For a TorchServe archive: `content_type`,"
        " the media type of request bodies.",
    )
    method: str | None = _option(TEXT, "The method to serve instead of `forward`.")
    hooks: str | None = _option(
        TEXT,
        "The class whose methods run around forward(), in the source file with the model's name;"
        " `none`: no hooks. Unset: `Hooks`, if the file defines it.",
    )
    fallback: str | None = _option(
        TEXT,
        "The file in the version folder to serve if an AOTInductor package was built for another"
        " machine.",
    )
    preprocess_threads: int | None = _option(
        POSITIVE,
        "Threads that run preprocess() of the hooks for the rows of a batch; useful if a row takes"
        " milliseconds outside of Python, for example a large image. Unset: no further threads.",
    )
    cast_inputs: str | None = _option(
        FLOATING, "Convert floating-point inputs to this type before the model sees them."
    )
    cast_outputs: bool = _option(
        BOOLEAN, "Convert outputs to the types in the config.", default=False
    )
    check_outputs: bool = _option(
        BOOLEAN,
        "Reject outputs whose shape does not match the dims in the config; `false` returns them as"
        " the model does, like LibTorch, with one warning.",
        default=True,
    )
    weights: str | None = _option(
        TEXT,
        "The weights file in the version folder; `none` serves the module as it is constructed.",
    )
    num_threads: int | None = _option(
        POSITIVE,
        "Intra-op threads of each instance. Unset, or INTRA_OP_THREAD_COUNT of 0 or less:"
        " OMP_NUM_THREADS, else the cores that this process may use, divided by the number of"
        " instances.",
        also=("INTRA_OP_THREAD_COUNT",),
    )
    num_interop_threads: int | None = _option(
        POSITIVE,
        "Inter-op threads of each instance. Unset, or INTER_OP_THREAD_COUNT of 0 or less: the"
        " cores that this process may use, divided by the number of instances.",
        also=("INTER_OP_THREAD_COUNT",),
    )
    torch_compile_optional_parameters: dict[str, Any] | None = _option(
        COMPILE_PARAMETERS,
        "Compile the model with these arguments of `torch.compile`; `{}` uses its defaults."
        " Unset: eager.",
    )
    compile_cache_dir: str | None = _option(
        TEXT,
        "The folder of torch.compile's cache, which later starts read: a path in the model's"
        " folder, or an absolute path; `none`: no cache. Unset: compile_cache, if it is writable.",
    )
    compile_required: bool = _option(
        BOOLEAN,
        "Fail the load if the model cannot be compiled, instead of serving it eagerly.",
        default=False,
    )
    optimize: tuple[str, ...] = _option(
        OPTIMIZE,
        "`freeze`: constant weights, for TorchScript and compiled modules; `channels_last`: this"
        " memory format for convolutions; `bf16`, `fp16`: autocast; `cuda_graphs`: one graph per"
        " bucket, on a GPU; `auto`: the result of `torch-py-backend tune` on an equal machine.",
        default=(),
    )
    batch_buckets: tuple[int, ...] | None = _option(
        BUCKETS,
        "Row counts that batches are padded to. Unset, or `auto`: powers of two if shapes are"
        " fixed (`dynamic: false`, CUDA graphs), else none.",
    )
    pad: dict[str, dict[str, Any]] | None = _option(
        PAD,
        "Inputs whose dims of -1 are padded, so that requests of different lengths share a batch:"
        ' `{"ids": {"value": 0, "side": "right", "multiple_of": 8, "mask": "attention_mask"}}`.',
    )
    state: dict[str, str] | None = _option(
        STATE,
        "The states of a sequence, if `sequence_batching` has no `state`: inputs of forward(), each"
        " with the part of the previous step's result that it receives:"
        ' `{"hidden": "RESULT[1]"}`. The first step runs without these inputs.',
    )
    sequence_memory_mb: int | None = _option(
        POSITIVE,
        "Memory limit in megabytes for the states of all sequences of an instance; a step that"
        " needs more fails with 503. Unset: no limit.",
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
        "Accepted for compatibility with LibTorch, without effect.",
        inert="PyTorch no longer has nvFuser",
    )
    disable_cudnn: bool = _option(BOOLEAN, "Switch cuDNN off for this instance.", default=False)
    cuda_memory_fraction: float | None = _option(
        FRACTION, "The fraction of the GPU's memory that this instance may use. Unset: all of it."
    )
    enable_cache_cleaning: bool = _option(
        BOOLEAN, "Empty the CUDA cache after each execution.", default=False
    )
    enable_weight_sharing: bool | None = _option(
        BOOLEAN,
        "One copy of the weights for all instances. Unset: on the CPU, if possible; true: also on a"
        " GPU, and the load fails if the weights cannot be shared; false: one copy per instance.",
    )
    watch_weights: bool = _option(
        BOOLEAN,
        "Watch the weights file, and load its new content without a reload of the model.",
        default=False,
    )
    device_map: dict[str, str] | str | None = _option(
        DEVICE_MAP,
        "For `KIND_MODEL`: the device of each part of a module, as JSON or as a file in the version"
        ' folder: `{"encoder": "cuda:0", "head": "cuda:1"}`. The longest matching name decides;'
        ' `""` matches everything else.',
    )
    parallel_loads: int | None = _option(
        POSITIVE,
        "The number of instances of this server that may load at the same time, if memory allows."
        " Unset: the number of cores that this process may use.",
    )
    retry_failed_batch: bool | None = _option(
        BOOLEAN,
        "Call the model again with parts of a failed batch, so that only the requests that cause"
        " the failure fail; `false` for a model with side effects. Unset: true, unless the model"
        " changed its buffers or its inputs.",
    )
    check_finite: bool = _option(
        BOOLEAN, "Fail requests whose outputs contain NaN or infinity.", default=False
    )
    on_fatal: str = _option(
        FATAL_ACTION,
        "The action of an instance whose device is no longer usable: `stay` and answer each request"
        " with 503, or `exit`.",
        default="stay",
    )
    auto_complete_timeout_s: int = _option(
        POSITIVE,
        "Time limit in seconds for running the model when config.pbtxt lacks inputs or outputs.",
        default=120,
    )
    execution_timeout_ms: int | None = _option(
        POSITIVE,
        "Time limit in milliseconds for one call of the model. Under `torch-py-backend serve`, an"
        " instance that exceeds it is killed, and the model is reloaded. Unset: no limit.",
    )
    warmup: bool | None = _option(
        BOOLEAN,
        "Run sample batches before READY, so that requests do not pay the cost of first calls."
        " Unset: true, and a [generated sample that fails](batching.md#warm-up) is a warning.",
    )
    max_streams: int = _option(
        POSITIVE,
        "The number of streams of a decoupled model that run at the same time in each instance."
        " Further requests wait in Triton's queue.",
        default=64,
    )
    tracing: bool | None = _option(
        BOOLEAN,
        "Make the OpenTelemetry context of a request that Triton traces the current context in the"
        " model's code. Unset: if [its spans are recorded](tracing.md#switch-it-on).",
    )
    profile_dir: str | None = _option(
        TEXT,
        "Write traces of torch.profiler into this folder, an absolute path: of the first batches"
        " after READY, and again each time its file `again` is touched. Unset: none.",
    )
    profile_batches: int | None = _option(POSITIVE, "Batches in each of these traces. Unset: 10.")
    force_cpu_only_input_tensors: bool = _option(
        YES_NO,
        "Read by Triton: `no` keeps inputs that are on the GPU there. A model on the CPU receives"
        " copies.",
        default=True,
    )
    execution_env_path: str | None = _option(
        TEXT,
        "Read by Triton: a [packed Python environment](environments.md) for this model.",
    )

    @property
    def autocast(self) -> str | None:
        """The type of autocast in OPTIMIZE, `bf16` or `fp16`; None: no autocast."""
        return next((name for name in ("bf16", "fp16") if name in self.optimize), None)


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
# The LibTorch backend treats numbers of 0 or less as unset.
_LIBTORCH_PARSERS = {"INTRA_OP_THREAD_COUNT": COUNT, "INTER_OP_THREAD_COUNT": COUNT}


def parse(model: str, parameters: Mapping[str, Any]) -> Options:
    """Parse Triton's `parameters`; log a warning for each unknown key.

    Raises:
        OptionError: a value is not accepted.
        ConfigError: two keys of one option have different values.
    """
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    rows = {key: row for row in TABLE for key in (row.key, *row.also)}
    for key, entry in parameters.items():
        row = rows.get(key)
        if row is None:
            similar = difflib.get_close_matches(key.upper(), rows, n=1)
            question = f" Did you mean {similar[0]}?" if similar else ""
            log.warning(
                "model '%s': the parameter %s is unknown and ignored.%s", model, key, question
            )
            continue
        value = _value(model, key, _LIBTORCH_PARSERS.get(key, row.parser), entry)
        if value is None:
            continue
        if row.inert and value:
            log.warning("model '%s': the parameter %s has no effect: %s.", model, key, row.inert)
        if row.field in values and values[row.field] != value:
            raise ConfigError(
                model,
                f"the parameters {keys[row.field]} and {key} contradict each other",
                cure="They mean the same; keep one.",
            )
        values[row.field], keys[row.field] = value, key
    return Options(**values)


def _value(model: str, key: str, parser: Parser, entry: Any) -> Any:
    # Triton's entries are always strings; entries of other files may be anything.
    text = entry.get("string_value", "") if isinstance(entry, Mapping) else entry
    if not isinstance(text, str) or text is entry:
        raise OptionError(model, key, str(entry), f"a string_value with {parser.accepted}")
    try:
        return parser.parse(text)
    except json.JSONDecodeError as error:
        accepted = f"{parser.accepted} (JSON says: {error})"
        raise OptionError(model, key, text, accepted) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise OptionError(model, key, text, parser.accepted) from None
