"""After a failed call: which items fail, which batches fit, and which errors are fatal."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
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


def test_binding_errors_are_not_retried() -> None:
    model = Model()
    served = engine(model, outputs=(build.spec("RESULT[3]", dims=(-1,)),))
    outcomes = served.run(items([1.0, 2.0, 3.0]))
    assert [type(outcome) for outcome in outcomes] == [BindingError] * 3
    assert model.calls == [3]


@pytest.mark.parametrize("first", [KeyboardInterrupt(), ValueError()])
def test_ctrl_c_is_raised_in_a_call_and_in_a_retry(first: BaseException) -> None:
    errors = [first, KeyboardInterrupt()]

    def judge(x: Tensor) -> None:
        raise errors.pop(0)

    with pytest.raises(KeyboardInterrupt):
        engine(Model(judge)).run(items([1.0, 2.0]))


class Counter(nn.Module):
    """Doubles, and counts its calls in a buffer: in place, or by replacing it."""

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
def test_models_that_change_their_buffers_are_called_once_by_default(
    wished: bool | None, stateful: bool, failed: list[int], calls: int
) -> None:
    counter = Counter()
    served = engine(counter, owner=counter if stateful else None, retry_failed_batch=wished)
    sent = items([1.0, BAD, 3.0, 4.0])
    assert check(sent, served.run(sent), ForwardError) == failed
    assert counter.count.item() == calls


def test_a_batch_whose_model_writes_to_its_inputs_is_retried() -> None:
    def double_in_place(x: Tensor) -> Tensor:
        x *= 2
        bad(x / 2)
        return x

    sent = items([1.0, BAD, 3.0, 4.0])
    before: list[Item] = [{"x": np.copy(np.asarray(item["x"]))} for item in sent]
    assert check(before, engine(double_in_place).run(sent), ForwardError) == [1]


def test_a_failed_batch_is_run_in_at_most_128_further_calls() -> None:
    model = Model(bad)
    outcomes = engine(model, max_batch_size=512).run(items([BAD] * 512))
    assert all(isinstance(outcome, ForwardError) for outcome in outcomes)
    assert len(model.calls) == 1 + 128


def test_each_error_of_the_model_is_reported_with_its_traceback() -> None:
    def judge(x: Tensor) -> None:
        for value in x.flatten().tolist():
            if value < 0:
                raise ValueError(f"value {value}")

    outcomes: Any = engine(Model(judge)).run([*items([-1.0, 2.0, -3.0, -1.0]), {}])
    reported = [at for at, outcome in enumerate(outcomes) if getattr(outcome, "reported", False)]
    assert reported == [0, 2, 3]
    for place, value in ((0, -1.0), (2, -3.0), (3, -1.0)):
        assert str(outcomes[place]) == f"forward() raised ValueError: value {value}."
        text = outcomes[place].traceback
        assert text.startswith("Traceback (most recent call last):")
        assert "in judge" in text
        assert "During handling" not in text


def test_every_retry_is_announced() -> None:
    model = Model(bad)
    served = engine(model)
    begun: list[int] = []
    served.failures.on_call = lambda: begun.append(len(model.calls))
    served.run(items([1.0, BAD, 3.0, 4.0]))
    assert begun == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("sizes", "takes", "repeats", "failed", "calls"),
    [
        pytest.param([1] * 32, ANY_ROWS, None, [], [32, 16, 16, 8, 8, 8, 8], id="any rows"),
        pytest.param([1] * 32, Rows(2, 32), None, [], [32, 16, 16, 8, 8, 8, 8], id="at least two"),
        pytest.param([10], ANY_ROWS, None, [0], [10], id="a single request"),
        pytest.param([2, 8], ANY_ROWS, False, [0, 1], [10], id="no retries"),
    ],
)
def test_a_batch_that_does_not_fit_is_halved_until_its_parts_fit(
    sizes: list[int], takes: Rows, repeats: bool | None, failed: list[int], calls: list[int]
) -> None:
    model = Model(above(9))
    sent = [item for place, rows in enumerate(sizes) for item in items([float(place)], rows)]
    outcomes = engine(model, takes, retry_failed_batch=repeats).run(sent)
    assert check(sent, outcomes, OutOfMemoryError) == failed
    assert model.calls == calls


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of calls that freed the cache."""
    times: list[int] = []
    monkeypatch.setattr(failures, "free", lambda: times.append(1))
    return times  # type: ignore[return-value]


def test_the_memory_of_a_failed_call_and_its_cause_is_freed_before_the_retry(
    freed: list[int],
) -> None:
    held: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    kept: list[Exception] = []  # by the model, which logs them later

    def layer(x: Tensor) -> None:
        activation = x + 1
        held.append(weakref.ref(activation))
        above(2)(x)

    def block(x: Tensor) -> None:
        try:
            layer(x)
        except RuntimeError as error:
            later = ValueError("later")
            kept.extend((error, later))
            raise later from error

    def model(x: Tensor) -> Tensor:
        alive.append(sum(tensor() is not None for tensor in held))
        before = x - 1
        held.append(weakref.ref(before))
        block(x)
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
        (ANY_ROWS, {"pad": {"x": {"multiple_of": 4, "outputs": ["y"]}}}),
    ],
    ids=["any rows", "some rows", "padded"],
)
def test_no_result_is_wrong_with_bad_values_and_varying_memory(
    rows: Rows, overrides: dict[str, Any]
) -> None:
    random = Random(1)
    fits = 32

    def judge(x: Tensor) -> None:
        above(max(fits, rows.least))(x)
        bad(x)

    x = dataclasses.replace(build.spec("x", dims=(-1,)), ragged=True)
    served = engine(Model(judge), rows, inputs=(x,), **overrides)
    for _ in range(30):
        fits = random.choice([2, 3, 9, 32, 32])
        sent, wrong = list[Item](), set[int]()
        for place in range(random.randint(1, 6)):
            value = random.choice([BAD, 1.0, 2.0, 3.0, 4.0])
            sent += items([value], random.randint(1, 5), random.choice([3, 4]))
            wrong |= {place} if value == BAD else set()
        outcomes = served.run(sent)
        for place, (item, outcome) in enumerate(zip(sent, outcomes, strict=True)):
            if isinstance(outcome, OutOfMemoryError):
                assert rows.least > 1 or len(np.asarray(item["x"])) > fits
            elif place in wrong:
                assert isinstance(outcome, ForwardError)
            else:
                np.testing.assert_array_equal(outcome["y"], 2 * np.asarray(item["x"]))


class Device:
    """A device that breaks at a bad value, and raises from then on in calls and probes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken = False
        monkeypatch.setattr(failures, "probe", self.probe)

    def judge(self, x: Tensor) -> None:
        self.broken |= bool((x == BAD).any())
        if self.broken:
            raise RuntimeError("the package failed")  # AOTInductor does not pass on CUDA's errors

    def probe(self, _: torch.device) -> None:
        if self.broken:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def test_nothing_is_run_or_freed_on_a_device_that_broke(
    monkeypatch: pytest.MonkeyPatch, freed: list[int]
) -> None:
    model = Model(Device(monkeypatch).judge)
    served = engine(model)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(2))
    served._cleans = True
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
def test_what_was_answered_before_the_device_broke_stays_answered(
    first: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)

    def judge(x: Tensor) -> None:
        if x.shape[0] > 2:
            raise first
        device.judge(x)

    model = Model(judge)
    sent = items([1.0, 2.0, BAD, 4.0, 5.0, 6.0, 7.0, 8.0])
    assert check(sent, engine(model).run(sent), UnavailableError) == [2, 3, 4, 5, 6, 7]
    assert model.calls == [8, 4, 4, 2, 2]


def test_outputs_for_padding_may_be_infinite() -> None:
    x = dataclasses.replace(build.spec("x", dims=(-1,)), ragged=True)
    served = engine(
        Model(),
        inputs=(x,),
        pad={"x": {"value": float("inf"), "outputs": ["y"]}},
        check_finite=True,
    )
    sent = [*items([1.0], length=3), *items([2.0], length=6)]
    assert check(sent, served.run(sent), OutputError) == []


def failures_of(model: nn.Module) -> Failures:
    return Failures("forward", device=torch.device("cpu"), owner=model)


@pytest.mark.parametrize(
    ("in_place", "mode"), [(True, torch.inference_mode), (False, torch.no_grad)]
)
def test_a_buffer_that_is_written_or_replaced_is_detected(in_place: bool, mode: Any) -> None:
    model = Counter(in_place=in_place)
    found = failures_of(model)
    assert not found.writes_buffers()
    with mode():
        model(torch.ones(1))
    assert found.writes_buffers()
    found.reset()
    assert not found.writes_buffers()


@pytest.mark.parametrize(("value", "writes"), [(1.0, True), (0.0, False)])
def test_a_buffer_made_in_inference_mode_is_compared_by_its_values(
    value: float, writes: bool
) -> None:
    model = nn.Module()
    with torch.inference_mode():  # torch does not count the writes to what is made here
        count = torch.zeros((), dtype=torch.bfloat16)
        model.register_buffer("count", count)
        found = failures_of(model)
        assert not found.writes_buffers()
        count += value
    assert found.writes_buffers() == writes


def linked(link: str) -> BaseException:
    error = ValueError("later")
    setattr(error, link, MemoryError())
    return error


_SHORTAGES = (
    torch.OutOfMemoryError("CUDA out of memory. Tried"),
    linked("__cause__"),
    linked("__context__"),
    *map(
        RuntimeError,
        (
            "std::bad_alloc",
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate",
            "The following operation failed in the TorchScript interpreter.\nCUDA out of memory",
            # Its first use, which has no memory for its workspace.
            "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasSgemm`",
            "Triton Error [CUDA]: out of memory",
            "cuFFT error: CUFFT_ALLOC_FAILED",
            "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        ),
    ),
)


_OTHERS = (
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    ValueError("CUDA out of memory."),  # a model's own class
    torch.AcceleratorError("CUDA error: an assertion"),
)


@pytest.mark.parametrize("error", _SHORTAGES + _OTHERS)
def test_errors_that_mean_out_of_memory(error: BaseException) -> None:
    assert failures.out_of_memory(error) == (error in _SHORTAGES)


def test_a_cycle_of_causes_ends() -> None:
    one, other = RuntimeError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert not failures.out_of_memory(one)
