"""Answer requests of a decoupled model with streams of responses, driven by a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from torch_py_backend import values
from torch_py_backend.adapter import logs, messages
from torch_py_backend.adapter.messages import Request, Requests
from torch_py_backend.engine import runtime
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.streams import Response, Streams
from torch_py_backend.errors import (
    BackendError,
    CancelledError,
    OutputError,
    UnavailableError,
    summarize,
)
from torch_py_backend.pipeline.failures import reported
from torch_py_backend.pipeline.run import OK, Entry
from torch_py_backend.processes.instance_status import InstanceStatus

_POLL_S = 0.1  # between queries whether clients have gone


class Streaming:
    """Answers the requests of one instance in a thread, which calls the model and counts."""

    def __init__(self, engine: Engine, status: InstanceStatus) -> None:
        self._engine = engine
        self._read = messages.reader(engine)
        self._slots = threading.BoundedSemaphore(engine.config.options.max_streams)
        self._streams = Streams(engine)
        self.live: dict[_Client, Any] = {}  # the tasks of the live streams
        engine.selector.status = status
        self._loop = engine.loop
        # The thread count is thread-local: a new thread starts with torch's default.
        self._thread = threading.Thread(
            target=self._drive, args=(torch.get_num_threads(),), name="streams", daemon=True
        )
        self._thread.start()

    def start(self, requests: Requests) -> None:
        """Start a stream for each request; while there are too many, wait and let Triton queue."""
        for request, entry in zip(requests, self._read(requests), strict=True):
            self._slots.acquire()
            stream = self._serve(entry, _Client(self._engine, request))
            with values.trace_context((entry,)):  # which the stream's task keeps
                asyncio.run_coroutine_threadsafe(stream, self._loop)

    def close(self) -> None:
        """End the live streams with an error, in bounded time."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10.0)

    def _drive(self, threads: int) -> None:
        """Run streams until `close`."""
        torch.set_num_threads(threads)
        runtime.make_current(self._engine.device)
        self._loop.call_soon(self._watch)
        with runtime.mode(self._engine.config.options):
            while True:
                # asyncio lets them through, from a task that the model has started.
                with contextlib.suppress(KeyboardInterrupt, SystemExit):
                    self._loop.run_forever()
                    break
            self._loop.run_until_complete(self._finish())
        self._loop.close()

    async def _serve(self, entry: Entry, client: _Client) -> None:
        self.live[client] = asyncio.current_task()
        error = await self._streams.run(entry, client.send)
        del self.live[client]
        self._slots.release()
        client.end(client.refusal or error)

    def _watch(self) -> None:
        """Cancel the streams of clients that have gone; look again later."""
        logs.end_if_orphaned()
        # A query takes 26 microseconds: those of all streams take a twentieth of the time.
        self._loop.call_later(max(_POLL_S, len(self.live) / 2000), self._watch)
        for client, task in self.live.items():
            # After the final response, a query reads memory that Triton has freed: 24.10 dies.
            with contextlib.suppress(pb_utils.TritonModelException):
                if not (client.ended or client.refusal) and client.sender.is_cancelled():
                    client.refusal = CancelledError("the request was cancelled in mid-stream")
                    task.cancel()

    async def _finish(self) -> None:
        """End the streams, and the tasks that the model has started."""
        unloaded = "the model is unloaded in mid-stream"
        for client in self.live:
            client.refusal = reported(UnavailableError(unloaded, cure="Retry later."))
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class _Client:
    """The client of one request, which gets its responses.

    `refusal` is why its stream was cancelled; None: it was not.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._name = messages.request_id(request)
        self.sender = request.get_response_sender()
        self.refusal: BackendError | None = None
        self.ended = False

    def send(self, response: Response, last: bool) -> bool:  # noqa: FBT001
        """Send a response; return whether the client takes more."""
        if self.refusal is not None:  # the model has swallowed the cancellation
            return False
        try:
            self._send(response, last)
        except Exception as error:
            raise OutputError(f"the outputs cannot be sent: {summarize(error)}") from error
        self.ended = last
        self._engine.counts.stream_responses += 1
        return True

    def end(self, error: BackendError | None) -> None:
        """Send the final response, unless the last one was it; log the error."""
        if not self.ended:
            self.ended = True
            for result in (error, OutputError("the error cannot be sent")):
                with contextlib.suppress(Exception):  # Triton has closed its side
                    self._send(result, True)  # noqa: FBT003
                    break
        self._engine.counts.count_requests(OK if error is None else error.code)
        if error is not None:
            logs.report([(error, self._name)])

    def _send(self, result: Response | BackendError | None, last: bool) -> None:  # noqa: FBT001
        logs.end_if_orphaned()
        response = messages.write(result, self._engine.config.name)
        self.sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL * last)
