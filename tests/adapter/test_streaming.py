"""The adapter of decoupled models: requests and streams of responses."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fake_triton
import pytest
import scenarios
import streamed
from scenarios import Refused, Scenario, assert_close
from streamed import Stream, Streamed

from torch_py_backend.adapter import TritonPythonModel, metrics, streaming

_SECONDS = 30
_STATUS = {
    fake_triton.TritonError.INTERNAL: 500,
    fake_triton.TritonError.INVALID_ARG: 400,
    fake_triton.TritonError.UNAVAILABLE: 503,
}


class _Served:
    """A model loaded through the adapter."""

    def __init__(self, folder: Path, scenario: Scenario) -> None:
        self.model = TritonPythonModel()
        given = fake_triton.completed(self.model, fake_triton.arguments(scenario.lay_out(folder)))
        self.model.initialize(given)
        self.document = json.loads(given["model_config"])

    def request(self, inputs: dict[str, Any], name: str = "") -> Any:
        return fake_triton.request(inputs, self.document, name)

    def start(self, *requests: Any) -> None:
        assert self.model.execute(list(requests)) is None


def _ended(request: Any) -> list[Any]:
    assert request.sender.ended.wait(_SECONDS)
    responses: list[Any] = request.sender.responses
    return responses


def _check(stream: Stream, responses: list[Any]) -> None:
    if stream.error is not None:
        _check_error(stream.error, responses.pop())
    assert len(responses) == len(stream.responses)
    for response, expected in zip(responses, stream.responses, strict=True):
        assert response.error() is None
        tensors = {one.name(): one.as_numpy() for one in response.output_tensors()}
        assert tensors.keys() == expected.keys()
        for name, value in expected.items():
            assert tensors[name].shape == value.shape
            assert_close(tensors[name], value)


def _check_error(expected: Refused, response: Any) -> None:
    message = response.error().message()
    assert _STATUS[response.error().code()] == expected.status
    assert all(part in message for part in expected.says), message
    assert not any(part in message for part in expected.hides), message


@pytest.mark.parametrize("one", streamed.TABLE, ids=lambda one: one.scenario.name)
def test_streams(one: Streamed, tmp_path: Path, process: None) -> None:
    """Streams behave as the table says, without a server: one by one, and all at once."""
    served = _Served(tmp_path, one.scenario)
    for stream in one.streams:
        request = served.request(stream.inputs)
        served.start(request)
        _check(stream, _ended(request))
    together = [(stream, served.request(stream.inputs)) for stream in one.streams * 4]
    served.start(*(request for _, request in together))
    for stream, request in together:
        _check(stream, _ended(request))


def _inputs(request: Any) -> list[Callable[[], object]]:
    """Return weak references to the memory of a request's numbers."""
    return [
        weakref.ref(tensor.as_numpy())
        for tensor in request.inputs()
        if tensor.as_numpy().dtype != object
    ]


def _free(inputs: list[Callable[[], object]]) -> bool:
    return all(one() is None for one in inputs)


@pytest.mark.parametrize("one", streamed.TABLE, ids=lambda one: one.scenario.name)
@pytest.mark.usefixtures("process", "no_collector")
def test_no_input_outlives_its_stream(one: Streamed, tmp_path: Path) -> None:
    """The memory of a request is free when its stream has ended, also with an error."""
    served = _Served(tmp_path, one.scenario)
    for stream in one.streams:
        request = served.request(stream.inputs)
        inputs = _inputs(request)
        served.start(request)
        _ended(request)
        del request
        _until(partial(_free, inputs))


@pytest.mark.parametrize(
    "text",
    [
        "def forward(x):\n    while True:\n        yield x\n",
        (
            "import asyncio\n\n\nasync def forward(x):\n    yield x\n"
            "    await asyncio.sleep(3600 * (x > 1))\n"
        ),
    ],
    ids=["generates", "waits"],
)
@pytest.mark.usefixtures("process", "no_collector")
def test_no_input_outlives_a_cancelled_stream(tmp_path: Path, text: str) -> None:
    """The memory of a request is free when its client has gone."""
    served = _Served(tmp_path, _model(text))
    request = served.request({"x": streamed.floats(2)})
    inputs, sender = _inputs(request), request.sender
    served.start(request)
    del request
    _until(partial(getattr, sender, "responses"))
    sender.cancelled = True
    assert sender.ended.wait(_SECONDS)
    del sender  # it keeps the responses, which are the input itself
    _until(partial(_free, inputs))


@pytest.mark.parametrize("scenario", streamed.REFUSED, ids=lambda one: one.name)
def test_refusals(scenario: Scenario, tmp_path: Path, process: None) -> None:
    """A model that cannot be served as a stream fails the load with the reason."""
    with pytest.raises(fake_triton.TritonModelException) as refusal:
        _Served(tmp_path, scenario)
    for part in scenario.load_error:
        assert part in str(refusal.value)


def _model(text: str, more: str = "") -> Scenario:
    config = streamed.config({"x": "FP32"}, {"y": "FP32"})
    return Scenario("endless", scenarios.text(text), config + more)


_ENDLESS = "def forward(x):\n    while True:\n        yield x\n"
_X = {"x": streamed.floats(1)}


def _parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def _live() -> float:
    (metric,) = fake_triton.MetricFamily.made["pytorch_py_live_streams"]
    return metric.value()


def test_a_client_that_leaves(tmp_path: Path, process: None) -> None:
    """After a cancellation the generator is closed and the client gets CANCELLED."""
    closed = tmp_path / "closed"
    served = _Served(
        tmp_path,
        _model(
            "import pathlib\n\n\ndef forward(x):\n    try:\n        while True:\n"
            f"            yield x\n    finally:\n        pathlib.Path({str(closed)!r}).touch()\n"
        ),
    )
    closed.unlink()  # of the warm-up
    request = served.request(_X)
    _leave_after(request, 5)
    served.start(request)
    assert _ended(request)[-1].error().code() == fake_triton.TritonError.CANCELLED
    assert "cancelled in mid-stream" in request.sender.responses[-1].error().message()
    assert closed.exists()


def _leave_after(request: Any, responses: int) -> None:
    def arrived(count: int) -> None:
        request.sender.cancelled = count >= responses

    request.sender.arrived = arrived


def test_a_client_that_leaves_while_its_stream_waits(tmp_path: Path, process: None) -> None:
    """A stream that awaits is cancelled when its client has gone, and cleans up."""
    closed = tmp_path / "closed"
    served = _Served(
        tmp_path,
        _model(
            "import asyncio\nimport pathlib\n\n\nasync def forward(x):\n    try:\n"
            "        yield x\n        await asyncio.sleep(3600 * (x > 1))\n    finally:\n"
            f"        pathlib.Path({str(closed)!r}).touch()\n"
        ),
    )
    closed.unlink()  # of the warm-up
    request = served.request({"x": streamed.floats(2)})
    served.start(request)
    _until(lambda: request.sender.responses)
    request.sender.cancelled = True
    assert _ended(request)[-1].error().code() == fake_triton.TritonError.CANCELLED
    assert closed.exists()


def test_a_client_that_leaves_before_its_stream_begins(
    tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton needs a final response for each request, also if its stream never began."""
    # The cancellation is found in the iteration of the loop that launches the stream.
    monkeypatch.setattr(streaming, "_POLL_S", 0)
    monkeypatch.setattr(streaming, "_POLLED_CHECK_S", 0)
    served = _Served(tmp_path, _model(_ENDLESS))
    living, late = served.request(_X), served.request(_X)
    served.start(living)
    _until(lambda: living.sender.responses)
    late.sender.cancelled = True
    served.start(late)
    assert _ended(late)[-1].error().code() == fake_triton.TritonError.CANCELLED
    living.sender.cancelled = True
    _ended(living)
    _until(lambda: _live() == 0)


def test_an_unexpected_exception_ends_a_stream(
    tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gets a final response, and the slot is released."""
    served = _Served(tmp_path, _model(_ENDLESS, _parameter("MAX_STREAMS", "1")))
    monkeypatch.setattr(served.model._engine, "clean", lambda: 1 / 0)
    for _ in range(2):
        request = served.request(_X)
        _leave_after(request, 3)
        served.start(request)
        error = _ended(request)[-1].error()
        assert error.code() == fake_triton.TritonError.INTERNAL
        assert "the backend raised an unexpected error" in error.message()
    _until(lambda: _live() == 0)
    assert any("ZeroDivisionError" in text for _, text in fake_triton.Logger.lines)


def test_a_task_that_raises_system_exit(tmp_path: Path, process: None) -> None:
    """A task of the model that raises SystemExit ends neither the streams nor their thread."""
    served = _Served(
        tmp_path,
        _model(
            "import asyncio\nimport sys\n\n\nasync def _leave():\n    sys.exit(3)\n\n\n"
            "async def forward(x):\n    yield x\n    if x > 1:\n"
            "        forward.task = asyncio.create_task(_leave())\n"
            "        forward.task.add_done_callback(asyncio.Task.exception)\n"
            "        await asyncio.sleep(0.01)\n        yield x\n"
        ),
    )
    for _ in range(2):
        request = served.request({"x": streamed.floats(2)})
        served.start(request)
        assert [one.error() for one in _ended(request)] == [None, None]
    warnings = [text for level, text in fake_triton.Logger.lines if level == "warn"]
    assert sum("has started raised SystemExit: 3" in text for text in warnings) == 2


def test_a_response_that_cannot_be_sent(tmp_path: Path, process: None) -> None:
    """The stream ends with Triton's error."""
    served = _Served(tmp_path, _model(_ENDLESS))
    request = served.request(_X)

    def refuse(count: int) -> None:
        if count == 3:
            raise fake_triton.TritonModelException("no room")

    request.sender.arrived = refuse
    served.start(request)
    last = _ended(request)[-1].error().message()
    assert "the outputs cannot be sent: TritonModelException: no room" in last


def test_the_number_of_streams_is_limited(
    tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With MAX_STREAMS live streams execute() waits; a stream cancelled meanwhile never begins."""
    served = _Served(tmp_path, _model(_ENDLESS, _parameter("MAX_STREAMS", "2")))
    assert served.model._streaming is not None
    room, waits = served.model._streaming._slots, threading.Event()
    acquire = room.acquire

    def acquiring(blocking: bool = True) -> bool:
        if blocking:
            waits.set()
        return acquire(blocking)

    monkeypatch.setattr(room, "acquire", acquiring)
    first, second, third, fourth = (served.request(_X) for _ in range(4))
    served.start(first, second)
    third.sender.cancelled = True
    waiting = threading.Thread(target=served.start, args=(third, fourth))
    waiting.start()
    assert waits.wait(_SECONDS)
    waiting.join(0.2)
    assert waiting.is_alive()
    assert not fourth.sender.responses
    first.sender.cancelled = True
    waiting.join(_SECONDS)
    (refused,) = _ended(third)
    assert "cancelled before it ran" in refused.error().message()
    _until(lambda: fourth.sender.responses)
    for request in (second, fourth):
        request.sender.cancelled = True
        _ended(request)


def test_the_end_of_an_instance(tmp_path: Path, process: None) -> None:
    """Streams that are live when the instance ends get an error that says so."""
    served = _Served(tmp_path, _model(_ENDLESS))
    request = served.request(_X)
    served.start(request)
    _until(lambda: request.sender.responses)
    served.model.finalize()
    assert request.sender.ended.is_set()
    error = request.sender.responses[-1].error()
    assert error.code() == fake_triton.TritonError.UNAVAILABLE
    assert "unloaded in mid-stream" in error.message()
    assert _live() == 0


def test_live_streams_are_counted(
    tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gauge has the number of live streams."""
    monkeypatch.setattr(metrics, "_SECONDS", 0.01)
    served = _Served(tmp_path, _model(_ENDLESS))
    requests = [served.request(_X) for _ in range(3)]
    served.start(*requests)
    _until(lambda: _live() == 3)
    for request in requests:
        request.sender.cancelled = True
    _until(lambda: _live() == 0)


def test_a_request_that_cannot_be_read(tmp_path: Path, process: None) -> None:
    """It is refused alone, with a final response; the other request streams."""
    (ticker,) = (one for one in streamed.TABLE if one.scenario.name == "ticker")
    served = _Served(tmp_path, ticker.scenario)
    good = served.request(ticker.streams[0].inputs)
    bad = served.request(ticker.streams[0].inputs)
    bad.inputs = lambda: 1 / 0
    served.start(bad, good)
    (refused,) = _ended(bad)
    assert refused.error().code() == fake_triton.TritonError.INVALID_ARG
    _check(ticker.streams[0], _ended(good))


def test_the_log_names_the_request(tmp_path: Path, process: None) -> None:
    """The error of a stream is logged with the request's ID and the traceback."""
    (ticker,) = (one for one in streamed.TABLE if one.scenario.name == "ticker")
    served = _Served(tmp_path, ticker.scenario)
    request = served.request(ticker.streams[-1].inputs, "number-9")
    served.start(request)
    _ended(request)
    _until(lambda: any(level == "error" for level, _ in fake_triton.Logger.lines))
    (text,) = [text for level, text in fake_triton.Logger.lines if level == "error"]
    assert "(request number-9)" in text
    assert "Traceback" in text


def test_a_fatal_error_ends_all(
    tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a fatal error live and new streams get 503, and the instance is not ready."""
    served = _Served(
        tmp_path,
        _model(
            "def forward(x):\n    while True:\n        if float(x) > 1:\n"
            "            raise RuntimeError('device gone')\n        yield x\n"
        ),
    )
    recovery = served.model._engine.recovery
    living = served.request(_X)
    served.start(living)
    _until(lambda: living.sender.responses)
    monkeypatch.setattr(
        "torch_py_backend.engine.faults.is_sticky", lambda error: "gone" in str(error)
    )
    guilty, late = served.request({"x": streamed.floats(2)}), served.request(_X)
    served.start(guilty)
    for request in (guilty, living):
        assert _ended(request)[-1].error().code() == fake_triton.TritonError.UNAVAILABLE
    served.start(late)
    (refused,) = _ended(late)
    assert "fatal error" in refused.error().message()
    assert recovery.fatal is not None
    assert not served.model.is_ready()
    (poisoned,) = fake_triton.MetricFamily.made["pytorch_py_poisoned"]
    assert poisoned.value() == 1


def _until(what: Callable[[], object]) -> None:
    deadline = threading.Event()
    for _ in range(_SECONDS * 100):
        if what():
            return
        deadline.wait(0.01)
    raise AssertionError("it did not happen")
