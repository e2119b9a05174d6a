import json
import logging
from typing import Any

import build
import pytest

from torch_py_backend.config import options
from torch_py_backend.config.options import Options, Parser
from torch_py_backend.errors import ConfigError, OptionError

# Keys that a repository written for Triton's LibTorch backend or its Python runtime may contain.
LIBTORCH_KEYS = {
    "DISABLE_OPTIMIZED_EXECUTION",
    "INFERENCE_MODE",
    "ENABLE_NVFUSER",
    "ENABLE_JIT_EXECUTOR",
    "ENABLE_JIT_PROFILING",
    "ENABLE_TENSOR_FUSER",
    "DISABLE_CUDNN",
    "ENABLE_WEIGHT_SHARING",
    "ENABLE_CACHE_CLEANING",
    "INTRA_OP_THREAD_COUNT",
    "NUM_THREADS",
    "INTER_OP_THREAD_COUNT",
    "NUM_INTEROP_THREADS",
    "TORCH_COMPILE_OPTIONAL_PARAMETERS",
    "FORCE_CPU_ONLY_INPUT_TENSORS",
    "EXECUTION_ENV_PATH",
}


def parsed(**parameters: str) -> Options:
    return options.parse(
        build.MODEL, {key: {"string_value": value} for key, value in parameters.items()}
    )


# --- options -----------------------------------------------------------------------------------

# Each option with its parser, and its value if it is not set.
OPTIONS: list[tuple[str, Parser, Any]] = [
    ("MODEL_CLASS", options.TEXT, None),
    ("MODEL_FACTORY", options.TEXT, None),
    ("MODEL_KWARGS", options.JSON_OBJECT, None),
    ("METHOD", options.TEXT, None),
    ("HOOKS", options.TEXT, None),
    ("FALLBACK", options.TEXT, None),
    ("PREPROCESS_THREADS", options.POSITIVE, None),
    ("CAST_INPUTS", options.FLOATING, None),
    ("CAST_OUTPUTS", options.BOOLEAN, False),
    ("CHECK_OUTPUTS", options.BOOLEAN, True),
    ("WEIGHTS", options.TEXT, None),
    ("NUM_THREADS", options.POSITIVE, None),
    ("NUM_INTEROP_THREADS", options.POSITIVE, None),
    ("TORCH_COMPILE_OPTIONAL_PARAMETERS", options.COMPILE_PARAMETERS, None),
    ("COMPILE_CACHE_DIR", options.TEXT, None),
    ("COMPILE_REQUIRED", options.BOOLEAN, False),
    ("OPTIMIZE", options.OPTIMIZE, ()),
    ("BATCH_BUCKETS", options.BUCKETS, None),
    ("PAD", options.PAD, None),
    ("STATE", options.STATE, None),
    ("SEQUENCE_MEMORY_MB", options.POSITIVE, None),
    ("INFERENCE_MODE", options.BOOLEAN, True),
    ("DISABLE_OPTIMIZED_EXECUTION", options.BOOLEAN, False),
    ("ENABLE_JIT_EXECUTOR", options.BOOLEAN, None),
    ("ENABLE_JIT_PROFILING", options.BOOLEAN, None),
    ("ENABLE_TENSOR_FUSER", options.BOOLEAN, None),
    ("ENABLE_NVFUSER", options.BOOLEAN, None),
    ("DISABLE_CUDNN", options.BOOLEAN, False),
    ("CUDA_MEMORY_FRACTION", options.FRACTION, None),
    ("ENABLE_CACHE_CLEANING", options.BOOLEAN, False),
    ("ENABLE_WEIGHT_SHARING", options.BOOLEAN, None),
    ("WATCH_WEIGHTS", options.BOOLEAN, False),
    ("DEVICE_MAP", options.DEVICE_MAP, None),
    ("PARALLEL_LOADS", options.POSITIVE, None),
    ("RETRY_FAILED_BATCH", options.BOOLEAN, None),
    ("CHECK_FINITE", options.BOOLEAN, False),
    ("ON_FATAL", options.FATAL_ACTION, "stay"),
    ("AUTO_COMPLETE_TIMEOUT_S", options.POSITIVE, 120),
    ("EXECUTION_TIMEOUT_MS", options.POSITIVE, None),
    ("WARMUP", options.BOOLEAN, None),
    ("MAX_STREAMS", options.POSITIVE, 64),
    ("TRACING", options.BOOLEAN, None),
    ("PROFILE_DIR", options.TEXT, None),
    ("PROFILE_BATCHES", options.POSITIVE, None),
    ("FORCE_CPU_ONLY_INPUT_TENSORS", options.YES_NO, True),
    ("EXECUTION_ENV_PATH", options.TEXT, None),
]
# A string that each parser accepts, and its value.
VALID: dict[Parser, tuple[str, Any]] = {
    options.TEXT: (" Net \n", "Net"),
    options.JSON_OBJECT: ('{"size": 3}', {"size": 3}),
    options.POSITIVE: ("7", 7),
    options.FLOATING: ("bf16", "BF16"),
    options.BOOLEAN: ("on", True),
    options.COMPILE_PARAMETERS: ('{"dynamic": true}', {"dynamic": True}),
    options.OPTIMIZE: ("freeze", ("freeze",)),
    options.BUCKETS: ("1,2", (1, 2)),
    options.PAD: ('{"x": {}}', {"x": {}}),
    options.STATE: ('{"h": "RESULT[1]"}', {"h": "RESULT[1]"}),
    options.FRACTION: ("0.5", 0.5),
    options.DEVICE_MAP: ('{"a": 0}', {"a": "cuda:0"}),
    options.FATAL_ACTION: ("exit", "exit"),
    options.YES_NO: ("no", False),
}


@pytest.mark.parametrize(("key", "parser", "default"), OPTIONS, ids=[row[0] for row in OPTIONS])
def test_option(key: str, parser: Parser, default: Any) -> None:
    """Each option has its key, its parser and its default."""
    text, value = VALID[parser]

    assert getattr(parsed(), key.lower()) == default
    assert getattr(parsed(**{key: text}), key.lower()) == value
    with pytest.raises(OptionError) as raised:
        parsed(**{key: ""})
    assert f"'digits': the parameter {key} is ''; expected {parser.accepted}" in str(raised.value)


def test_every_option_is_tested() -> None:
    """The table above names each option, and no key names two options."""
    keys = [key for row in options.TABLE for key in (row.key, *row.also)]

    assert [row.key for row in options.TABLE] == [key for key, _, _ in OPTIONS]
    assert len(keys) == len(set(keys))
    assert set(keys) >= LIBTORCH_KEYS


# --- parsers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parser", "text", "value"),
    [
        *((options.BOOLEAN, text, True) for text in ("true", "True", "ON", "1", " true\n")),
        *((options.BOOLEAN, text, False) for text in ("false", "fAlSe", "off", "Off", "0")),
        (options.YES_NO, "yes", True),
        (options.POSITIVE, "1", 1),
        (options.POSITIVE, " 64 ", 64),
        (options.FRACTION, "1", 1.0),
        (options.COUNT, "3", 3),
        *((options.COUNT, text, None) for text in ("0", "-1", " -64 ")),
        (options.FATAL_ACTION, " Stay ", "stay"),
        *((options.FLOATING, name, name) for name in ("FP16", "BF16", "FP32", "FP64")),
        (options.FLOATING, " type_fp32\n", "FP32"),
        (options.JSON_OBJECT, "{}", {}),
        (options.JSON_OBJECT, '{"a": [{"ü": null}], "c": true}', {"a": [{"ü": None}], "c": True}),
        (options.OPTIMIZE, "none", ()),
        (options.OPTIMIZE, "auto", ("auto",)),
        (options.OPTIMIZE, " Channels_Last , BF16 ", ("bf16", "channels_last")),
        (options.OPTIMIZE, "freeze,freeze", ("freeze",)),
        (options.OPTIMIZE, "cuda_graphs,fp16", ("cuda_graphs", "fp16")),
        (options.BUCKETS, "auto", None),
        (options.BUCKETS, "NONE", ()),
        (options.BUCKETS, "4", (4,)),
        (options.BUCKETS, "8, 1,4", (1, 4, 8)),
        (options.BUCKETS, "2,2", (2,)),
        (options.DEVICE_MAP, '{"a.b": "cuda:1", "": "cpu"}', {"a.b": "cuda:1", "": "cpu"}),
        (options.DEVICE_MAP, '{"a": 1, "b": "cuda"}', {"a": "cuda:1", "b": "cuda:0"}),
        (options.DEVICE_MAP, " devices.json\n", "devices.json"),
    ],
)
def test_accepted_text(parser: Parser, text: str, value: Any) -> None:
    """A parser accepts its spellings, without regard to case and blanks around where that helps."""
    assert parser.parse(text) == value
    assert type(parser.parse(text)) is type(value)


@pytest.mark.parametrize(
    ("parser", "value"),
    [
        *(
            (options.COMPILE_PARAMETERS, value)
            for value in (
                {},
                {"fullgraph": True, "dynamic": None, "backend": "eager"},
                {"mode": "max-autotune", "options": {"trace.enabled": True}, "disable": False},
            )
        ),
        *(
            (options.PAD, {"ids": value})
            for value in (
                {"value": 0, "side": "left", "multiple_of": 8, "mask": "m", "outputs": ["y"]},
                {"value": 0.5, "side": "right"},
            )
        ),
    ],
)
def test_accepted_json(parser: Parser, value: dict[str, Any]) -> None:
    """All known keys of a JSON object are accepted, and the object is not changed."""
    assert parser.parse(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        *((options.BOOLEAN, text) for text in (" ", "2", "-1", "t", "yes", "no", "truefalse")),
        *((options.YES_NO, text) for text in ("true", "on", "1", "false", "0", "No", "YES")),
        *((options.POSITIVE, text) for text in ("0", "-1", "1.5", "four", "0x4", "1e3", "inf")),
        *((options.COUNT, text) for text in ("", "1.5", "four")),
        *((options.FRACTION, text) for text in ("0", "-0.5", "1.01", "nan", "half")),
        *((options.FATAL_ACTION, text) for text in ("restart", "exit,stay")),
        (options.TEXT, "  "),
        *((options.FLOATING, text) for text in ("INT8", "float16", "FP8", "TYPE_", "TYPE_STRING")),
        *((options.JSON_OBJECT, text) for text in ("[3]", "3", "null")),
        *(
            (options.COMPILE_PARAMETERS, text)
            for text in ("[3]", '{"model": null}', '{"full_graph": true}', '{"Mode": "x"}')
        ),
        *(
            (options.OPTIMIZE, text)
            for text in ("fast", "freeze bf16", "auto,freeze", "none,freeze", "true")
        ),
        *(
            (options.BUCKETS, text)
            for text in ("0", "-1", "1,,2", "1.5", "[1, 2]", "auto,4", "many")
        ),
        *(
            (options.PAD, text)
            for text in (
                "[]",
                '{"ids": 0}',
                '{"ids": {"fill": 0}}',
                '{"ids": {"value": "0"}}',
                '{"ids": {"side": "top"}}',
                '{"ids": {"multiple_of": 0}}',
                '{"ids": {"multiple_of": 1.5}}',
                '{"ids": {"multiple_of": "8"}}',
                '{"ids": {"mask": 1}}',
                '{"ids": {"outputs": "y"}}',
                '{"ids": {"outputs": [1]}}',
            )
        ),
        *((options.STATE, text) for text in ("[]", "{}", '{"h": ""}', '{"": "y"}', '{"h": 1}')),
        *(
            (options.DEVICE_MAP, text)
            for text in (
                "{}",
                "[]",
                '{"a": "disk"}',
                '{"a": "meta"}',
                '{"a": "cuda:-1"}',
                '{"a": -1}',
                '{"a": true}',
                '{"a": null}',
                '{"a": {"b": "cpu"}}',
                '{"a": "cpu", "a": "cuda:0"}',
            )
        ),
    ],
)
def test_rejected_text(parser: Parser, text: str) -> None:
    """Another text is rejected; the message names the key, the text and what is accepted."""
    key = {options.COUNT: "INTRA_OP_THREAD_COUNT"} | {parser: key for key, parser, _ in OPTIONS}

    with pytest.raises(OptionError) as raised:
        parsed(**{key[parser]: text})

    assert f"the parameter {key[parser]} is '{text}'; expected {parser.accepted}" in str(
        raised.value
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("{'size': 3}", "Expecting property name", id="single quotes"),
        pytest.param('{"size": 3', "Expecting ',' delimiter", id="cut off"),
        pytest.param("size=3", "Expecting value", id="no JSON"),
    ],
)
def test_invalid_json(text: str, problem: str) -> None:
    """The message for invalid JSON contains the message of the JSON parser."""
    with pytest.raises(OptionError) as raised:
        parsed(MODEL_KWARGS=text)

    assert f"expected a JSON object (JSON says: {problem}" in str(raised.value)


@pytest.mark.parametrize("entry", [{}, {"string_value": ""}])
def test_parameter_without_a_value(entry: dict[str, str]) -> None:
    """A parameter without string_value is treated like an empty one."""
    with pytest.raises(OptionError, match="the parameter WARMUP is ''"):
        options.parse(build.MODEL, {"WARMUP": entry})


@pytest.mark.parametrize("entry", ["true", 3, {"string_value": True}])
def test_entry_that_triton_does_not_write(entry: Any) -> None:
    """An entry that is not an object with a string is rejected."""
    with pytest.raises(OptionError, match="expected a string_value with true, on, 1, false, off"):
        options.parse(build.MODEL, {"WARMUP": entry})


# --- keys --------------------------------------------------------------------------------------

ALIASES = [
    ("NUM_THREADS", "INTRA_OP_THREAD_COUNT"),
    ("NUM_INTEROP_THREADS", "INTER_OP_THREAD_COUNT"),
]


@pytest.mark.parametrize(("key", "alias"), ALIASES)
def test_two_keys_of_one_option(key: str, alias: str) -> None:
    """Both keys of an option may be set to the same value; different values are an error."""
    assert getattr(parsed(**{alias: "3"}), key.lower()) == 3
    assert getattr(parsed(**{key: "3", alias: "3"}), key.lower()) == 3
    with pytest.raises(ConfigError) as raised:
        parsed(**{key: "3", alias: "4"})

    assert f"'digits': the parameters {key} and {alias} contradict each other" in str(raised.value)


@pytest.mark.parametrize(("key", "alias"), ALIASES)
@pytest.mark.parametrize("text", ["0", "-1"])
def test_libtorch_count_below_one_is_unset(key: str, alias: str, text: str) -> None:
    """Like in the LibTorch backend, a count of 0 or less is unset, and the other key decides."""
    assert parsed(**{alias: text}) == Options()
    assert getattr(parsed(**{alias: text, key: "3"}), key.lower()) == 3


@pytest.mark.parametrize(
    ("key", "similar"),
    [
        ("NUM_THREAD", "NUM_THREADS"),
        ("inference_mode", "INFERENCE_MODE"),
        ("INTRA_OP_THREADS_COUNT", "INTRA_OP_THREAD_COUNT"),
        ("TORCH_COMPILE_PARAMETERS", "TORCH_COMPILE_OPTIONAL_PARAMETERS"),
        ("OUR_TEAM", ""),
    ],
)
def test_unknown_key(key: str, similar: str, caplog: pytest.LogCaptureFixture) -> None:
    """An unknown key is ignored with a warning, which names the most similar known key if any."""
    assert parsed(**{key: "1"}) == Options()

    (record,) = caplog.records
    question = f" Did you mean {similar}?" if similar else ""
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"model 'digits': the parameter {key} is unknown and ignored.{question}"
    )


@pytest.mark.parametrize(("text", "warnings"), [("true", 1), ("false", 0)])
def test_option_without_effect(text: str, warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    """An option of LibTorch that has no effect here is accepted; switching it on logs a warning."""
    parsed(ENABLE_NVFUSER=text)

    message = "model 'digits': the parameter ENABLE_NVFUSER has no effect"
    assert [message in line for line in caplog.messages] == [True] * warnings


def test_known_keys_are_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """A config with correct keys logs nothing."""
    parsed(WARMUP="false", NUM_THREADS="2", MODEL_CLASS="Net")

    assert caplog.messages == []


@pytest.mark.parametrize(
    ("optimize", "autocast"), [("none", None), ("bf16,freeze", "bf16"), ("fp16", "fp16")]
)
def test_precision_of_autocast(optimize: str, autocast: str | None) -> None:
    """Two of the optimizations are types of autocast."""
    assert parsed(OPTIMIZE=optimize).autocast == autocast
