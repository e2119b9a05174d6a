"""Answers to batches of requests: failures are isolated, and the log names the requests."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_triton
import instances
import models
import numpy as np
import pytest
import scenarios
import torch
from fake_triton import TritonError
from instances import logged, request, until
from scenarios import Scenario

from torch_py_backend.adapter import TritonPythonModel, answering, messages
from torch_py_backend.pipeline import failures

pytestmark = pytest.mark.usefixtures("process")


def load(folder: Path, definition: Any = models.Judge, **parameters: str) -> TritonPythonModel:
    config = scenarios.x_to_y(4, **parameters)
    return instances.load(folder, Scenario("judge", scenarios.python(definition), config))


def check(requests: list[Any], responses: list[Any]) -> list[int | None]:
    """Return the codes of the errors; check that all others have results."""
    codes: list[int | None] = []
    for sent, response in zip(requests, responses, strict=True):
        error = response.error()
        codes.append(None if error is None else error.code())
        if error is None:
            (y,) = response.output_tensors()
            np.testing.assert_array_equal(y.as_numpy(), 2 * sent.inputs()[0].as_numpy())
    return codes


# --- memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "cancelled"),
    [
        pytest.param([-1], True, id="one fails"),
        pytest.param([1, -1, 2, -2, -4, 5], False, id="some fail"),
        pytest.param([1, -5, 2], False, id="memory runs out"),
    ],
)
@pytest.mark.usefixtures("no_collector")
def test_no_input_outlives_its_response(
    tmp_path: Path, values: list[float], cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a request is free after its response; no exception's frames keep it."""
    model = load(tmp_path)
    monkeypatch.setattr(answering, "CHECK_CANCELLED_S", -1)  # always checked
    requests = [request(value) for value in values]
    requests.append(request(7, cancelled=cancelled))
    inputs = [weakref.ref(sent.inputs()[0].as_numpy()) for sent in requests]
    responses = model.execute(requests)
    assert len(responses) == len(inputs)
    del requests, responses
    assert not any(alive() is not None for alive in inputs)


# --- the log ---------------------------------------------------------------------------------


def test_log_names_the_requests(tmp_path: Path) -> None:
    """The log has the traceback and the IDs of failed requests, not of invalid ones."""
    model = load(tmp_path)
    lacking = fake_triton.InferenceRequest([], "without its input")
    sent = [request(1, "good"), request(-2, "first"), lacking, request(-2, "second")]
    codes = [None, TritonError.INTERNAL, TritonError.INVALID_ARG, TritonError.INTERNAL]
    assert check(sent, model.execute(sent)) == codes
    (line,) = logged()
    assert line.startswith(
        "model 'judge': forward() raised SystemExit: 3. (requests first, second)"
    )
    assert "Traceback (most recent call last):" in line
    assert "model.py" in line
    assert "good" not in line
    assert "without its input" not in line


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a\nE1121 forged\x1b[0m", "", ""], "(requests a?E1121 forged?[0m, without an id)"),
        (["x" * 1000], f"(requests {'x' * 64})"),
    ],
)
def test_ids_are_sanitized(names: list[str], said: str, tmp_path: Path) -> None:
    """A client's ID cannot add lines to the log."""
    load(tmp_path).execute([request(-2, name) for name in names])
    assert said in logged()[0].splitlines()[0]


def test_log_is_not_flooded(tmp_path: Path) -> None:
    """Many different failures in one batch are a bounded number of log records."""
    model = load(tmp_path, Talks)
    model.execute([request(-value) for value in range(1, 31)])
    assert len(logged()) == 9
    assert logged()[-1] == "model 'judge': 22 more failures of the same batch."


class Talks(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x < 0).any()):
            raise ValueError(f"value {x.min().item()}")
        return x * 2


def test_ids_are_not_read_without_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Request IDs are not read while nothing fails."""

    def asked(request: Any) -> str:
        raise AssertionError

    model = load(tmp_path)
    monkeypatch.setattr(fake_triton.InferenceRequest, "request_id", asked)
    monkeypatch.setattr(fake_triton.InferenceRequest, "is_cancelled", asked)
    sent = [request(1), request(2)]
    assert check(sent, model.execute(sent)) == [None, None]


# --- unreadable requests and responses -------------------------------------------------------


class Unreadable(fake_triton.Tensor):
    """A tensor whose bytes do not match its type."""

    error: BaseException = ValueError("unpack requires 4 bytes, in /usr/lib/python/utils.py")

    def as_numpy(self) -> np.ndarray[Any, Any]:
        raise self.error


def unreadable(error: BaseException | None = None) -> Any:
    tensor = Unreadable("x", np.ones((1, 4), dtype=np.float32))
    tensor.error = error or tensor.error
    return fake_triton.InferenceRequest([tensor])


def test_request_that_cannot_be_read(tmp_path: Path) -> None:
    """It gets an error, and the others are answered."""
    sent = [request(1), unreadable(), request(3), unreadable()]
    responses = load(tmp_path).execute(sent)
    bad = TritonError.INVALID_ARG
    assert check(sent, responses) == [None, bad, None, bad]
    assert responses[1].error().message() == (
        "model 'judge': the request cannot be read: ValueError: unpack requires 4 bytes, in"
        " utils.py."
    )


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Breaks the device."""

    def probe(_: torch.device) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    return lambda: monkeypatch.setattr(failures, "probe", probe)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (MemoryError(), False),
        (torch.OutOfMemoryError("CUDA out of memory."), False),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
    ],
    ids=["memory", "CUDA memory", "lost device"],
)
def test_request_that_fails_while_it_is_read(
    error: Exception, lost: bool, tmp_path: Path, broken: Callable[[], None]
) -> None:
    """The client is not at fault: UNAVAILABLE. A device that is lost poisons the instance."""
    model = load(tmp_path)
    if lost:
        broken()
    sent = [unreadable(error), request(2)]
    codes = [TritonError.UNAVAILABLE, TritonError.UNAVAILABLE if lost else None]
    assert check(sent, model.execute(sent)) == codes
    assert model.is_ready() is not lost
    assert "Traceback" in logged()[-1]


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (TypeError("no such type"), TritonError.INTERNAL, "the outputs cannot be sent: TypeError"),
        (MemoryError(), TritonError.UNAVAILABLE, "does not fit in memory"),
    ],
)
def test_response_that_cannot_be_written(
    error: Exception,
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An outcome that Triton refuses fails alone."""
    from_dlpack = fake_triton.Tensor.from_dlpack

    def picky(name: str, capsule: Any) -> Any:
        tensor = from_dlpack(name, capsule)
        if tensor.as_numpy().reshape(-1)[0] == 4:
            raise error
        return tensor

    monkeypatch.setattr(fake_triton.Tensor, "from_dlpack", picky)
    model = load(tmp_path)
    sent = [request(1, "one"), request(2, "two"), request(3, "three")]
    responses = model.execute(sent)

    assert check(sent, responses) == [None, code, None]
    assert says in responses[1].error().message()
    assert "(requests two)" in logged()[0]


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt("Ctrl-C"), MemoryError("no memory for the traceback")], ids=repr
)
def test_internal_errors(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing leaves execute(): Triton would send the traceback to every client.

    An exception of the backend is one sentence for clients, and a traceback in the log.
    """
    model = load(tmp_path)

    def fail(*_: object) -> Any:
        raise error

    monkeypatch.setattr(model._engine.failures, "halve", fail)
    sent = [request(1, "one"), request(-1, "two")]
    responses = model.execute(sent)
    assert check(sent, responses) == [TritonError.INTERNAL] * 2
    assert "the backend raised an unexpected error" in responses[0].error().message()
    assert str(error) in logged()[0]
    assert "(requests one, two)" in logged()[0]


# --- cancelled requests ----------------------------------------------------------------------


class Slow(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(0.05)
        if bool((x == -1).any()):
            raise ValueError("negative")
        return x * 2


@pytest.mark.parametrize("first", [1, -1], ids=["success", "failure"])
def test_cancelled_requests_are_not_run(first: float, tmp_path: Path) -> None:
    """If batches take long, cancelled requests are skipped."""
    model = load(tmp_path, Slow)
    model.execute([request(first)])
    before = model._engine.counts.rows
    for _ in range(3):  # what was not run says nothing of how long the next one takes
        sent = [request(2, cancelled=True)] * 2
        assert check(sent, model.execute(sent)) == [TritonError.CANCELLED] * 2
    sent = [request(1), request(2, cancelled=True), request(3)]
    assert check(sent, model.execute(sent)) == [None, TritonError.CANCELLED, None]
    assert model._engine.counts.rows - before == 2


# --- fatal errors ----------------------------------------------------------------------------


def gauge() -> list[float]:
    return [metric.value() for metric in fake_triton.MetricFamily.made["pytorch_py_poisoned"]]


@pytest.mark.parametrize("generation", fake_triton.GENERATIONS)
def test_a_poisoned_instance(
    generation: str,
    tmp_path: Path,
    broken: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error is reported once, every request is refused unread, and the model is not called.

    A newer server is told that the model is not ready.
    """
    fake_triton.become(generation, monkeypatch)
    model = load(tmp_path)
    reasons: list[str] = []
    monkeypatch.setattr(model._status, "poisoned", reasons.append)
    assert fake_triton.is_ready(generation, model)
    assert gauge() == [0]

    broken()
    sent = [request(1, "one"), request(-2, "two")]
    responses: list[Any] = model.execute(sent)
    assert check(sent, responses) == [TritonError.UNAVAILABLE] * 2
    rows = model._engine.counts.rows
    monkeypatch.setattr(messages, "read", None)
    later = [request(1), request(2)]

    assert check(later, model.execute(later)) == [TritonError.UNAVAILABLE] * 2
    assert model._engine.counts.rows == rows
    assert fake_triton.is_ready(generation, model) is (generation == fake_triton.GENERATIONS[0])
    assert not model.is_ready()
    until(lambda: gauge() == [1])
    assert "device-side assert triggered" in responses[0].error().message()
    assert reasons == ["RuntimeError: CUDA error: device-side assert triggered"]
    assert len(logged()) == 2
    assert "Traceback" in logged()[1]
    assert logged()[0] == (
        "model 'judge': instance judge_0_0 is poisoned and refuses all requests until the model is"
        " reloaded."
    )


def test_a_device_that_breaks_in_the_warm_up(tmp_path: Path, broken: Callable[[], None]) -> None:
    """A model whose warm-up breaks the device is not served."""
    broken()
    with pytest.raises(fake_triton.TritonModelException, match="met a fatal error"):
        load(tmp_path, Raises)


class Raises(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")
