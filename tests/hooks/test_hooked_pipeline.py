"""What hooks do around a module: rows, batches, results, and whose error an error is."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import build
import numpy as np
import pytest
import torch
from torch import Tensor

from torch_py_backend.artifacts.discovery import Kind
from torch_py_backend.batching import runtime
from torch_py_backend.batching.gather_scatter import ANY_ROWS, Rows
from torch_py_backend.config import request_parameters
from torch_py_backend.config.options import Options
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import (
    BackendError,
    BindingError,
    HookError,
    InputError,
    OutputError,
)
from torch_py_backend.hooks.user_hooks import Hook, Hooks
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature import introspection

_X, _Y = build.spec("x", dims=(-1,)), build.spec("y", dims=(-1,))


class Recorder:
    """A module that remembers the batches it was called with."""

    def __init__(self, function: Callable[[Any], Any] = lambda x: x) -> None:
        self.calls: list[Any] = []
        self._function = function

    def __call__(self, x: Any) -> Any:
        self.calls.append(x)
        return self._function(x)


def stage(name: str, function: Callable[..., Any]) -> Hook:
    asks = request_parameters.ASKED in signatures_of(function)
    return Hook(build.MODEL, name, function, name, asks=asks, blames=name.startswith("preprocess"))


def signatures_of(function: Callable[..., Any]) -> list[str]:
    return [one.name for one in introspection.of_function(function).arguments]


def engine(
    module: Callable[..., Any],
    hooks: dict[str, Callable[..., Any]],
    rows: Rows = ANY_ROWS,
    **overrides: Any,
) -> Engine:
    """An engine around a function: one input x and one output y, both FP32 [-1], unless told."""
    settings = build.config(**{"inputs": (_X,), "outputs": (_Y,), **overrides})
    loaded = Loaded(Kind.MODULE, module, introspection.of_function(module), None, rows)
    surroundings = runtime.surround(Options(), torch.device("cpu"), ())
    found = Hooks(**{name: stage(name, function) for name, function in hooks.items()})
    return Engine(settings, loaded, surroundings, build.artifact(), found)


def item(*rows: Any, told: dict[str, Any] | None = None) -> dict[str, Any]:
    """A request with an input x, and parameters."""
    sent: dict[str, Any] = {"x": torch.tensor(rows, dtype=torch.float32)}
    return (
        sent if told is None else sent | {request_parameters.KEY: request_parameters.column([told])}
    )


def values(outcomes: Any, name: str = "y") -> list[Any]:
    """Each outcome's output as lists, or its error."""
    return [one if isinstance(one, BackendError) else one[name].tolist() for one in outcomes]


# --- before the module -----------------------------------------------------------------------


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def test_each_row_by_itself() -> None:
    """preprocess() sees a row without its batch dimension; the module sees one batch."""
    seen: list[list[float]] = []

    def preprocess(x: Tensor) -> Tensor:
        seen.append(x.tolist())
        return x + 1

    module = Recorder()
    made = engine(module, {"preprocess": preprocess})
    assert values(made.run([item([1.0], [2.0]), item([3.0])])) == [[[2], [3]], [[4]]]
    assert seen == [[1], [2], [3]]
    assert [call.tolist() for call in module.calls] == [[[2], [3], [4]]]


@pytest.mark.parametrize(
    ("returned", "module"),
    [
        pytest.param(lambda x: x, lambda a: a, id="tensor"),
        pytest.param(lambda x: x.numpy(), lambda a: a, id="array"),
        pytest.param(lambda x: x.tolist(), lambda a: a, id="list of numbers"),
        pytest.param(lambda x: (2 * x, x), lambda a, b: a - b, id="tuple"),
        pytest.param(lambda x: {"b": x, "a": 2 * x}, lambda a, b: a - b, id="dict"),
        pytest.param(
            lambda x: collections.UserDict({"b": x, "a": 2 * x}), lambda a, b: a - b, id="mapping"
        ),
        pytest.param(
            lambda x: {"a": x, "b": 3},
            lambda a, b: a + b.reshape(-1, *[1] * (a.ndim - 1)) - 3,
            id="with a number",
        ),
    ],
)
@pytest.mark.parametrize("batched", [True, False])
def test_what_is_passed(
    returned: Callable[[Tensor], Any], module: Callable[..., Any], batched: bool
) -> None:
    """A dict is the arguments by name, a tuple several, anything else the one."""

    def preprocess(x: Tensor) -> Any:
        return returned(x)

    def plain(a: Any, b: Any = None) -> Any:
        if b is None:
            return module(a)
        return module(a, b)

    made = engine(plain, {"preprocess": preprocess}, max_batch_size=8 if batched else 0)
    sent = item([1.0, 2.0], [3.0, 4.0]) if batched else item(1.0, 2.0)
    expected = sent["x"].tolist()
    assert values(made.run([sent])) == [expected]


@pytest.mark.parametrize(
    ("annotation", "kind", "sent", "expected"),
    [
        (bytes, "BYTES", np.array([[b"\xff"]], dtype=object), b"\xff"),
        (str, "BYTES", np.array([["é".encode()]], dtype=object), "é"),
        (list[str], "BYTES", np.array([[b"a", b"b"]], dtype=object), ["a", "b"]),
        (list[bytes], "BYTES", np.array([[b"a"]], dtype=object), [b"a"]),
        (int, "INT32", torch.tensor([[7]], dtype=torch.int32), 7),
        (float, "FP32", torch.tensor([[0.5]]), 0.5),
        (bool, "BOOL", np.array([[True]]), True),
    ],
)
def test_annotations(annotation: Any, kind: str, sent: Any, expected: Any) -> None:
    """A row's value is what the annotation says."""
    seen: list[Any] = []

    def preprocess(value: Any) -> Tensor:
        seen.append(value)
        return torch.zeros(1)

    preprocess.__annotations__["value"] = annotation
    inputs = (build.spec("value", kind, (-1,)),)
    made = engine(Recorder(), {"preprocess": preprocess}, inputs=inputs)
    assert values(made.run([{"value": sent}])) == [[[0]]]
    assert seen == [expected]
    assert type(seen[0]) is type(expected)


def test_shapes_are_called_apart() -> None:
    """Rows that cannot be stacked are different calls, where nobody collates."""
    module = Recorder()
    made = engine(module, {"preprocess": doubled})
    outcomes = made.run([item([1.0]), item([1.0, 2.0]), item([3.0])])
    assert values(outcomes) == [[[2]], [[2, 4]], [[6]]]
    assert sorted(call.shape for call in module.calls) == [(1, 2), (2, 1)]


def test_collate() -> None:
    """collate() makes one batch of rows of any kind, from several requests."""
    seen: list[Any] = []

    def preprocess(x: Tensor) -> str:
        return "a" * int(x.sum())

    def collate(rows: list[str]) -> Tensor:
        seen.append(rows)
        return torch.tensor([[len(row)] for row in rows], dtype=torch.float32)

    made = engine(Recorder(), {"preprocess": preprocess, "collate": collate})
    assert values(made.run([item([1.0, 1.0], [3.0, 0.0]), item([1.0])])) == [[[2], [3]], [[1]]]
    assert seen == [["aa", "aaa", "a"]]


def test_collate_of_lists() -> None:
    """A list is one argument, as detectors take it; without preprocess() rows are dicts."""

    def collate(rows: list[dict[str, Tensor]]) -> list[Tensor]:
        return [row["x"] for row in rows]

    module = Recorder(lambda images: torch.stack([image.sum(0, keepdim=True) for image in images]))
    made = engine(module, {"collate": collate})
    assert values(made.run([item([1.0, 2.0]), item([3.0])])) == [[[3]], [[3]]]
    assert [len(call) for call in module.calls] == [2]


def test_rows_that_fill() -> None:
    """Buckets repeat the last row of what preprocess() made; its results are dropped."""
    module = Recorder()

    def collate(rows: list[Tensor]) -> Tensor:
        return torch.stack(rows)

    made = engine(
        module,
        {"preprocess": doubled, "collate": collate, "postprocess": lambda result: result},
        batch_buckets=(4,),
    )
    assert values(made.run([item([1.0], [2.0], [3.0])])) == [[[2], [4], [6]]]
    assert [len(call) for call in module.calls] == [4]


def test_preprocess_batch() -> None:
    """All rows of all requests at once, as forward() would get them."""

    def preprocess_batch(x: Tensor, text: list[str]) -> dict[str, Tensor]:
        lengths = torch.tensor([[float(len(one))] for one in text])
        return {"x": x + lengths}

    inputs = (_X, build.spec("text", "BYTES", (1,)))
    made = engine(Recorder(), {"preprocess_batch": preprocess_batch}, inputs=inputs)
    texts = [np.array([[one.encode()]], dtype=object) for one in ("a", "bbb")]
    outcomes = made.run([item([1.0]) | {"text": one} for one in texts])
    assert values(outcomes) == [[[2]], [[4]]]


def test_inference() -> None:
    """inference() has the module, and the inputs by name where nothing has prepared them."""

    def inference(module: Any, batch: dict[str, Tensor]) -> Tensor:
        result: Tensor = module(batch["x"]) + module(batch["x"])
        return result

    assert values(engine(doubled, {"inference": inference}).run([item([1.0])])) == [[[4]]]


@pytest.mark.parametrize(
    ("returned", "expects"),
    [
        (lambda x: x, Tensor),
        (lambda x: (x, x), tuple),
        (lambda x: {"x": x}, dict),
    ],
)
def test_inference_has_what_was_returned(returned: Callable[..., Any], expects: type) -> None:
    """What preprocess() returned for each row is what inference() has for the batch."""
    seen: list[Any] = []

    def preprocess(x: Tensor) -> Any:
        return returned(x)

    def inference(module: Any, batch: Any) -> Tensor:
        seen.append(batch)
        return torch.zeros(2, 1)

    engine(doubled, {"preprocess": preprocess, "inference": inference}).run([item([1.0], [2.0])])
    assert isinstance(seen[0], expects)


# --- after the module ------------------------------------------------------------------------


class Parts(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Record:
    first: Any
    second: Any = None


@dataclasses.dataclass
class Output(collections.OrderedDict[str, Any]):
    """As Hugging Face's: a dict whose entries are attributes; what is None is no entry."""

    first: Any = None
    second: Any = None

    def __post_init__(self) -> None:
        self.update({name: one for name, one in vars(self).items() if one is not None})


@pytest.mark.parametrize(
    ("result", "read"),
    [
        (lambda x: x, lambda row: row),
        (lambda x: (x, "more"), lambda row: row[0] if row[1] == "more" else None),
        (lambda x: Parts(x, x), lambda row: row.first),
        (lambda x: torch.max(x, 1, keepdim=True), lambda row: row.values),
        (lambda x: {"a": {"b": x}, "c": None}, lambda row: row["a"]["b"]),
        (Record, lambda row: row.first),
        (Output, lambda row: row.first),
        (lambda x: [{"a": one} for one in x], lambda row: row["a"]),
        (lambda x: (x, torch.tensor(0.5)), lambda row: row[0] + row[1] - 0.5),
        (lambda x: x.numpy(), torch.from_numpy),
    ],
    ids=[
        "tensor", "tuple", "named tuple", "of torch", "dicts", "dataclass", "of Hugging Face",
        "list", "a loss", "array",
    ],
)  # fmt: skip
def test_parts(result: Callable[[Tensor], Any], read: Callable[[Any], Any]) -> None:
    """Each row has its part of a result of any structure."""

    def postprocess(part: Any) -> Any:
        return read(part) * 10

    made = engine(Recorder(result), {"postprocess": postprocess})
    assert values(made.run([item([1.0], [2.0]), item([3.0])])) == [[[10], [20]], [[30]]]


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (lambda x: x[:1], "a Tensor [1, 1]"),
        (lambda x: {"a": x.sum(0)}, "a Tensor [1]"),
        (lambda x: [x], "a list of 1"),
    ],
)
def test_parts_that_rows_do_not_have(result: Callable[[Tensor], Any], found: str) -> None:
    """A result that is not of as many rows cannot be taken apart, and says what helps."""
    made = engine(Recorder(result), {"postprocess": lambda result: result})
    (outcome,) = made.run([item([1.0], [2.0], [3.0])])
    assert isinstance(outcome, OutputError)
    assert f"the result for 3 rows holds {found}" in str(outcome)
    assert "write postprocess_batch()" in str(outcome)


@pytest.mark.parametrize(
    ("kind", "dims", "returned", "expected"),
    [
        ("FP32", (1,), 0.5, [[0.5]]),
        ("FP32", (2,), [1, 2.5], [[1, 2.5]]),
        ("FP32", (-1,), [], [[]]),
        ("INT64", (1,), 3, [[3]]),
        ("INT32", (2,), [1, 2], [[1, 2]]),
        ("INT64", (2, 1), [[1], [2]], [[[1], [2]]]),
        ("FP64", (2,), np.array([1.0, 2.0]), [[1, 2]]),
        ("BOOL", (2,), [True, False], [[True, False]]),
        ("BYTES", (1,), "seven", [["seven"]]),
        ("BYTES", (2,), ["a", b"b"], [["a", b"b"]]),
        ("BYTES", (-1,), [], [[]]),
        ("BYTES", (2,), np.array(["a", "b"]), [["a", "b"]]),
        ("FP32", (), torch.tensor(2.0), [2]),
    ],
)
def test_outputs(kind: str, dims: tuple[int, ...], returned: Any, expected: Any) -> None:
    """What postprocess() returns becomes the output that the config has."""
    outputs = (build.spec("y", kind, dims),)
    for value in (returned, {"y": returned}):
        made = engine(
            doubled,
            {"postprocess": lambda result, value=value: value},
            outputs=outputs,
        )
        assert values(made.run([item([1.0])])) == [expected]


@pytest.mark.parametrize(
    ("kind", "returned", "says"),
    [
        ("INT64", [1.5], "a list for output 'y': numbers of float32; expected y INT64 [1]"),
        ("INT8", [300], "a list for output 'y'"),
        ("BOOL", [1], "numbers of int64"),
        ("FP32", [True], "numbers of bool"),
        ("FP32", [[1.0], [1.0, 2.0]], "a list for output 'y'"),
        ("FP32", torch.ones(2), "output 'y' is float32 [2]; expected float32 [1]"),
        (
            "FP32",
            {"z": torch.ones(1)},
            "postprocess() returned a dict with z; expected the outputs y",
        ),
        ("BYTES", [1], "output 'y' is"),
        ("FP32", None, "output 'y' is a NoneType"),
        ("FP32", "text", "output 'y' is a str"),
    ],
)
def test_refused_outputs(kind: str, returned: Any, says: str) -> None:
    """What the config contradicts is that request's error, and names what came."""
    outputs = (build.spec("y", kind, (1,)),)
    made = engine(doubled, {"postprocess": lambda result: returned}, outputs=outputs)
    (outcome,) = made.run([item([1.0])])
    assert isinstance(outcome, OutputError | BindingError)
    if says != "output 'y' is" or not isinstance(returned, list):
        assert says in str(outcome)


def test_rows_of_one_request_have_one_shape() -> None:
    """Outputs of one request are one tensor; others may have other shapes."""
    made = engine(doubled, {"postprocess": lambda result: torch.ones(int(result))})
    outcomes = made.run([item([1.0], [2.0]), item([0.5])])
    assert isinstance(outcomes[0], OutputError)
    assert "gives output 'y' other shapes for other rows of one request: [[2], [4]]" in str(
        outcomes[0]
    )
    assert values(outcomes[1:]) == [[[1]]]


def test_postprocess_batch() -> None:
    """The whole result at once; its outputs are checked as forward()'s."""
    made = engine(doubled, {"postprocess_batch": lambda result: {"y": result + 1}})
    assert values(made.run([item([1.0]), item([2.0])])) == [[[3]], [[5]]]
    made = engine(doubled, {"postprocess_batch": lambda result: {"y": result[:1]}})
    (outcome,) = made.run([item([1.0], [2.0])])
    assert isinstance(outcome, OutputError)
    assert "has 1 rows for a batch of 2" in str(outcome)


def test_check_finite() -> None:
    """CHECK_FINITE looks at what postprocess() returns, for each request."""
    made = engine(doubled, {"postprocess": lambda result: result / (result - 2)}, check_finite=True)
    outcomes = made.run([item([2.0]), item([1.0])])
    assert values(outcomes[:1]) == [[[2]]]
    assert isinstance(outcomes[1], OutputError)
    assert "holds NaN or infinity" in str(outcomes[1])


# --- parameters ------------------------------------------------------------------------------


def test_parameters_of_each_row() -> None:
    """Every method that asks has the parameters of the rows that it is given."""
    seen: dict[str, Any] = collections.defaultdict(list)

    def preprocess(x: Tensor, parameters: Any) -> Tensor:
        seen["preprocess"].append(parameters["n"])
        return x

    def collate(items: list[Tensor], parameters: Any) -> Tensor:
        seen["collate"].append([told["n"] for told in parameters])
        return torch.stack(items)

    def inference(module: Any, batch: Tensor, parameters: Any) -> Any:
        seen["inference"].append([told["n"] for told in parameters])
        return module(batch)

    def postprocess(result: Tensor, parameters: Any) -> Tensor:
        seen["postprocess"].append(parameters["n"])
        scaled: Tensor = result * parameters["n"]
        return scaled

    functions: list[Callable[..., Any]] = [preprocess, collate, inference, postprocess]
    names = ("preprocess", "collate", "inference", "postprocess")
    made = engine(doubled, dict(zip(names, functions, strict=True)), batch_buckets=(4,))
    outcomes = made.run([item([1.0], [2.0], told={"n": 3}), item([3.0], told={"n": 5})])
    assert values(outcomes) == [[[6], [12]], [[30]]]
    assert seen["preprocess"] == seen["postprocess"] == [3, 3, 5]
    assert seen["collate"] == seen["inference"] == [[3, 3, 5, 5]]  # the last row fills


def test_parameters_between_arguments() -> None:
    """`parameters` may stand anywhere among the inputs; without any they are empty."""

    def preprocess_batch(parameters: Any, x: Tensor) -> Tensor:
        assert len(parameters) == len(x)
        return x + torch.tensor([[float(told.get("n", 0))] for told in parameters])

    made = engine(doubled, {"preprocess_batch": preprocess_batch})
    outcomes = made.run([item([1.0], told={"n": 3}), item([1.0], [2.0])])
    assert values(outcomes) == [[[8]], [[2], [4]]]


def test_parameters_with_the_inputs_as_they_are() -> None:
    """Who asks after the module has them also where nothing prepares rows, and with optionals."""
    optional = dataclasses.replace(build.spec("z", dims=(-1,)), optional=True)

    def module(x: Tensor, z: Tensor | None = None) -> Tensor:
        return x if z is None else x + z

    def postprocess_batch(result: Tensor, parameters: Any) -> Tensor:
        return result * torch.tensor([[float(told.get("n", 1))] for told in parameters])

    made = engine(module, {"postprocess_batch": postprocess_batch}, inputs=(_X, optional))
    both = item([1.0], told={"n": 2}) | {"z": torch.ones(1, 1)}
    assert values(made.run([both, item([1.0], told={"n": 3})])) == [[[4]], [[3]]]


# --- threads ---------------------------------------------------------------------------------


def test_rows_are_prepared_at_the_same_time() -> None:
    """With PREPROCESS_THREADS rows of one request and of several are under way together."""
    all_four = threading.Barrier(4, timeout=60)
    modes: list[bool] = []

    def preprocess(x: Tensor, parameters: Any) -> Tensor:
        all_four.wait()
        modes.append(torch.is_inference_mode_enabled())
        more: Tensor = x + parameters.get("n", 0)
        return more

    made = engine(doubled, {"preprocess": preprocess}, preprocess_threads=4)
    sent = [item([1.0], [2.0], told={"n": 1}), item([3.0]), item([4.0])]
    for _ in range(2):
        assert values(made.run(sent)) == [[[4], [6]], [[6]], [[8]]]
    assert modes == [True] * 8


def test_errors_in_threads() -> None:
    """A row that fails in a thread is its request's own error."""
    made = engine(doubled, {"preprocess": picky}, preprocess_threads=2)
    outcomes = made.run([item([1.0]), item([1.0], [-1.0]), item([0.0]), {}, item([2.0])])
    assert kinds(outcomes) == [dict, InputError, HookError, InputError, dict]
    assert list(made.recovery.reports.values()) == [[2]]


# --- errors ----------------------------------------------------------------------------------


def picky(x: Tensor) -> Tensor:
    """Refuses negative values, fails at zero."""
    if x.min() < 0:
        raise ValueError("negative")
    if x.min() == 0:
        raise KeyError("zero")
    return x


def kinds(outcomes: Any) -> list[type]:
    return [type(one) for one in outcomes]


def test_a_row_that_fails_is_its_requests_own_error() -> None:
    """The others of the batch are answered, in one call of the module."""
    module = Recorder()
    made = engine(module, {"preprocess": picky})
    outcomes = made.run([item([1.0]), item([1.0], [-1.0]), item([0.0]), item([2.0])])
    assert kinds(outcomes) == [dict, InputError, HookError, dict]
    assert [len(call) for call in module.calls] == [2]
    assert str(outcomes[1]) == (
        "model 'digits': preprocess() refuses the input: ValueError: negative."
    )
    assert str(outcomes[2]) == "model 'digits': preprocess() raised KeyError: 'zero'."


def test_a_result_that_fails_is_its_requests_own_error() -> None:
    """postprocess() failing calls the module for nobody again."""
    module = Recorder()
    made = engine(module, {"postprocess": picky})
    outcomes = made.run([item([1.0]), item([-1.0]), item([2.0])])
    assert kinds(outcomes) == [dict, HookError, dict]
    assert [len(call) for call in module.calls] == [3]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("preprocess_batch", InputError),
        ("collate", HookError),
        ("inference", HookError),
        ("postprocess_batch", HookError),
    ],
)
def test_a_batch_that_fails_is_narrowed_down(name: str, kind: type) -> None:
    """What a method for batches raises is in the end that of the request at fault."""

    def collate(items: list[Any]) -> Tensor:
        return picky(torch.stack([one["x"] for one in items]))

    def inference(module: Any, batch: dict[str, Tensor]) -> Any:
        return module(picky(batch["x"]))

    hooks: dict[str, Callable[..., Any]] = {
        "preprocess_batch": picky,
        "collate": collate,
        "inference": inference,
        "postprocess_batch": picky,
    }
    made = engine(doubled, {name: hooks[name]})
    outcomes = made.run([item([1.0]), item([2.0]), item([-1.0]), item([3.0])])
    assert kinds(outcomes) == [dict, dict, kind, dict]
    assert f"{name}() r" in str(outcomes[2])


class Changed:
    """What preprocess() returns, for a collate() that uses it up."""

    def __init__(self, x: Tensor) -> None:
        self.parts = {"x": 10 * x}


class Uncopied(Changed):
    """As an open file, say."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")


def uses_up(rows: list[Changed]) -> Tensor:
    """A batch of what it changes in place, and takes out."""
    for row in rows:
        row.parts["x"] += 1
    return torch.stack([row.parts.pop("x") for row in rows])


@pytest.mark.parametrize("kind", [Changed, Uncopied])
@pytest.mark.parametrize("threads", [None, 2])
def test_collate_may_change_its_rows(kind: type[Changed], threads: int | None) -> None:
    """What is run again is prepared again: nobody's answer depends on who shared the batch."""
    prepared: list[float] = []

    def preprocess(x: Tensor) -> Changed:
        prepared.append(float(x))
        return kind(x)

    made = engine(
        picky,
        {"preprocess": preprocess, "collate": uses_up},
        preprocess_threads=threads,
    )

    assert values(made.run([item([1.0]), item([2.0], [3.0])])) == [[[11]], [[21], [31]]]
    assert sorted(prepared) == [1, 2, 3]
    outcomes = made.run([item([1.0]), item([2.0]), item([-1.0]), item([3.0])])
    assert values([*outcomes[:2], outcomes[3]]) == [[[11]], [[21]], [[31]]]
    assert isinstance(outcomes[2], BackendError)


@pytest.mark.parametrize(("kind", "calls"), [(Changed, 2), (Uncopied, 4)])
def test_rows_that_fill_a_batch_up_are_copies(kind: type[Changed], calls: int) -> None:
    """They repeat the last row, which collate() may change; one without a copy is made anew."""
    prepared: list[float] = []

    def preprocess(x: Tensor) -> Changed:
        prepared.append(float(x))
        return kind(x)

    made = engine(doubled, {"preprocess": preprocess, "collate": uses_up}, rows=Rows(4, 4))

    assert values(made.run([item([1.0], [2.0])])) == [[[22], [42]]]
    assert len(prepared) == calls


def test_reports() -> None:
    """The log has tracebacks of what fails, with the places; not of what clients did wrong."""
    made = engine(doubled, {"preprocess": picky, "postprocess": lambda result: 1 / 0})
    made.run([item([-1.0]), item([0.0]), item([1.0])])
    reports = {sentence: places for (sentence, _), places in made.recovery.reports.items()}
    assert list(reports.values()) == [[1], [2]]
    assert all("Traceback" in text for _, text in made.recovery.reports)


def test_memory_in_hooks() -> None:
    """Memory that runs out in a hook is told as anywhere else, and the next request is served."""

    def greedy(x: Tensor) -> Tensor:
        if x.min() < 0:
            raise MemoryError
        return x

    outcomes = engine(doubled, {"preprocess": greedy}).run([item([-1.0]), item([1.0])])
    assert isinstance(outcomes[0], BackendError)
    assert outcomes[0].code == "UNAVAILABLE"
    assert values(outcomes[1:]) == [[[2]]]


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ({}, "leaves out every input"),
        ({"x": torch.ones(1)}, "has the shape [1] and no rows"),
        ({"x": torch.ones(2, 1), "z": torch.ones(3, 1)}, "inputs have 2 and 3 rows"),
        ({"x": torch.ones(0, 1), "z": torch.ones(0, 1)}, "has no rows"),
        ({"z": torch.ones(1, 1)}, "lacks the input 'x'"),
    ],
)
def test_refused_requests(sent: dict[str, Any], says: str) -> None:
    """What can be told of a request alone is told before hooks see it."""

    def preprocess(x: Tensor, z: Tensor | None = None) -> Tensor:
        return x

    optional = dataclasses.replace(build.spec("z", dims=(-1,)), optional=True)
    made = engine(doubled, {"preprocess": preprocess}, inputs=(_X, optional))
    (outcome,) = made.run([sent])
    assert isinstance(outcome, InputError)
    assert says in str(outcome)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda x: object(), "preprocess() returned a object, of which no batch can be made"),
        (lambda x: "text", "preprocess() returned a str"),
        (lambda x: torch.ones(int(x)), "preprocess() returned {'INPUT__0': [1]} and others"),
        (lambda x: {"a": x} if x > 1 else {"x": x}, "and others for rows of one request"),
        (lambda x: {"other": x}, "has no other"),
        (lambda x: (x, x), "takes 1 positional argument"),
    ],
)
def test_refused_rows(returned: Callable[[Tensor], Any], says: str) -> None:
    """What no batch can be made of, or forward() does not take, is named."""

    def preprocess(x: Tensor) -> Any:
        return returned(x)

    made = engine(doubled, {"preprocess": preprocess})
    (outcome,) = made.run([item([1.0], [2.0])])
    assert isinstance(outcome, BackendError)
    assert says in str(outcome)


# --- load ------------------------------------------------------------------------------------


def test_unnamed_strings() -> None:
    """BYTES without an annotation could be bytes or text."""
    with pytest.raises(BindingError) as refusal:
        engine(doubled, {"preprocess": lambda x: x}, inputs=(build.spec("x", "BYTES"),))
    assert "input 'x' is BYTES, and preprocess(x) does not say what it takes" in str(refusal.value)


def test_single_values_of_a_batch() -> None:
    """A method for all rows cannot take the value of one."""

    def preprocess_batch(x: str) -> Tensor:
        return torch.ones(1)

    with pytest.raises(BindingError) as refusal:
        engine(doubled, {"preprocess_batch": preprocess_batch}, inputs=(build.spec("x", "BYTES"),))
    assert "takes a str for the input 'x', and gets all rows'" in str(refusal.value)


def test_types_that_differ() -> None:
    """An annotation that the config contradicts is refused by the hook's name."""

    def preprocess(x: int) -> Tensor:
        return torch.ones(1)

    with pytest.raises(BindingError, match=r"input 'x' is FP32, and preprocess\(\) takes an int"):
        engine(doubled, {"preprocess": preprocess})


def test_without_batches() -> None:
    """With max_batch_size 0 a request is one item: nothing is stacked or taken apart."""
    seen: list[Any] = []

    def postprocess(result: Tensor) -> Tensor:
        seen.append(result.shape)
        return result

    hooks = {"preprocess": doubled, "postprocess": postprocess}
    made = engine(doubled, hooks, max_batch_size=0)
    assert values(made.run([item(1.0, 2.0), item(3.0)])) == [[4, 8], [12]]
    assert seen == [(2,), (1,)]


class Scratch:
    """Doubles into memory of its own, which the next call uses again."""

    def __init__(self) -> None:
        self._memory = torch.zeros(4096)

    def __call__(self, x: Tensor) -> Tensor:
        made = self._memory[: x.numel()].view(x.shape)
        return made.copy_(x * 2)


@pytest.mark.parametrize("wide", [False, True], ids=["one call", "two calls"])
@pytest.mark.parametrize("batch", [8, 0], ids=["batched", "unbatched"])
@pytest.mark.parametrize("names", [{"preprocess"}, {"postprocess"}, {"preprocess", "collate"}])
def test_hooks_and_models_that_use_their_memory_again(
    names: set[str], batch: int, wide: bool
) -> None:
    """Rows prepared, batches computed and results read stay what they are until they are sent."""
    rows = [(1.0,), (2.0,), (3.0, 4.0)] if wide else [(1.0,), (2.0,), (3.0,)]
    hooks: dict[str, Any] = {
        "preprocess": Scratch(),
        "collate": lambda rows: torch.stack([torch.nn.functional.pad(row, (0, 2)) for row in rows]),
        "postprocess": lambda result, again=Scratch(): again(result)[: 1 + wide],  # noqa: B008
    }
    if batch == 0:
        hooks["collate"] = lambda rows: rows[0]

    made = engine(Scratch(), {name: hooks[name] for name in names}, max_batch_size=batch)
    outcomes = made.run([item(*row) if batch == 0 else item(row) for row in rows])

    firsts = [torch.as_tensor(one["y"]).flatten()[0].item() for one in outcomes]  # type: ignore[index]
    assert firsts == [4 * row[0] for row in rows]


def test_rows_of_one_request_that_share_a_hooks_memory() -> None:
    """Each row of a request is what the hook made of that row."""
    hooks: dict[str, Any] = {"preprocess": Scratch(), "postprocess": Scratch()}
    (outcome,) = values(engine(Scratch(), hooks).run([item((1.0,), (2.0,), (3.0,))]))
    assert outcome == [[8.0], [16.0], [24.0]]
