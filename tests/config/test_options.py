"""The parameters of config.pbtxt."""

import json
from typing import Any

import pytest

from torch_py_backend.config import options, removed_names
from torch_py_backend.config.options import Options, Parser
from torch_py_backend.errors import ConfigError

# Keys that a repository written for Triton's LibTorch backend or its Python runtime may contain.
_KEYS = {row.key for row in options.TABLE}
LIBTORCH_KEYS = """
    DISABLE_OPTIMIZED_EXECUTION INFERENCE_MODE ENABLE_JIT_EXECUTOR
    ENABLE_JIT_PROFILING ENABLE_TENSOR_FUSER DISABLE_CUDNN ENABLE_WEIGHT_SHARING
    ENABLE_CACHE_CLEANING INTRA_OP_THREAD_COUNT NUM_THREADS INTER_OP_THREAD_COUNT
    NUM_INTEROP_THREADS TORCH_COMPILE_OPTIONAL_PARAMETERS FORCE_CPU_ONLY_INPUT_TENSORS
    EXECUTION_ENV_PATH
"""
ALIASES = [
    ("NUM_THREADS", "INTRA_OP_THREAD_COUNT"),
    ("NUM_INTEROP_THREADS", "INTER_OP_THREAD_COUNT"),
]


def parsed(**parameters: str) -> Options:
    return options.parse({key: {"string_value": value} for key, value in parameters.items()})


def test_keys() -> None:
    """No key names two options; all keys of LibTorch are accepted; no value may be empty."""
    keys = [key for row in options.TABLE for key in (row.key, *row.aliases)]
    assert len(keys) == len(set(keys))
    assert set(keys) >= set(LIBTORCH_KEYS.split())
    for row in options.TABLE:
        with pytest.raises(ConfigError) as raised:
            parsed(**{row.key: ""})
        expected = f"the parameter {row.key} is ''; expected {row.parser.accepted}"
        assert expected in str(raised.value)


# --- parsers -----------------------------------------------------------------------------------

ACCEPTED: list[tuple[Parser[Any], dict[str, Any]]] = [
    (options.boolean, {"true": True, "ON": True, "1": True, " true\n": True}),
    (options.boolean, {"fAlSe": False, "off": False, "0": False}),
    (options.yes_no, {"yes": True, "no": False}),
    (options.name, {" Net \n": "Net"}),
    (options.positive, {"1": 1, " 64 ": 64}),
    (options.fraction, {"1": 1.0}),
    (options.count, {"3": 3, "0": None, " -64 ": None}),
    (options.matmul_precision, {" High ": "high", "highest": "highest"}),
    (options.floating, {"bf16": "BF16", " type_fp32\n": "FP32"}),
    (options.json_object, {"{}": {}, '{"a": [{"ü": null}]}': {"a": [{"ü": None}]}}),
    (options.optimizations, {"none": (), "freeze,freeze": ("freeze",)}),
    (options.optimizations, {" Channels_Last , BF16 ": ("bf16", "channels_last")}),
    (options.buckets, {"auto": None, "NONE": (), "8, 1,4": (1, 4, 8), "2,2": (2,)}),
]
# The keys of JSON objects; the object is not changed.
ACCEPTED += [
    (parser, {json.dumps(value): value for value in values})
    for parser, values in (
        (
            options.compile_parameters,
            [{}, {"fullgraph": True, "dynamic": None, "backend": "eager"}],
        ),
        (
            options.compile_parameters,
            [{"mode": "max-autotune", "options": {"trace.enabled": True}, "disable": False}],
        ),
        (
            options.padding,
            [
                {
                    "a": {
                        "value": 0,
                        "side": "left",
                        "multiple_of": 8,
                        "mask": "m",
                        "outputs": ["y"],
                    }
                },
                {"ids": {"value": 0.5, "side": "right"}, "b": {}},
            ],
        ),
    )
]


@pytest.mark.parametrize(("parser", "values"), ACCEPTED)
def test_accepted_text(parser: Parser[Any], values: dict[str, Any]) -> None:
    """A parser accepts its spellings, without regard to case and blanks around where that helps."""
    for text, value in values.items():
        assert parser.parse(text) == value
        assert type(parser.parse(text)) is type(value)


@pytest.mark.parametrize(
    ("key", "texts"),
    [
        ("WARMUP", [" ", "2", "yes"]),
        ("FORCE_CPU_ONLY_INPUT_TENSORS", ["true", "0", "No"]),
        ("CUDA_MEMORY_FRACTION", ["0", "-0.5", "1.01", "nan", "half"]),
        ("METHOD", ["  "]),
        ("CAST_INPUTS", ["INT8", "float16", "TYPE_"]),
        ("MODEL_KWARGS", ["[3]", "3", "null"]),
        (
            "TORCH_COMPILE_OPTIONAL_PARAMETERS",
            ["[3]", '{"model": null}', '{"Mode": "x"}', '{"options": "x"}', '{"disable": "false"}'],
        ),
        ("OPTIMIZE", ["fast", "freeze bf16", "auto,freeze", "none,freeze", "true"]),
        ("BATCH_BUCKETS", ["0", "-1", "1,,2", "1.5", "[1, 2]", "auto,4", "many"]),
        ("PAD", ["[]", '{"ids": []}', '{"ids": {"fill": 0}}', '{"ids": {"value": "0"}}']),
        ("PAD", ['{"ids": {"side": "top"}}', '{"ids": {"side": []}}', '{"ids": {"mask": 1}}']),
        ("PAD", [f'{{"ids": {{"multiple_of": {number}}}}}' for number in ("0", "1.5", '"8"')]),
        ("PAD", ['{"ids": {"outputs": "y"}}', '{"ids": {"outputs": [1]}}']),
    ],
)
def test_rejected_text(key: str, texts: list[str]) -> None:
    """Another text is rejected; the message names the key, the text and what is accepted."""
    (parser,) = (row.parser for row in options.TABLE if row.key == key)
    for text in texts:
        with pytest.raises(ConfigError) as raised:
            parsed(**{key: text})
        assert f"the parameter {key} is '{text}'; expected {parser.accepted}" in str(raised.value)


@pytest.mark.parametrize(
    ("key", "entry", "message"),
    [
        (
            "MODEL_KWARGS",
            {"string_value": '{"a": 3'},
            "a JSON object (JSON says: Expecting ',' del",
        ),
        ("INTRA_OP_THREAD_COUNT", {"string_value": "1.5"}, "expected an integer; 0 or less leaves"),
        # without a value it is empty
        ("WARMUP", {}, "the parameter WARMUP is ''"),
        ("WARMUP", "true", "expected a string_value with true, on, 1, false, off"),
        ("WARMUP", {"string_value": True}, "expected a string_value with true, on, 1, false, off"),
    ],
)
def test_rejected_entry(key: str, entry: object, message: str) -> None:
    """An entry without a valid string is rejected with its cause."""
    with pytest.raises(ConfigError) as raised:
        options.parse({key: entry})
    assert message in str(raised.value)


# --- keys --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "alias"), ALIASES)
def test_two_keys_of_one_option(key: str, alias: str) -> None:
    """Both keys may have the same value; as in LibTorch, a count of 0 or less is unset."""
    for parameters in ({alias: "3"}, {key: "3", alias: "3"}, {key: "3", alias: "-1"}):
        assert getattr(parsed(**parameters), key.lower()) == 3
    assert parsed(**{alias: "0"}) == Options()
    with pytest.raises(ConfigError, match=f"parameters {key} and {alias} contradict each other"):
        parsed(**{key: "3", alias: "4"})


@pytest.mark.parametrize(
    ("key", "question"),
    [
        ("NUM_THREAD", " Did you mean NUM_THREADS?"),
        ("inference_mode", " Did you mean INFERENCE_MODE?"),
        ("INTRA_OP_THREADS_COUNT", " Did you mean INTRA_OP_THREAD_COUNT?"),
        ("OUR_TEAM", ""),
    ],
)
def test_unknown_key(key: str, question: str, caplog: pytest.LogCaptureFixture) -> None:
    """An unknown key is ignored with a warning, which names the most similar known key if any."""
    assert parsed(**{key: "1"}) == Options()
    assert caplog.messages == [f"the parameter {key} is unknown and ignored.{question}"]


def test_option_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    """An option of LibTorch that has no effect here logs a warning; known keys log none."""
    parsed(WARMUP="false", NUM_THREADS="2", MODEL_CLASS="Net")
    assert caplog.messages == []
    parsed(ENABLE_NVFUSER="true")
    assert "the parameter ENABLE_NVFUSER has no effect" in caplog.messages[0]


def test_reduced_precision() -> None:
    """bf16 and fp16 are types of the weights."""
    texts = ("none", "bf16,freeze", "fp16")
    dtypes = [parsed(OPTIMIZE=text).weights_dtype for text in texts]
    assert dtypes == [None, "bfloat16", "float16"]


@pytest.mark.parametrize("key", sorted(removed_names.OPTIONS.keys() - _KEYS))
def test_removed_options(key: str) -> None:
    """An option of an earlier version fails the load with what to do instead."""
    with pytest.raises(ConfigError, match=f"the parameter {key} was removed. ") as raised:
        parsed(**{key: "true"})
    assert removed_names.OPTIONS[key] in str(raised.value)


@pytest.mark.parametrize("value", sorted(removed_names.OPTIMIZE))
def test_removed_optimizations(value: str) -> None:
    with pytest.raises(ConfigError, match=f"{value} was removed. "):
        parsed(OPTIMIZE=f"channels_last,{value}")


@pytest.mark.parametrize(
    ("arguments", "static"),
    [
        ({}, False),
        ({"backend": "cudagraphs"}, True),
        ({"backend": "cudagraphs", "dynamic": 1}, False),
    ],
)
def test_graphs_of_fixed_shapes(arguments: dict[str, Any], static: bool) -> None:
    """torch.compile's backend cudagraphs records the shapes of a call."""
    assert Options(torch_compile_optional_parameters=arguments).static_shapes is static
