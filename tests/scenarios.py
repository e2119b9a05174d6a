"""The table of scenarios: a model folder, what is sent to it, and what must come back.

Each runs through the adapter against the fake of Triton's utilities; one of each kind also on a
real tritonserver (`serving.TABLE`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models
import numpy as np
import safetensors.torch
import torch
from fake_triton import Turn
from torch import nn

from torch_py_backend.config import dtypes

Arrays = dict[str, Any]
Writer = Callable[[Path], None]


@dataclass(frozen=True)
class Refused:
    """An error: its HTTP status, and what its message says and does not say."""

    status: int
    says: tuple[str, ...]
    hides: tuple[str, ...] = ("/srv", "/tmp", "Traceback", "site-packages", " at 0x", "10.1.2.3")

    def check(self, message: str) -> None:
        assert all(part in message for part in self.says), message
        assert not any(part in message for part in self.hides), message


@dataclass(frozen=True)
class Call:
    """A request and its answer; `turn` is its place in a sequence."""

    inputs: Arrays
    expected: Arrays | Refused
    parameters: Arrays = field(default_factory=dict)
    turn: Turn | None = None


@dataclass(frozen=True)
class Scenario:
    """One model.

    Attributes:
        write: fills the version folder.
        config: the text of config.pbtxt.
        load_error: what the refusal to load must say; empty: the model loads.
        logs: what the server's log must hold.
        batches: requests that are sent at once, as many as fit in one batch together.
    """

    name: str
    write: Writer
    config: str
    calls: tuple[Call, ...] = ()
    load_error: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    batches: tuple[tuple[Call, ...], ...] = ()

    def lay_out(self, repository: Path) -> Path:
        folder = repository / self.name
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(self.config)
        self.write(folder / "1")
        return folder


def tensor(role: str, name: str, dims: list[int], kind: str = "FP32", more: str = "") -> str:
    sizes = ", ".join(map(str, dims))
    return f'{role} [{{ name: "{name}" data_type: TYPE_{kind} dims: [{sizes}] {more} }}]\n'


def option(key: str, value: str) -> str:
    escaped = value.replace('"', '\\"')
    return f'parameters {{ key: "{key}" value {{ string_value: "{escaped}" }} }}\n'


Specs = Mapping[str, Sequence[int | str]]


def tensors(role: str, specs: Specs) -> str:
    """Tensors by name: their sizes, with a type like "INT64" and more fields among them."""
    text = ""
    for name, spec in specs.items():
        words = [part for part in spec if isinstance(part, str)]
        kind = next((word for word in words if word.isupper()), "FP32")
        more = " ".join(word for word in words if word != kind)
        text += tensor(role, name, [part for part in spec if isinstance(part, int)], kind, more)
    return text


# What the model completes.
BARE = 'backend: "pytorch_py"\ninstance_group [{ kind: KIND_CPU count: 1 }]\n'


def config(
    inputs: Specs,
    outputs: Specs,
    *,
    max_batch_size: int = 8,
    parameters: dict[str, str] | None = None,
    more: str = "",
) -> str:
    text = f'backend: "pytorch_py"\nmax_batch_size: {max_batch_size}\n'
    text += tensors("input", inputs) + tensors("output", outputs)
    text += "".join(option(key, value) for key, value in (parameters or {}).items())
    if "instance_group" not in more:
        more += "instance_group [{ kind: KIND_CPU count: 1 }]\n"
    return text + more


def script(module: nn.Module) -> Writer:
    return lambda folder: torch.jit.script(module.eval()).save(folder / "model.pt")


def python(*definitions: Any, name: str = "model.py") -> Writer:
    return text(models.source(*definitions), name)


def text(content: str, name: str = "model.py") -> Writer:
    return raw(content.encode(), name)


def hooked(code: str) -> Writer:
    """Write code up to `class Hooks:` to model.py; if there is such a class, all to hooks.py."""
    module, found, _ = code.partition("class Hooks:")
    return both(text(module), *([text(code, "hooks.py")] if found else ()))


def raw(content: bytes, name: str = "model.pt") -> Writer:
    def write(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)

    return write


def saved(value: Any, name: str = "model.pt", **how: Any) -> Writer:
    return lambda folder: torch.save(value, folder / name, **how)


def safe(state: dict[str, torch.Tensor], name: str = "model.safetensors") -> Writer:
    return lambda folder: safetensors.torch.save_file(state, folder / name)


def both(*writers: Writer) -> Writer:
    def write(folder: Path) -> None:
        for one in writers:
            one(folder)

    return write


def floats(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def strings(*rows: Sequence[Any]) -> np.ndarray[Any, Any]:
    return np.array(rows, dtype=np.object_)


def assert_close(came: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Equal; floating-point values within float32's rounding."""
    if came.dtype == np.object_:
        np.testing.assert_array_equal(came, expected)
        return
    if came.dtype.kind == "V":  # numpy cannot compare BF16 with a tolerance
        came, expected = came.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_allclose(came, expected, rtol=1e-5, atol=1e-5)


def eager(module: nn.Module, **inputs: np.ndarray[Any, Any]) -> Any:
    with torch.inference_mode():
        result = module.eval()(**{name: torch.from_numpy(one) for name, one in inputs.items()})
    return result.numpy()


def affine(**keywords: int) -> models.Affine:
    torch.manual_seed(7)
    return models.Affine(**keywords)


def affine_files() -> Writer:
    return both(python(models.Affine), safe(affine().state_dict()))


def x_to_y(y: int = 4, **parameters: str) -> str:
    return config({"x": [4]}, {"y": [y]}, parameters=parameters)


_A, _B, _X = floats(3, 4), floats(3, 4, seed=1), floats(2, 4, seed=2)
_X_TO_Y = x_to_y()
# Requests that are sent at once are to be one batch.
TOGETHER = "dynamic_batching { max_queue_delay_microseconds: 200000 }\n"
_COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"


NAMES = (
    Scenario(  # other dims are sent, as by LibTorch
        "script_by_index_of_other_dims",
        script(models.AddSub()),
        config({"IN__1": [4], "IN__0": [4]}, {"OUT__1": [-1], "OUT__0": [2, 2]})
        + option(_COMPILE, "{}"),
        (Call({"IN__0": _A, "IN__1": _B}, {"OUT__0": _A + _B, "OUT__1": _A - _B}),),
        logs=(
            "TORCH_COMPILE_OPTIONAL_PARAMETERS has no effect on TorchScript",
            "output 'OUT__0' is [8, 4], and config.pbtxt says [-1, 2, 2]",
        ),
    ),
)

# Weights of 1 and whole numbers are exact in bf16.
_SUMS = {"MODEL_FACTORY": "build_sum", "MODEL_KWARGS": '{"width": 4}', "OPTIMIZE": "bf16"}
_SUM = both(python(models.build_sum), safe(models.build_sum(4).state_dict()))
_SUMMED = (Call({"x": _X.round()}, {"y": _X.round().sum(1, keepdims=True)}),)

FILES = (
    Scenario(  # with an entry that is no tensor
        "module_pt",
        both(python(models.Factor), saved(models.Factor(3.0).state_dict())),
        _X_TO_Y,
        (Call({"x": _X}, {"y": 6 * _X}),),
    ),
    Scenario(
        "module_class_and_kwargs",
        both(
            python(models.Negate, models.Affine),
            saved(affine(out=5).state_dict(), "big.pth", _use_new_zipfile_serialization=False),
        ),
        x_to_y(5, MODEL_CLASS="Affine", MODEL_KWARGS='{"out": 5}', WEIGHTS="big.pth"),
        (Call({"x": _X}, {"y": eager(affine(out=5), x=_X)}),),
    ),
    Scenario("function", python(models.double), _X_TO_Y, (Call({"x": _X}, {"y": 2 * _X}),)),
    Scenario("factory", _SUM, x_to_y(1, **_SUMS), _SUMMED),
)


def _mirrored(*shape: int) -> Call:
    # Triton refuses BF16 with three or more dims of which the last one is 0.
    x, b = floats(*shape), torch.ones((*shape[:2], shape[2] or 1), dtype=torch.bfloat16)
    return Call({"x": x, "b": b}, {"x": x, "b": b, "y": -x})


_OUTPUTS = {
    "y": -_X,
    "total": _X.sum(1, keepdims=True),
    "gradient": _X.reshape(2, 2, 2),
    "a": _X,
    "b": np.repeat(_X[:1], 2, 0),
    "c": _X,
    "d": _X[:, ::-1],
}

BATCHES = (
    Scenario(
        "outputs",
        python(models.Outputs),
        config(
            {"x": [4, "reshape { shape: [2, 2] }"]},
            {
                "y": [4, "reshape { shape: [2, 2] }"],
                "total": [1, "reshape { shape: [] }"],
                "gradient": [2, 2],
                **{key: [4] for key in "abcd"},
            },
        ),
        (Call({"x": _X}, _OUTPUTS),),
    ),
    Scenario(
        "sizes",
        python(models.mirror),
        config(
            {"x": [-1, -1], "b": ["BF16", -1, -1]},
            {"x": [-1, -1], "y": [-1, -1], "b": ["BF16", -1, -1]},
            more="dynamic_batching { }\n",
        ),
        (
            *(_mirrored(2, n, 3) for n in (1, 5, 9, 0)),
            *(_mirrored(*shape) for shape in ((1, 0, 3), (2, 3, 0), (1, 0, 0), (8, 64, 64))),
        ),
    ),
)

_EVERY_TYPE: Arrays = {
    one.triton: np.array([[0, 1, 100]]).astype(one.numpy)
    for one in dtypes.TABLE
    if one.numpy not in (None, "object")
}
_EVERY_TYPE["BF16"] = torch.tensor([[0.5, -1.0, 3e38]], dtype=torch.bfloat16)
_THREE_OF_EACH: Specs = {kind: [kind, 3] for kind in _EVERY_TYPE}

_PRINTS = """
import logging
import sys

print("загружено ✅ \\udcff")


def prints(x):
    print("ошибка", file=sys.stderr)
    logging.getLogger("model").warning("журнал")
    return x
"""

TYPES = (
    # A stub runs in the C locale.
    Scenario("prints_beyond_ascii", text(_PRINTS), _X_TO_Y, (Call({"x": _X}, {"y": _X}),)),
    Scenario(
        "every_type",
        python(models.echo),
        config(_THREE_OF_EACH, _THREE_OF_EACH, parameters={"BATCH_BUCKETS": "4"}),
        (Call(_EVERY_TYPE, _EVERY_TYPE),) * 2,
    ),
)


def _settings(name: str, options: str, logs: str, *values: int) -> Scenario:
    parameters = dict(option.split("=", 1) for option in options.split())
    text = config({"x": [4]}, {"y": ["INT64", 9]}, parameters={"WARMUP": "false", **parameters})
    call = Call({"x": _X}, {"y": np.array([values] * 2)})
    return Scenario(name, python(models.settings), text, (call,), logs=(logs,))


_SCALARS: Arrays = {
    "x": _X,
    "power": np.array([[2], [2]], dtype=np.int64),
    "factor": np.array([[0.5], [0.5]], dtype=np.float32),
    "negative": np.array([[True], [True]]),
}
_OPTIONAL = ("scale", "bias", "ARGS[2][0]", "ARGS[2][1]")

CALLS = (
    Scenario(
        "optional_inputs",
        python(models.optionals),
        config(
            {"x": [4], **{name: [4, "optional: true"] for name in _OPTIONAL}},
            {"y": [4]},
            more="dynamic_batching { }\n",
        ),
        (
            Call({"x": _X, "scale": _X, "bias": _X}, {"y": _X * _X + _X}),
            Call({"x": _X}, {"y": _X}),
            Call({"x": _X, "scale": _X}, {"y": _X * _X}),
            Call({"bias": _X, "x": _X}, {"y": _X + _X}),
            Call({"x": _X, "ARGS[2][0]": _X, "ARGS[2][1]": _X}, {"y": _X * _X + _X}),
            Call({"x": _X, "ARGS[2][1]": _X}, Refused(400, ("ARGS[2][1] leave gaps",))),
        ),
    ),
    Scenario(
        "scalars",
        python(models.scalars),
        config(
            {
                "x": [4],
                "factor": [1],
                "power": ["INT64", 1],
                "negative": ["BOOL", 1],
                "unit": ["STRING", 1, "optional: true"],
            },
            {"y": [4]},
            parameters={"WARMUP": "false"},
        ),
        (
            Call(_SCALARS, {"y": -(_X**2) * 0.5}),
            Call(_SCALARS | {"negative": np.array([[False]] * 2)}, {"y": _X**2 * 0.5}),
            Call(_SCALARS | {"unit": strings(["ten"], ["ten"])}, {"y": -(_X**2) * 5}),
            Call(
                _SCALARS | {"power": np.array([[1], [2]], dtype=np.int64)},
                Refused(400, ("input 'power' holds 2 values", "an int")),
            ),
        ),
    ),
    Scenario(  # strings of TorchScript are bytes of any encoding
        "script_bytes",
        script(models.Lengths()),
        config({"texts": ["STRING", 1]}, {"y": ["INT64", 1]}),
        (Call({"texts": strings([b"\xff"], ["zwei"])}, {"y": np.array([[1], [4]])}),),
    ),
)


def _tokens(rows: int, length: int) -> Call:
    ids = np.arange(1, rows * length + 1).reshape(rows, length)
    places = np.tile(np.arange(1, length + 1), (rows, 1))
    counts = np.full((rows, 1), length)
    return Call({"ids": ids}, {"y": ids * 100 + places, "count": counts})


_RAGGED = "allow_ragged_batch: true"

OPTIONS = (
    _settings(
        "settings_libtorch_names",
        "INTRA_OP_THREAD_COUNT=3 INTER_OP_THREAD_COUNT=1 INFERENCE_MODE=OFF DISABLE_CUDNN=true"
        " DISABLE_OPTIMIZED_EXECUTION=1 ENABLE_JIT_EXECUTOR=false ENABLE_JIT_PROFILING=0"
        " ENABLE_TENSOR_FUSER=off ENABLE_NVFUSER=true ENABLE_CACHE_CLEANING=true"
        " ENABLE_WEIGHT_SHARING=false",
        "the parameter ENABLE_NVFUSER is unknown and ignored",
        *(3, 1, 0, 0, 0, 0, 0, 0, 0),
    ),
    _settings(
        "settings_python_names",
        "NUM_THREADS=1 NUM_INTEROP_THREADS=1 ENABLE_TENSOR_FUSER=True ENABLE_JIT_EXECUTOR=on"
        " ENABLE_JIT_PROFILING=TRUE FORCE_CPU_ONLY_INPUT_TENSORS=no NUM_TREADS=4"
        ' TORCH_COMPILE_OPTIONAL_PARAMETERS={"disable":true}',
        "NUM_TREADS is unknown and ignored. Did you mean NUM_THREADS?",
        *(1, 1, 1, 0, 1, 1, 1, 1, 1),
    ),
    Scenario(
        "compiled",
        _SUM,
        x_to_y(
            1,
            BATCH_BUCKETS="2",  # one graph
            TORCH_COMPILE_OPTIONAL_PARAMETERS='{"dynamic": false, "options": {"freezing": true}}',
            **_SUMS,
        ),
        _SUMMED,
    ),
    Scenario(
        "padded",
        python(models.Tokens),
        config(
            {"ids": ["INT64", -1, _RAGGED], "mask": ["INT64", -1, _RAGGED, "optional: true"]},
            {"y": ["INT64", -1], "count": ["INT64", 1]},
            parameters={
                "PAD": '{"ids": {"value": 9, "multiple_of": 4, "mask": "mask", "outputs": ["y"]}}'
            },
            more=TOGETHER,
        ),
        (_tokens(1, 3), _tokens(2, 4), _tokens(1, 9)),
        batches=(
            (
                _tokens(1, 3),
                Call(
                    {"ids": np.ones((1, 3), np.int64), "mask": np.ones((1, 9), np.int64)},
                    Refused(400, ("input 'mask' is [1, 9]", "'ids'", "as long as its input")),
                ),
                _tokens(2, 5),
            ),
        ),
    ),
)


_BATCH = 32


def _row(value: float) -> np.ndarray[Any, Any]:
    return np.full((1, 4), value, dtype=np.float32)


def _judged(value: float, *says: str, status: int = 500) -> Call:
    return Call({"x": _row(value)}, Refused(status, ("model 'poison'", *says)))


_POISONS = (
    _judged(-1, "ValueError: bad value in model.py"),
    _judged(-2, "SystemExit: 3"),
    _judged(-3, "RuntimeError: bad ?? character"),
    _judged(-4, "output 'y' has 0 rows for a batch of 1"),
    _judged(-5, "the request does not fit in memory", status=503),
    _judged(-6, "output 'y' is a nested, sparse or empty tensor"),
    _judged(-7, "output 'y' is float64 [1, 4]", "expected float32 [-1, 4]"),
    _judged(-8, "output 'y' is float32 [1, 2]", "expected float32 [-1, 4]"),
    _judged(-9, "output 'y' has 2 rows for a batch of 1"),
    _judged(-10, "output 'y' is strings []", "expected float32 [-1, 4]"),
    _judged(np.inf, "output 'y' holds NaN or infinity"),
)
_JUDGED_GOOD = Call({"x": _row(5)}, {"y": _row(10)})


def _poisoned(count: int) -> tuple[Call, ...]:
    step = _BATCH // count
    return tuple(
        _POISONS[place // step % len(_POISONS)]
        if place % step == step // 2
        else Call({"x": _row(place)}, {"y": 2 * _row(place)})
        for place in range(_BATCH)
    )


def _doubled(value: int, size: int) -> Call:
    x = np.full((1, size), value, dtype=np.float32)
    return Call({"x": x}, Refused(500, ("ValueError: seven",)) if value == 7 else {"y": 2 * x})


POISON = (
    Scenario(
        "poison",
        python(models.Judge),
        config(
            {"x": [4]},
            {"y": [4]},
            max_batch_size=_BATCH,
            more=TOGETHER,
            parameters={"CHECK_FINITE": "true"},
        ),
        tuple(call for poison in _POISONS for call in (poison, _JUDGED_GOOD)),
        logs=("Traceback (most recent call last)", "model.py", "bad value in", "requests poison-"),
        batches=tuple(_poisoned(count) for count in (1, 2, 16)),
    ),
    Scenario(
        "outputs_in_memory_used_again",
        python(models.Reuses),
        config({"x": [-1, _RAGGED]}, {"y": [-1]}, more=TOGETHER),
        batches=(
            tuple(_doubled(*one) for one in ((1, 1), (2, 3), (7, 3), (4, 3), (5, 2), (6, 1))),
        ),
    ),
)


def _batch_input(kind: str, name: str) -> str:
    fields = f'kind: BATCH_{kind} target_name: "{name}" source_input: "x"'
    return f"batch_input [{{ {fields} data_type: TYPE_INT32 }}]\n"


def _centered(*shape: int) -> Call:
    x = floats(*shape, seed=shape[-1])
    mean = x.mean().reshape(1, 1)
    return Call({"x": x}, {"y": x - mean, "mean": mean})


_TOO_LARGE = Call({"x": _row(2000)}, Refused(500, ("AssertionError", "value too large")))
_CENTERED = (
    _batch_input("ELEMENT_COUNT", "sizes")
    + "batch_output [{ kind: BATCH_SCATTER_WITH_INPUT_SHAPE"
    + ' target_name: "y" source_input: "x" }]\n'
)


def _row_sums(rows: int, length: int) -> Call:
    x, factor = floats(rows, length, seed=length), floats(rows, 1, seed=rows)
    return Call({"x": x, "factor": factor}, {"y": x.sum(1, keepdims=True) * factor})


_ROW_SUMS = (_row_sums(2, 3), _row_sums(1, 5), _row_sums(3, 1))

RAGGED = (
    Scenario(
        "batch_output",
        python(models.Centered),
        config({"x": [-1, _RAGGED]}, {"y": [-1], "mean": [1]}, more=TOGETHER) + _CENTERED,
        (_centered(1, 3), _TOO_LARGE, _centered(1, 5)),
        batches=(
            (_centered(1, 3), _centered(1, 1), _centered(1, 5)),
            (_centered(1, 2), _centered(1, 4), _TOO_LARGE, _centered(1, 3)),
        ),
    ),
    Scenario(
        "batch_output_without_batches",
        python(models.Centered),
        config({"x": [-1, -1, _RAGGED]}, {"y": [-1, -1], "mean": [1, 1]}, max_batch_size=0)
        + _CENTERED,
        (_centered(2, 3), _centered(4, 1)),
    ),
    Scenario(
        "batch_input_of_rows",
        script(models.RowSums()),
        config({"x": [-1, _RAGGED], "factor": [1]}, {"y": [1]}, more=TOGETHER)
        + _batch_input("ITEM_SHAPE", "shape"),
        _ROW_SUMS,
        batches=(_ROW_SUMS,),
    ),
)


def sequencing(
    *states: str, strategy: str = "oldest { max_candidate_sequences: 16 }", controls: str = ""
) -> str:
    listed = ", ".join(states)
    state = f"state [{listed}] " if states else ""
    return f"sequence_batching {{ {strategy} {state}{controls} }}\n"


def state(
    names: tuple[str, str] = ("total", "sum"),
    dims: str = "4",
    kind: str = "FP32",
    initial: str = "",
) -> str:
    """A state; `initial` is zero_data or data_file."""
    fields = f"data_type: TYPE_{kind} dims: [{dims}]"
    begins = f'initial_state [{{ name: "begins" {fields} {initial} }}]' if initial else ""
    return f'{{ input_name: "{names[0]}" output_name: "{names[1]}" {fields} {begins} }}'


def control(name: str, kind: str, value: str) -> str:
    return (
        f'control_input {{ name: "{name}" control {{ kind: CONTROL_SEQUENCE_{kind} {value} }} }} '
    )


def steps(name: int | str, *pairs: tuple[Arrays, Arrays]) -> list[Call]:
    """A sequence from its start to its end: inputs and what they give."""
    return [
        Call(inputs, expected, turn=Turn(name, starts=place == 0, ends=place == len(pairs) - 1))
        for place, (inputs, expected) in enumerate(pairs)
    ]


def totals(name: int | str, *rows: float) -> list[Call]:
    pairs = zip(map(_row, rows), map(_row, itertools.accumulate(rows)), strict=True)
    return steps(name, *(({"x": x}, {"y": total, "sum": total}) for x, total in pairs))


def interleaved(*sequences: list[Call]) -> tuple[Call, ...]:
    """The first steps of all, then the second ones."""
    return tuple(call for step in zip(*sequences, strict=True) for call in step)


_SIGNALS = {"start": "INT32", "end": "FP32", "ready": "BOOL", "corrid": "UINT64"}


def _signaled(starts: bool, ends: bool) -> Call:
    turn = Turn(2**40 + 5, starts, ends)
    told = {
        "start": np.array([[starts]], np.int32),
        "end": np.array([[ends]], np.float32),
        "ready": np.array([[True]]),
        "corrid": np.array([[turn.id]], np.uint64),
    }
    return Call({"x": _row(1)}, told, turn=turn)


_MINUS = Refused(500, ("ValueError: no -1",))


def _chronicle(name: str, *words: str) -> list[Call]:
    pairs: list[tuple[Arrays, Arrays]] = []
    for place, text in enumerate(itertools.accumulate(words)):
        told = {"written": strings([text.encode()]), "told": strings([f"Once {text}".encode()])}
        sent = {"x": _row(1), "words": strings([words[place]])}
        pairs.append((sent, {"y": _row(101 + place), **told}))
    return steps(name, *pairs)


_CHRONICLE = sequencing(
    state(("pages", "new_pages"), "1", "STRING"),
    state(("story", "new_story"), "1", "STRING", 'data_file: "story"'),
    state(initial='data_file: "total"'),
)


SEQUENCES = (
    Scenario(
        "state_oldest",
        python(models.Accumulate),
        config(
            {"x": [4]},
            {"y": [4], "sum": [4]},
            more=sequencing(state(initial="zero_data: true")),
        ),
        (
            *interleaved(totals(1, 1, 2, 4), totals("1", 10, 20, 40)),
            # A sequence that never ends, and one that begins in the middle of itself.
            *totals(4, 1, 2, 4)[:2],
            *totals(4, 10, 20)[:1],
            *totals(4, 5, 5),
            # Errors in the middle and at the end.
            Call({"x": _row(2)}, {"y": _row(2), "sum": _row(2)}, turn=Turn(3, starts=True)),
            Call({"x": _row(-1)}, _MINUS, turn=Turn(3)),
            Call({"x": _row(3)}, {"y": _row(5), "sum": _row(5)}, turn=Turn(3)),
            Call({"x": _row(-1)}, _MINUS, turn=Turn(3, ends=True)),
            *totals(3, 4, 5),
        ),
    ),
    Scenario(
        "state_unbatched",
        python(models.Accumulate),
        config(
            {"x": [1, 4]},
            {"y": [1, 4], "sum": [1, 4]},
            max_batch_size=0,
            more=sequencing(state(dims="1, 4")),
        ),
        interleaved(totals(1, 1, 2, 4), totals(2, 10, 20, 40)),
    ),
    Scenario(
        "states_of_strings_and_files",
        both(
            python(models.Chronicle),
            raw(np.full(4, 100, dtype=np.float32).tobytes(), "../initial_state/total"),
            raw(b"\x05\x00\x00\x00Once ", "../initial_state/story"),
        ),
        config(
            {"x": [4], "words": ["STRING", 1]},
            {"y": [4], "written": ["STRING", 1], "told": ["STRING", 1]},
            more=_CHRONICLE,
        ),
        interleaved(_chronicle("a", "in ", "the ", "beginning"), _chronicle("b", "1", "2", "3")),
    ),
    Scenario(
        "signals_uint64_direct",
        python(models.signals),
        config(
            {"x": [4]},
            {output: [kind, 1] for output, kind in _SIGNALS.items()},
            more=sequencing(
                strategy="direct { }",
                controls=control("START", "START", "int32_false_true: [0, 1]")
                + control("END", "END", "fp32_false_true: [0, 1]")
                + control("READY", "READY", "bool_false_true: [false, true]")
                + control("CORRID", "CORRID", "data_type: TYPE_UINT64"),
            ),
        ),
        tuple(map(_signaled, (True, False, False, True), (False, False, True, True))),
    ),
)


def refused(name: str, write: Writer, text: str, *says: str) -> Scenario:
    return Scenario(name, write, text, load_error=(f"model '{name}'", *says))


_SCRIPT = torch.jit.script(models.Negate())
_LISTS = "def f(x):\n    return {'y': (x * 2).tolist()}\n"


def _refused_state(name: str, batching: str, says: str) -> Scenario:
    text = config({"x": [4]}, {"y": [4]}, more=batching)
    return refused(name, python(models.Accumulate), text, says)


def _refused_file(name: str, content: bytes, kind: str, says: str) -> Scenario:
    """The contents of the file are too short for two values."""
    total = state(dims="2", kind=kind, initial='data_file: "total"')
    writer = both(python(models.echo), raw(content, "../initial_state/total"))
    text = config({"x": [4]}, {"y": [4]}, more=sequencing(total))
    return refused(name, writer, text, "data_file of the state 'total'", says)


LOAD_ERRORS = (
    refused("no_files", both(), _X_TO_Y, "holds no files"),
    refused("whole_module", saved(nn.Linear(4, 4)), _X_TO_Y, "a state_dict beside model.py"),
    refused("truncated", raw(_SCRIPT.save_to_buffer()[:-300]), _X_TO_Y, "or a damaged one"),
    refused("syntax_error", text("import torch\n\ndef f(:\n"), _X_TO_Y, "(model.py, line 3)"),
    refused("several_classes", python(models.Negate, models.AddSub), _X_TO_Y, "MODEL_CLASS"),
    refused("no_weights", python(models.Affine), x_to_y(3), 'WEIGHTS to "none"'),
    refused("list_error", text(_LISTS), _X_TO_Y, "no list of numbers"),
    _refused_state("state_of_another_shape", sequencing(state(dims="1")), "output 'sum' is"),
    _refused_state("state_file_missing", sequencing(state(initial='data_file: "b"')), "'b'"),
    _refused_state(
        "state_file_elsewhere",
        sequencing(state(initial='data_file: "/dev/zero"')),
        "'/dev/zero'; expected a file in the model's own folder",
    ),
    _refused_file("state_file_short", b"1234567", "FP32", "actual buffer length (7 bytes)"),
    _refused_file("state_file_of_one_string", b"\2\0\0\0ab\5\0\0\0", "STRING", "(2,)"),
    _refused_state(
        "iterative_sequences",
        sequencing(state(), controls="iterative_sequence: true"),
        "no Python-based backend supports",
    ),
)

TABLE: tuple[Scenario, ...] = NAMES + FILES + BATCHES + TYPES + CALLS + OPTIONS
TABLE += POISON + RAGGED + SEQUENCES + LOAD_ERRORS
