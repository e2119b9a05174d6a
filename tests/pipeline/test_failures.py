"""After a failed call: which items fail, which batches fit, and which errors are fatal."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import build
import engines
import numpy as np
import pytest
import torch
from engines import BAD, bad, check, items
from torch import Tensor, nn

from torch_py_backend.errors import (
    BackendError,
    BindingError,
    ForwardError,
    OutOfMemoryError,
    OutputError,
    UnavailableError,
)
from torch_py_backend.pipeline import failures
from torch_py_backend.pipeline.failures import Failures
from torch_py_backend.values import ANY_ROWS, Item, Rows

engine = functools.partial(engines.engine, max_batch_size=32)


class Model:
    """Doubles; records its calls, and calls a judge before each."""

    def __init__(self, judge: Callable[[Tensor], None] = lambda x: None) -> None:
        self.calls: list[int] = []
        self._judge = judge

    def __call__(self, x: Tensor) -> Tensor:
        self.calls.append(x.shape[0])
        self._judge(x)
        return x * 2


def above(rows: int) -> Callable[[Tensor], None]:
    """Exhaust the memory for more than a number of rows."""

    def judge(x: Tensor) -> None:
        if x.shape[0] > rows:
            torch.empty(10**15)

    return judge


# --- bisection -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guilty", "rows", "overrides"),
    [
        pytest.param([31], Rows(4, 4), {}, id="last, fixed rows"),
        pytest.param([3, 19], ANY_ROWS, {"batch_buckets": (1, 2, 4, 8, 16, 32)}, id="buckets"),
        pytest.param(list(range(0, 32, 2)), ANY_ROWS, {}, id="every other"),
        pytest.param(list(range(32)), ANY_ROWS, {}, id="all"),
    ],
)
def test_only_failing_requests_get_the_error(
    guilty: list[int], rows: Rows, overrides: dict[str, Any]
) -> None:
    """In a batch of 32 only the bad requests get the error, the others their results."""
    sent = items([BAD if place in guilty else float(place) for place in range(32)])
    model = Model(bad)
    outcomes = engine(model, rows, **overrides).run(sent)
    assert check(sent, outcomes, ForwardError) == guilty
    for place in guilty:
        assert str(outcomes[place]) == ("forward() raised ValueError: a bad value, see place.txt.")
    if rows.least == 4:
        assert set(model.calls) == {4}


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize(
    "result",
    [
        lambda x: x[(x != BAD).all(dim=1)] * 2,
        lambda x: x.double(),
        lambda x: None,
        lambda x: torch.nested.nested_tensor([x[0], x[0, :1]]),  # its shape raises
    ],
    ids=["rows", "type", "nothing", "nested"],
)
def test_invalid_outputs_of_one_request(result: Callable[[Tensor], Any]) -> None:
    """Invalid outputs for one request fail only that request."""

    def model(x: Tensor) -> Any:
        return result(x) if bool((x == BAD).any()) else x * 2

    sent = items([1.0, 2.0, BAD, 4.0, 5.0])
    assert check(sent, engine(model).run(sent), OutputError) == [2]


def test_binding_errors_are_not_retried() -> None:
    """A config that names missing outputs fails every request, so it is not retried."""
    model = Model()
    served = engine(model, outputs=(build.spec("RESULT[3]", dims=(-1,)),))
    outcomes = served.run(items([1.0, 2.0, 3.0]))
    assert [type(outcome) for outcome in outcomes] == [BindingError] * 3
    assert model.calls == [3]


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), RecursionError()])
def test_any_exception_is_an_outcome(error: BaseException) -> None:
    """No exception of a model reaches Triton, which would fail the whole batch."""

    def judge(x: Tensor) -> None:
        if bool((x == BAD).any()):
            raise error

    sent = items([1.0, BAD, 3.0])
    assert check(sent, engine(Model(judge)).run(sent), ForwardError) == [1]


@pytest.mark.parametrize("first", [KeyboardInterrupt(), ValueError()])
def test_keyboard_interrupt_is_raised(first: BaseException) -> None:
    """Ctrl-C in `check` or `tune` is not an error of the model, in a retry neither."""
    errors = [first, KeyboardInterrupt()]

    def judge(x: Tensor) -> None:
        raise errors.pop(0)

    with pytest.raises(KeyboardInterrupt):
        engine(Model(judge)).run(items([1.0, 2.0]))


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        bad(x)
        return x * 2


@pytest.mark.parametrize(
    ("wished", "stateful", "failed", "calls"),
    [
        pytest.param(None, False, [1], 5, id="unset"),
        pytest.param(False, False, [0, 1, 2, 3], 1, id="false"),
        pytest.param(None, True, [0, 1, 2, 3], 1, id="unset, with state"),
        pytest.param(True, True, [1], 5, id="true, with state"),
    ],
)
def test_models_that_must_not_be_called_twice(
    wished: bool | None, stateful: bool, failed: list[int], calls: int
) -> None:
    """RETRY_FAILED_BATCH decides; by default a model that changes its buffers is called once."""
    counter = Counter()
    served = engine(counter, owner=counter if stateful else None, retry_failed_batch=wished)
    sent = items([1.0, BAD, 3.0, 4.0])
    assert check(sent, served.run(sent), ForwardError) == failed
    assert counter.count.item() == calls


class InPlace(Model):
    """Doubles in place, then calls the judge."""

    def __call__(self, x: Tensor) -> Tensor:
        self.calls.append(x.shape[0])
        x *= 2
        self._judge(x)
        return x


def copies(sent: Sequence[Item]) -> list[Item]:
    return [{"x": np.copy(np.asarray(item["x"]))} for item in sent]


def test_batches_of_models_that_write_to_their_inputs() -> None:
    """A batch of several requests is a copy, so it is retried: only bad requests fail."""
    sent = items([1.0, BAD, 3.0, 4.0])
    before = copies(sent)

    def judge(x: Tensor) -> None:
        bad(x / 2)

    assert check(before, engine(InPlace(judge)).run(sent), ForwardError) == [1]


def test_work_is_bounded() -> None:
    """A batch is run in at most 128 further calls."""
    model = Model(bad)
    outcomes = engine(model, max_batch_size=512).run(items([BAD] * 512))
    assert all(isinstance(outcome, ForwardError) for outcome in outcomes)
    assert len(model.calls) == 1 + 128


def test_reports() -> None:
    """Each error of the model is marked for the log, with the traceback of its cause."""

    def judge(x: Tensor) -> None:
        for value in x.flatten().tolist():
            if value < 0:
                raise ValueError(f"value {value}")

    served = engine(Model(judge))
    outcomes = served.run([*items([-1.0, 2.0, -3.0, -1.0]), {}])

    reported = [at for at, outcome in enumerate(outcomes) if getattr(outcome, "reported", False)]
    assert reported == [0, 2, 3]
    for place, value in ((0, -1.0), (2, -3.0), (3, -1.0)):
        error = outcomes[place]
        assert isinstance(error, ForwardError)
        assert str(error) == f"forward() raised ValueError: value {value}."
        assert error.traceback.startswith("Traceback (most recent call last):")
        assert "in judge" in error.traceback
        assert "During handling" not in error.traceback


def test_endless_recursion() -> None:
    """Only the last frames of a long traceback are reported."""

    def even(x: Tensor) -> None:
        odd(x)

    def odd(x: Tensor) -> None:
        even(x)

    (error,) = engine(Model(even)).run(items([1.0]))
    assert isinstance(error, ForwardError)
    assert "RecursionError" in str(error)
    assert len(error.traceback.splitlines()) < 300


def test_long_messages() -> None:
    """A client's text of megabytes in an exception is cut: logging it would fill /dev/shm."""

    def judge(x: Tensor) -> None:
        raise ValueError("/" * 10_000_000)

    (error,) = engine(Model(judge)).run(items([1.0]))
    assert isinstance(error, ForwardError)
    assert "in judge" in error.traceback
    assert len(error.traceback) < 200_000


def test_every_retry_is_announced() -> None:
    """The callback that resets a call's time limit runs before each retry."""
    model = Model(bad)
    served = engine(model)
    begun: list[int] = []
    served.failures.on_call = lambda: begun.append(len(model.calls))
    served.run(items([1.0, BAD, 3.0, 4.0]))
    assert begun == [1, 2, 3, 4]


# --- memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [ANY_ROWS, Rows(2, 32)], ids=["any rows", "at least two"])
def test_batches_that_do_not_fit(rows: Rows) -> None:
    """A batch that does not fit is halved until its parts fit."""
    model = Model(above(9))
    sent = items([float(place) for place in range(32)])
    assert check(sent, engine(model, rows).run(sent), OutOfMemoryError) == []
    assert model.calls == [32, 16, 16, 8, 8, 8, 8]


@pytest.mark.parametrize(("rows", "repeats"), [([10], None), ([2, 8], False)])
def test_requests_that_do_not_fit(rows: list[int], repeats: bool | None) -> None:
    """A single request is not run again, nor a batch with RETRY_FAILED_BATCH false."""
    model = Model(above(4))
    sent = [item for count in rows for item in items([1.0], rows=count)]
    outcomes = engine(model, retry_failed_batch=repeats).run(sent)
    assert check(sent, outcomes, OutOfMemoryError) == list(range(len(rows)))
    assert model.calls == [10]


def test_only_what_never_fits_is_refused() -> None:
    """A single row that does not fit fails with 503; others, and later batches, are answered."""

    def judge(x: Tensor) -> None:
        if bool((x == BAD).any()):
            raise MemoryError

    model = Model(judge)
    served = engine(model)
    sent = items([1.0, 2.0, BAD, 4.0, 5.0])
    outcomes = served.run(sent)
    assert check(sent, outcomes, OutOfMemoryError) == [2]
    assert outcomes[2].code == "UNAVAILABLE"
    model.calls.clear()
    served.run(items([1.0, 2.0, 3.0]))
    assert model.calls == [3], "one request slows down those that come after it"


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of calls that freed the cache."""
    times: list[int] = []
    monkeypatch.setattr(failures, "free", lambda: times.append(1))
    return times  # type: ignore[return-value]


def test_frames_are_cleared_before_the_retry(freed: list[int]) -> None:
    """The memory of the failed call is released and the cache freed before the retry."""
    held: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def model(x: Tensor) -> Tensor:
        alive.append(sum(tensor() is not None for tensor in held))
        activation = x + 1
        held.append(weakref.ref(activation))
        above(2)(x)
        return x * 2

    sent = items([float(place) for place in range(8)])
    assert check(sent, engine(model).run(sent), OutOfMemoryError) == []
    assert set(alive) == {0}
    assert len(freed) == 3


@pytest.mark.parametrize(
    ("rows", "overrides"),
    [
        (ANY_ROWS, {"check_finite": True}),
        (Rows(4, 8), {}),
        (ANY_ROWS, {"batch_buckets": (2, 8, 32)}),
        (ANY_ROWS, {"pad": {"x": {"multiple_of": 4, "outputs": ["y"]}}}),
    ],
)
def test_everything_at_once(rows: Rows, overrides: dict[str, Any]) -> None:
    """With bad values, rows that never fit and varying memory, no result is ever wrong."""
    random = Random(1)
    fits = [32]
    kinds: dict[float, type[BackendError]] = {BAD: ForwardError, -8.0: OutOfMemoryError}

    def judge(x: Tensor) -> None:
        above(max(fits[0], rows.least))(x)
        if bool((x == -8).any()):
            raise MemoryError
        bad(x)

    x = dataclasses.replace(build.spec("x", dims=(-1,)), ragged=True)
    served = engine(Model(judge), rows, inputs=(x,), **overrides)
    for _ in range(60):
        fits[0] = random.choice([2, 3, 9, 32, 32])
        sent = [
            *(
                item
                for _ in range(random.randint(1, 6))
                for item in items([random.random()], random.randint(1, 5), random.choice([3, 4]))
            )
        ]
        wrong = {
            place: random.choice(list(kinds)) for place in range(len(sent)) if random.random() < 0.2
        }
        for place, value in wrong.items():
            x_of = np.asarray(sent[place]["x"])
            x_of[random.randrange(len(x_of)), 1] = value
        outcomes = served.run(sent)

        fixed = rows.least > 1 or "batch_buckets" in overrides
        for place, (item, outcome) in enumerate(zip(sent, outcomes, strict=True)):
            if isinstance(outcome, BackendError):
                too_large = fixed or len(np.asarray(item["x"])) > fits[0]
                assert place in wrong or (too_large and isinstance(outcome, OutOfMemoryError))
                assert place not in wrong or type(outcome) in (
                    kinds[wrong[place]],
                    OutOfMemoryError,
                )
            else:
                assert place not in wrong
                np.testing.assert_array_equal(outcome["y"], 2 * np.asarray(item["x"]))


# --- fatal errors ----------------------------------------------------------------------------


class Device:
    """A device that breaks at a bad value, and raises from then on in calls and probes."""

    broken = False

    def judge(self, x: Tensor) -> None:
        self.broken |= bool((x == BAD).any())
        if self.broken:
            raise RuntimeError("the package failed")  # AOTInductor does not pass on CUDA's errors

    def probe(self, _: torch.device) -> None:
        if self.broken:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def test_device_that_breaks(monkeypatch: pytest.MonkeyPatch, freed: list[int]) -> None:
    """After a sticky error nothing is run or freed; every request gets the error and its reason."""
    device = Device()
    monkeypatch.setattr(failures, "probe", device.probe)
    model = Model(device.judge)
    served = engine(model)
    served._free_memory = lambda: freed.append(2)
    served.run = served.pipeline()
    served.run(items([1.0]))
    sent = [*items([1.0, BAD, 3.0]), *items([4.0], length=6)]

    outcomes = served.run(sent)
    later = served.run(items([5.0, 6.0]))

    assert check(sent, outcomes, UnavailableError) == [0, 1, 2, 3]
    assert [type(outcome) for outcome in later] == [UnavailableError] * 2
    assert model.calls == [1, 3]
    assert freed == [2], "freeing the cache of a broken device would raise again"
    assert "device-side assert triggered" in str(outcomes[0])
    assert served.failures.fatal is outcomes[0]
    assert served.failures.fatal.reported
    assert "Traceback" in served.failures.fatal.traceback


@pytest.mark.parametrize("first", [RuntimeError("bisection"), MemoryError()])
def test_device_that_breaks_in_a_retry(first: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that were answered before the device broke stay answered; no other part is run."""
    device = Device()
    monkeypatch.setattr(failures, "probe", device.probe)

    def judge(x: Tensor) -> None:
        if x.shape[0] > 2:
            raise first
        device.judge(x)

    model = Model(judge)
    sent = items([1.0, 2.0, BAD, 4.0])
    assert check(sent, engine(model).run(sent), UnavailableError) == [2, 3]
    assert model.calls == [4, 2, 2]


# --- CHECK_FINITE ----------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "rows"), [(np.nan, 1), (-np.inf, 3)])
def test_values_that_are_not_finite(value: float, rows: int) -> None:
    """Only requests whose outputs hold NaN or infinity are refused."""
    sent = items([1.0, 2.0, 3.0], rows)
    np.asarray(sent[1]["x"])[rows - 1, 2] = value
    served = engine(Model(), check_finite=True)
    outcomes = served.run(sent)
    assert check(sent, outcomes, OutputError) == [1]
    assert outcomes[1].reported


def test_padding_that_is_not_finite() -> None:
    """Outputs for padding are not checked."""
    x = dataclasses.replace(build.spec("x", dims=(-1,)), ragged=True)
    served = engine(
        Model(),
        inputs=(x,),
        pad={"x": {"value": float("inf"), "outputs": ["y"]}},
        check_finite=True,
    )
    sent = [*items([1.0], length=3), *items([2.0], length=6)]
    assert check(sent, served.run(sent), OutputError) == []


# --- buffers ---------------------------------------------------------------------------------


class Written(nn.Module):
    """Counts in a buffer: in place, or by replacing it."""

    count: Tensor

    def __init__(self, *, in_place: bool = True) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self._in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        if self._in_place:
            self.count += 1
        else:
            self.count = self.count + 1
        return x


def of(model: nn.Module) -> Failures:
    return Failures("forward", device=torch.device("cpu"), owner=model)


@pytest.mark.parametrize(
    ("in_place", "mode"), [(True, torch.inference_mode), (False, torch.no_grad)]
)
def test_buffers_that_are_written(in_place: bool, mode: Any) -> None:
    """A buffer that is written or replaced is detected; first calls may fill tables."""
    model = Written(in_place=in_place)
    failures = of(model)
    assert not failures.writes_buffers()
    with mode():
        model(torch.ones(1))
    assert failures.writes_buffers()
    failures.reset()
    assert not failures.writes_buffers()


class Late(nn.Module):
    """Creates its counter in the first call, in inference mode; torch does not count its writes."""

    count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.zeros((), dtype=torch.bfloat16))
        self.count += x.sum()
        return x


@pytest.mark.parametrize(("value", "writes"), [(1.0, True), (0.0, False)])
def test_buffers_made_in_inference_mode(value: float, writes: bool) -> None:
    """A buffer created in inference mode is compared by its values."""
    model = Late()
    failures = of(model)
    with torch.inference_mode():
        model(torch.ones(1))
        failures.reset()
        assert not failures.writes_buffers()
        model(torch.full((1,), value))
    assert failures.writes_buffers() == writes


@pytest.mark.parametrize(
    "model", [nn.BatchNorm1d(4).eval(), torch.jit.script(nn.BatchNorm1d(4).eval())]
)
def test_models_that_keep_their_buffers(model: nn.Module) -> None:
    """A model in eval mode keeps its buffers; also in TorchScript."""
    failures = of(model)
    with torch.inference_mode():
        model(torch.rand(2, 4))
    assert not failures.writes_buffers()
