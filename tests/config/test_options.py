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
    ("MODEL_CLASS", options.name, None),
    ("MODEL_FACTORY", options.name, None),
    ("MODEL_KWARGS", options.json_object, None),
    ("METHOD", options.name, None),
    ("HOOKS", options.name, None),
    ("FALLBACK", options.name, None),
    ("PREPROCESS_THREADS", options.positive, None),
    ("CAST_INPUTS", options.floating, None),
    ("CAST_OUTPUTS", options.boolean, False),
    ("CHECK_OUTPUTS", options.boolean, True),
    ("WEIGHTS", options.name, None),
    ("NUM_THREADS", options.positive, None),
    ("NUM_INTEROP_THREADS", options.positive, None),
    ("TORCH_COMPILE_OPTIONAL_PARAMETERS", options.compile_parameters, None),
    ("COMPILE_CACHE_DIR", options.name, None),
    ("COMPILE_REQUIRED", options.boolean, False),
    ("OPTIMIZE", options.optimizations, ()),
    ("BATCH_BUCKETS", options.buckets, None),
    ("PAD", options.padding, None),
    ("STATE", options.state_paths, None),
    ("SEQUENCE_MEMORY_MB", options.positive, None),
    ("INFERENCE_MODE", options.boolean, True),
    ("DISABLE_OPTIMIZED_EXECUTION", options.boolean, False),
    ("ENABLE_JIT_EXECUTOR", options.boolean, None),
    ("ENABLE_JIT_PROFILING", options.boolean, None),
    ("ENABLE_TENSOR_FUSER", options.boolean, None),
    ("ENABLE_NVFUSER", options.boolean, None),
    ("DISABLE_CUDNN", options.boolean, False),
    ("CUDA_MEMORY_FRACTION", options.fraction, None),
    ("ENABLE_CACHE_CLEANING", options.boolean, False),
    ("ENABLE_WEIGHT_SHARING", options.boolean, None),
    ("WATCH_WEIGHTS", options.boolean, False),
    ("DEVICE_MAP", options.devices, None),
    ("PARALLEL_LOADS", options.positive, None),
    ("RETRY_FAILED_BATCH", options.boolean, None),
    ("CHECK_FINITE", options.boolean, False),
    ("ON_FATAL", options.fatal_action, "stay"),
    ("AUTO_COMPLETE_TIMEOUT_S", options.positive, 120),
    ("EXECUTION_TIMEOUT_MS", options.positive, None),
    ("WARMUP", options.boolean, None),
    ("MAX_STREAMS", options.positive, 64),
    ("TRACING", options.boolean, None),
    ("PROFILE_DIR", options.name, None),
    ("PROFILE_BATCHES", options.positive, None),
    ("FORCE_CPU_ONLY_INPUT_TENSORS", options.yes_no, True),
    ("EXECUTION_ENV_PATH", options.name, None),
]
# A string that each parser accepts, and its value.
VALID: dict[Parser, tuple[str, Any]] = {
    options.name: (" Net \n", "Net"),
    options.json_object: ('{"size": 3}', {"size": 3}),
    options.positive: ("7", 7),
    options.floating: ("bf16", "BF16"),
    options.boolean: ("on", True),
    options.compile_parameters: ('{"dynamic": true}', {"dynamic": True}),
    options.optimizations: ("freeze", ("freeze",)),
    options.buckets: ("1,2", (1, 2)),
    options.padding: ('{"x": {}}', {"x": {}}),
    options.state_paths: ('{"h": "RESULT[1]"}', {"h": "RESULT[1]"}),
    options.fraction: ("0.5", 0.5),
    options.devices: ('{"a": 0}', {"a": "cuda:0"}),
    options.fatal_action: ("exit", "exit"),
    options.yes_no: ("no", False),
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
        *((options.boolean, text, True) for text in ("true", "True", "ON", "1", " true\n")),
        *((options.boolean, text, False) for text in ("false", "fAlSe", "off", "Off", "0")),
        (options.yes_no, "yes", True),
        (options.positive, "1", 1),
        (options.positive, " 64 ", 64),
        (options.fraction, "1", 1.0),
        (options.count, "3", 3),
        *((options.count, text, None) for text in ("0", "-1", " -64 ")),
        (options.fatal_action, " Stay ", "stay"),
        *((options.floating, name, name) for name in ("FP16", "BF16", "FP32", "FP64")),
        (options.floating, " type_fp32\n", "FP32"),
        (options.json_object, "{}", {}),
        (options.json_object, '{"a": [{"ü": null}], "c": true}', {"a": [{"ü": None}], "c": True}),
        (options.optimizations, "none", ()),
        (options.optimizations, "auto", ("auto",)),
        (options.optimizations, " Channels_Last , BF16 ", ("bf16", "channels_last")),
        (options.optimizations, "freeze,freeze", ("freeze",)),
        (options.optimizations, "cuda_graphs,fp16", ("cuda_graphs", "fp16")),
        (options.buckets, "auto", None),
        (options.buckets, "NONE", ()),
        (options.buckets, "4", (4,)),
        (options.buckets, "8, 1,4", (1, 4, 8)),
        (options.buckets, "2,2", (2,)),
        (options.devices, '{"a.b": "cuda:1", "": "cpu"}', {"a.b": "cuda:1", "": "cpu"}),
        (options.devices, '{"a": 1, "b": "cuda"}', {"a": "cuda:1", "b": "cuda:0"}),
        (options.devices, " devices.json\n", "devices.json"),
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
            (options.compile_parameters, value)
            for value in (
                {},
                {"fullgraph": True, "dynamic": None, "backend": "eager"},
                {"mode": "max-autotune", "options": {"trace.enabled": True}, "disable": False},
            )
        ),
        *(
            (options.padding, {"ids": value})
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
        *((options.boolean, text) for text in (" ", "2", "-1", "t", "yes", "no", "truefalse")),
        *((options.yes_no, text) for text in ("true", "on", "1", "false", "0", "No", "YES")),
        *((options.positive, text) for text in ("0", "-1", "1.5", "four", "0x4", "1e3", "inf")),
        *((options.count, text) for text in ("", "1.5", "four")),
        *((options.fraction, text) for text in ("0", "-0.5", "1.01", "nan", "half")),
        *((options.fatal_action, text) for text in ("restart", "exit,stay")),
        (options.name, "  "),
        *((options.floating, text) for text in ("INT8", "float16", "FP8", "TYPE_", "TYPE_STRING")),
        *((options.json_object, text) for text in ("[3]", "3", "null")),
        *(
            (options.compile_parameters, text)
            for text in ("[3]", '{"model": null}', '{"full_graph": true}', '{"Mode": "x"}')
        ),
        *(
            (options.optimizations, text)
            for text in ("fast", "freeze bf16", "auto,freeze", "none,freeze", "true")
        ),
        *(
            (options.buckets, text)
            for text in ("0", "-1", "1,,2", "1.5", "[1, 2]", "auto,4", "many")
        ),
        *(
            (options.padding, text)
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
        *(
            (options.state_paths, text)
            for text in ("[]", "{}", '{"h": ""}', '{"": "y"}', '{"h": 1}')
        ),
        *(
            (options.devices, text)
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
    key = {options.count: "INTRA_OP_THREAD_COUNT"} | {parser: key for key, parser, _ in OPTIONS}

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
