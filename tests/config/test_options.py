import json
import re
from typing import Any

import pytest

from torch_py_backend.config import options
from torch_py_backend.config.options import Options
from torch_py_backend.errors import ConfigError

# Keys that a repository written for Triton's LibTorch backend or its Python runtime may contain.
LIBTORCH_KEYS = """
    DISABLE_OPTIMIZED_EXECUTION INFERENCE_MODE ENABLE_JIT_EXECUTOR ENABLE_JIT_PROFILING
    ENABLE_TENSOR_FUSER DISABLE_CUDNN ENABLE_WEIGHT_SHARING ENABLE_CACHE_CLEANING NUM_THREADS
    INTRA_OP_THREAD_COUNT NUM_INTEROP_THREADS INTER_OP_THREAD_COUNT EXECUTION_ENV_PATH
    TORCH_COMPILE_OPTIONAL_PARAMETERS FORCE_CPU_ONLY_INPUT_TENSORS
"""


def parsed(**parameters: str) -> Options:
    return options.parse({key: {"string_value": value} for key, value in parameters.items()})


def test_options_of_libtorch_are_known_and_none_may_be_empty() -> None:
    assert options.TABLE.keys() >= set(LIBTORCH_KEYS.split())
    for key, row in options.TABLE.items():
        says = f"the parameter {key} is ''; expected {row.metadata['parser'].accepted}"
        with pytest.raises(ConfigError, match=re.escape(says)):
            parsed(**{key: ""})


_COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
_OBJECTS = (
    (_COMPILE, "{}"),
    (_COMPILE, '{"fullgraph": true, "dynamic": null, "backend": "eager"}'),
    (_COMPILE, '{"mode": "x", "options": {"a": true}, "disable": false}'),
    ("PAD", '{"a": {"value": 0.5, "side": "left"}, "b": {}}'),
    ("PAD", '{"a": {"multiple_of": 8, "mask": "m", "outputs": ["y"]}}'),
)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("WARMUP", {"true": True, "ON": True, "1": True, " true\n": True, "fAlSe": False}),
        ("INFERENCE_MODE", {"off": False, "0": False}),
        ("FORCE_CPU_ONLY_INPUT_TENSORS", {"yes": True, "no": False}),
        ("METHOD", {" Net \n": "Net"}),
        ("MAX_STREAMS", {"1": 1, " 64 ": 64}),
        ("CUDA_MEMORY_FRACTION", {"1": 1.0}),
        ("FLOAT32_MATMUL_PRECISION", {" High ": "high", "highest": "highest"}),
        ("CAST_INPUTS", {"bf16": "BF16", " Fp32\n": "FP32"}),
        ("MODEL_KWARGS", {"{}": {}, '{"a": [{"ü": null}]}': {"a": [{"ü": None}]}}),
        ("OPTIMIZE", {"none": (), "freeze,freeze": ("freeze",)}),
        ("OPTIMIZE", {" Channels_Last , BF16 ": ("bf16", "channels_last")}),
        ("BATCH_BUCKETS", {"auto": None, "NONE": (), "8, 1,4": (1, 4, 8), "2,2": (2,)}),
        *((key, {text: json.loads(text)}) for key, text in _OBJECTS),
    ],
)
def test_accepted_spellings(key: str, values: dict[str, Any]) -> None:
    for text, value in values.items():
        read = getattr(parsed(**{key: text}), key.lower())
        assert read == value
        assert type(read) is type(value)


@pytest.mark.parametrize(
    ("key", "texts"),
    [
        ("WARMUP", [" ", "2", "yes"]),
        ("FORCE_CPU_ONLY_INPUT_TENSORS", ["true", "0"]),
        ("CUDA_MEMORY_FRACTION", ["0", "-0.5", "1.01", "nan", "half"]),
        ("METHOD", ["  "]),
        ("CAST_INPUTS", ["INT8", "float16", "TYPE_"]),
        ("MODEL_KWARGS", ["[3]", "3", "null"]),
        (_COMPILE, ["[3]", '{"options": "x"}', '{"disable": "false"}', '{"dynamic": 0}']),
        ("OPTIMIZE", ["fast", "freeze bf16"]),
        ("BATCH_BUCKETS", ["0", "-1", "1,,2", "1.5", "[1, 2]", "auto,4", "many"]),
        ("PAD", ["[]", '{"ids": []}', '{"ids": {"fill": 0}}', '{"ids": {"value": "0"}}']),
        ("PAD", ['{"ids": {"side": "top"}}', '{"ids": {"side": []}}', '{"ids": {"mask": 1}}']),
        ("PAD", [f'{{"ids": {{"multiple_of": {number}}}}}' for number in ("0", "1.5", '"8"')]),
        ("PAD", ['{"ids": {"outputs": "y"}}', '{"ids": {"outputs": [1]}}']),
    ],
)
def test_rejected_text_is_named_with_what_is_accepted(key: str, texts: list[str]) -> None:
    parser = options.TABLE[key].metadata["parser"]
    for text in texts:
        says = f"the parameter {key} is '{text}'; expected {parser.accepted}"
        with pytest.raises(ConfigError, match=re.escape(says)):
            parsed(**{key: text})


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("MODEL_KWARGS", '{"a": 3', "object (JSON says: Expecting ',' del"),
        ("INTRA_OP_THREAD_COUNT", "1.5", "expected an integer; 0 or less leaves"),
        # names of earlier versions
        ("STATE", "h", "STATE was removed. Declare the states in config.pbtxt"),
        ("OPTIMIZE", "freeze,auto", "auto was removed. `torch-py-backend tune`"),
    ],
)
def test_rejected_entry_with_its_cause(key: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parsed(**{key: text})


def test_two_keys_of_one_option() -> None:
    """Both keys may have the same value; as in LibTorch, a count of 0 or less is unset."""
    key, alias = "NUM_INTEROP_THREADS", "INTER_OP_THREAD_COUNT"
    for parameters in ({alias: "3"}, {key: "3", alias: "3"}, {key: "3", alias: "-1"}):
        assert getattr(parsed(**parameters), key.lower()) == 3
    assert parsed(**{alias: "0"}) == Options()
    with pytest.raises(ConfigError, match=f"{alias} and another name of {key} contradict"):
        parsed(**{key: "3", alias: "4"})


def test_ignored_keys_are_warned_about_with_the_most_similar_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hints = {
        "inference_mode": " Did you mean INFERENCE_MODE?",
        "INTRA_OP_THREADS_COUNT": " Did you mean INTRA_OP_THREAD_COUNT?",
        "OUR_TEAM": "",
    }
    assert parsed(**dict.fromkeys(hints, "1"), WARMUP="true") == Options(warmup=True)
    assert caplog.messages == [
        f"the parameter {key} is unknown and ignored.{hint}" for key, hint in hints.items()
    ]
