"""A request's stream: one outcome after the other, from what the model returned for its item.

What was returned decides: a generator, or any other iterator, is a stream of what it gives, and so
is an asynchronous one; what begin() of a module with step() returned is a stream's first state;
anything else is a stream of one. All streams of a model take turns in one event loop: each waits
for one step of the others at most, and what is awaited holds up nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from torch_py_backend.batching import runtime
from torch_py_backend.batching.gather_scatter import Item, Outcome, Value
from torch_py_backend.engine import faults
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.retry import Failure
from torch_py_backend.engine.stream_calls import Given
from torch_py_backend.errors import (
    BackendError,
    CancelledError,
    OutputError,
    UnavailableError,
    brief,
)
from torch_py_backend.streaming import continuous_batching
from torch_py_backend.streaming.continuous_batching import FailedError, Steps

log = logging.getLogger(__name__)

T = TypeVar("T")
_END = object()
# Of a trial: responses that are waited for, and steps without one.
_TRIED = 3
_MOST_STEPS = 1000


class Consumer(Protocol):
    """Who a stream's outcomes are for. The last word is a last outcome, or an end."""

    def take(self, outcome: dict[str, Value], *, last: bool) -> None:
        """One response."""

    def end(self, error: BackendError | None, text: str = "") -> None:
        """There are no more; with an error, where the stream failed, and its traceback."""

    def cancelled(self) -> bool:
        """Asked after each step: whether nobody waits for more."""


class _Source(Protocol):
    """Where a stream's outcomes come from."""

    async def next(self) -> tuple[Outcome | None, bool]:
        """The next outcome, None where a step made none; and whether it was the last."""

    async def close(self) -> None:
        """Let go of what the model keeps for this stream; it may have ended already."""


class Streams:
    """One model's streams. Used within one event loop.

    Attributes:
        live: how many have begun and not ended.
        counts: the engine's.
        closing: the streams that are left are to end.
        steps: those of a module with step(); None: it has none.

    Args:
        engine: the model.
        rests: called whenever no code of the model runs any more.
    """

    def __init__(self, engine: Engine, rests: Callable[[], None] = lambda: None) -> None:
        self.live = 0
        self.counts = engine.counts
        self.closing = False
        self.steps = Steps(engine, self.calling) if engine.loaded.step is not None else None
        self._engine = engine
        self._model = engine.config.name
        self._rests = rests

    async def run(self, item: Item, consumer: Consumer) -> None:
        """One stream, from its beginning to its end; what goes wrong is told to the consumer."""
        self.live += 1
        source: _Source | None = None
        failure: Failure | None = None
        try:
            try:
                source = self._begin(item)
                await self._pass_on(source, consumer)
            except BaseException as error:
                failure = self.failure(error, consumer)
            if source is not None:
                await self._close(source)
            self._engine.clean()
        finally:
            self.live -= 1
        if failure is not None:
            consumer.end(self._engine.recovery.fatal or failure.error, failure.text)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """What every call of the model has around it."""
        try:
            with self._engine.calling():
                yield
        finally:
            self._rests()

    @contextlib.contextmanager
    def advancing(self) -> Iterator[None]:
        """As `calling`, where the model goes on to its next response.

        Raises:
            OutputError: it has left a context open, which would be in force for all streams.
        """
        with self.calling():
            before = runtime.contexts(self._engine.device)
            yield
            if runtime.contexts(self._engine.device) != before:
                raise OutputError(
                    self._model,
                    "the model yields within torch.autocast or a torch.device, or awaits there:"
                    " other streams would then run in it",
                    expected="such contexts left before",
                )

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """As `advancing`, where nothing else is done within; the time is counted."""
        with self.advancing():
            began = time.perf_counter()
            yield
            self.counts.forward_seconds += time.perf_counter() - began

    def advance(self, resume: Callable[[], Any]) -> Any:
        """Go on with one stream; what it comes to. Called within `calling`."""
        return self._engine.stream_calls.advance(resume)

    def outcome(self, result: Any, given: Given) -> Outcome:
        """A result of the model, as the config says. Called within `calling`."""
        (outcome,) = self._engine.stream_calls.outcomes([(result, given)])
        return outcome

    def _begin(self, item: Item) -> _Source:
        if self._engine.recovery.fatal is not None:
            raise self._engine.recovery.fatal
        with self.calling():
            result, given = self._engine.stream_calls.begin(item)
        if self.steps is not None:
            return _Stepped(self.steps, result, given)
        if isinstance(result, AsyncIterator):
            return _Awaited(self, result, given)
        if isinstance(result, Iterator):
            return _Iterated(self, result, given)
        return _Whole(self, result, given)

    async def _pass_on(self, source: _Source, consumer: Consumer) -> None:
        last = False
        while not last:
            outcome, last = await source.next()
            if isinstance(outcome, BackendError):
                raise outcome
            if self._engine.recovery.fatal is not None:
                raise self._engine.recovery.fatal
            if outcome is not None:
                consumer.take(outcome, last=last)
            elif last:
                consumer.end(None)
            if not last and consumer.cancelled():
                raise CancelledError(self._model, "in mid-stream")

    def failure(self, error: BaseException, consumer: Consumer) -> Failure:
        """Why a stream has ended with this exception, whose frames let go of the request."""
        try:
            return self._failure(error, consumer)
        finally:
            # What is raised where a task waits is also in the future that it waits for: a cycle,
            # which would keep the request's tensors until a collection.
            faults.release(error)

    def _failure(self, error: BaseException, consumer: Consumer) -> Failure:
        if isinstance(error, FailedError):
            return error.failure
        if isinstance(error, asyncio.CancelledError) and self.closing:
            ended = UnavailableError(
                self._model, "the model is unloaded in mid-stream", cure="Ask again later."
            )
            return Failure(ended)
        if isinstance(error, asyncio.CancelledError | CancelledError) and consumer.cancelled():
            return Failure(CancelledError(self._model, "in mid-stream"))
        return self._engine.recovery.judge(error)

    async def _close(self, source: _Source) -> None:
        try:
            await source.close()
        except BaseException as error:  # code of the model's own, after its last response
            log.warning("model '%s': what ends a stream raised %s.", self._model, brief(error))


class _Whole:
    """A result that is no stream: the only outcome."""

    def __init__(self, streams: Streams, result: Any, given: Given) -> None:
        self._streams, self._result, self._given = streams, result, given

    async def next(self) -> tuple[Outcome | None, bool]:
        with self._streams.calling():
            return self._streams.outcome(self._result, self._given), True

    async def close(self) -> None:
        del self._result


class _Iterated:
    """What a generator yields, or any other iterator gives."""

    def __init__(self, streams: Streams, results: Iterator[Any], given: Given) -> None:
        self._streams, self._results, self._given = streams, results, given

    async def next(self) -> tuple[Outcome | None, bool]:
        await asyncio.sleep(0)  # the others' turn
        with self._streams.advancing():
            began = time.perf_counter()
            result = self._streams.advance(partial(next, self._results, _END))
            self._streams.counts.forward_seconds += time.perf_counter() - began
            if result is _END:
                return None, True
            return self._streams.outcome(result, self._given), False

    async def close(self) -> None:
        if isinstance(self._results, Generator):
            with self._streams.calling():
                self._results.close()


class _Awaited:
    """What an asynchronous generator yields: while it waits, others run."""

    def __init__(self, streams: Streams, results: AsyncIterator[Any], given: Given) -> None:
        self._streams, self._results, self._given = streams, results, given

    async def next(self) -> tuple[Outcome | None, bool]:
        await asyncio.sleep(0)  # one that never waits leaves the others their turn, too
        result = await _Sliced(anext(self._results, _END), self._streams, advances=True)
        if result is _END:
            return None, True
        with self._streams.calling():
            return self._streams.outcome(result, self._given), False

    async def close(self) -> None:
        close = getattr(self._results, "aclose", None)
        if close is not None:
            await _Sliced(close(), self._streams)


class _Stepped:
    """A stream of a module with begin() and step()."""

    def __init__(self, steps: Steps, state: Any, given: Given) -> None:
        self._steps, self._state, self._given = steps, state, given

    async def next(self) -> tuple[Outcome | None, bool]:
        if self._state is None:
            return None, True
        made = await self._steps.next(self._state, self._given)
        self._state = made.state
        return made.outcome, made.state is None

    async def close(self) -> None:
        del self._state


class _Sliced(Awaitable[T]):
    """An awaitable of the model's; each stretch of it, from wait to wait, is a call of its own.

    Args:
        awaitable: it.
        streams: whose calls its stretches are.
        advances: whether it goes on to a response, and each stretch leaves what it enters.
    """

    def __init__(
        self, awaitable: Awaitable[T], streams: Streams, *, advances: bool = False
    ) -> None:
        self._awaitable, self._streams = awaitable, streams
        self._calling = streams.computing if advances else streams.calling

    def __await__(self) -> Generator[Any, None, T]:
        stretches = self._awaitable.__await__()
        resume: Callable[[], Any] = stretches.__next__
        while True:
            waits = False
            try:
                with self._calling():
                    try:
                        waited_for = self._streams.advance(resume)
                    except StopIteration as end:
                        result: T = end.value
                        return result
                    waits = True
            except OutputError:
                if waits:
                    self._leave(stretches)
                raise
            try:
                yield waited_for
                resume = stretches.__next__
            except BaseException as error:  # what the loop throws in: the task is cancelled
                resume = _thrower(stretches, error)

    def _leave(self, stretches: Generator[Any, None, Any]) -> None:
        """Let it leave the contexts that it waits in: no other stream is to run in them."""
        with self._streams.calling(), contextlib.suppress(BaseException):
            stretches.throw(asyncio.CancelledError())


def _thrower(stretches: Generator[Any, None, Any], error: BaseException) -> Callable[[], Any]:
    return lambda: stretches.throw(error)


# --- before READY ------------------------------------------------------------------------------


class _Taster:
    """Takes a stream's first responses and leaves."""

    def __init__(self, engine: Engine) -> None:
        self.outcome: Outcome = {}
        self._engine = engine
        self._taken = 0

    def take(self, outcome: dict[str, Value], *, last: bool) -> None:  # noqa: ARG002  a Consumer's
        self.outcome = outcome
        self._taken += 1

    def end(self, error: BackendError | None, text: str = "") -> None:
        if error is not None and not isinstance(error, CancelledError):
            self.outcome = error
            self._engine.recovery.report(error, text, ())

    def cancelled(self) -> bool:
        return self._taken >= _TRIED


def trial(engine: Engine) -> Callable[[Sequence[Item]], Sequence[Outcome]]:
    """What runs the first responses of items' streams: the last one of each, or its error."""

    def run(items: Sequence[Item]) -> Sequence[Outcome]:
        return asyncio.run(_tried(engine, items))

    return run


async def _tried(engine: Engine, items: Sequence[Item]) -> Sequence[Outcome]:
    streams = Streams(engine)
    # A step of one stream is not yet one of several.
    tasters = [_Taster(engine) for _ in range(len(items) * (2 if streams.steps else 1))]
    await asyncio.gather(
        *(streams.run(items[at % len(items)], one) for at, one in enumerate(tasters))
    )
    failed = next((one.outcome for one in tasters if isinstance(one.outcome, BackendError)), None)
    return [failed or one.outcome for one in tasters[: len(items)]]


def first(model: str, step: Callable[[list[Any]], Any] | None, result: Any) -> Any:
    """The first outputs of what forward() returned, be it a stream or not.

    Raises:
        BackendError: the stream has none.
    """
    if step is not None:
        return continuous_batching.first(model, step, result, _MOST_STEPS)
    found: Any = result
    if isinstance(result, AsyncIterator):
        found = asyncio.run(_first_awaited(result))
    elif isinstance(result, Iterator):
        found = next(result, _END)
        if isinstance(result, Generator):
            result.close()
    if found is _END:
        raise continuous_batching.no_outputs(model, _MOST_STEPS)
    return found


async def _first_awaited(results: AsyncIterator[Any]) -> Any:
    found = await anext(results, _END)
    close = getattr(results, "aclose", None)
    if close is not None:
        await close()
    return found
