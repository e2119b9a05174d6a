"""The parameters of config.pbtxt: one table with name, type, default and a line of documentation.

The fields of `Options` are that table. The table in docs/options.md and every message about a
parameter are made from it.
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
    wished = text.strip().lower()
    if wished in ("auto", "none"):
        return None if wished == "auto" else ()
    return tuple(sorted({_positive(size) for size in text.split(",")}))


_PAD_KEYS = {"value", "side", "multiple_of", "mask", "outputs"}


def _pad(text: str) -> dict[str, dict[str, Any]]:
    wished = _json_object(text)
    for how in wished.values():
        if not isinstance(how, dict) or not how.keys() <= _PAD_KEYS:
            raise TypeError(text)
        if how.get("side", "right") not in ("left", "right"):
            raise ValueError(text)
        if not isinstance(how.get("value", 0), bool | int | float):
            raise TypeError(text)
        if not isinstance(how.get("multiple_of", 1), int) or how.get("multiple_of", 1) < 1:
            raise ValueError(text)
        if not isinstance(how.get("mask", ""), str):
            raise TypeError(text)
        outputs = how.get("outputs", [])
        if not isinstance(outputs, list) or not all(isinstance(name, str) for name in outputs):
            raise TypeError(text)
    return wished


_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON takes the last of two entries with one name; here they contradict each other."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(pairs)
    return found


def _device(value: Any) -> str:
    """A device as torch calls it; a number is a GPU's."""
    if type(value) is int and value >= 0:
        return f"cuda:{value}"
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise ValueError(value)
    return "cuda:0" if value == "cuda" else value


def devices(text: str) -> dict[str, str]:
    """A device map as JSON.

    Raises:
        ValueError, TypeError: it is none.
    """
    value = json.loads(text, object_pairs_hook=_distinct)
    if not isinstance(value, dict) or not value:
        raise TypeError(text)
    return {name: _device(device) for name, device in value.items()}


def _device_map(text: str) -> dict[str, str] | str:
    name = _text(text)
    return name if name.endswith(".json") else devices(text)


def _names(text: str) -> dict[str, str]:
    value = _json_object(text)
    if not value or not all(isinstance(one, str) and one and key for key, one in value.items()):
        raise TypeError(text)
    return value


BOOLEAN = Parser("true, on, 1, false, off or 0", _boolean)
# Triton reads such a parameter itself and accepts only these two strings, in ModelState():
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
    _names,
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
        TEXT,
        "What is called once, at load, and returns the module: a function in model.py, or"
        " `package.module:callable`. A class with `from_pretrained` is given the version folder.",
    )
    model_kwargs: dict[str, Any] | None = _option(
        JSON_OBJECT,
        "Keyword arguments for the class or the factory. For a TorchServe archive: `content_type`,"
        " what the bodies of requests are.",
    )
    method: str | None = _option(TEXT, "The method to serve instead of `forward`.")
    hooks: str | None = _option(
        TEXT,
        "The class in the source beside the model whose methods run around forward(); `none`: no"
        " class does. Unset: `Hooks`, where there is one.",
    )
    fallback: str | None = _option(
        TEXT,
        "The file in the version folder to serve where an AOTInductor package was built for"
        " another machine.",
    )
    preprocess_threads: int | None = _option(
        POSITIVE,
        "Threads that run the preprocess() of hooks for the rows of a batch: where a row takes"
        " milliseconds outside of Python, as large images do. Unset: none but the instance's own.",
    )
    cast_inputs: str | None = _option(
        FLOATING, "Convert floating-point inputs to this type before the model sees them."
    )
    cast_outputs: bool = _option(
        BOOLEAN, "Convert outputs to the types in the config.", default=False
    )
    check_outputs: bool = _option(
        BOOLEAN,
        "Refuse outputs whose shape contradicts the dims in the config; `false` serves them as the"
        " model returns them, as LibTorch does, with one warning.",
        default=True,
    )
    weights: str | None = _option(
        TEXT,
        "The weights file in the version folder; `none` serves the module as it is built.",
    )
    num_threads: int | None = _option(
        POSITIVE,
        "Intra-op threads of each instance. Unset, or INTRA_OP_THREAD_COUNT of 0 or less:"
        " OMP_NUM_THREADS, else the cores this process may use, divided by the model's instances.",
        also=("INTRA_OP_THREAD_COUNT",),
    )
    num_interop_threads: int | None = _option(
        POSITIVE,
        "Inter-op threads of each instance. Unset, or INTER_OP_THREAD_COUNT of 0 or less: the"
        " cores this process may use, divided by the model's instances.",
        also=("INTER_OP_THREAD_COUNT",),
    )
    torch_compile_optional_parameters: dict[str, Any] | None = _option(
        COMPILE_PARAMETERS,
        "Compile the model with these arguments of `torch.compile`; `{}` takes its defaults."
        " Unset: eager.",
    )
    compile_cache_dir: str | None = _option(
        TEXT,
        "Where what torch.compile made is kept for the next start: a folder in the model's own, or"
        " an absolute path; `none` keeps nothing. Unset: compile_cache, where it can be written.",
    )
    compile_required: bool = _option(
        BOOLEAN,
        "Fail the load where the model cannot be compiled, rather than serve it eagerly.",
        default=False,
    )
    optimize: tuple[str, ...] = _option(
        OPTIMIZE,
        "`freeze`: constant weights, for TorchScript and compiled modules; `channels_last`: that"
        " memory format for convolutions; `bf16`, `fp16`: autocast; `cuda_graphs`: one graph for"
        " each bucket, on a GPU; `auto`: what `torch-py-backend tune` found on such a machine.",
        default=(),
    )
    batch_buckets: tuple[int, ...] | None = _option(
        BUCKETS,
        "Row counts that batches are padded to. Unset, or `auto`: powers of two where shapes are"
        " fixed (`dynamic: false`, CUDA graphs), none elsewhere.",
    )
    pad: dict[str, dict[str, Any]] | None = _option(
        PAD,
        "Inputs whose dims of -1 are padded, so that requests of different lengths share a call:"
        ' `{"ids": {"value": 0, "side": "right", "multiple_of": 8, "mask": "attention_mask"}}`.',
    )
    state: dict[str, str] | None = _option(
        STATE,
        "What a sequence keeps from one request to the next, where `sequence_batching` has no"
        " `state`: inputs of forward(), and what of its result they are in the next step:"
        ' `{"hidden": "RESULT[1]"}`. They are left out in the first step.',
    )
    sequence_memory_mb: int | None = _option(
        POSITIVE,
        "Megabytes that the states of all sequences of an instance may take; a step that needs more"
        " is refused with 503. Unset: no limit.",
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
    cuda_memory_fraction: float | None = _option(
        FRACTION, "The share of the GPU's memory that this instance may take. Unset: all of it."
    )
    enable_cache_cleaning: bool = _option(
        BOOLEAN, "Empty the CUDA cache after each execution.", default=False
    )
    enable_weight_sharing: bool | None = _option(
        BOOLEAN,
        "One copy of the weights for all instances. Unset: on the CPU, where it is possible; true:"
        " also on a GPU, and a model that cannot share them is not loaded; false: each instance"
        " copies them.",
    )
    watch_weights: bool = _option(
        BOOLEAN,
        "Watch the file of weights, and swap in what replaces it, without a reload.",
        default=False,
    )
    device_map: dict[str, str] | str | None = _option(
        DEVICE_MAP,
        "For `KIND_MODEL`: which part of a module is on which device, as JSON or as a file in the"
        ' version folder: `{"encoder": "cuda:0", "head": "cuda:1"}`. The longest name counts;'
        ' `""` is all the rest.',
    )
    parallel_loads: int | None = _option(
        POSITIVE,
        "How many instances of this server may load at once, as far as memory bears it. Unset: the"
        " cores this process may use.",
    )
    retry_failed_batch: bool | None = _option(
        BOOLEAN,
        "Call the model again with parts of a batch that failed, so that only the requests at fault"
        " do; `false` for a model with side effects. Unset: true, as long as it was not seen to"
        " change its buffers or its inputs.",
    )
    check_finite: bool = _option(
        BOOLEAN, "Refuse requests whose outputs hold NaN or infinity.", default=False
    )
    on_fatal: str = _option(
        FATAL_ACTION,
        "What an instance does whose device cannot be used any more: `stay` and refuse each request"
        " with 503, or `exit`.",
        default="stay",
    )
    auto_complete_timeout_s: int = _option(
        POSITIVE,
        "Seconds that trying the model may take when config.pbtxt leaves out inputs or outputs.",
        default=120,
    )
    execution_timeout_ms: int | None = _option(
        POSITIVE,
        "Milliseconds that one call of the model may take. Where `torch-py-backend serve` watches,"
        " an instance that takes longer is ended, and the model loaded again. Unset: no limit.",
    )
    warmup: bool | None = _option(
        BOOLEAN,
        "Run sample batches before READY, so that no request pays for what a first call costs."
        " Unset: true, and a [made-up sample that fails](batching.md#warm-up) is a warning.",
    )
    max_streams: int = _option(
        POSITIVE,
        "Streams of a decoupled model that are live at once in each instance. Further requests wait"
        " in Triton's queue.",
        default=64,
    )
    tracing: bool | None = _option(
        BOOLEAN,
        "Make the context of a request that Triton traces with OpenTelemetry the current one in the"
        " model's code. Unset: where [somebody there sees it](tracing.md#switch-it-on).",
    )
    profile_dir: str | None = _option(
        TEXT,
        "Write a trace of torch.profiler into this folder, an absolute path: of the first batches"
        " after READY, and again whenever its file `again` is touched. Unset: none.",
    )
    profile_batches: int | None = _option(POSITIVE, "Batches in each of these traces. Unset: 10.")
    force_cpu_only_input_tensors: bool = _option(
        YES_NO,
        "Triton's own: `no` leaves inputs that are on the GPU there. A model on the CPU gets"
        " copies.",
        default=True,
    )
    execution_env_path: str | None = _option(
        TEXT,
        "Triton's own: a [packed Python environment](environments.md) for this model.",
    )

    @property
    def autocast(self) -> str | None:
        """The type that OPTIMIZE computes in, `bf16` or `fp16`; None: as the model is."""
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
# LibTorch's backend sets only numbers above 0, and takes others for its default.
_LIBTORCHS = {"INTRA_OP_THREAD_COUNT": COUNT, "INTER_OP_THREAD_COUNT": COUNT}


def parse(model: str, parameters: Mapping[str, Any]) -> Options:
    """Triton's `parameters` as Options; an unknown key is warned about.

    Raises:
        OptionError: a value is not accepted.
        ConfigError: two parameters contradict each other.
    """
    values: dict[str, Any] = {}
    source: dict[str, str] = {}
    rows = {key: row for row in TABLE for key in (row.key, *row.also)}
    for key, entry in parameters.items():
        row = rows.get(key)
        if row is None:
            _warn_unknown(model, key, list(rows))
            continue
        value = _value(model, row, key, _string(model, row, key, entry))
        if value is None:
            continue
        if row.inert and value:
            log.warning("model '%s': the parameter %s has no effect: %s.", model, key, row.inert)
        if row.field in values and values[row.field] != value:
            raise ConfigError(
                model,
                f"the parameters {source[row.field]} and {key} contradict each other",
                cure="They mean the same; keep one.",
            )
        values[row.field], source[row.field] = value, key
    if "model_class" in values and "model_factory" in values:
        raise ConfigError(
            model,
            "MODEL_CLASS and MODEL_FACTORY both name what is to be served",
            cure="They exclude each other; keep one.",
        )
    return Options(**values)


def _string(model: str, row: OptionRow, key: str, entry: Any) -> str:
    """Triton's own entries are always strings; what is read from other files may be anything."""
    text = entry.get("string_value", "") if isinstance(entry, Mapping) else entry
    if not isinstance(text, str) or text is entry:
        raise OptionError(model, key, str(entry), f"a string_value with {row.parser.accepted}")
    return text


def _value(model: str, row: OptionRow, key: str, text: str) -> Any:
    parser = _LIBTORCHS.get(key, row.parser)
    try:
        return parser.parse(text)
    except json.JSONDecodeError as error:
        problem = f"{parser.accepted} (JSON says: {error})"
        raise OptionError(model, key, text, problem) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise OptionError(model, key, text, parser.accepted) from None


def _warn_unknown(model: str, key: str, known: list[str]) -> None:
    close = difflib.get_close_matches(key.upper(), known, n=1)
    question = f" Did you mean {close[0]}?" if close else ""
    log.warning("model '%s': the parameter %s is unknown and ignored.%s", model, key, question)
