"""After a failed call: which items fail, which batches fit, and which errors are fatal."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import build
import engines
import pytest
import torch
from engines import BAD, bad, check, items
from torch import Tensor, nn

from torch_py_backend.config.model_config import SequenceConfig
from torch_py_backend.errors import (
    BackendError,
    BindingError,
    ForwardError,
    OutOfMemoryError,
    UnavailableError,
)
from torch_py_backend.pipeline import failures
from torch_py_backend.values import Item, Rows

engine = functools.partial(engines.engine, max_batch_size=32)


class Model(nn.Module):
    """Doubles; records its calls, counts them in a buffer, and calls a judge before each."""

    count: Tensor

    def __init__(self, judge: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.calls: list[int] = []
        self._judge = judge

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(x.shape[0])
        self.count += 1
        self._judge(x)
        return x * 2


def above(rows: int) -> Callable[[Tensor], None]:
    """Exhaust the memory for more than a number of rows."""

    def judge(x: Tensor) -> None:
        if x.shape[0] > rows:
            torch.empty(10**15)

    return judge


def spoils(x: Tensor) -> None:
    """Overwrite a batch with a bad value, and fail."""
    if bool((x == BAD).any()):
        x.zero_()
        raise ValueError


_ONE_BAD = items([1.0, BAD, 3.0, 4.0])
_TWO_LARGE = [*items([1.0], 2), *items([2.0], 8)]
_MANY = items([1.0] * 32)
_HALVED = [4, 2, 2, 1, 1]
_FITS = [32, 16, 16, 8, 8, 8, 8]
_YES, _NO = {"retry_failed_batch": True}, {"retry_failed_batch": False}
# It changes its buffers.
_OWNED = {"owner": True}
# Without states of Triton's it keeps its own: a second call would count good requests twice.
_SEQUENCES = {"sequencing": SequenceConfig(5.0, (), (), False, 8)}
_CONFLICT = {"outputs": (build.spec("RESULT[3]", dims=(-1,)),)}


@pytest.mark.parametrize(
    ("judge", "sent", "how", "kind", "failed", "calls"),
    [
        pytest.param(bad, _ONE_BAD, {}, ForwardError, [1], _HALVED, id="one bad"),
        pytest.param(spoils, _ONE_BAD, {}, ForwardError, [1], _HALVED, id="written inputs"),
        pytest.param(bad, _ONE_BAD, _NO, ForwardError, [0, 1, 2, 3], [4], id="no retries"),
        pytest.param(bad, _ONE_BAD, _OWNED, ForwardError, [0, 1, 2, 3], [4], id="buffers"),
        pytest.param(bad, _ONE_BAD, _OWNED | _YES, ForwardError, [1], _HALVED, id="buffers, true"),
        pytest.param(bad, _ONE_BAD, _SEQUENCES, ForwardError, [0, 1, 2, 3], [4], id="sequences"),
        pytest.param(bad, items([1, 2]), _CONFLICT, BindingError, [0, 1], [2, 1, 1], id="conflict"),
        pytest.param(bad, items([1]) + items([2], 1, 6), {}, ForwardError, [], [1, 1], id="groups"),
        pytest.param(above(9), _MANY, {}, OutOfMemoryError, [], _FITS, id="any rows"),
        pytest.param(
            above(9), _MANY, {"rows": Rows(2, 32)}, OutOfMemoryError, [], _FITS, id="at least two"
        ),
        pytest.param(above(9), items([1.0], 10), {}, OutOfMemoryError, [0], [10], id="one large"),
        pytest.param(above(9), _TWO_LARGE, _NO, OutOfMemoryError, [0, 1], [10], id="two large"),
    ],
)
def test_halves_of_a_failed_batch_are_run_again_until_only_failing_requests_fail(
    judge: Callable[[Tensor], None],
    sent: list[Item],
    how: dict[str, Any],
    kind: type[BackendError],
    failed: list[int],
    calls: list[int],
) -> None:
    model = Model(judge)
    served = engine(model.forward, **{**how, "owner": model if "owner" in how else None})
    announced: list[int] = []
    served.failures.on_call = lambda: announced.append(len(model.calls))
    sent = copy.deepcopy(sent)  # the model may write to it
    assert check(sent, served.run(sent), kind) == failed
    assert model.calls == calls
    assert announced == list(range(len(calls)))


def test_a_buffer_that_changes_once_costs_the_retries_of_one_batch() -> None:
    owner = Model(bad)
    served = engine(Model(bad).forward, owner=owner)
    owner.count += 1
    failed = [check(_ONE_BAD, served.run(_ONE_BAD), ForwardError) for _ in range(2)]
    assert failed == [[0, 1, 2, 3], [1]]


def test_a_failed_batch_is_run_in_at_most_128_further_calls() -> None:
    model = Model(bad)
    outcomes = engine(model.forward, max_batch_size=512).run(items([BAD] * 512))
    assert all(isinstance(outcome, ForwardError) for outcome in outcomes)
    assert len(model.calls) == 1 + 128


@pytest.mark.parametrize("first", [KeyboardInterrupt(), ValueError()])
def test_ctrl_c_is_raised_in_a_call_and_in_a_retry(first: BaseException) -> None:
    errors = mock.Mock(side_effect=[first, KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        engine(Model(errors).forward).run(items([1.0, 2.0]))


def test_each_error_of_the_model_is_reported_with_its_traceback() -> None:
    def judge(x: Tensor) -> None:
        for value in x.flatten().tolist():
            if value < 0:
                raise ValueError(f"value {value}")

    outcomes: Any = engine(Model(judge).forward).run([*items([-1.0, 2.0, -3.0, -1.0]), {}])
    reported = [at for at, outcome in enumerate(outcomes) if getattr(outcome, "reported", False)]
    assert reported == [0, 2, 3]
    for place, value in ((0, -1.0), (2, -3.0), (3, -1.0)):
        assert str(outcomes[place]) == f"forward() raised ValueError: value {value}."
        text = outcomes[place].traceback
        assert text.startswith("Traceback (most recent call last):")
        assert "in judge" in text
        assert "During handling" not in text


def test_the_memory_of_a_failed_call_and_its_cause_is_freed_before_the_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", free := mock.Mock())
    held: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    kept: list[Exception] = []  # by the model, which logs them later

    def layer(x: Tensor) -> None:
        activation = x + 1
        held.append(weakref.ref(activation))
        above(2)(x)

    def judge(x: Tensor) -> None:
        alive.append(sum(tensor() is not None for tensor in held))
        before = x - 1
        held.append(weakref.ref(before))
        try:
            layer(x)
        except RuntimeError as error:
            later = ValueError("later")
            kept.extend((error, later))
            raise later from error

    sent = items([float(place) for place in range(8)])
    assert check(sent, engine(Model(judge).forward).run(sent), OutOfMemoryError) == []
    assert set(alive) == {0}
    assert free.call_count == 3


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


def test_nothing_is_run_or_freed_on_a_device_that_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(Device(monkeypatch).judge)
    served = engine(model.forward)
    monkeypatch.setattr(torch.cuda, "empty_cache", free := mock.Mock())
    served._cleans = True
    served.run = served.pipeline()
    served.run(items([1.0]))
    sent = [*items([1.0, BAD, 3.0]), *items([4.0], length=6)]

    outcomes = served.run(sent)
    later = served.run(items([5.0, 6.0]))

    assert check(sent, outcomes, UnavailableError) == [0, 1, 2, 3]
    assert [type(outcome) for outcome in later] == [UnavailableError] * 2
    assert model.calls == [1, 3]
    # To free the cache of a broken device would raise again.
    free.assert_called_once_with()  # after the first batch
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
    assert check(sent, engine(model.forward).run(sent), UnavailableError) == [2, 3, 4, 5, 6, 7]
    assert model.calls == [8, 4, 4, 2, 2]


_NEW = torch.zeros(())


@pytest.mark.parametrize(
    ("made", "written", "write", "writes"),
    [
        (torch.no_grad, torch.inference_mode, lambda model: model.count.add_(1), True),
        (torch.no_grad, torch.no_grad, lambda model: model.register_buffer("count", _NEW), True),
        # torch does not count the writes to what is made in this mode.
        (torch.inference_mode, torch.inference_mode, lambda model: model.count.add_(1), True),
        (torch.inference_mode, torch.inference_mode, lambda model: model.count.add_(0), False),
    ],
    ids=["written", "replaced", "by values", "equal values"],
)
def test_a_buffer_that_is_written_or_replaced_is_detected(
    made: Any, written: Any, write: Callable[[Any], None], writes: bool
) -> None:
    model = nn.Module()
    with made():
        model.register_buffer("count", torch.zeros((), dtype=torch.bfloat16))
        found = failures.Failures("forward", device=torch.device("cpu"), owner=model)
    assert not found.writes_buffers()
    with written():
        write(model)
    assert found.writes_buffers() == writes
    found.reset()
    assert not found.writes_buffers()


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
