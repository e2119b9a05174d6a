"""Requests of a decoupled model: each becomes a stream of responses, driven by a thread of ours.

Imported when an instance starts, not before: it needs torch, and Triton's utilities complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from torch_py_backend.adapter import messages
from torch_py_backend.batching import runtime
from torch_py_backend.batching.gather_scatter import Item, Value
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import (
    BackendError,
    CancelledError,
    InputError,
    InternalError,
    OutputError,
    brief,
)
from torch_py_backend.observability.metric_families import OK
from torch_py_backend.observability.tracing import Tracing
from torch_py_backend.streaming.streams import Streams

log = logging.getLogger(__name__)

# To ask Triton whether a request was cancelled takes 26 microseconds. Each live stream is asked so
# rarely that all together cost a twentieth of the time.
_BETWEEN_ASKS_S = 20 * 26e-6
# How long an instance that ends waits for what its streams still do.
_SECONDS_TO_END = 10.0
_BETWEEN_ROUNDS_S = 0.1
# When a stream is asked that has not come back to its client for so long.
_BETWEEN_LOOKS_S = 0.5


class Streaming:
    """One instance's way from requests to streams of responses.

    Args:
        engine: the model, warmed up.
        end: called once, with the reason, when the process has become useless.
        rests: called whenever no code of the model runs any more.
        traces: who carries traces into the model's code; None: nobody.
    """

    def __init__(
        self,
        engine: Engine,
        end: Callable[[str], None],
        rests: Callable[[], None],
        traces: Tracing | None = None,
    ) -> None:
        self.engine = engine
        self.model = engine.config.name
        self._end = end
        self._ended = False
        self._traces = traces
        self._read_request: Callable[[Any], Item] = partial(messages.read_kept, guard=engine.guard)
        if traces is not None:
            self._read_request = messages.traced(self._read_request, traces.carry, kept=True)
        # Who waits for it is Triton, which then gives requests to another instance, or queues them.
        self._room = threading.BoundedSemaphore(engine.config.options.max_streams)
        self._streams = Streams(engine, rests)
        # Streams end in their thread, and requests that cannot be read in Triton's.
        self._counting = threading.Lock()
        self._looking = False
        self._clients: dict[asyncio.Task[None], _Client] = {}
        self._loop = asyncio.new_event_loop()
        # Of this thread; in another one they would be torch's own again.
        threads = torch.get_num_threads()
        self._thread = threading.Thread(
            target=self._drive, args=(threads,), name="streams", daemon=True
        )
        self._thread.start()

    @property
    def streams(self) -> Streams:
        """The streams themselves."""
        return self._streams

    @property
    def between_asks(self) -> float:
        """Seconds until it pays to ask a stream again whether it was cancelled."""
        return _BETWEEN_ASKS_S * max(self._streams.live, 1)

    def start(self, requests: Sequence[Any]) -> None:
        """Let requests become streams, which go on after this; wait while there are too many."""
        for request in requests:
            client = _Client(self, request)
            item = self._read(request, client)
            if item is not None:
                self._admit(item, client)

    def close(self) -> None:
        """End the streams that are left with an error, in bounded time; twice is no error."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it ends at this moment
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_SECONDS_TO_END)

    def fatal(self) -> None:
        """The process cannot compute any more: said once."""
        if not self._ended:
            self._ended = True
            self._end(self.engine.recovery.reason)

    def ended(self, code: str) -> None:
        """A request was answered, with this code at its end."""
        with self._counting:
            self.engine.counts.answered(code)

    def _read(self, request: Any, client: _Client) -> Item | None:
        try:
            return self._read_request(request)
        except Exception as error:  # of Triton's utilities, or of a device that is gone
            with self.engine.turn:
                said, failure = brief(error), self.engine.recovery.judge(error)
        if self.engine.recovery.fatal is not None or failure.memory:
            client.end(failure.error, failure.text)
        else:
            client.end(InputError(self.model, f"the request cannot be read: {said}"))
        return None

    def _admit(self, item: Item, client: _Client) -> None:
        if not self._room.acquire(blocking=False):
            self._room.acquire()
            if client.cancelled():  # while it waited
                self._room.release()
                client.end(CancelledError(self.model))
                return
        self._loop.call_soon_threadsafe(self._launch, item, client)

    # --- in the thread of the streams --------------------------------------------------------

    def _drive(self, threads: int) -> None:
        torch.set_num_threads(threads)
        with runtime.mode(self.engine.config.options):
            while not self._run():
                pass
            self._loop.run_until_complete(self._finish())
        self._loop.close()

    def _run(self) -> bool:
        """Let streams go on until `close`; False: something that the model started ended that."""
        try:
            self._loop.run_forever()
        except (KeyboardInterrupt, SystemExit) as error:  # which asyncio lets through
            log.warning(
                "model '%s': a task or a callback that the model has started raised %s.",
                self.model,
                brief(error),
            )
            return False
        return True

    def _launch(self, item: Item, client: _Client) -> None:
        if self._traces is None:
            task = self._loop.create_task(self._streams.run(item, client))
        else:
            with self._traces.streaming(item) as ended:  # a task keeps what is current here
                task = self._loop.create_task(self._streams.run(item, client))
            task.add_done_callback(lambda _: ended(client.error))
        self._clients[task] = client
        task.add_done_callback(self._landed)
        self._look_soon()

    def _landed(self, task: asyncio.Task[None]) -> None:
        client = self._clients.pop(task)
        self._room.release()
        # A stream tells its client how it ended, but for what nobody has foreseen.
        if task.cancelled():  # before it began
            client.end(self._streams.failure(asyncio.CancelledError(), client).error)
            return
        error = task.exception()
        if error is not None:
            text = self.engine.recovery.judge(error).text
            client.end(self.engine.recovery.fatal or InternalError(self.model), text)

    def _look_soon(self) -> None:
        """What is done now and then, off the way of the responses."""
        if not self._looking:
            self._looking = True
            self._loop.call_later(_BETWEEN_ROUNDS_S, self._look)

    def _look(self) -> None:
        """End the streams of clients that have gone."""
        self._looking = False
        if self._clients:  # first: whatever fails below is tried again
            self._look_soon()
        for task, client in self._clients.items():
            if client.left():
                task.cancel()

    async def _finish(self) -> None:
        self._streams.closing = True
        # Also what the model itself has started.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


class _Client:
    """Who waits for the responses of one request.

    Attributes:
        error: what the stream has ended with; None: with none, or it goes on.
    """

    def __init__(self, streaming: Streaming, request: Any) -> None:
        self._streaming = streaming
        self._sender = request.get_response_sender()
        self._name = messages.request_id(request)
        self._asked = time.monotonic()
        self._gone = False
        self.error: BackendError | None = None

    def take(self, outcome: dict[str, Value], *, last: bool) -> None:
        """Send a response."""
        try:
            response = messages.write(outcome)
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL * last)
        except Exception as error:
            raise OutputError(
                self._streaming.model, f"the outputs cannot be sent: {brief(error)}"
            ) from error
        self._streaming.engine.counts.responses += 1
        if last:
            self._streaming.ended(OK)

    def end(self, error: BackendError | None, text: str = "") -> None:
        """Tell the client that there are no more, and the log why."""
        self.error = error
        response = () if error is None else (messages.write(error),)
        self._streaming.ended(OK if error is None else error.code)
        try:
            self._sender.send(*response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception as failed:  # Triton's side of it has gone
            log.warning(
                "model '%s': the end of a stream cannot be sent: %s.",
                self._streaming.model,
                brief(failed),
            )
        if error is not None and not isinstance(error, InputError | CancelledError):
            named = f" (request {self._name})" if self._name else ""
            log.error("%s%s%s", error, named, f"\n{text}" if text else "")
        if self._streaming.engine.recovery.fatal is not None:
            self._streaming.fatal()

    def cancelled(self) -> bool:
        """Whether the client has gone, asked no more often than it pays."""
        return self._gone or self._ask(self._streaming.between_asks)

    def left(self) -> bool:
        """Whether the client has gone while the stream waits: it does not ask by itself then."""
        return not self._gone and self._ask(_BETWEEN_LOOKS_S)

    def _ask(self, seconds: float) -> bool:
        """Ask Triton, if that was not done for so many seconds."""
        now = time.monotonic()
        if now >= self._asked + seconds:
            self._asked = now
            self._gone = self._sender.is_cancelled()
        return self._gone
