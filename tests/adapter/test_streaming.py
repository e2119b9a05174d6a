"""The adapter of decoupled models: requests and streams of responses."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import fake_triton
import pytest
import scenarios
import streamed
import torch
from instances import Served, check_refusal, ended, logged, lose_device, until
from scenarios import Scenario, assert_close
from streamed import Stream, Streamed

from torch_py_backend.adapter import streaming
from torch_py_backend.engine import runtime

pytestmark = pytest.mark.usefixtures("process")

_SECONDS = 30


def _check(stream: Stream, responses: list[Any]) -> None:
    if stream.error is not None:
        check_refusal(responses.pop().error(), stream.error)
    assert len(responses) == len(stream.responses)
    for response, expected in zip(responses, stream.responses, strict=True):
        assert response.error() is None
        tensors = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        assert tensors.keys() == expected.keys()
        for name, value in expected.items():
            assert tensors[name].shape == value.shape
            assert_close(tensors[name], value)


@pytest.mark.parametrize("entry", streamed.TABLE, ids=lambda entry: entry.scenario.name)
@pytest.mark.usefixtures("no_collector")
def test_streams_of_the_table_alone_and_together_free_their_inputs(
    entry: Streamed, tmp_path: Path
) -> None:
    served = Served(tmp_path, entry.scenario)
    for stream in entry.streams:
        request = served.request(stream.inputs)
        inputs = _inputs(request)
        served.model.execute([request])
        _check(stream, ended(request))
        del request
        until(partial(_free, inputs))
    together = [(stream, served.request(stream.inputs)) for stream in entry.streams * 4]
    served.model.execute([request for _, request in together])
    for stream, request in together:
        _check(stream, ended(request))


def _inputs(request: Any) -> list[Callable[[], object]]:
    """Return weak references to the memory of a request's numbers."""
    return [
        weakref.ref(tensor.as_numpy())
        for tensor in request.inputs()
        if tensor.as_numpy().dtype != object
    ]


def _free(inputs: list[Callable[[], object]]) -> bool:
    return all(tensor() is None for tensor in inputs)


@pytest.mark.parametrize("scenario", streamed.REFUSED, ids=lambda scenario: scenario.name)
def test_models_that_cannot_stream_fail_the_load(scenario: Scenario, tmp_path: Path) -> None:
    with pytest.raises(fake_triton.TritonModelException) as refusal:
        Served(tmp_path, scenario)
    for part in scenario.load_error:
        assert part in str(refusal.value)


def _model(text: str, more: str = "") -> Scenario:
    config = streamed.config({"x": "FP32"}, {"y": "FP32"})
    return Scenario("endless", scenarios.text(text), config + more)


_ENDLESS = "def forward(x):\n    while True:\n        yield x\n"
_X = {"x": streamed.floats(1)}


def _parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def _last(served: Served, value: float) -> Any:
    """Return the last response to a request."""
    return served.send(served.request({"x": streamed.floats(value)}))[0][-1]


def _live() -> float:
    (metric,) = fake_triton.MetricFamily.made["pytorch_py_live_streams"]
    return metric.value()


_WAITS = "await asyncio.sleep(3600 * (x > 1))"
_SWALLOWS = f"""
        while True:
            yield x
            try:
                {_WAITS}
            except asyncio.CancelledError:
                pass
"""


@pytest.mark.parametrize(
    "body",
    [
        "def forward(x):\n    try:\n        while True:\n            yield x\n",
        f"async def forward(x):\n    try:\n        yield x\n        {_WAITS}\n",
        f"async def forward(x):\n    try:{_SWALLOWS}",
    ],
    ids=["generates", "waits", "swallows the cancellation"],
)
@pytest.mark.usefixtures("no_collector")
def test_the_stream_of_a_client_that_leaves_is_closed_and_its_memory_free(
    body: str, tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    touch = f"    finally:\n        pathlib.Path({str(closed)!r}).touch()\n"
    served = Served(tmp_path, _model("import asyncio\nimport pathlib\n\n\n" + body + touch))
    closed.unlink()  # of the warm-up
    request = served.request({"x": streamed.floats(2)})
    inputs, sender = _inputs(request), request.sender
    served.model.execute([request])
    del request
    until(lambda: sender.responses)
    sender.cancelled = True
    assert sender.ended.wait(_SECONDS)
    error = sender.responses[-1].error()
    assert error.code() == fake_triton.TritonError.CANCELLED
    assert "cancelled in mid-stream" in error.message()
    assert closed.exists()
    sender.responses.clear()  # which are the input itself
    until(partial(_free, inputs))


def test_a_stream_that_has_ended_is_not_checked(tmp_path: Path) -> None:
    """A poll between the end of a stream and of its task does not query Triton, which would die."""
    served = Served(tmp_path, _model(_ENDLESS))
    start: Any = served.model._answer
    for responds in (True, False):
        client = streaming._Client(served.model._engine, served.request(_X))
        if responds:
            client.send({}, last=True)
        else:
            client.end(None)
        with mock.patch.dict(start.__self__.live, {client: None}):
            start.__self__._watch()


def test_an_unexpected_exception_ends_a_stream_and_releases_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "from torch_py_backend.errors import CallError\n\n\ndef forward(x):\n    yield x\n"
        "    if x > 1:\n        raise CallError('other', 'no', code='OF_NO_SERVER')\n"
    )
    served = Served(tmp_path, _model(text, _parameter("MAX_STREAMS", "1")))
    for value in (2, 1, 2):
        error = _last(served, value).error()
        assert error.code() == fake_triton.TritonError.INTERNAL
        monkeypatch.setattr(served.model._engine, "clean", lambda: 1 / 0)
    until(lambda: _live() == 0)
    assert "ZeroDivisionError" in logged()[-1]


@pytest.mark.parametrize(
    ("body", "place"),
    [(_ENDLESS, 3), ("def forward(x):\n    return x\n", 1)],
    ids=["one of many", "the last"],
)
def test_a_response_that_cannot_be_sent_ends_the_stream(
    body: str, place: int, tmp_path: Path
) -> None:
    served = Served(tmp_path, _model(body))
    request = served.request(_X)

    def refuse(count: int) -> None:
        if count == place:
            raise fake_triton.TritonModelException("no room")

    request.sender.arrived = refuse
    last = served.send(request)[0][-1].error().message()
    assert "the outputs cannot be sent: TritonModelException: no room" in last


def test_the_number_of_streams_is_limited(tmp_path: Path) -> None:
    """execute() waits."""
    served = Served(tmp_path, _model(_ENDLESS, _parameter("MAX_STREAMS", "2")))
    first, second, left, last = (served.request(_X) for _ in range(4))
    served.model.execute([first, second])
    waiting = threading.Thread(target=served.model.execute, args=([left, last],))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    left.sender.cancelled = first.sender.cancelled = True
    waiting.join(_SECONDS)
    assert ended(left)[-1].error().code() == fake_triton.TritonError.CANCELLED
    until(lambda: last.sender.responses)
    for request in (second, last):
        request.sender.cancelled = True
        ended(request)


def test_a_stream_that_waits_is_idle_and_one_that_blocks_is_busy(tmp_path: Path) -> None:
    """EXECUTION_TIMEOUT_MS limits what blocks."""
    free = tmp_path / "free"
    code = (
        "import asyncio\nimport os\n\n\nasync def forward(x):\n    yield x\n"
        f"    while x > 2 and not os.path.exists({str(free)!r}):\n        pass\n    {_WAITS}\n"
    )
    served = Served(tmp_path, _model(code))
    status, clients = served.model._status, [served.request({"x": streamed.floats(2)})]
    served.model.execute(clients)
    until(lambda: clients[0].sender.responses)
    until(lambda: status.running_seconds() == 0)
    clients.append(served.request({"x": streamed.floats(3)}))
    served.model.execute(clients[1:])
    until(lambda: status.running_seconds() > 3 * streaming._POLL_S)
    free.touch()
    until(lambda: status.running_seconds() == 0)
    for client in clients:
        client.sender.cancelled = True
        ended(client)


def test_the_end_of_an_instance_ends_its_streams_with_503(tmp_path: Path) -> None:
    served = Served(tmp_path, _model(_ENDLESS))
    request = served.request(_X)
    served.model.execute([request])
    until(lambda: request.sender.responses)
    served.model.finalize()
    assert request.sender.ended.is_set()
    error = request.sender.responses[-1].error()
    assert error.code() == fake_triton.TritonError.UNAVAILABLE
    assert "unloaded in mid-stream" in error.message()
    assert _live() == 0


def test_the_end_of_an_instance_whose_thread_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request before it has begun is answered. The thread begins with the instance's device."""
    closing, prepared = threading.Event(), []

    def begin_late(device: torch.device) -> None:
        if threading.current_thread().name == "streams":
            prepared.append(device.type)
            closing.wait(_SECONDS)

    monkeypatch.setattr(runtime, "make_current", begin_late)
    served = Served(tmp_path, _model(_ENDLESS))
    start: Any = served.model._answer
    streams = start.__self__
    request = served.request(_X)
    served.model.execute([request])
    threading.Timer(0.2, closing.set).start()
    served.model.finalize()
    assert request.sender.ended.is_set()
    assert prepared == ["cpu"]
    assert not streams._thread.is_alive()
    assert streams._loop.is_closed()


_TICKER = next(entry for entry in streamed.TABLE if entry.scenario.name == "ticker")


def test_a_request_that_cannot_be_read_is_refused_alone(tmp_path: Path) -> None:
    served = Served(tmp_path, _TICKER.scenario)
    good, bad = (served.request(_TICKER.streams[0].inputs) for _ in range(2))
    bad.inputs = lambda: 1 / 0
    served.model.execute([bad, good])
    (refused,) = ended(bad)
    assert refused.error().code() == fake_triton.TritonError.INVALID_ARG
    _check(_TICKER.streams[0], ended(good))


def test_the_log_names_the_request(tmp_path: Path) -> None:
    served = Served(tmp_path, _TICKER.scenario)
    served.send(served.request(_TICKER.streams[-1].inputs, "number-9"))
    until(logged)
    (text,) = logged()
    assert "(requests number-9)" in text
    assert "Traceback" in text


def test_a_fatal_error_ends_live_and_new_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(
        tmp_path,
        _model(
            "def forward(x):\n    while True:\n        if float(x) > 1:\n"
            "            raise RuntimeError('device gone')\n        yield x\n"
        ),
    )
    failures = served.model._engine.failures
    living = served.request(_X)
    served.model.execute([living])
    until(lambda: living.sender.responses)
    lose_device(monkeypatch)
    for response in (_last(served, 2), ended(living)[-1]):
        assert response.error().code() == fake_triton.TritonError.UNAVAILABLE
    assert "fatal error" in _last(served, 1).error().message()
    assert failures.fatal is not None
    assert not served.model.is_ready()
    (poisoned,) = fake_triton.MetricFamily.made["pytorch_py_poisoned"]
    until(lambda: poisoned.value() == 1)


def test_a_task_that_raises_system_exit_ends_no_stream(tmp_path: Path) -> None:
    served = Served(
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
        (responses,) = served.send(served.request({"x": streamed.floats(2)}))
        assert [response.error() for response in responses] == [None, None]
