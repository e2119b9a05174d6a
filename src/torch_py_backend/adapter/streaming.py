"""Answer requests of a decoupled model with streams of responses, driven by a thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from torch_py_backend import values
from torch_py_backend.adapter import logs, messages
from torch_py_backend.adapter.messages import Request
from torch_py_backend.engine import runtime
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.profiling import Profiler
from torch_py_backend.engine.streams import Streams
from torch_py_backend.engine.tracing import TraceContexts
from torch_py_backend.errors import (
    BackendError,
    CancelledError,
    OutputError,
    UnavailableError,
    summarize,
)
from torch_py_backend.pipeline.failures import reported
from torch_py_backend.pipeline.run import OK
from torch_py_backend.values import Item, Value

log = logging.getLogger(__name__)

# How long `close` waits for the thread.
_SECONDS_TO_END = 10.0
# The interval of polls for clients that have gone.
_POLL_S = 0.1
# A query takes 26 microseconds. At this interval for each live stream, all take a twentieth of the
# time.
_POLL_OF_EACH_S = 20 * 26e-6


class Streaming:
    """Answers the requests of one instance with streams of responses.

    Only the thread of the streams uses the engine, its failures and its counts.

    Attributes:
        streams: the live streams.

    Args:
        on_fatal: called with the reason when the process cannot use its device any more.
        on_idle: called whenever none of the model's code runs any more.
        contexts: carries trace contexts to the model's code; None: requests have no traces.
        profiler: profiles the first calls of the model's code; None: they are not profiled.
    """

    def __init__(
        self,
        engine: Engine,
        on_fatal: Callable[[str], None],
        on_idle: Callable[[], None],
        contexts: TraceContexts | None = None,
        profiler: Profiler | None = None,
    ) -> None:
        self.engine = engine
        self.on_fatal = on_fatal
        self._profiler = profiler
        self._read: messages.Read = messages.read_kept
        if contexts is not None:
            self._read = messages.traced(self._read, contexts.carry, kept=True)
        # While `start` waits for it, Triton queues requests or sends them to other instances.
        self._slots = threading.BoundedSemaphore(engine.config.options.max_streams)
        self.streams = Streams(engine, on_idle, profiler)
        self._tasks: dict[_Client, Any] = {}
        self._closed = False
        self._loop = asyncio.new_event_loop()
        # The thread count is thread-local: a new thread starts with torch's default.
        self._thread = threading.Thread(
            target=self._drive, args=(torch.get_num_threads(),), name="streams", daemon=True
        )
        self._thread.start()

    def start(self, requests: Sequence[Request]) -> None:
        """Start a stream for each request; wait while there are too many."""
        for request in requests:
            client = _Client(self, request)
            try:
                (item,) = self._read((request,))
            except Exception as error:  # from Triton's utilities, or because of a lost device
                self._loop.call_soon_threadsafe(self._refuse, error, client)
                continue
            self._slots.acquire()
            with values.trace_context((item,)):  # which the stream's task keeps
                asyncio.run_coroutine_threadsafe(self._serve(item, client), self._loop)

    def close(self) -> None:
        """End the live streams with an error, in bounded time. May be called twice."""
        self._closed = True
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop is closing already
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_SECONDS_TO_END)

    # --- in the thread of the streams --------------------------------------------------------

    def _drive(self, threads: int) -> None:
        """Run streams until `close`."""
        torch.set_num_threads(threads)
        runtime.make_current(self.engine.device)
        profiled = self._profiler.running() if self._profiler else contextlib.nullcontext()
        with runtime.mode(self.engine.config.options), profiled:
            polling = self._loop.create_task(self._poll())
            while not self._closed:
                # asyncio lets them through, from a task that the model has started.
                with contextlib.suppress(KeyboardInterrupt, SystemExit):
                    self._loop.run_forever()
            polling.cancel()
            self._loop.run_until_complete(self._finish())
        self._loop.close()

    def _refuse(self, error: Exception, client: _Client) -> None:
        client.end(self.engine.failures.unreadable(error))

    async def _serve(self, item: Item, client: _Client) -> None:
        self._tasks[client] = asyncio.current_task()
        error: BackendError | None = None
        try:
            async with contextlib.aclosing(self.streams.outcomes(item)) as outcomes:
                async for outcome, last in outcomes:
                    if client.refusal is not None:  # the model may have swallowed the cancellation
                        break
                    if outcome is not None:
                        client.send(outcome, last=last)
        except BaseException as raised:
            error = self.streams.error(raised)
        del self._tasks[client]
        self._slots.release()
        if not client.ended:
            client.end(client.refusal or error)

    async def _poll(self) -> None:
        """Cancel the streams of clients that have gone."""
        while True:
            await asyncio.sleep(max(_POLL_S, _POLL_OF_EACH_S * len(self._tasks)))
            for client in list(self._tasks):
                with contextlib.suppress(pb_utils.TritonModelException):  # the others are polled
                    if client.has_left():
                        client.refusal = CancelledError("in mid-stream")
                        self._tasks[client].cancel()

    async def _finish(self) -> None:
        """End the streams, and the tasks that the model has started."""
        await asyncio.sleep(0)  # a task that is cancelled before it begins would never run
        unloaded = "the model is unloaded in mid-stream"
        for client in self._tasks:
            client.refusal = reported(UnavailableError(unloaded, cure="Retry later."))
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


class _Client:
    """The client of one request, which gets its responses.

    Attributes:
        refusal: why its stream was cancelled; None: it was not.
        ended: whether it got its final response.
    """

    def __init__(self, streaming: Streaming, request: Request) -> None:
        self.refusal: BackendError | None = None
        self.ended = False
        self._streaming, self._engine = streaming, streaming.engine
        self._sender = request.get_response_sender()
        self._name = messages.request_id(request)

    def has_left(self) -> bool:
        """Query Triton whether the client has gone.

        After the final response, the query would read memory that Triton has freed: 24.10 dies.
        """
        logs.end_if_orphaned()
        if self.ended or self.refusal is not None:
            return False
        return bool(self._sender.is_cancelled())

    def send(self, outcome: dict[str, Value], *, last: bool) -> None:
        """Send a response."""
        logs.end_if_orphaned()
        try:
            response = messages.write(outcome, self._engine.config.name)
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL * last)
        except Exception as error:
            raise OutputError(f"the outputs cannot be sent: {summarize(error)}") from error
        self.ended = last
        self._engine.counts.responses += 1
        if last:
            self._engine.counts.count_requests(OK)

    def end(self, error: BackendError | None) -> None:
        """End the stream for the client; log the error."""
        logs.end_if_orphaned()
        self.ended = True
        send = self._sender.send
        if error is not None:
            send = partial(send, messages.write(error, self._engine.config.name))
        self._engine.counts.count_requests(OK if error is None else error.code)
        with contextlib.suppress(Exception):  # Triton has closed its side
            send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        if error is not None and error.reported:
            request = f" (request {self._name})" if self._name else ""
            text = f"\n{error.traceback}" if error.traceback else ""
            log.error("%s%s%s", error, request, text)
        if self._engine.failures.fatal is not None:
            self._streaming.on_fatal(self._engine.failures.reason)
