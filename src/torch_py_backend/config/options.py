"""The parameters of config.pbtxt: one table with name, parser and default.

docs/options.md has their meanings; the rest of its table is generated from the fields of `Options`.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from torch_py_backend.config import removed_names
from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.errors import ConfigError

log = logging.getLogger(__name__)

OPTIMIZATIONS = ("freeze", "channels_last", "aoti", "bf16", "fp16")


class Parser(NamedTuple):
    """Strings that are accepted, in words, and their conversion."""

    accepted: str
    parse: Callable[[str], Any]  # raises ValueError, KeyError, TypeError or RecursionError


def _checked(
    accepted: str,
    convert: Callable[[str], Any],
    is_valid: Callable[[Any], object],
) -> Parser:
    def parse(text: str) -> Any:
        value = convert(text)
        if not is_valid(value):
            raise ValueError(text)
        return value

    return Parser(accepted, parse)


def _one_of(values: Mapping[str, object]) -> Parser:
    """Return a parser of words, in any case and with blanks around."""
    *words, last = values
    lower = {word.lower(): value for word, value in values.items()}
    return Parser(f"{', '.join(words)} or {last}", lambda text: lower[text.strip().lower()])


boolean = _one_of({"true": True, "on": True, "1": True, "false": False, "off": False, "0": False})
yes_no = Parser("yes or no", {"yes": True, "no": False}.__getitem__)  # Triton reads only these
matmul_precision = _one_of({word: word for word in ("highest", "high", "medium")})
floating = _one_of({name: name for name in ("FP16", "BF16", "FP32", "FP64")})
positive = _checked("an integer of at least 1", int, lambda number: number >= 1)
fraction = _checked("a number above 0, at most 1", float, lambda number: 0 < number <= 1)
# As the LibTorch backend reads it.
count = Parser("an integer; 0 or less leaves it unset", lambda text: max(int(text), 0) or None)
name = _checked("a name", str.strip, bool)
json_object = _checked("a JSON object", json.loads, lambda value: isinstance(value, dict))
# torch.compile itself refuses other arguments.
_COMPILE_TYPES = {"fullgraph": bool, "dynamic": bool, "disable": bool, "options": dict}
compile_parameters = _checked(
    "a JSON object of arguments of torch.compile, with true or false for fullgraph, dynamic and"
    " disable, and an object for options",
    json_object.parse,
    lambda values: all(
        isinstance(values.get(key), kind | None) for key, kind in _COMPILE_TYPES.items()
    ),
)
_PAD_VALUES: Mapping[str, Callable[[Any], object]] = {
    "value": lambda value: isinstance(value, int | float),
    "side": lambda side: side in ("left", "right"),
    "multiple_of": lambda number: isinstance(number, int) and number >= 1,
    "mask": lambda name: isinstance(name, str),
    "outputs": lambda names: isinstance(names, list) and all(isinstance(n, str) for n in names),
}
padding = _checked(
    "a JSON object of inputs, each with some of value (a number), side (left or right),"
    " multiple_of (an integer of at least 1), mask (an input's name), outputs (names)",
    json_object.parse,
    lambda inputs: all(
        isinstance(entry, dict) and all(_PAD_VALUES[key](entry[key]) for key in entry)
        for entry in inputs.values()
    ),
)
optimizations = _checked(
    "none, or some of " + ", ".join(OPTIMIZATIONS),
    lambda text: tuple(sorted({part.strip().lower() for part in text.split(",")} - {"none"})),
    set(OPTIMIZATIONS).issuperset,
)


def _parse_buckets(text: str) -> tuple[int, ...] | None:
    keyword = text.strip().lower()
    if keyword in ("auto", "none"):
        return None if keyword == "auto" else ()
    return tuple(sorted({positive.parse(size) for size in text.split(",")}))


buckets = Parser("auto, none, or row counts such as 1,2,4,8", _parse_buckets)


def _option(parser: Parser, *aliases: str, default: object = None) -> Any:
    """Return a field of Options: a row of the table."""
    return field(default=default, metadata={"parser": parser, "aliases": aliases})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The values of `parameters` in config.pbtxt. The key of a field is its name in capitals."""

    model_class: str | None = _option(name)
    model_factory: str | None = _option(name)
    model_kwargs: JsonObject | None = _option(json_object)
    method: str | None = _option(name)
    cast_inputs: str | None = _option(floating)
    weights: str | None = _option(name)
    num_threads: int | None = _option(count, "INTRA_OP_THREAD_COUNT")
    num_interop_threads: int | None = _option(count, "INTER_OP_THREAD_COUNT")
    torch_compile_optional_parameters: JsonObject | None = _option(compile_parameters)
    compile_cache_dir: str | None = _option(name)
    optimize: tuple[str, ...] = _option(optimizations, default=())
    batch_buckets: tuple[int, ...] | None = _option(buckets)
    pad: dict[str, JsonObject] | None = _option(padding)
    inference_mode: bool = _option(boolean, default=True)
    disable_optimized_execution: bool = _option(boolean, default=False)
    enable_jit_executor: bool | None = _option(boolean)
    enable_jit_profiling: bool | None = _option(boolean)
    enable_tensor_fuser: bool | None = _option(boolean)
    float32_matmul_precision: str | None = _option(matmul_precision)
    disable_cudnn: bool = _option(boolean, default=False)
    cuda_memory_fraction: float | None = _option(fraction)
    enable_cache_cleaning: bool = _option(boolean, default=False)
    enable_weight_sharing: bool | None = _option(boolean)
    retry_failed_batch: bool | None = _option(boolean)
    check_finite: bool = _option(boolean, default=False)
    execution_timeout_ms: int | None = _option(positive)
    warmup: bool | None = _option(boolean)
    max_streams: int = _option(positive, default=64)
    profile_dir: str | None = _option(name)
    # Triton itself reads the next two.
    force_cpu_only_input_tensors: bool = _option(yes_no, default=True)
    execution_env_path: str | None = _option(name)

    @property
    def compilation(self) -> JsonObject | None:
        """The arguments of torch.compile; None: the model is not compiled."""
        arguments = self.torch_compile_optional_parameters
        if arguments is None or arguments.get("disable"):
            return None
        # That backend records the shapes of a call, whatever the graph accepts.
        static = {"dynamic": False} if arguments.get("backend") == "cudagraphs" else {}
        return {**static, **arguments}

    @property
    def static_shapes(self) -> bool:
        """Whether torch.compile makes a graph for each shape."""
        return (self.compilation or {}).get("dynamic") is False

    @property
    def freezes(self) -> bool:
        """Whether weights become constants of a graph."""
        inductor = (self.compilation or {}).get("options") or {}
        return "freeze" in self.optimize or bool(inductor.get("freezing"))

    @property
    def weights_dtype(self) -> str | None:
        """The torch type that OPTIMIZE converts weights to; None: they keep their types."""
        dtypes = {"bf16": "bfloat16", "fp16": "float16"}
        return next((dtypes[name] for name in self.optimize if name in dtypes), None)


TABLE = {
    key: entry
    for entry in fields(Options)
    for key in (entry.name.upper(), *entry.metadata["aliases"])
}


def parse(parameters: Mapping[str, Mapping[str, str]]) -> Options:
    """Parse Triton's `parameters`; log a warning for unknown keys, refuse removed ones."""
    values: dict[str, Any] = {}
    for key, entry in parameters.items():
        if key in TABLE:
            name = TABLE[key].name
            value = _parse(key, entry["string_value"])
            if value is not None and values.setdefault(name, value) != value:
                raise ConfigError(
                    f"the parameter {key} and another name of {name.upper()} contradict each other",
                    cure="They mean the same; keep one.",
                )
        elif removed := removed_names.advice("parameter", [key]):
            raise ConfigError(removed)
        else:
            similar = difflib.get_close_matches(key.upper(), TABLE, n=1)
            hint = f" Did you mean {similar[0]}?" if similar else ""
            log.warning("the parameter %s is unknown and ignored.%s", key, hint)
    return Options(**values)


def _parse(key: str, text: str) -> Any:
    parser: Parser = TABLE[key].metadata["parser"]
    try:
        return parser.parse(text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f" (JSON says: {error})" if isinstance(error, json.JSONDecodeError) else ""
        words = text.lower().replace(" ", "").split(",") if key == "OPTIMIZE" else []
        raise ConfigError(
            f"the parameter {key} is '{text}'",
            expected=parser.accepted + reason,
            cure=removed_names.advice("OPTIMIZE", words) or "Correct it in config.pbtxt.",
        ) from None
