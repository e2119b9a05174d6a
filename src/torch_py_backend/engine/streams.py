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
import logging
import time
import types
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from torch_py_backend import composition, values
from torch_py_backend.engine import runtime
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError, OutputError, a_type, counted, summarize
from torch_py_backend.pipeline import failures
from torch_py_backend.values import Item, Outcome, Value

log = logging.getLogger(__name__)

Response: TypeAlias = "dict[str, Value]"
# Returns the outcome for a result of the model. Called within `calling`.
_Extract: TypeAlias = "Callable[[object], Outcome]"
# What follows: the next state, or the iterator; None at the end of the stream. And the outcome,
# None for no response.
_Advance: TypeAlias = "tuple[object, Outcome | None]"
# A stream that waits for its next step.
_Waiting: TypeAlias = "tuple[object, _Extract, asyncio.Future[_Advance]]"
_END = object()
# The number of responses in a trial.
_TRIAL_RESPONSES = 3


class Streams:
    """The streams of one model. Used within one event loop, and the context of the model's calls.

    Attributes:
        live: number of streams that have begun and not ended.
        stepped: number of streams in all calls of step(); None: the module has none.

    Args:
        on_idle: called after each call of the model's code.
    """

    def __init__(
        self,
        engine: Engine,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.live = 0
        self.stepped = None if engine.loaded.step is None else 0
        self._engine = engine
        self._on_idle = on_idle
        self._waiting: list[_Waiting] = []
        self._call_step: Any = engine.loaded.step
        self._stages = engine.stages

    async def run(
        self,
        item: Item,
        send: Callable[[Response, bool], bool],
    ) -> BackendError | None:
        """Run one stream to its end; return its error, None without one.

        `send` takes each response, and whether it is the last one; it returns whether to go on.
        """
        self.live += 1
        state: object = None
        try:
            try:
                with self._calling():
                    state, extract = self._begin(item)
                last = False
                while not last:
                    if self._engine.failures.fatal is not None:  # another stream may have met it
                        raise self._engine.failures.fatal
                    state, outcome = await self._advance(state, extract)
                    if isinstance(outcome, BackendError):
                        raise outcome
                    last = state is None
                    if outcome is not None and not send(outcome, last):
                        break
            finally:
                await self._close(state)
                self.live -= 1
                self._engine.clean()
        except BaseException as raised:
            if isinstance(raised, BackendError) and raised.reported:  # of a step
                # The task and its future refer to it: a reference cycle, which would keep the
                # request's tensors until the next garbage collection.
                failures.release(raised)
                return raised
            return self._engine.failures.classify(raised).error
        return None

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Enter a call of the model's code, until its next response or await.

        Raises:
            OutputError: the model leaves a context open, which would affect all streams.
        """
        counts = self._engine.counts
        began, fetched = time.perf_counter(), counts.device_to_host_seconds
        before = runtime.thread_state(self._engine.device)
        self._engine.failures.on_call()
        try:
            yield
        finally:
            self._on_idle()
            fetched -= counts.device_to_host_seconds
            counts.forward_seconds += time.perf_counter() - began + fetched
        if runtime.thread_state(self._engine.device) != before:
            raise OutputError(
                "the model yields within torch.autocast or a torch.device, or awaits there:"
                " other streams would then run in it",
                expected="such contexts closed before each yield and await",
            )

    def _begin(self, item: Item) -> tuple[object, _Extract]:
        """Call the model for one item; return its result, and what makes outcomes of its stream.

        Raises:
            InputError: the item is not what the model takes.
        """
        (entry,), groups = self._stages.group([item])
        if isinstance(entry, BackendError):
            raise entry
        (group,) = groups
        columns, (rows,) = group.gather(group.items)
        self._engine.counts.rows += rows
        if self._stages.send is not None:
            columns = self._stages.send(columns)
        return group.call(*columns), partial(self._outcome, rows, values.on_gpu(entry))

    def _outcome(self, rows: int, on_gpu: bool, result: object) -> Outcome:  # noqa: FBT001
        """Return the outcome for a result of a stream with the rows and the place of its inputs."""
        try:
            columns = self._stages.extract(result, rows)
        except OutputError as error:
            return error
        began = time.perf_counter()
        if self._stages.fetch is not None:
            columns = self._stages.fetch(columns)
        if not on_gpu:
            columns = [column.cpu() if isinstance(column, Tensor) else column for column in columns]
        if self.stepped is not None:
            # The begin() of another stream or a further step() may overwrite memory that an outcome
            # shares with the model before the outcome is sent.
            columns = [values.clone(column) for column in columns]
        self._engine.counts.device_to_host_seconds += time.perf_counter() - began
        outcome: Outcome = dict(zip(self._engine.output_names, columns, strict=True))
        finite = self._engine.finite
        return outcome if finite is None else finite.checked(outcome)

    async def _advance(self, state: object, extract: _Extract) -> _Advance:
        if self.stepped is not None:
            return await self._next_step(state, extract)
        if not isinstance(state, AsyncIterator | Iterator):
            with self._calling():
                return None, extract(state)
        await asyncio.sleep(0)  # an asynchronous model may never await

        def made(value: object) -> _Advance:
            return (None, None) if value is _END else (state, extract(value))

        if isinstance(state, AsyncIterator):
            return await self._sliced(anext(state, _END), made)
        with self._calling():
            return made(next(state, _END))

    async def _close(self, stream: object) -> None:
        """Close a generator, which may have code for its end."""
        try:
            if isinstance(stream, AsyncGenerator):
                await self._sliced(stream.aclose(), lambda _: (None, None))
            elif isinstance(stream, Generator):
                with self._calling():
                    stream.close()
        except BaseException as error:
            log.warning("closing a stream raised %s.", summarize(error))

    @types.coroutine
    def _sliced(
        self, awaitable: Any, made: Callable[[object], _Advance]
    ) -> Generator[Any, Any, _Advance]:
        """Await an awaitable of the model as one call of it for each slice between two awaits."""
        slices = awaitable.__await__()
        thrown: BaseException | None = None
        while True:
            try:
                with self._calling():
                    try:
                        awaited = next(slices) if thrown is None else slices.throw(thrown)
                    except StopIteration as end:
                        return made(end.value)
                    finally:
                        thrown = None  # its frames keep the request's tensors
            except OutputError:  # close the contexts in which it awaits
                with contextlib.suppress(BaseException):
                    slices.throw(asyncio.CancelledError())
                raise
            try:
                yield awaited
            except BaseException as error:  # of the event loop: the task is cancelled
                thrown = error

    async def _next_step(self, state: object, extract: _Extract) -> _Advance:
        """Return what follows a state: one step for all streams that wait by then.

        Raises:
            BackendError: the step failed.
        """
        loop = asyncio.get_running_loop()
        if not self._waiting:
            # After the streams that got results in this iteration of the loop have sent them. The
            # step has the context variables of this stream, such as a trace's context.
            loop.call_soon(loop.call_soon, self._share_step)
        future: asyncio.Future[_Advance] = loop.create_future()
        self._waiting.append((state, extract, future))
        return await future

    def _share_step(self) -> None:
        """Step all streams; if that fails, halves of them, until only failing streams end."""
        # A result that is done has been cancelled: the stream's client has left.
        batch = [waiting for waiting in self._waiting if not waiting[-1].done()]
        self._waiting = []
        if not batch:
            return
        failures, called = self._engine.failures, self._engine.loaded.returns
        failures.calls_before = composition.calls
        results: Sequence[_Advance | BackendError] = ()
        try:
            results = self._step(batch)
        except BaseException as error:  # the streams wait for a result, whatever was raised
            failure = failures.classify(error, called)
        if not results:
            if isinstance(failure.error, OutputError):  # with fewer streams, it may look right
                failure = failure._replace(final=True)
            results = failures.halve(batch, self._step_again, failure, called)
        for (_, _, future), result in zip(batch, results, strict=True):
            if isinstance(result, BackendError):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _step_again(self, batch: Sequence[_Waiting]) -> Sequence[_Advance]:
        self._engine.counts.retried_rows += len(batch)
        return self._step(batch)

    def _step(self, batch: Sequence[_Waiting]) -> Sequence[_Advance]:
        self.stepped = (self.stepped or 0) + len(batch)
        with self._calling():
            returned = self._call_step([state for state, _, _ in batch])
            return [
                (state, None if outputs is None else extract(outputs))
                for (_, extract, _), (state, outputs) in zip(
                    batch, _pairs(returned, len(batch)), strict=True
                )
            ]


def _pairs(returned: object, count: int) -> Sequence[tuple[object, object]]:
    """Return the pair of each stream.

    Raises:
        OutputError: step() has returned something else.
    """
    pairs = returned if isinstance(returned, list | tuple) else ()
    are_pairs = (isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)  # noqa: PLR2004
    if len(pairs) == count and all(are_pairs):
        return pairs
    items = f"a list of {len(returned)}" if isinstance(returned, list) else a_type(returned)
    raise OutputError(
        f"step() returned {items} for {counted(count, 'stream')}",
        expected="a list with a pair (next state, outputs) for each stream",
    )


def trial(engine: Engine) -> Callable[[Sequence[Item]], Sequence[Outcome]]:
    """Return a function that runs the first responses of each item's stream.

    Its outcomes are the last of these responses of each stream, or the first error of all streams.
    """

    async def run_one(streams: Streams, item: Item) -> Outcome:
        responses: list[Response] = [{}]

        def send(response: Response, _: bool) -> bool:  # noqa: FBT001
            responses.append(response)
            return len(responses) <= _TRIAL_RESPONSES

        return await streams.run(item, send) or responses[-1]

    async def run(items: Sequence[Item]) -> Sequence[Outcome]:
        streams = Streams(engine)
        # With step(), each item is run twice: a step of one stream differs from one of several.
        twice = items if streams.stepped is None else [*items, *items]
        with runtime.mode(engine.config.options):
            outcomes = await asyncio.gather(*(run_one(streams, item) for item in twice))
        errors = [outcome for outcome in outcomes if isinstance(outcome, BackendError)]
        return (errors[:1] * len(items) if errors else outcomes)[: len(items)]

    return lambda items: asyncio.run(run(items))
