from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import fake_triton
import instances
import models
import numpy as np
import pytest
import scenarios
import torch
from children import until
from fake_triton import MetricFamily, TritonError, Turn
from instances import Served, logged, lose_device, request, unreadable
from scenarios import Scenario

from torch_py_backend.adapter import TritonPythonModel, answering, metrics
from torch_py_backend.processes.instance_status import InstanceStatus

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


@pytest.mark.parametrize(
    ("values", "cancelled"),
    [([-1], True), ([1, -1, 2, -2, -4, 5], False), ([1, -5, 2], False)],
    ids=["cancelled", "failures", "memory runs out"],
)
@pytest.mark.usefixtures("no_collector")
def test_no_input_outlives_its_response(
    tmp_path: Path, values: list[float], cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tmp_path)
    monkeypatch.setattr(answering, "CHECK_CANCELLED_S", -1)  # always checked
    requests = [request(value) for value in values]
    requests.append(request(7, cancelled=cancelled))
    inputs = [weakref.ref(sent.inputs()[0].as_numpy()) for sent in requests]
    responses = model.execute(requests)
    assert len(responses) == len(inputs)
    del requests, responses
    assert not any(alive() is not None for alive in inputs)


def test_log_names_the_requests(tmp_path: Path) -> None:
    """It has the traceback and the IDs of failed requests, which cannot add lines to it."""
    model = load(tmp_path)
    failing = "first\nE1121 forged\x1b[0m", "", "x" * 1000, "\udcff"
    sent = [request(1, "good"), *(request(-2, name) for name in failing)]
    sent.append(fake_triton.InferenceRequest([], "without its input"))
    codes = [None, *[TritonError.INTERNAL] * 4, TritonError.INVALID_ARG]
    assert check(sent, model.execute(sent)) == codes
    (line,) = logged()
    named = f"(requests first?E1121 forged?[0m, without an id, {'x' * 64}, ?)"
    assert f"forward() raised SystemExit: 3. {named}" in line.splitlines()[0]
    assert "Traceback (most recent call last):" in line
    assert "model.py" in line


def shouts(x: torch.Tensor) -> torch.Tensor:
    if bool((x < 0).any()):
        raise ValueError("/" * 10_000_000)
    return x * 2


def test_ids_are_not_read_without_a_failure_and_long_messages_are_cut(tmp_path: Path) -> None:
    """Triton passes log messages through /dev/shm."""
    model = load(tmp_path, shouts)
    with mock.patch.multiple(fake_triton.InferenceRequest, request_id=None, is_cancelled=None):
        sent = [request(1), request(2)]
        assert check(sent, model.execute(sent)) == [None, None]
    model.execute([request(-1)])
    (line,) = logged()
    assert "in shouts" in line
    assert len(line) < 200_000


_LOST = RuntimeError("CUDA error: device-side assert triggered")
_INVALID, _AGAIN = TritonError.INVALID_ARG, TritonError.UNAVAILABLE


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ValueError("4 bytes, in /usr/lib/utils.py"), _INVALID, "in utils.py"),
        (torch.OutOfMemoryError("CUDA out of memory."), _AGAIN, "memory"),
        (_LOST, _AGAIN, "fatal error"),
    ],
)
def test_request_that_fails_while_it_is_read(
    error: Exception, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are answered, unless the device is lost, which poisons the instance."""
    model = load(tmp_path)
    if error is _LOST:
        lose_device(monkeypatch)
    sent = [request(1), unreadable(error), request(2), unreadable(error)]
    responses = model.execute(sent)
    answered = code if error is _LOST else None
    assert check(sent, responses) == [answered, code, answered, code]
    assert says in responses[1].error().message()
    assert model.is_ready() is (error is not _LOST)
    assert code == TritonError.INVALID_ARG or "Traceback" in logged()[-1]


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (TypeError("no such type"), TritonError.INTERNAL, "the outputs cannot be sent: TypeError"),
        (MemoryError(), _AGAIN, "does not fit in memory"),
    ],
)
def test_response_that_cannot_be_written(
    error: Exception, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    ("function", "error"),
    [
        ("Failures.isolate", KeyboardInterrupt("Ctrl-C")),
        ("traceback.format_exception", MemoryError("no memory for the traceback")),
    ],
)
def test_internal_errors(
    function: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception of the backend is one sentence for clients, and a traceback in the log."""
    model = load(tmp_path)
    raises = mock.Mock(side_effect=error)
    monkeypatch.setattr(f"torch_py_backend.pipeline.failures.{function}", raises)
    sent = [request(1, "one"), request(-1, "two")]
    responses = model.execute(sent)
    assert check(sent, responses) == [TritonError.INTERNAL] * 2
    assert "the backend raised an unexpected error" in responses[0].error().message()
    assert str(error) in logged()[0]
    assert "(requests one, two)" in logged()[0]


def slow(x: torch.Tensor) -> torch.Tensor:
    import time

    time.sleep(0.05)
    if bool((x == -1).any()):
        raise ValueError("negative")
    return x * 2


@pytest.mark.parametrize("first", [1, -1], ids=["success", "failure"])
def test_cancelled_requests_are_not_run(first: float, tmp_path: Path) -> None:
    """They are skipped if batches take long."""
    model = load(tmp_path, slow)
    model.execute([request(first)])
    before = model._engine.counts.rows
    for _ in range(3):  # what was not run says nothing of how long the next one takes
        sent = [request(2, cancelled=True)] * 2
        assert check(sent, model.execute(sent)) == [TritonError.CANCELLED] * 2
    sent = [request(1), request(2, cancelled=True), request(3)]
    assert check(sent, model.execute(sent)) == [None, TritonError.CANCELLED, None]
    assert model._engine.counts.rows - before == 2


def test_a_poisoned_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is reported once, every request is refused unread, and the model is not called."""
    reasons: list[str] = []
    monkeypatch.setattr(InstanceStatus, "poisoned", lambda _, reason: reasons.append(reason))
    model = load(tmp_path)
    assert model.is_ready() is True
    (gauge,) = fake_triton.MetricFamily.made["pytorch_py_poisoned"]
    assert gauge.value() == 0
    lose_device(monkeypatch)
    sent = [request(1, "one"), request(-2, "two")]
    responses: list[Any] = model.execute(sent)
    assert check(sent, responses) == [TritonError.UNAVAILABLE] * 2
    assert "device-side assert triggered" in responses[0].error().message()
    assert reasons == ["RuntimeError: CUDA error: device-side assert triggered"]
    rows, served = model._engine.counts.rows, model._answer
    monkeypatch.setattr(served.__self__, "_read", None)  # type: ignore[attr-defined]
    assert check(sent, model.execute(sent)) == [TritonError.UNAVAILABLE] * 2
    assert model._engine.counts.rows == rows
    assert model.is_ready() is False
    until(lambda: gauge.value() == 1)
    (failed,) = logged()
    assert "Traceback" in failed


def test_a_device_that_breaks_in_the_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_device(monkeypatch)
    raises = scenarios.text("def forward(x):\n    raise RuntimeError('no')\n")
    with pytest.raises(fake_triton.TritonModelException, match="met a fatal error"):
        instances.load(tmp_path, Scenario("judge", raises, scenarios.x_to_y()))


class Loaded(Served):
    """A model of sequences: with a state `total` by default, that sums its inputs."""

    def __init__(
        self, folder: Path, definition: Any = models.Accumulate, more: str = "", **parameters: str
    ) -> None:
        more = more or scenarios.sequencing(scenarios.state())
        text = scenarios.config({"x": [4]}, {"y": [4]}, parameters=parameters, more=more)
        super().__init__(folder, Scenario("sums", scenarios.python(definition), text))

    def step(self, value: float, flags: str = "", id: Any = 7, **how: Any) -> Any:  # noqa: A002
        row = np.full((1, 4), value, dtype=np.float32)
        return self.request({"x": row}, turn=Turn(id, "s" in flags, "e" in flags), **how)

    def run(self, *requests: Any) -> list[Any]:
        """Return the first value of each response, or the code of its error."""
        return [_first(response) for (response,) in self.send(*requests)]


def _first(response: Any) -> Any:
    if response.error() is not None:
        return response.error().code()
    (y,) = response.output_tensors()
    return float(y.as_numpy()[0, 0])


def bad(flags: str) -> Any:
    return unreadable(turn=Turn(7, "s" in flags, "e" in flags))


@pytest.mark.parametrize(
    ("flags", "after"), [("", 12), ("s", 7), ("e", TritonError.INVALID_ARG), ("se", 3)]
)
def test_a_request_that_cannot_be_read(flags: str, after: float, tmp_path: Path) -> None:
    """It still begins or ends its sequence."""
    loaded = Loaded(tmp_path)
    assert loaded.run(loaded.step(5, "s")) == [5]
    assert loaded.run(bad(flags)) == [TritonError.INVALID_ARG]
    if flags == "se":
        assert loaded.run(loaded.step(7)) == [TritonError.INVALID_ARG]
    again = loaded.step(3, "s") if flags == "se" else loaded.step(7)
    assert loaded.run(again) == [after]


def test_a_step_of_a_sequence_whose_id_is_not_utf_8_is_refused_alone(tmp_path: Path) -> None:
    loaded = Loaded(tmp_path)
    steps = loaded.step(1, "s", id="\udcff"), loaded.step(2, "s")
    assert loaded.run(*steps) == [TritonError.INVALID_ARG, 2]


def test_a_cancelled_step_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step needs its state. Live sequences are a metric."""
    monkeypatch.setattr(answering, "CHECK_CANCELLED_S", -1)  # batches take long
    monkeypatch.setattr(metrics, "_SECONDS", 0.01)
    loaded = Loaded(tmp_path)
    (metric,) = MetricFamily.made["pytorch_py_sequences"]
    loaded.run(loaded.step(1, "s"))
    until(lambda: metric.value() == 1)
    loaded.run(loaded.step(1, cancelled=True))
    assert loaded.run(loaded.step(1, "e")) == [3]
    until(lambda: metric.value() == 0)


def test_states_of_requests_are_not_read(tmp_path: Path) -> None:
    """Triton's memory for a state is uninitialized, and may not even be valid strings."""
    loaded = Loaded(tmp_path)
    x, total = loaded.step(1, "s").inputs()
    (state,) = unreadable(name=total.name()).inputs()
    assert loaded.run(fake_triton.InferenceRequest([x, state], turn=Turn(7, True, False))) == [1]


_SLOTS = scenarios.sequencing(
    strategy="direct { }",
    controls=scenarios.control("START", "START", "fp32_false_true: [0, 1]")
    + scenarios.control("READY", "READY", "fp32_false_true: [0, 1]")
    + scenarios.control("END", "END", "int32_false_true: [0, 1]"),
)


def test_slots(tmp_path: Path) -> None:
    """Without states all slots are run, with zeros for empty ones; or none if one is refused."""
    loaded = Loaded(tmp_path, models.Slots, _SLOTS)

    def send(flags: str, *steps: tuple[int, float]) -> list[Any]:
        return loaded.run(*(loaded.step(value, flags, id=name) for name, value in steps))

    assert send("s", (5, 1), (6, 10), (7, 5)) == [1, 10, 5]
    assert send("", (0, np.nan), (6, 10)) == [1, 20]
    refused, others = TritonError.INVALID_ARG, TritonError.UNAVAILABLE
    for flags in ("", "s"):
        batch = loaded.step(1, id=5), bad(flags), loaded.step(1, id=7)
        assert loaded.run(*batch) == [others, refused, others]
    # What was not run is sent again: a row less would have shifted the slots.
    assert send("", (5, 1), (6, 10), (7, 5)) == [2, 30, 10]


@pytest.mark.parametrize("mode", ["true", "false"])
def test_compiled_graphs_serve_requests(mode: str, tmp_path: Path) -> None:
    """The warm-up's tensors are like those of requests: nothing runs eagerly."""
    compiled = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "eager"}'}
    loaded = Loaded(tmp_path, INFERENCE_MODE=mode, **compiled)
    for flags in ("s", "", "e"):
        for rows in (1, 3):
            loaded.run(*(loaded.step(1, flags, id=rows * 10 + row) for row in range(rows)))
    assert fake_triton.Logger.lines == []
