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
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.errors import ConfigError, OptionError

log = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

OPTIMIZATIONS = ("freeze", "channels_last", "bf16", "fp16", "cuda_graphs")
DEVICES = "cpu, cuda:0, or the number of a GPU"
_COMPILE_KEYS = ("fullgraph", "dynamic", "backend", "mode", "options", "disable")
_PAD_VALUES: Mapping[str, Callable[[Any], bool]] = {
    "value": lambda value: isinstance(value, bool | int | float),
    "side": lambda side: side in ("left", "right"),
    "multiple_of": lambda number: isinstance(number, int) and number >= 1,
    "mask": lambda name: isinstance(name, str),
    "outputs": lambda names: isinstance(names, list) and all(isinstance(n, str) for n in names),
}
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclass(frozen=True, slots=True)
class Parser(Generic[T_co]):
    """A conversion of a string to a value.

    Attributes:
        accepted: describes valid strings in messages.
        parse: raises ValueError, KeyError, TypeError or RecursionError for other strings.
    """

    accepted: str
    parse: Callable[[str], T_co]


def _checked(
    accepted: str, convert: Callable[[str], T], is_valid: Callable[[T], object]
) -> Parser[T]:
    """Return a parser that converts a string, and then checks the value."""

    def parse(text: str) -> T:
        value = convert(text)
        if not is_valid(value):
            raise ValueError(text)
        return value

    return Parser(accepted, parse)


def _is_padding(entry: object) -> bool:
    return isinstance(entry, dict) and all(_PAD_VALUES[key](entry[key]) for key in entry)


def _words(accepted: str, values: Mapping[str, T]) -> Parser[T]:
    """Return a parser of words, in any case and with blanks around."""
    return Parser(accepted, lambda text: values[text.strip().lower()])


boolean = _words(
    "true, on, 1, false, off or 0",
    {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False},
)
fatal_action = _words("exit or stay", {"exit": "exit", "stay": "stay"})
floating = _words(
    "FP16, BF16, FP32 or FP64",
    {
        prefix + name.lower(): name
        for name in ("FP16", "BF16", "FP32", "FP64")
        for prefix in ("", "type_")
    },
)
# Triton itself reads this parameter in ModelState() and accepts only these two strings:
# https://github.com/triton-inference-server/python_backend/blob/main/src/python_be.cc
yes_no = Parser("yes or no", {"yes": True, "no": False}.__getitem__)
positive = _checked("an integer of at least 1", int, lambda number: number >= 1)
fraction = _checked("a number above 0, at most 1", float, lambda number: 0 < number <= 1)
count = Parser(
    "an integer; 0 or less leaves it unset", lambda text: int(text) if int(text) > 0 else None
)
name = _checked("a name", str.strip, bool)
json_object: Parser[JsonObject] = _checked(
    "a JSON object", json.loads, lambda value: isinstance(value, dict)
)
compile_parameters = _checked(
    f"a JSON object with keys among {', '.join(_COMPILE_KEYS)}",
    json_object.parse,
    lambda value: value.keys() <= set(_COMPILE_KEYS),
)
padding = _checked(
    "a JSON object of inputs, each with some of value (a number), side (left or right),"
    " multiple_of (an integer of at least 1), mask (an input's name), outputs (names)",
    json_object.parse,
    lambda inputs: all(map(_is_padding, inputs.values())),
)
state_paths = _checked(
    "a JSON object from inputs of forward() to parts of its result",
    json_object.parse,
    lambda paths: paths and all(key and isinstance(p, str) and p for key, p in paths.items()),
)


def _parse_optimizations(text: str) -> tuple[str, ...]:
    names = tuple(sorted({part.strip().lower() for part in text.split(",")}))
    return () if names == ("none",) else names


optimizations = _checked(
    f"none, auto, or some of {', '.join(OPTIMIZATIONS)}",
    _parse_optimizations,
    lambda names: names == ("auto",) or set(names) <= set(OPTIMIZATIONS),
)


def _parse_buckets(text: str) -> tuple[int, ...] | None:
    keyword = text.strip().lower()
    if keyword in ("auto", "none"):
        return None if keyword == "auto" else ()
    return tuple(sorted({positive.parse(size) for size in text.split(",")}))


buckets = Parser("auto, none, or row counts such as 1,2,4,8", _parse_buckets)


def parse_device_map(text: str) -> dict[str, str]:
    """Parse a device map in JSON.

    Raises:
        ValueError, TypeError: the text is not a device map.
    """
    value = json.loads(text, object_pairs_hook=_distinct)
    if not isinstance(value, dict) or not value:
        raise TypeError(text)
    device_map = {}
    for module, device in value.items():
        if type(device) is int and device >= 0:
            device_map[module] = f"cuda:{device}"  # the ordinal of a GPU
        elif isinstance(device, str) and _DEVICE.fullmatch(device):
            device_map[module] = "cuda:0" if device == "cuda" else device
        else:
            raise ValueError(device)
    return device_map


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; raise if a name occurs twice, where `json` keeps the last one."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError(pairs)
    return entries


def _parse_devices(text: str) -> dict[str, str] | str:
    file = name.parse(text)
    return file if file.endswith(".json") else parse_device_map(text)


devices = Parser(
    f"a JSON object from each module once to its device ({DEVICES}), or the .json file that holds"
    " one",
    _parse_devices,
)


def _option(
    parser: Parser[object],
    doc: str,
    *,
    default: object = None,
    aliases: tuple[str, ...] = (),
    inert: str = "",
) -> Any:
    """Return a field of Options.

    Args:
        parser: the parser of the value.
        doc: the text in docs/options.md.
        default: the value if the parameter is not set.
        aliases: other keys of the same option.
        inert: why the option has no effect.
    """
    return field(
        default=default, metadata={"parser": parser, "doc": doc, "aliases": aliases, "inert": inert}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The values of `parameters` in config.pbtxt. The key of a field is its name in capitals."""

    model_class: str | None = _option(
        name, "The class or function in model.py to serve, when the file defines several."
    )
    model_factory: str | None = _option(
        name,
        "A callable that returns the module; it is called once, at load: a function in model.py, or"
        " `package.module:callable`. A class with `from_pretrained` receives the version folder.",
    )
    model_kwargs: JsonObject | None = _option(
        json_object,
        "Keyword arguments for the class or the factory. For a TorchServe archive: `content_type`,"
        " the media type of request bodies.",
    )
    method: str | None = _option(name, "The method to serve instead of `forward`.")
    hooks: str | None = _option(
        name,
        "The class whose methods run around forward(), in the source file with the model's name;"
        " `none`: no hooks. Unset: `Hooks`, if the file defines it.",
    )
    fallback: str | None = _option(
        name,
        "The file in the version folder to serve if an AOTInductor package was built for another"
        " machine.",
    )
    preprocess_threads: int | None = _option(
        positive,
        "Threads that run preprocess() of the hooks for the rows of a batch; useful if a row takes"
        " milliseconds outside of Python, for example a large image. Unset: no further threads.",
    )
    cast_inputs: str | None = _option(
        floating, "Convert floating-point inputs to this type before the model sees them."
    )
    cast_outputs: bool = _option(
        boolean, "Convert outputs to the types in the config.", default=False
    )
    check_outputs: bool = _option(
        boolean,
        "Reject outputs whose shape does not match the dims in the config; `false` returns them as"
        " the model does, like LibTorch, with one warning.",
        default=True,
    )
    weights: str | None = _option(
        name,
        "The weights file in the version folder; `none` serves the module as it is constructed.",
    )
    num_threads: int | None = _option(
        positive,
        "Intra-op threads of each instance. Unset, or INTRA_OP_THREAD_COUNT of 0 or less:"
        " OMP_NUM_THREADS, else the cores that this process may use, divided by the number of"
        " instances.",
        aliases=("INTRA_OP_THREAD_COUNT",),
    )
    num_interop_threads: int | None = _option(
        positive,
        "Inter-op threads of each instance. Unset, or INTER_OP_THREAD_COUNT of 0 or less: the"
        " cores that this process may use, divided by the number of instances.",
        aliases=("INTER_OP_THREAD_COUNT",),
    )
    torch_compile_optional_parameters: JsonObject | None = _option(
        compile_parameters,
        "Compile the model with these arguments of `torch.compile`; `{}` uses its defaults."
        " Unset: eager.",
    )
    compile_cache_dir: str | None = _option(
        name,
        "The folder of torch.compile's cache, which later starts read: a path in the model's"
        " folder, or an absolute path; `none`: no cache. Unset: compile_cache, if it is writable.",
    )
    compile_required: bool = _option(
        boolean,
        "Fail the load if the model cannot be compiled, instead of serving it eagerly.",
        default=False,
    )
    optimize: tuple[str, ...] = _option(
        optimizations,
        "`freeze`: constant weights, for TorchScript and compiled modules; `channels_last`: this"
        " memory format for convolutions; `bf16`, `fp16`: autocast; `cuda_graphs`: one graph per"
        " bucket, on a GPU; `auto`: the result of `torch-py-backend tune` on an equal machine.",
        default=(),
    )
    batch_buckets: tuple[int, ...] | None = _option(
        buckets,
        "Row counts that batches are padded to. Unset, or `auto`: powers of two if shapes are"
        " fixed (`dynamic: false`, CUDA graphs), else none.",
    )
    pad: dict[str, JsonObject] | None = _option(
        padding,
        "Inputs whose dims of -1 are padded, so that requests of different lengths share a batch:"
        ' `{"ids": {"value": 0, "side": "right", "multiple_of": 8, "mask": "attention_mask"}}`.',
    )
    state: dict[str, str] | None = _option(
        state_paths,
        "The states of a sequence, if `sequence_batching` has no `state`: inputs of forward(), each"
        " with the part of the previous step's result that it receives:"
        ' `{"hidden": "RESULT[1]"}`. The first step runs without these inputs.',
    )
    sequence_memory_mb: int | None = _option(
        positive,
        "Memory limit in megabytes for the states of all sequences of an instance; a step that"
        " needs more fails with 503. Unset: no limit.",
    )
    inference_mode: bool = _option(
        boolean, "Run under `torch.inference_mode`; false: under `torch.no_grad`.", default=True
    )
    disable_optimized_execution: bool = _option(
        boolean, "Switch off TorchScript's graph-executor optimisation.", default=False
    )
    enable_jit_executor: bool | None = _option(
        boolean, "TorchScript's profiling executor. Unset: PyTorch's default."
    )
    enable_jit_profiling: bool | None = _option(
        boolean, "TorchScript's profiling mode. Unset: PyTorch's default."
    )
    enable_tensor_fuser: bool | None = _option(
        boolean, "TorchScript's tensor-expression fuser. Unset: PyTorch's default."
    )
    enable_nvfuser: bool | None = _option(
        boolean,
        "Accepted for compatibility with LibTorch, without effect.",
        inert="PyTorch no longer has nvFuser",
    )
    disable_cudnn: bool = _option(boolean, "Switch cuDNN off for this instance.", default=False)
    cuda_memory_fraction: float | None = _option(
        fraction, "The fraction of the GPU's memory that this instance may use. Unset: all of it."
    )
    enable_cache_cleaning: bool = _option(
        boolean, "Empty the CUDA cache after each execution.", default=False
    )
    enable_weight_sharing: bool | None = _option(
        boolean,
        "One copy of the weights for all instances. Unset: on the CPU, if possible; true: also on a"
        " GPU, and the load fails if the weights cannot be shared; false: one copy per instance.",
    )
    watch_weights: bool = _option(
        boolean,
        "Watch the weights file, and load its new content without a reload of the model.",
        default=False,
    )
    device_map: dict[str, str] | str | None = _option(
        devices,
        "For `KIND_MODEL`: the device of each part of a module, as JSON or as a file in the version"
        ' folder: `{"encoder": "cuda:0", "head": "cuda:1"}`. The longest matching name decides;'
        ' `""` matches everything else.',
    )
    parallel_loads: int | None = _option(
        positive,
        "The number of instances of this server that may load at the same time, if memory allows."
        " Unset: the number of cores that this process may use.",
    )
    retry_failed_batch: bool | None = _option(
        boolean,
        "Call the model again with parts of a failed batch, so that only the requests that cause"
        " the failure fail; `false` for a model with side effects. Unset: true, unless the model"
        " changed its buffers or its inputs.",
    )
    check_finite: bool = _option(
        boolean, "Fail requests whose outputs contain NaN or infinity.", default=False
    )
    on_fatal: str = _option(
        fatal_action,
        "The action of an instance whose device is no longer usable: `stay` and answer each request"
        " with 503, or `exit`.",
        default="stay",
    )
    auto_complete_timeout_s: int = _option(
        positive,
        "Time limit in seconds for running the model when config.pbtxt lacks inputs or outputs.",
        default=120,
    )
    execution_timeout_ms: int | None = _option(
        positive,
        "Time limit in milliseconds for one call of the model. Under `torch-py-backend serve`, an"
        " instance that exceeds it is killed, and the model is reloaded. Unset: no limit.",
    )
    warmup: bool | None = _option(
        boolean,
        "Run sample batches before READY, so that requests do not pay the cost of first calls."
        " Unset: true, and a [generated sample that fails](batching.md#warm-up) is a warning.",
    )
    max_streams: int = _option(
        positive,
        "The number of streams of a decoupled model that run at the same time in each instance."
        " Further requests wait in Triton's queue.",
        default=64,
    )
    tracing: bool | None = _option(
        boolean,
        "Make the OpenTelemetry context of a request that Triton traces the current context in the"
        " model's code. Unset: if [its spans are recorded](tracing.md#switch-it-on).",
    )
    profile_dir: str | None = _option(
        name,
        "Write traces of torch.profiler into this folder, an absolute path: of the first batches"
        " after READY, and again each time its file `again` is touched. Unset: none.",
    )
    profile_batches: int | None = _option(positive, "Batches in each of these traces. Unset: 10.")
    force_cpu_only_input_tensors: bool = _option(
        yes_no,
        "Read by Triton: `no` keeps inputs that are on the GPU there. A model on the CPU receives"
        " copies.",
        default=True,
    )
    execution_env_path: str | None = _option(
        name,
        "Read by Triton: a [packed Python environment](environments.md) for this model.",
    )

    @property
    def autocast(self) -> str | None:
        """The type of autocast in OPTIMIZE, `bf16` or `fp16`; None: no autocast."""
        return next((name for name in ("bf16", "fp16") if name in self.optimize), None)


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One row of the table of parameters; `field` is the name in Options, the others as above."""

    key: str
    field: str
    default: object
    parser: Parser[object]
    doc: str
    aliases: tuple[str, ...]
    inert: str


TABLE = tuple(
    OptionRow(entry.name.upper(), entry.name, entry.default, **entry.metadata)
    for entry in fields(Options)
)
# The LibTorch backend treats numbers of 0 or less as unset.
_LIBTORCH_PARSERS = {"INTRA_OP_THREAD_COUNT": count, "INTER_OP_THREAD_COUNT": count}


def parse(model: str, parameters: Mapping[str, object]) -> Options:
    """Parse Triton's `parameters`; log a warning for each unknown key.

    Raises:
        OptionError: a value is not accepted.
        ConfigError: two keys of one option have different values.
    """
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    rows = {key: row for row in TABLE for key in (row.key, *row.aliases)}
    for key, entry in parameters.items():
        row = rows.get(key)
        if row is None:
            similar = difflib.get_close_matches(key.upper(), rows, n=1)
            question = f" Did you mean {similar[0]}?" if similar else ""
            log.warning(
                "model '%s': the parameter %s is unknown and ignored.%s", model, key, question
            )
            continue
        value = _parse_value(model, key, _LIBTORCH_PARSERS.get(key, row.parser), entry)
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


def _parse_value(model: str, key: str, parser: Parser[object], entry: object) -> object:
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
