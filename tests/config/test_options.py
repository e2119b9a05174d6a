import json
import logging
import re
from typing import Any

import build
import pytest

from torch_py_backend.config import options
from torch_py_backend.config.options import OptionRow, Options
from torch_py_backend.errors import ConfigError, OptionError

BOOLEANS = [row for row in options.TABLE if row.parser is options.BOOLEAN]
COUNTS = [row for row in options.TABLE if row.parser is options.POSITIVE]
TEXTS = [row for row in options.TABLE if row.parser is options.TEXT]
KEYS_OF_COUNTS = [key for row in COUNTS for key in (row.key, *row.also)]
# What a repository written for Triton's LibTorch backend or its Python runtime may carry.
LIBTORCH_KEYS = [
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
]


def key_of(row: OptionRow) -> str:
    return row.key


def parsed(**parameters: str) -> Options:
    return options.parse(
        build.MODEL, {key: {"string_value": value} for key, value in parameters.items()}
    )


# --- the table -------------------------------------------------------------------------------


def test_table_is_made_of_the_options() -> None:
    """The table has a row for each field of Options, and no key stands for two of them."""
    keys = [key for row in options.TABLE for key in (row.key, *row.also)]

    assert [row.field for row in options.TABLE] == list(Options.__slots__)
    assert len(keys) == len(set(keys))
    assert all(re.fullmatch(r"[A-Z_]+", key) for key in keys)


@pytest.mark.parametrize("row", options.TABLE, ids=key_of)
def test_row_says_what_the_option_does(row: OptionRow) -> None:
    """Each option has a sentence for the documentation, and the default that Options has."""
    assert row.doc.endswith(".")
    assert row.parser.accepted
    assert row.default == getattr(Options(), row.field)


@pytest.mark.parametrize("key", LIBTORCH_KEYS)
def test_libtorch_parameters_are_known(key: str, caplog: pytest.LogCaptureFixture) -> None:
    """No parameter of the LibTorch backend is taken for a misspelt one."""
    row = next(row for row in options.TABLE if key in (row.key, *row.also))
    texts = {options.POSITIVE: "2", options.COMPILE_PARAMETERS: "{}", options.YES_NO: "yes"}
    valid = texts.get(row.parser, "true")

    options.parse(build.MODEL, {key: {"string_value": valid}})

    assert "unknown" not in caplog.text


# --- options ---------------------------------------------------------------------------------


def test_no_parameters_are_the_defaults() -> None:
    """A config without parameters has the options' defaults."""
    assert parsed() == Options()


@pytest.mark.parametrize(
    ("field", "default"),
    [
        ("inference_mode", True),
        ("disable_optimized_execution", False),
        ("enable_jit_executor", None),
        ("enable_jit_profiling", None),
        ("enable_tensor_fuser", None),
        ("disable_cudnn", False),
        ("enable_cache_cleaning", False),
        ("torch_compile_optional_parameters", None),
        ("force_cpu_only_input_tensors", True),
        ("warmup", None),
    ],
)
def test_defaults_are_libtorchs(field: str, default: bool | None) -> None:
    """A repository that says nothing gets what LibTorch would do, and a warm-up."""
    assert getattr(parsed(), field) is default


@pytest.mark.parametrize("row", BOOLEANS, ids=key_of)
@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(pytest.param(text, True, id=text) for text in ("true", "True", "TRUE", "on", "ON", "1")),
        *(pytest.param(text, False, id=text) for text in ("false", "fAlSe", "off", "Off", "0")),
        pytest.param(" true\n", True, id="blanks around"),
    ],
)
def test_boolean_is_read_in_any_spelling(row: OptionRow, text: str, value: bool) -> None:
    """A switch takes true, on, 1, false, off and 0 in any case."""
    assert getattr(parsed(**{row.key: text}), row.field) is value


@pytest.mark.parametrize("row", BOOLEANS, ids=key_of)
@pytest.mark.parametrize("text", ["", " ", "2", "-1", "t", "enabled", "truefalse", "None"])
def test_wrong_boolean_is_refused(row: OptionRow, text: str) -> None:
    """A switch with another value fails the load and names key, value and what is accepted."""
    with pytest.raises(OptionError) as raised:
        parsed(**{row.key: text})

    assert f"'digits': the parameter {row.key} is '{text}'" in str(raised.value)
    assert "expected true, on, 1, false, off or 0" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("yes", True), ("no", False)],
)
def test_tritons_own_switch_is_yes_or_no(text: str, value: bool) -> None:
    """The one key that Triton reads itself has Triton's own spelling."""
    assert parsed(FORCE_CPU_ONLY_INPUT_TENSORS=text).force_cpu_only_input_tensors is value


@pytest.mark.parametrize("text", ["true", "on", "1", "false", "off", "0", "No", "YES", ""])
def test_what_triton_refuses_is_refused(text: str) -> None:
    """Triton fails the load for other values of its own switch; `check` says so beforehand."""
    with pytest.raises(OptionError, match=f"INPUT_TENSORS is '{text}'; expected yes or no"):
        parsed(FORCE_CPU_ONLY_INPUT_TENSORS=text)


@pytest.mark.parametrize("text", ["yes", "no"])
def test_yes_is_no_value_of_our_switches(text: str) -> None:
    """Only Triton's own key takes yes and no: LibTorch refuses them."""
    with pytest.raises(OptionError, match=f"INFERENCE_MODE is '{text}'"):
        parsed(INFERENCE_MODE=text)


@pytest.mark.parametrize("key", KEYS_OF_COUNTS)
@pytest.mark.parametrize(("text", "value"), [("1", 1), ("64", 64), (" 4 ", 4)])
def test_count_is_a_number_of_at_least_one(key: str, text: str, value: int) -> None:
    """A thread count is read under LibTorch's name and under the Python runtime's."""
    row = next(row for row in COUNTS if key in (row.key, *row.also))

    assert getattr(parsed(**{key: text}), row.field) == value


@pytest.mark.parametrize("key", KEYS_OF_COUNTS)
@pytest.mark.parametrize("text", ["1.5", "", "four", "0x4", "1e3", "inf"])
def test_wrong_count_is_refused(key: str, text: str) -> None:
    """A thread count that is none is refused under the key that the user wrote."""
    with pytest.raises(OptionError) as raised:
        parsed(**{key: text})

    assert f"the parameter {key} is '{text}'" in str(raised.value)
    assert "expected an integer" in str(raised.value)


@pytest.mark.parametrize("key", [row.key for row in COUNTS])
@pytest.mark.parametrize("text", ["0", "-1"])
def test_count_below_one_is_refused(key: str, text: str) -> None:
    """Where LibTorch has no say, a count is a count."""
    with pytest.raises(OptionError, match=f"{key} is '{text}'; expected an integer of at least 1"):
        parsed(**{key: text})


@pytest.mark.parametrize("key", ["INTRA_OP_THREAD_COUNT", "INTER_OP_THREAD_COUNT"])
@pytest.mark.parametrize("text", ["0", "-1", " -64 "])
def test_libtorchs_count_below_one_is_unset(key: str, text: str) -> None:
    """LibTorch's backend keeps its default then; so what else the config says counts."""
    assert parsed(**{key: text}) == Options()
    assert parsed(**{key: text, "NUM_THREADS": "3", "NUM_INTEROP_THREADS": "3"}) == Options(
        num_threads=3, num_interop_threads=3
    )


@pytest.mark.parametrize("row", TEXTS, ids=key_of)
def test_text_is_taken_without_the_blanks_around(row: OptionRow) -> None:
    """A name is taken as it is written, less the blanks around it."""
    assert getattr(parsed(**{row.key: " Net \n"}), row.field) == "Net"


@pytest.mark.parametrize("row", TEXTS, ids=key_of)
@pytest.mark.parametrize("text", ["", "  "])
def test_empty_text_is_refused(row: OptionRow, text: str) -> None:
    """A key with an empty value is a mistake, not the default."""
    with pytest.raises(OptionError, match=f"the parameter {row.key} is '{text}'; expected a name"):
        parsed(**{row.key: text})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("FP16", "FP16"),
        ("BF16", "BF16"),
        ("FP32", "FP32"),
        ("FP64", "FP64"),
        ("bf16", "BF16"),
        ("TYPE_FP16", "FP16"),
        (" type_fp32\n", "FP32"),
    ],
)
def test_floating_type_is_read_in_any_spelling(text: str, value: str) -> None:
    """A type to cast to is named as in requests or as in config.pbtxt."""
    assert parsed(CAST_INPUTS=text).cast_inputs == value


@pytest.mark.parametrize("text", ["", "INT8", "float16", "FP8", "TYPE_", "TYPE_STRING", "true"])
def test_other_type_is_refused(text: str) -> None:
    """Inputs are cast between floating-point types, and to no other."""
    with pytest.raises(OptionError) as raised:
        parsed(CAST_INPUTS=text)

    assert f"'digits': the parameter CAST_INPUTS is '{text}'" in str(raised.value)
    assert "expected FP16, BF16, FP32 or FP64" in str(raised.value)


def test_parameters_beyond_libtorchs() -> None:
    """What LibTorch does not have is off, unless the config says so."""
    default = parsed()
    found = parsed(METHOD="encode", FALLBACK="slow.pt2", CAST_OUTPUTS="on")

    assert (default.method, default.fallback, default.cast_inputs) == (None, None, None)
    assert default.cast_outputs is False
    assert (found.method, found.fallback, found.cast_outputs) == ("encode", "slow.pt2", True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        pytest.param("{}", {}, id="empty"),
        pytest.param('{"size": 3}', {"size": 3}, id="number"),
        pytest.param(
            '{"a": [1, {"b": null}], "c": true}', {"a": [1, {"b": None}], "c": True}, id="nested"
        ),
        pytest.param('{"näme": "ü"}', {"näme": "ü"}, id="not ASCII"),
    ],
)
def test_keyword_arguments_are_json(text: str, value: dict[str, Any]) -> None:
    """The constructor's keyword arguments are any JSON object."""
    assert parsed(MODEL_KWARGS=text).model_kwargs == value


@pytest.mark.parametrize("key", ["MODEL_KWARGS", "TORCH_COMPILE_OPTIONAL_PARAMETERS"])
@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        pytest.param("{'size': 3}", "JSON says: Expecting property name", id="single quotes"),
        pytest.param('{"size": 3', "JSON says: Expecting ',' delimiter", id="cut off"),
        pytest.param("", "JSON says: Expecting value", id="empty"),
        pytest.param("size=3", "JSON says: Expecting value", id="no JSON"),
        pytest.param("[3]", "a JSON object", id="list"),
        pytest.param("3", "a JSON object", id="number"),
        pytest.param("null", "a JSON object", id="null"),
    ],
)
def test_wrong_json_is_refused(key: str, text: str, accepted: str) -> None:
    """JSON that is none, or no object, is refused, and JSON's own complaint is passed on."""
    with pytest.raises(OptionError) as raised:
        parsed(**{key: text})

    assert f"the parameter {key} is '" in str(raised.value)
    assert accepted in str(raised.value)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"fullgraph": True},
        {"dynamic": False},
        {"backend": "eager"},
        {"mode": "max-autotune"},
        {"options": {"trace.enabled": True}},
        {"disable": True},
        {
            "fullgraph": True,
            "dynamic": None,
            "backend": "inductor",
            "mode": None,
            "options": None,
            "disable": False,
        },
    ],
    ids=lambda value: "+".join(value) or "none",
)
def test_compile_parameters_are_those_of_torch_compile(value: dict[str, Any]) -> None:
    """All arguments of torch.compile but the model are accepted as JSON."""
    text = json.dumps(value)

    assert parsed(TORCH_COMPILE_OPTIONAL_PARAMETERS=text).torch_compile_optional_parameters == value


@pytest.mark.parametrize(
    "text",
    [
        '{"model": null}',
        '{"fullgraph": true, "model": "x"}',
        '{"full_graph": true}',
        '{"Mode": "x"}',
    ],
)
def test_foreign_compile_parameters_are_refused(text: str) -> None:
    """The model itself and misspelt arguments are refused, and the valid ones listed."""
    with pytest.raises(OptionError) as raised:
        parsed(TORCH_COMPILE_OPTIONAL_PARAMETERS=text)

    assert f"TORCH_COMPILE_OPTIONAL_PARAMETERS is '{text}'" in str(raised.value)
    assert "keys among fullgraph, dynamic, backend, mode, options, disable" in str(raised.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [("NUM_THREADS", "INTRA_OP_THREAD_COUNT"), ("NUM_INTEROP_THREADS", "INTER_OP_THREAD_COUNT")],
)
def test_two_names_of_one_option_must_agree(one: str, other: str) -> None:
    """Both names of an option may stand there with one value; two values contradict each other."""
    agreeing = parsed(**{one: "3", other: "3"})
    with pytest.raises(ConfigError) as raised:
        parsed(**{one: "3", other: "4"})

    assert 3 in (agreeing.num_threads, agreeing.num_interop_threads)
    assert f"'digits': the parameters {one} and {other} contradict each other" in str(raised.value)
    assert "keep one" in str(raised.value)


def test_a_class_and_a_factory_contradict_each_other() -> None:
    """A class and a factory name two models to serve: one of them would be ignored."""
    with pytest.raises(ConfigError, match=r"MODEL_CLASS and MODEL_FACTORY.* keep one"):
        parsed(MODEL_CLASS="Net", MODEL_FACTORY="make")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("NUM_THREAD", "NUM_THREADS"),
        ("INFERENCEMODE", "INFERENCE_MODE"),
        ("inference_mode", "INFERENCE_MODE"),
        ("INTRA_OP_THREADS_COUNT", "INTRA_OP_THREAD_COUNT"),
        ("TORCH_COMPILE_PARAMETERS", "TORCH_COMPILE_OPTIONAL_PARAMETERS"),
    ],
)
def test_misspelt_key_is_warned_about(
    key: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A key that nobody reads is ignored, with a warning that names the one that was meant."""
    assert parsed(**{key: "1"}) == Options()

    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"model 'digits': the parameter {key} is unknown and ignored. Did you mean {meant}?"
    )


def test_foreign_key_is_warned_about_without_a_guess(caplog: pytest.LogCaptureFixture) -> None:
    """A key that resembles none of ours is named, and nothing is guessed."""
    parsed(OUR_TEAM="vision")

    assert caplog.messages == ["model 'digits': the parameter OUR_TEAM is unknown and ignored."]


@pytest.mark.parametrize("wished", [True, False], ids=["on", "off"])
def test_option_without_effect_is_warned_about(
    wished: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An option of LibTorch's that does nothing here is accepted; who switches it on is told."""
    parsed(ENABLE_NVFUSER=str(wished))

    warning = "model 'digits': the parameter ENABLE_NVFUSER has no effect"
    assert [warning in one for one in caplog.messages] == [True] * wished


def test_known_keys_are_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """A config with correct keys leaves no line in the server's log."""
    parsed(WARMUP="false", NUM_THREADS="2", MODEL_CLASS="Net")

    assert caplog.messages == []


def test_parameter_without_a_value_is_refused() -> None:
    """A parameter that has no string_value is treated as an empty one."""
    with pytest.raises(OptionError, match="the parameter WARMUP is ''"):
        options.parse(build.MODEL, {"WARMUP": {}})


# --- runtimes, buckets, padding ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("none", ()),
        ("auto", ("auto",)),
        ("freeze", ("freeze",)),
        (" Channels_Last , BF16 ", ("bf16", "channels_last")),
        ("freeze,freeze", ("freeze",)),
        ("cuda_graphs,fp16", ("cuda_graphs", "fp16")),
    ],
)
def test_optimize_is_a_list_of_names(text: str, value: tuple[str, ...]) -> None:
    """Optimizations are named in any order and spelling, each once."""
    assert parsed(OPTIMIZE=text).optimize == value


@pytest.mark.parametrize("text", ["", "fast", "freeze bf16", "auto,freeze", "none,freeze", "true"])
def test_other_optimizations_are_refused(text: str) -> None:
    """What OPTIMIZE does not know is told with what it does."""
    with pytest.raises(OptionError, match="expected none, auto, or some of freeze, channels_last"):
        parsed(OPTIMIZE=text)


@pytest.mark.parametrize(
    ("optimize", "autocast"), [("none", None), ("bf16,freeze", "bf16"), ("fp16", "fp16")]
)
def test_precision_of_autocast(optimize: str, autocast: str | None) -> None:
    """Of the optimizations, two are types to compute in."""
    assert parsed(OPTIMIZE=optimize).autocast == autocast


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("auto", None),
        ("NONE", ()),
        ("4", (4,)),
        ("8, 1,4", (1, 4, 8)),
        ("2,2", (2,)),
    ],
)
def test_buckets_are_row_counts(text: str, value: tuple[int, ...] | None) -> None:
    """Buckets are sorted, each once."""
    assert parsed(BATCH_BUCKETS=text).batch_buckets == value


@pytest.mark.parametrize("text", ["", "0", "-1", "1,,2", "1.5", "[1, 2]", "auto,4", "many"])
def test_wrong_buckets_are_refused(text: str) -> None:
    """Anything but row counts of at least one is refused."""
    with pytest.raises(OptionError, match="expected auto, none, or row counts such as"):
        parsed(BATCH_BUCKETS=text)


def test_pad_is_an_object_of_inputs() -> None:
    """PAD is handed on as it is."""
    how = {"value": 0, "side": "left", "multiple_of": 8, "mask": "mask", "outputs": ["y"]}

    assert parsed(PAD=json.dumps({"ids": how, "x": {}})).pad == {"ids": how, "x": {}}


@pytest.mark.parametrize(
    "text",
    [
        "ids",
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
    ],
)
def test_wrong_pad_is_refused(text: str) -> None:
    """What PAD may say of an input is told where it says something else."""
    with pytest.raises(OptionError, match="expected a JSON object of inputs, each with some of"):
        parsed(PAD=text)


# --- faults -------------------------------------------------------------------------------------


def test_faults_by_default() -> None:
    """Unset, a batch is tried again, values are not looked at, and an instance stays to say why."""
    plain = parsed()

    assert plain.retry_failed_batch is None
    assert plain.check_finite is False
    assert plain.on_fatal == "stay"
    assert plain.cuda_memory_fraction is None


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("RETRY_FAILED_BATCH", "false", False),
        ("RETRY_FAILED_BATCH", "true", True),
        ("CHECK_FINITE", "on", True),
        ("ON_FATAL", "exit", "exit"),
        ("ON_FATAL", " Stay ", "stay"),
        ("CUDA_MEMORY_FRACTION", "0.5", 0.5),
        ("CUDA_MEMORY_FRACTION", "1", 1.0),
    ],
)
def test_faults_as_wished(key: str, text: str, value: Any) -> None:
    """Each is read from its key."""
    assert getattr(parsed(**{key: text}), key.lower()) == value


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(("CUDA_MEMORY_FRACTION", text) for text in ("0", "-0.5", "1.01", "nan", "half", "")),
        *(("ON_FATAL", text) for text in ("", "restart", "exit,stay")),
        ("RETRY_FAILED_BATCH", "auto"),
    ],
)
def test_faults_that_are_not_accepted(key: str, text: str) -> None:
    """Anything else fails the load with what is accepted."""
    with pytest.raises(OptionError, match=f"the parameter {key} is '{text}'; expected"):
        parsed(**{key: text})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a.b": "cuda:1", "": "cpu"}', {"a.b": "cuda:1", "": "cpu"}),
        ('{"a": 0, "b": "cuda"}', {"a": "cuda:0", "b": "cuda:0"}),
        (" devices.json\n", "devices.json"),
    ],
)
def test_device_map(text: str, value: Any) -> None:
    """A map is written out, or a file's name; numbers are those of GPUs, as accelerate has them."""
    assert parsed(DEVICE_MAP=text).device_map == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "auto",
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
        "devices.yaml",
    ],
)
def test_wrong_device_map(text: str) -> None:
    """Anything else is refused; so is a part that is named twice."""
    with pytest.raises(OptionError, match="expected a JSON object from each module once to its"):
        parsed(DEVICE_MAP=text)
