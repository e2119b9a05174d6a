"""A request's stream: a sequence of outcomes from the value that the model returned for its item.

A generator or any other iterator, synchronous or asynchronous, is a stream of its values. The value
of begin() of a module with step() is the first state of a stream. Any other value is a stream of
one response.

All streams of a model take turns in one event loop. Each waits for at most one step of each other
stream. A stream that awaits does not block the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Sequence,
)
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from torch import Tensor

from torch_py_backend import values
from torch_py_backend.engine import runtime
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.stepping import Stepper, StreamInputs
from torch_py_backend.errors import (
    BackendError,
    CancelledError,
    OutputError,
    UnavailableError,
    summarize,
)
from torch_py_backend.pipeline import faults
from torch_py_backend.pipeline.failures import reported
from torch_py_backend.pipeline.run import attempt
from torch_py_backend.values import Item, Outcome, Value

log = logging.getLogger(__name__)

T = TypeVar("T")
# Each outcome, None for a step without a response, and whether it is the last.
Outcomes: TypeAlias = "AsyncGenerator[tuple[Outcome | None, bool], None]"
_END = object()
# The number of responses in a trial.
_TRIAL_RESPONSES = 3


class Consumer(Protocol):
    """Receives the outcomes of a stream. A last outcome, or a call of `end`, ends the stream.

    Attributes:
        left: whether the stream's task was cancelled because its client has gone.
    """

    left: bool

    def send(self, outcome: dict[str, Value], *, last: bool) -> None:
        """Send one response."""

    def end(self, error: BackendError | None) -> None:
        """End without another response; with the error if the stream failed."""


class Streams:
    """The streams of one model. Used within one event loop.

    Attributes:
        live: number of streams that have begun and not ended.
        closing: whether the model is being unloaded, which cancels the remaining streams.
        steps: calls step() of a module that has one, else None.

    Args:
        around_call: returns a context manager that is entered around each call of the model's code.
    """

    def __init__(
        self,
        engine: Engine,
        around_call: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.live = 0
        self.closing = False
        self._engine = engine
        self._around_call = around_call
        self._stages = stages = engine.stages
        begins = stages._replace(extract=_unchanged, fill=None, fetch=None, scatter=_with_rows)
        self._begin_group = attempt(begins, engine.counts)
        step = engine.loaded.step
        self.steps = None if step is None else Stepper(engine, step, self.calling, self._outcome)

    async def run(self, item: Item, consumer: Consumer) -> None:
        """Run one stream to its end. Errors go to the consumer."""
        self.live += 1
        result = error = None
        ended = False
        try:
            try:
                self._check_device()
                with self.calling():
                    result, inputs = self._begin(item)
                source = self._outcomes(result, inputs)
                if self.steps is not None:  # the first state must not live as long as its stream
                    result = None
                async with contextlib.aclosing(source) as outcomes:
                    ended = await self._send(outcomes, consumer)
            except BaseException as raised:
                error = self.error(raised, consumer)
            await self._close(result)
            self._engine.clean()
        finally:
            self.live -= 1
        if not ended:
            consumer.end(self._engine.failures.fatal or error)

    async def _send(self, outcomes: Outcomes, consumer: Consumer) -> bool:
        """Send the outcomes; return whether the consumer knows which was the last."""
        async for outcome, last in outcomes:
            if isinstance(outcome, BackendError):
                raise outcome
            self._check_device()
            if consumer.left or self.closing:  # the model has swallowed the cancellation
                raise asyncio.CancelledError
            if outcome is not None:
                consumer.send(outcome, last=last)
            if last:
                return outcome is not None
        return False

    async def _close(self, result: object) -> None:
        """Close a stream of the model, whose code may keep something for it."""
        try:
            if isinstance(result, Generator):
                with self.calling():
                    result.close()
            elif isinstance(result, AsyncIterator) and hasattr(result, "aclose"):
                await _Sliced(result.aclose(), self)
        except BaseException as error:
            log.warning("closing a stream raised %s.", summarize(error))

    def error(self, raised: BaseException, consumer: Consumer) -> BackendError:
        """Return the error for an exception that ended a stream, and clear its frames."""
        try:
            if isinstance(raised, asyncio.CancelledError) and self.closing:
                unloaded = "the model is unloaded in mid-stream"
                return reported(UnavailableError(unloaded, cure="Retry later."))
            if isinstance(raised, asyncio.CancelledError) and consumer.left:
                return CancelledError("in mid-stream")
            if isinstance(raised, BackendError) and raised.reported:  # of a step
                return raised
            return self._engine.failures.refusal(self._engine.failures.classify(raised))
        finally:
            # The future that a task awaits refers to the exception that it raises: a reference
            # cycle, which would keep the request's tensors until the next garbage collection.
            faults.release(raised)

    def _check_device(self) -> None:
        """Raise the fatal error of the process, which another stream may have met."""
        if self._engine.failures.fatal is not None:
            raise self._engine.failures.fatal

    # --- calls of the model --------------------------------------------------------------------

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Enter the context of a call of the model."""
        with self._around_call():
            self._engine.failures.on_call()
            with self._engine.guard():
                yield

    @contextlib.contextmanager
    def advancing(self) -> Iterator[None]:
        """Enter the context of a call that resumes the model until its next response.

        Raises:
            OutputError: the model leaves a context open, which would affect all streams.
        """
        with self.calling():
            before = runtime.thread_state(self._engine.device)
            yield
            if runtime.thread_state(self._engine.device) != before:
                raise OutputError(
                    "the model yields within torch.autocast or a torch.device, or awaits there:"
                    " other streams would then run in it",
                    expected="such contexts closed before each yield and await",
                )

    def advance(self, resume: Callable[[], T]) -> T:
        """Resume one stream and return the result. Called within `calling`."""
        began = time.perf_counter()
        try:
            return resume()
        finally:
            self._engine.counts.forward_seconds += time.perf_counter() - began

    def _begin(self, item: Item) -> tuple[object, StreamInputs]:
        """Call the model for one item; return its result, a stream, and the stream's inputs.

        Raises:
            InputError: the item is not what the model takes.
        """
        (entry,), groups = self._stages.group([item])
        if isinstance(entry, BackendError):
            raise entry
        ((result, rows),) = self._begin_group(groups[0], False)  # noqa: FBT003  as in `run`
        return result, StreamInputs(rows, values.on_gpu(entry))

    def _outcome(self, result: object, inputs: StreamInputs) -> Outcome:
        """Return the outcome for a result of the model. Called within `calling`."""
        try:
            columns = self._stages.extract(result, inputs.rows)
        except OutputError as error:
            return error
        began = time.perf_counter()
        if self._stages.fetch is not None:
            columns = self._stages.fetch(columns)
        if not inputs.on_gpu:
            columns = [column.cpu() if isinstance(column, Tensor) else column for column in columns]
        if self.steps is not None:
            # The begin() of another stream or a further step() may overwrite memory that an outcome
            # shares with the model before the outcome is sent.
            columns = [values.clone(column) for column in columns]
        self._engine.counts.device_to_host_seconds += time.perf_counter() - began
        outputs = self._engine.outputs
        outcome: dict[str, Value] = dict(zip(outputs.names, columns, strict=True))
        refusal = None if outputs.finite is None else outputs.finite.refusal(outcome)
        return outcome if refusal is None else refusal

    async def _outcomes(self, result: object, inputs: StreamInputs) -> Outcomes:
        """Yield the outcomes of a stream. Other streams run between two of them."""
        if self.steps is not None:
            while result is not None:
                result, outcome = await self.steps.next(result, inputs)
                yield outcome, result is None
        elif isinstance(result, AsyncIterator):
            while True:
                await asyncio.sleep(0)  # the model may never await
                value = await _Sliced(anext(result, _END), self, advances=True)
                if value is _END:
                    return
                with self.calling():
                    outcome = self._outcome(value, inputs)
                del value  # before the next one is computed
                yield outcome, False
        elif isinstance(result, Iterator):
            while True:
                await asyncio.sleep(0)
                with self.advancing():
                    value = self.advance(partial(next, result, _END))
                    if value is _END:
                        return
                    outcome = self._outcome(value, inputs)
                del value
                yield outcome, False
        else:
            with self.calling():
                outcome = self._outcome(result, inputs)
            yield outcome, True


def _unchanged(result: Any, _: int) -> Any:
    return result


def _with_rows(result: Any, sizes: Sequence[int], _: Sequence[Item]) -> Any:
    return [(result, sum(sizes))]


class _Sliced(Awaitable[T]):
    """An awaitable of the model, run as one call of the model for each slice between two awaits.

    Args:
        streams: provides the context of the calls.
        advances: whether the awaitable makes a response. Each slice must then close the contexts
            that it enters.
    """

    def __init__(
        self, awaitable: Awaitable[T], streams: Streams, *, advances: bool = False
    ) -> None:
        self._awaitable, self._streams = awaitable, streams
        self._calling = streams.advancing if advances else streams.calling

    def __await__(self) -> Generator[object, None, T]:
        coroutine = self._awaitable.__await__()
        resume: Callable[[], object] = coroutine.__next__
        while True:
            awaits = False
            try:
                with self._calling():
                    try:
                        awaited = self._streams.advance(resume)
                    except StopIteration as end:
                        result: T = end.value
                        return result
                    awaits = True
            except OutputError:
                if awaits:  # close the contexts in which it awaits: no other stream may run in them
                    with self._streams.calling(), contextlib.suppress(BaseException):
                        coroutine.throw(asyncio.CancelledError())
                raise
            try:
                yield awaited
                resume = coroutine.__next__
            except BaseException as error:  # thrown in by the event loop: the task is cancelled
                resume = partial(coroutine.throw, error)


# --- before READY ------------------------------------------------------------------------------


class _TrialConsumer:
    """Keeps the last of the first responses of a stream, and ends it then."""

    left = False

    def __init__(self) -> None:
        self.outcome: Outcome = {}
        self._responses = 0

    def send(self, outcome: dict[str, Value], *, last: bool) -> None:  # noqa: ARG002  a Consumer's
        self.outcome = outcome
        self._responses += 1
        if self._responses == _TRIAL_RESPONSES:
            raise CancelledError

    def end(self, error: BackendError | None) -> None:
        if error is not None and not isinstance(error, CancelledError):
            self.outcome = error


def trial(engine: Engine) -> Callable[[Sequence[Item]], Sequence[Outcome]]:
    """Return a function that runs the first responses of each item's stream.

    Its outcomes are the last of these responses of each stream, or the first error of all streams.
    """

    async def run(items: Sequence[Item]) -> Sequence[Outcome]:
        streams = Streams(engine)
        # With step(), each item is run twice: a step of one stream differs from one of several.
        twice = [*items, *items] if streams.steps is not None else items
        consumers = [_TrialConsumer() for _ in twice]
        await asyncio.gather(*map(streams.run, twice, consumers))
        outcomes = [consumer.outcome for consumer in consumers]
        error = next((outcome for outcome in outcomes if isinstance(outcome, BackendError)), None)
        return [error or outcome for outcome in outcomes[: len(items)]]

    return lambda items: asyncio.run(run(items))
