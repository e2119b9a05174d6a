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
from children import until
from instances import Served, check_refusal, ended, logged, lose_device
from scenarios import Scenario
from streamed import Stream, Streamed

from torch_py_backend.adapter import streaming
from torch_py_backend.engine import runtime

pytestmark = pytest.mark.usefixtures("process")

_SECONDS = 30


def _check(stream: Stream, responses: list[Any]) -> None:
    stream.check([*map(_received, responses)])
    if stream.error is not None:
        check_refusal(responses[-1].error(), stream.error)


def _received(response: Any) -> Any:
    if response.error() is not None:
        return response.error().message()
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


@pytest.mark.parametrize("entry", streamed.TABLE, ids=lambda entry: entry.scenario.name)
@pytest.mark.usefixtures("no_collector")
def test_streams_of_the_table_alone_and_together_free_their_inputs(
    entry: Streamed, tmp_path: Path
) -> None:
    served = Served(tmp_path, entry.scenario)
    for stream in entry.streams:
        request = served.request(stream.inputs)
        inputs = _inputs(request)
        _check(stream, served.send(request)[0])
        del request
        until(partial(_free, inputs))
    streams = entry.streams * 4
    together = served.send(*(served.request(stream.inputs) for stream in streams))
    for stream, responses in zip(streams, together, strict=True):
        _check(stream, responses)


def _inputs(request: Any) -> list[Callable[[], object]]:
    """Return weak references to the memory of a request's numbers."""
    arrays = [tensor.as_numpy() for tensor in request.inputs()]
    return [weakref.ref(array) for array in arrays if array.dtype != object]


def _free(inputs: list[Callable[[], object]]) -> bool:
    return all(tensor() is None for tensor in inputs)


def _model(text: str, **parameters: str) -> Scenario:
    more = "".join(scenarios.option(*parameter) for parameter in parameters.items())
    config = streamed.config({"x": "FP32"}, {"y": "FP32"})
    return Scenario("endless", scenarios.text(text), config + more)


_ENDLESS = "def forward(x):\n    while True:\n        yield x\n"


def _request(served: Served, value: float = 1) -> Any:
    return served.request({"x": streamed.floats(value)}, "\udcff")  # not UTF-8


def _sent(served: Served, value: float = 1) -> Any:
    """Return a request whose stream has begun."""
    request = _request(served, value)
    served.model.execute([request])
    until(lambda: request.sender.responses)
    return request


def _left(*requests: Any) -> list[Any]:
    """Cancel streams; return their last errors."""
    for request in requests:
        request.sender.cancelled = True
    return [ended(request)[-1].error() for request in requests]


def _last(served: Served, value: float) -> Any:
    """Return the last response to a request."""
    return served.send(_request(served, value))[0][-1]


def _live() -> float:
    (metric,) = fake_triton.MetricFamily.made["pytorch_py_live_streams"]
    return metric.value()


_WAITS = "await asyncio.sleep(3600 * (x > 1))"
_SWALLOWS = f"""
        while True:
            yield x
            with contextlib.suppress(asyncio.CancelledError):
                {_WAITS}
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
    served = Served(tmp_path, _model(f"import asyncio, contextlib, pathlib\n\n\n{body}{touch}"))
    closed.unlink()  # of the warm-up
    request = _sent(served, 2)
    inputs = _inputs(request)
    (error,) = _left(request)
    assert error.code() == fake_triton.TritonError.CANCELLED
    assert "cancelled in mid-stream" in error.message()
    assert closed.exists()
    del request  # and its responses, which are the input itself
    until(partial(_free, inputs))


def test_a_stream_that_has_ended_is_not_checked(tmp_path: Path) -> None:
    """A query of Triton between the end of a stream and of its task would end the server."""
    served = Served(tmp_path, _model(_ENDLESS))
    start: Any = served.model._answer
    for responds in (True, False):
        client = streaming._Client(served.model._engine, _request(served))
        if responds:
            client.send({}, last=True)
        else:
            client.end(None)
        with mock.patch.dict(start.__self__.live, {client: None}):
            start.__self__._watch()


def test_an_unexpected_exception_ends_a_stream_and_releases_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With a code and a text that Triton does not take.
    raises = "raise torch_py_backend.errors.CallError('other', chr(int(x)), code='OF_NO_SERVER')"
    text = f"def forward(x):\n    yield x\n    if x > 1:\n        {raises}\n"
    served = Served(tmp_path, _model(f"import torch_py_backend.errors\n{text}", MAX_STREAMS="1"))
    for value in (2, 0xD800, 1, 2):
        error = _last(served, value).error()
        assert error.code() == fake_triton.TritonError.INTERNAL
        if value > 2:
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
    request = _request(served)
    refusals = [None] * (place - 1) + [fake_triton.TritonModelException("no room"), None]
    request.sender.arrived = mock.Mock(side_effect=refusals)
    last = served.send(request)[0][-1].error().message()
    assert "the outputs cannot be sent: TritonModelException: no room" in last


def test_the_number_of_streams_is_limited(tmp_path: Path) -> None:
    """execute() waits."""
    served = Served(tmp_path, _model(_ENDLESS, MAX_STREAMS="2"))
    first, second, left, last = (_request(served) for _ in range(4))
    served.model.execute([first, second])
    waiting = threading.Thread(target=served.model.execute, args=([left, last],))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    _, error = _left(first, left)
    waiting.join(_SECONDS)
    assert error.code() == fake_triton.TritonError.CANCELLED
    until(lambda: last.sender.responses)
    _left(second, last)


def test_a_stream_that_waits_is_idle_and_one_that_blocks_is_busy(tmp_path: Path) -> None:
    """EXECUTION_TIMEOUT_MS limits what blocks."""
    free = tmp_path / "free"
    blocks = f"while x > 2 and not os.path.exists({str(free)!r}):\n        pass\n"
    code = f"async def forward(x):\n    yield x\n    {blocks}    {_WAITS}\n"
    served = Served(tmp_path, _model(f"import asyncio, os\n\n\n{code}"))
    status, clients = served.model._status, [_sent(served, 2)]
    until(lambda: status.running_seconds() == 0)
    clients.append(_request(served, 3))
    served.model.execute(clients[1:])
    until(lambda: status.running_seconds() > 3 * streaming._POLL_S)
    free.touch()
    until(lambda: status.running_seconds() == 0)
    _left(*clients)


@pytest.mark.parametrize("begun", [True, False])
def test_the_end_of_an_instance_ends_its_streams_with_503(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if their thread, which begins with the instance's device, has not begun."""
    closing, prepared = threading.Event(), []

    def begin(device: torch.device) -> None:
        if threading.current_thread().name == "streams":
            prepared.append(device.type)
            assert begun or closing.wait(_SECONDS)

    monkeypatch.setattr(runtime, "make_current", begin)
    served = Served(tmp_path, _model(_ENDLESS))
    streams: Any = served.model._answer
    request = _request(served)
    served.model.execute([request])
    if begun:
        until(lambda: request.sender.responses)
    threading.Timer(0.2, closing.set).start()
    served.model.finalize()
    assert request.sender.ended.is_set()
    error = request.sender.responses[-1].error()
    assert error.code() == fake_triton.TritonError.UNAVAILABLE
    assert "unloaded in mid-stream" in error.message()
    assert prepared == ["cpu"]
    assert _live() == 0
    assert not streams.__self__._thread.is_alive()
    assert streams.__self__._loop.is_closed()


_TICKER = next(entry for entry in streamed.TABLE if entry.scenario.name == "ticker")


def test_a_request_that_cannot_be_read_is_refused_alone_and_the_log_names_one_that_failed(
    tmp_path: Path,
) -> None:
    served = Served(tmp_path, _TICKER.scenario)
    good, bad = (served.request(_TICKER.streams[0].inputs) for _ in range(2))
    bad.inputs = lambda: 1 / 0
    failing = served.request(_TICKER.streams[-1].inputs, "number-9")
    refused, answered, _ = served.send(bad, good, failing)
    assert refused[0].error().code() == fake_triton.TritonError.INVALID_ARG
    _check(_TICKER.streams[0], answered)
    until(logged)
    (text,) = logged()
    assert "(requests number-9)" in text
    assert "Traceback" in text


def test_a_fatal_error_ends_live_and_new_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def forward(x):\n    while True:\n        assert x < 2\n        yield x\n"
    served = Served(tmp_path, _model(text))
    living = _sent(served)
    lose_device(monkeypatch)
    for response in (_last(served, 2), ended(living)[-1]):
        assert response.error().code() == fake_triton.TritonError.UNAVAILABLE
    assert "fatal error" in _last(served, 1).error().message()
    assert served.model._engine.failures.fatal is not None
    assert not served.model.is_ready()
    (poisoned,) = fake_triton.MetricFamily.made["pytorch_py_poisoned"]
    until(lambda: poisoned.value() == 1)


_EXITS = """import asyncio, sys

queue = asyncio.Queue()

async def forward(x):
    yield x
    loop = asyncio.get_running_loop()
    if x > 1:
        loop.call_soon(sys.exit, 3)
    loop.call_later(0.01, queue.put_nowait, x)
    yield await queue.get()
"""


def test_a_model_with_a_queue_and_a_system_exit_has_its_streams(tmp_path: Path) -> None:
    served = Served(tmp_path, _model(_EXITS))
    for _ in range(2):
        (responses,) = served.send(_request(served, 2))
        assert [response.error() for response in responses] == [None, None]
