"""Streams: a request of a decoupled model has any number of responses.

A generator or any other iterator, synchronous or asynchronous, is a stream of its values. A module
may have begin() and step() instead: begin() takes the inputs of one request and returns the state
of its stream, any object. step() takes the states of all live streams and returns a pair for each:

    (next state, or None at the end of the stream;  outputs, or None for no response)

Any other value is a stream of one response. All streams of a model take turns in one event loop:
each waits for at most one step of each other stream, and one that awaits does not block the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch_py_backend import values
from torch_py_backend.engine import runtime
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError, OutputError, a_type, counted
from torch_py_backend.pipeline.run import Entries, Entry, Results, Run
from torch_py_backend.values import Outcome, Value

Response: TypeAlias = "dict[str, Value]"
# Takes a response, and whether it is the last one; returns whether to go on.
Send: TypeAlias = "Callable[[Response, bool], bool]"
_Extract: TypeAlias = "Callable[[object], Outcome]"
# The next state, or the iterator; None at the end. And the outcome; None for no response.
_Advance: TypeAlias = "tuple[object, Outcome | None]"
_Waiting: TypeAlias = "tuple[object, _Extract, asyncio.Future[_Advance]]"
_END = object()


class Streams:
    """The streams of one model, within one event loop and the context of the model's calls."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: list[_Waiting] = []
        self._call_step: Any = engine.loaded.step
        self._stages = engine.stages

    async def run(self, entry: Entry, send: Send) -> BackendError | None:
        """Run one stream to its end; return its error, None without one."""
        state: object = None
        outcome: Outcome | None = None
        try:
            try:
                state, extract = self._begin(entry)
                last = False
                while not last:
                    state, outcome = await self._advance(state, extract)
                    if lost := self._engine.refusal():  # another stream may have met it
                        raise lost
                    last = state is None or isinstance(outcome, BackendError)
                    if isinstance(outcome, dict) and not send(outcome, last):
                        break
            finally:
                try:  # a generator may have code for its end
                    if isinstance(state, AsyncGenerator):
                        await state.aclose()
                    elif isinstance(state, Generator):
                        state.close()
                finally:
                    self._engine.clean()
        except BaseException as raised:
            error = self._engine.failures.classify(raised)
            return outcome if isinstance(outcome, BackendError) else error
        return outcome if isinstance(outcome, BackendError) else None

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Enter a call of the model's code; OutputError if it leaves a context open for others."""
        began, before = time.perf_counter(), runtime.thread_state(self._engine.device)
        self._engine.failures.on_call()
        try:
            yield
        finally:
            self._engine.counts.forward_seconds += time.perf_counter() - began
        if runtime.thread_state(self._engine.device) != before:
            raise OutputError(
                "the model yields within torch.autocast or a torch.device, in which other streams"
                " would then run",
                expected="such contexts closed before each yield and await",
            )

    def _begin(self, entry: Entry) -> tuple[object, _Extract]:
        """Call the model for one item; return its result, and what makes outcomes of its stream."""
        (entry,), groups = self._stages.group([entry])
        if isinstance(entry, BackendError):
            raise entry
        (group,) = groups
        columns, (rows,) = group.gather(group.items)
        self._engine.counts.rows += rows
        if self._stages.send is not None:
            columns = self._stages.send(columns)
        with self._calling():
            result = group.call(*columns)
        return result, partial(self._outcome, rows, values.on_gpu(entry))

    def _outcome(self, rows: int, on_gpu: bool, result: object) -> Outcome:  # noqa: FBT001
        """Return the outcome for a result of a stream with the rows and the place of its inputs."""
        try:
            columns = self._stages.extract(result, rows)
        except OutputError as error:
            return self._engine.failures.classify(error)
        began = time.perf_counter()
        if self._stages.fetch is not None:
            columns = self._stages.fetch(columns)
        if not on_gpu:
            columns = [values.on_host(column) for column in columns]
        if self._call_step is not None:
            # Another begin() or step() may overwrite memory of an outcome before it is sent.
            columns = [values.clone(column) for column in columns]
        self._engine.counts.device_to_host_seconds += time.perf_counter() - began
        outcome = dict(zip(self._engine.output_names, columns, strict=True))
        finite = self._engine.finite
        return outcome if finite is None else finite(outcome)

    async def _advance(self, state: object, extract: _Extract) -> _Advance:
        """Return what follows a state; one step serves all streams that wait by then."""
        if self._call_step is not None:
            loop = asyncio.get_running_loop()
            if not self._waiting:
                # After the streams that got results in this iteration of the loop have sent them.
                # The step has the context variables of this stream, such as a trace's context.
                loop.call_soon(loop.call_soon, self._share_step)
            future: asyncio.Future[_Advance] = loop.create_future()
            self._waiting.append((state, extract, future))
            return await future
        if not isinstance(state, AsyncIterator | Iterator):
            return None, extract(state)
        await asyncio.sleep(0)  # an asynchronous model may never await
        with self._calling():
            if isinstance(state, AsyncIterator):
                result = await anext(state, _END)
            else:
                result = next(state, _END)
        return (None, None) if result is _END else (state, extract(result))

    def _share_step(self) -> None:
        """Step all streams; if that fails, halves of them, until only failing streams end."""
        # A result that is done has been cancelled: the stream's client has left.
        batch = [waiting for waiting in self._waiting if not waiting[-1].done()]
        self._waiting = []
        if not batch:
            return
        called = self._engine.loaded.returns
        results = self._engine.failures.isolate(batch, self._step, called)
        for (_, _, future), result in zip(batch, results, strict=True):
            future.set_result((None, result) if isinstance(result, BackendError) else result)

    def _step(self, batch: Sequence[_Waiting], again: bool) -> Sequence[_Advance]:  # noqa: FBT001
        """Return what follows the state of each stream; OutputError without a pair for each."""
        self._engine.counts.stepped_streams += len(batch)
        self._engine.counts.retried_rows += len(batch) * again
        try:
            with self._calling():
                returned = self._call_step([state for state, _, _ in batch])
            pairs = returned if isinstance(returned, list | tuple) else ()
            # Tensors with the states and the outputs of all streams can be unpacked, too.
            if [isinstance(pair, tuple) and len(pair) for pair in pairs] != [2] * len(batch):
                raise OutputError(
                    f"step() returned {a_type(returned)} without a pair for each stream",
                    expected=f"a list with {counted(len(batch), 'pair')} (next state, outputs)",
                )
        except OutputError as error:
            error.final = True  # with fewer streams, it may look right
            raise
        return [
            (state, None if outputs is None else extract(outputs))
            for (_, extract, _), (state, outputs) in zip(batch, pairs, strict=True)
        ]


def trial(engine: Engine) -> Run:
    """Return what runs three responses of each item's stream, and returns its error or {}."""

    async def run(items: Entries) -> Results:
        streams = Streams(engine)

        def first(item: Entry) -> Any:
            more = iter((True, True))
            return streams.run(item, lambda _response, _last: next(more, False))

        # With step(), each item is run twice: a step of one stream differs from one of several.
        repeats = 1 if engine.loaded.step is None else 2
        errors = await asyncio.gather(*map(first, [*items] * repeats))
        return [error or {} for error in errors]

    return lambda items: engine.loop.run_until_complete(run(items))
