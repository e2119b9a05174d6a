import json
import logging
from typing import Any

import build
import pytest

from torch_py_backend.config import options
from torch_py_backend.config.options import OptionRow, Options, Parser
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


@pytest.mark.parametrize("row", options.TABLE, ids=lambda row: row.key)
def test_option_is_not_empty(row: OptionRow) -> None:
    """The message for an empty value names the key and what its parser accepts."""
    with pytest.raises(OptionError) as raised:
        parsed(**{row.key: ""})
    expected = f"'digits': the parameter {row.key} is ''; expected {row.parser.accepted}"
    assert expected in str(raised.value)


def test_keys() -> None:
    """No key names two options, and all keys of Triton's LibTorch backend are accepted."""
    keys = [key for row in options.TABLE for key in (row.key, *row.aliases)]

    assert len(keys) == len(set(keys))
    assert set(keys) >= LIBTORCH_KEYS


# --- parsers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parser", "text", "value"),
    [
        *((options.boolean, text, True) for text in ("true", "ON", "1", " true\n")),
        *((options.boolean, text, False) for text in ("fAlSe", "off", "0")),
        (options.yes_no, "yes", True),
        (options.name, " Net \n", "Net"),
        (options.state_paths, '{"h": "RESULT[1]"}', {"h": "RESULT[1]"}),
        (options.positive, "1", 1),
        (options.positive, " 64 ", 64),
        (options.fraction, "1", 1.0),
        (options.count, "3", 3),
        *((options.count, text, None) for text in ("0", "-1", " -64 ")),
        (options.fatal_action, " Stay ", "stay"),
        (options.floating, "bf16", "BF16"),
        (options.floating, " type_fp32\n", "FP32"),
        (options.json_object, "{}", {}),
        (options.json_object, '{"a": [{"ü": null}], "c": true}', {"a": [{"ü": None}], "c": True}),
        (options.optimizations, "none", ()),
        (options.optimizations, "auto", ("auto",)),
        (options.optimizations, " Channels_Last , BF16 ", ("bf16", "channels_last")),
        (options.optimizations, "freeze,freeze", ("freeze",)),
        (options.buckets, "auto", None),
        (options.buckets, "NONE", ()),
        (options.buckets, "8, 1,4", (1, 4, 8)),
        (options.buckets, "2,2", (2,)),
        (options.devices, '{"a.b": "cuda:1", "": "cpu"}', {"a.b": "cuda:1", "": "cpu"}),
        (options.devices, '{"a": 1, "b": "cuda"}', {"a": "cuda:1", "b": "cuda:0"}),
        (options.devices, " devices.json\n", "devices.json"),
    ],
)
def test_accepted_text(parser: Parser[Any], text: str, value: Any) -> None:
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
def test_accepted_json(parser: Parser[Any], value: dict[str, Any]) -> None:
    """All known keys of a JSON object are accepted, and the object is not changed."""
    assert parser.parse(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        *((options.boolean, text) for text in (" ", "2", "yes")),
        *((options.yes_no, text) for text in ("true", "0", "No")),
        *((options.positive, text) for text in ("0", "-1", "1.5", "four")),
        (options.count, "1.5"),
        *((options.fraction, text) for text in ("0", "-0.5", "1.01", "nan", "half")),
        *((options.fatal_action, text) for text in ("restart", "exit,stay")),
        (options.name, "  "),
        *((options.floating, text) for text in ("INT8", "float16", "TYPE_")),
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
                '{"a": "meta"}',
                '{"a": "cuda:-1"}',
                '{"a": -1}',
                '{"a": true}',
                '{"a": {"b": "cpu"}}',
                '{"a": "cpu", "a": "cuda:0"}',
            )
        ),
    ],
)
def test_rejected_text(parser: Parser[Any], text: str) -> None:
    """Another text is rejected; the message names the key, the text and what is accepted."""
    keys = {row.parser: row.key for row in options.TABLE}
    key = keys.get(parser, "INTRA_OP_THREAD_COUNT")

    with pytest.raises(OptionError) as raised:
        parsed(**{key: text})

    assert f"the parameter {key} is '{text}'; expected {parser.accepted}" in str(raised.value)


def test_invalid_json() -> None:
    """The message for invalid JSON contains the message of the JSON parser."""
    with pytest.raises(OptionError, match=r"expected a JSON object \(JSON says: Expecting ',' del"):
        parsed(MODEL_KWARGS='{"size": 3')


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "the parameter WARMUP is ''"),
        ("true", "expected a string_value with true, on, 1, false, off"),
        ({"string_value": True}, "expected a string_value with true, on, 1, false, off"),
    ],
)
def test_entry_without_text(entry: object, message: str) -> None:
    """An entry that is not an object with a string is rejected; without a value it is empty."""
    with pytest.raises(OptionError, match=message):
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
def test_libtorch_count_below_one_is_unset(key: str, alias: str) -> None:
    """Like in the LibTorch backend, a count of 0 or less is unset, and the other key decides."""
    assert parsed(**{alias: "0"}) == Options()
    assert getattr(parsed(**{alias: "-1", key: "3"}), key.lower()) == 3


@pytest.mark.parametrize(
    ("key", "similar"),
    [
        ("NUM_THREAD", "NUM_THREADS"),
        ("inference_mode", "INFERENCE_MODE"),
        ("INTRA_OP_THREADS_COUNT", "INTRA_OP_THREAD_COUNT"),
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
    """Only switching on an option that has no effect here logs a warning; known keys log none."""
    parsed(ENABLE_NVFUSER=text, WARMUP="false", NUM_THREADS="2", MODEL_CLASS="Net")

    message = "model 'digits': the parameter ENABLE_NVFUSER has no effect"
    assert [message in line for line in caplog.messages] == [True] * warnings


@pytest.mark.parametrize(
    ("optimize", "autocast"), [("none", None), ("bf16,freeze", "bf16"), ("fp16", "fp16")]
)
def test_precision_of_autocast(optimize: str, autocast: str | None) -> None:
    """Two of the optimizations are types of autocast."""
    assert parsed(OPTIMIZE=optimize).autocast == autocast
