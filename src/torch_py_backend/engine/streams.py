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
import contextvars
import dataclasses
import logging
import time
import types
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from torch import Tensor

from torch_py_backend import composition, values
from torch_py_backend.engine import runtime
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.profiling import Profiler
from torch_py_backend.errors import (
    BackendError,
    CancelledError,
    OutputError,
    a_type,
    counted,
    summarize,
)
from torch_py_backend.pipeline import failures
from torch_py_backend.pipeline.run import attempt
from torch_py_backend.values import Item, Outcome, Value

log = logging.getLogger(__name__)

_R = TypeVar("_R")
# Returns the outcome for a result of the model. Called within `calling`.
_Extract: TypeAlias = "Callable[[object], Outcome]"
# The next state, None at the end of the stream, and the response, None for none.
_StepResult: TypeAlias = "tuple[object, Outcome | None]"
_END = object()
# The number of responses in a trial.
_TRIAL_RESPONSES = 3


class Client(Protocol):
    """Receives the responses of one stream. `refusal` says why its task was cancelled."""

    refusal: BackendError | None

    def send(self, outcome: dict[str, Value], *, last: bool) -> None: ...


class _Waiting(NamedTuple):
    """A stream that waits for its next step."""

    state: object
    extract: _Extract
    result: asyncio.Future[_StepResult]
    context: contextvars.Context


class Streams:
    """The streams of one model. Used within one event loop.

    Attributes:
        live: number of streams that have begun and not ended.
        stepped: number of streams in all calls of step(); None: the module has none.

    Args:
        on_idle: called after each call of the model's code.
        profiler: profiles the first calls; None: they are not profiled.
    """

    def __init__(
        self,
        engine: Engine,
        on_idle: Callable[[], None] = lambda: None,
        profiler: Profiler | None = None,
    ) -> None:
        self.live = 0
        self.stepped = None if engine.loaded.step is None else 0
        self._engine = engine
        self._on_idle, self._profiler = on_idle, profiler
        self._waiting: list[_Waiting] = []
        self._call_step: Any = engine.loaded.step
        self._stages = engine.stages
        begins = self._stages._replace(
            extract=lambda result, _: result,
            fill=None,
            fetch=None,
            scatter=lambda result, sizes, _: [(result, sum(sizes))],
        )
        self._begin_group = attempt(begins, engine.counts)

    async def run(self, item: Item, client: Client) -> BackendError | None:
        """Run one stream to its end; return the error that ended it."""
        self.live += 1
        error = None
        try:
            await self._respond(item, client)
        except BaseException as raised:
            error = self._error(raised, client)
        finally:
            self.live -= 1
        return self._engine.failures.fatal or error

    async def _respond(self, item: Item, client: Client) -> None:
        try:
            self._check(client)
            async with contextlib.aclosing(self._outcomes(*self._begin(item))) as outcomes:
                async for outcome, last in outcomes:
                    if isinstance(outcome, BackendError):
                        raise outcome
                    self._check(client)  # the model may have swallowed the cancellation
                    if outcome is not None:
                        client.send(outcome, last=last)
        finally:
            self._engine.clean()

    def _check(self, client: Client) -> None:
        """Raise the fatal error of the process, which another stream may have met; or cancel."""
        if self._engine.failures.fatal is not None:
            raise self._engine.failures.fatal
        if client.refusal is not None:
            raise asyncio.CancelledError

    def _error(self, raised: BaseException, client: Client) -> BackendError:
        """Return the error for an exception that ended a stream, and clear its frames."""
        try:
            if isinstance(raised, asyncio.CancelledError) and client.refusal is not None:
                return client.refusal
            if isinstance(raised, BackendError) and raised.reported:  # of a step
                return raised
            return self._engine.failures.refusal(self._engine.failures.classify(raised))
        finally:
            # The future that a task awaits refers to the exception that it raises: a reference
            # cycle, which would keep the request's tensors until the next garbage collection.
            failures.release(raised)

    # --- calls of the model --------------------------------------------------------------------

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Enter the context of a call of the model."""
        profiled = self._profiler.batch() if self._profiler else contextlib.nullcontext()
        self._engine.failures.on_call()
        try:
            with profiled, self._engine.guard():
                yield
        finally:
            self._on_idle()

    @contextlib.contextmanager
    def _advancing(self) -> Iterator[None]:
        """Enter the context of a call that resumes the model until its next response or await.

        Raises:
            OutputError: the model leaves a context open, which would affect all streams.
        """
        with self._calling():
            before = runtime.thread_state(self._engine.device)
            yield
            if runtime.thread_state(self._engine.device) != before:
                raise OutputError(
                    "the model yields within torch.autocast or a torch.device, or awaits there:"
                    " other streams would then run in it",
                    expected="such contexts closed before each yield and await",
                )

    def _timed(self, call: Callable[[], _R]) -> _R:
        began = time.perf_counter()
        try:
            return call()
        finally:
            self._engine.counts.forward_seconds += time.perf_counter() - began

    def _begin(self, item: Item) -> tuple[object, _Extract]:
        """Call the model for one item; return its result, and what makes outcomes of its stream.

        Raises:
            InputError: the item is not what the model takes.
        """
        with self._calling():
            (entry,), groups = self._stages.group([item])
            if isinstance(entry, BackendError):
                raise entry
            ((result, rows),) = self._begin_group(groups[0], False)  # noqa: FBT003  as in `run`
        return result, partial(self._outcome, rows, values.on_gpu(entry))

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
        outputs = self._engine.outputs
        outcome: dict[str, Value] = dict(zip(outputs.names, columns, strict=True))
        refusal = None if outputs.finite is None else outputs.finite.refusal(outcome)
        return outcome if refusal is None else refusal

    async def _outcomes(
        self, result: object, extract: _Extract
    ) -> AsyncGenerator[tuple[Outcome | None, bool], None]:
        """Yield the outcomes of a stream, None for a step without one, and whether it is the last.

        Other streams run between two of them.
        """
        if self.stepped is not None:
            while result is not None:  # a stream keeps its present state only
                result, outcome = await self._next(result, extract)
                yield outcome, result is None
        elif isinstance(result, AsyncIterator | Iterator):
            try:
                while True:
                    await asyncio.sleep(0)  # an asynchronous model may never await
                    if isinstance(result, AsyncIterator):
                        value = await self._sliced(anext(result, _END), self._advancing)
                        with self._calling():
                            outcome = None if value is _END else extract(value)
                    else:
                        with self._advancing():
                            value = self._timed(partial(next, result, _END))
                            outcome = None if value is _END else extract(value)
                    if outcome is None:
                        return
                    del value  # before the next one is computed
                    yield outcome, False
            finally:
                await self._close(result)
        else:
            with self._calling():
                outcome = extract(result)
            yield outcome, True

    async def _close(self, result: object) -> None:
        """Close a stream of the model, whose code may keep something for it."""
        try:
            if isinstance(result, Generator):
                with self._calling():
                    result.close()
            elif hasattr(result, "aclose"):
                await self._sliced(result.aclose(), self._calling)
        except BaseException as error:
            log.warning("closing a stream raised %s.", summarize(error))

    @types.coroutine
    def _sliced(
        self, awaitable: Any, calling: Callable[[], AbstractContextManager[None]]
    ) -> Generator[Any, Any, Any]:
        """Await an awaitable of the model as one call of it for each slice between two awaits."""
        slices = awaitable.__await__()
        resume: Callable[[], object] = slices.__next__
        while True:
            try:
                with calling():
                    try:
                        awaited = self._timed(resume)
                    except StopIteration as end:
                        return end.value
            except OutputError:  # close the contexts in which it awaits
                with self._calling(), contextlib.suppress(BaseException):
                    slices.throw(asyncio.CancelledError())
                raise
            try:
                yield awaited
                resume = slices.__next__
            except BaseException as error:  # thrown in by the event loop: the task is cancelled
                resume = partial(slices.throw, error)

    # --- shared steps --------------------------------------------------------------------------

    async def _next(self, state: object, extract: _Extract) -> _StepResult:
        """Return the result of a stream's next step, shared with all streams that wait by then.

        Raises:
            BackendError: the step failed.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[_StepResult] = loop.create_future()
        if not self._waiting:
            # After the streams that got results in this iteration of the loop have sent them.
            loop.call_soon(loop.call_soon, self._share_step)
        self._waiting.append(_Waiting(state, extract, result, contextvars.copy_context()))
        return await result

    def _share_step(self) -> None:
        # A result that is done has been cancelled: the stream's client has left.
        batch = [stream for stream in self._waiting if not stream.result.done()]
        self._waiting = []
        for stream, result in zip(batch, self._results(batch) if batch else (), strict=True):
            if isinstance(result, BackendError):
                stream.result.set_exception(result)
            else:
                stream.result.set_result(result)

    def _results(self, batch: Sequence[_Waiting]) -> Sequence[_StepResult | BackendError]:
        """Step all streams; if that fails, halves of them, until only failing streams end."""
        failures, called = self._engine.failures, self._engine.loaded.returns
        failures.calls_before = composition.calls
        try:
            return self._step(batch)
        except BaseException as error:  # the streams wait for a result, whatever was raised
            failure = failures.classify(error, called)
        if isinstance(failure.error, OutputError):  # with fewer streams, it may look right
            failure = dataclasses.replace(failure, final=True)
        return failures.halve(batch, self._retry, failure, called)

    def _retry(self, batch: Sequence[_Waiting]) -> Sequence[_StepResult]:
        self._engine.counts.retried_rows += len(batch)
        return self._step(batch)

    def _step(self, batch: Sequence[_Waiting]) -> Sequence[_StepResult]:
        self.stepped = (self.stepped or 0) + len(batch)
        with self._calling():
            # Context variables, such as a trace's context, are those of the first stream.
            step = partial(batch[0].context.run, self._call_step)
            returned = self._timed(partial(step, [stream.state for stream in batch]))
            pairs = zip(batch, _pairs(returned, len(batch)), strict=True)
            return [
                (state, None if outputs is None else stream.extract(outputs))
                for stream, (state, outputs) in pairs
            ]


def _pairs(returned: object, count: int) -> Sequence[tuple[object, object]]:
    """Return the pair of each stream.

    Raises:
        OutputError: step() has returned something else.
    """
    if isinstance(returned, list | tuple):
        pairs = [pair for pair in returned if isinstance(pair, tuple) and len(pair) == 2]  # noqa: PLR2004
        if len(pairs) == len(returned) == count:
            return pairs
    items = f"a list of {len(returned)}" if isinstance(returned, list) else a_type(returned)
    raise OutputError(
        f"step() returned {items} for {counted(count, 'stream')}",
        expected="a list with a pair (next state, outputs) for each stream",
    )


# --- before READY ------------------------------------------------------------------------------


class _Trial:
    """A client that keeps the last of the first responses of a stream, and leaves then."""

    def __init__(self) -> None:
        self.refusal: BackendError | None = None
        self.outcome: Outcome = {}
        self._responses = 0

    def send(self, outcome: dict[str, Value], *, last: bool) -> None:  # noqa: ARG002  a Client's
        self.outcome = outcome
        self._responses += 1
        if self._responses == _TRIAL_RESPONSES:
            self.refusal = CancelledError()
            raise asyncio.CancelledError


def trial(engine: Engine) -> Callable[[Sequence[Item]], Sequence[Outcome]]:
    """Return a function that runs the first responses of each item's stream.

    Its outcomes are the last of these responses of each stream, or the first error of all streams.
    """

    async def run(items: Sequence[Item]) -> Sequence[Outcome]:
        streams = Streams(engine)
        # With step(), each item is run twice: a step of one stream differs from one of several.
        twice = items if streams.stepped is None else [*items, *items]
        clients = [_Trial() for _ in twice]
        ends = await asyncio.gather(*map(streams.run, twice, clients))
        for client, end in zip(clients, ends, strict=True):
            if end is not None and end is not client.refusal:
                return [end] * len(items)
        return [client.outcome for client in clients[: len(items)]]

    return lambda items: asyncio.run(run(items))
