"""Continuous batching: the live streams of a module with begin() and step() share each step.

`begin(...)` takes the inputs of one request and returns the state of its stream, any object.
`step(states)` takes the states of all live streams and returns a list with a pair for each:

    (next state, or None at the end of the stream;  outputs, or None for no response)

If a step fails, it is run again for halves of its streams, and so on, until only the failing
streams end with the error. This needs a step() that returns new states and leaves the old ones
unchanged.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch_py_backend import composition
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.stream_calls import StreamInputs
from torch_py_backend.errors import BackendError, OutputError, a_type, counted
from torch_py_backend.values import Outcome


class StepError(Exception):
    """A step failed for a stream."""

    def __init__(self, error: BackendError) -> None:
        super().__init__()
        self.error = error


class _WrongResultError(OutputError):
    """step() returned no pairs. With fewer streams, the wrong value may look right: no retry."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step for one stream.

    Attributes:
        state: the next state; None: the stream has ended.
        outcome: the response; None: this step has no response.
    """

    state: object
    outcome: Outcome | None


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A stream that waits for its next step."""

    state: object
    inputs: StreamInputs
    result: asyncio.Future[StepResult]
    context: contextvars.Context


class Stepper:
    """Calls step() for all streams that wait for a step. Used within one event loop.

    Attributes:
        streams: number of streams in all calls of step().

    Args:
        calling: the context manager for calls of the model.
    """

    def __init__(self, engine: Engine, calling: Callable[[], AbstractContextManager[None]]) -> None:
        self.streams = 0
        self._engine = engine
        self._calling = calling
        self._pending: list[_PendingStep] = []
        self._running: asyncio.Task[None] | None = None

    async def next(self, state: object, inputs: StreamInputs) -> StepResult:
        """Return the result of a stream's next step, shared with all streams that wait by then.

        Raises:
            StepError: the step failed.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[StepResult] = loop.create_future()
        self._pending.append(_PendingStep(state, inputs, result, contextvars.copy_context()))
        if self._running is None or self._running.done():
            self._running = loop.create_task(self._run_steps())
        return await result

    async def _run_steps(self) -> None:
        """Run steps until no stream waits for one."""
        while self._pending:
            waiting, self._pending = self._pending, []
            # A result that is done has been cancelled: the stream's client has left.
            waiting = [pending for pending in waiting if not pending.result.done()]
            results = self._run_batch(waiting) if waiting else ()
            for pending, result in zip(waiting, results, strict=True):
                if isinstance(result, BackendError):
                    pending.result.set_exception(StepError(result))
                else:
                    pending.result.set_result(result)
            # Streams receive their results, new streams begin, and both request their next step.
            await asyncio.sleep(0)

    def _run_batch(self, batch: Sequence[_PendingStep]) -> Sequence[StepResult | BackendError]:
        failures, called = self._engine.failures, self._engine.loaded.returns
        failures.calls_before = composition.calls
        try:
            return self._attempt(batch)
        except BaseException as error:  # its streams wait for a result, whatever was raised
            failure = failures.classify(error, called)
        if isinstance(failure.error, _WrongResultError):
            failure = dataclasses.replace(failure, final=True)
        return failures.halve(batch, self._retry, failure, called)

    def _retry(self, batch: Sequence[_PendingStep]) -> Sequence[StepResult]:
        self._engine.counts.retried_rows += len(batch)
        return self._attempt(batch)

    def _attempt(self, batch: Sequence[_PendingStep]) -> Sequence[StepResult]:
        with self._calling():
            # Context variables, such as a trace's context, are those of the first stream.
            return batch[0].context.run(self._step, batch)

    def _step(self, batch: Sequence[_PendingStep]) -> Sequence[StepResult]:
        step = self._engine.stream_calls.step
        assert step is not None  # noqa: S101  a Stepper is made for a model with step()
        self.streams += len(batch)
        began = time.perf_counter()
        returned = step([pending.state for pending in batch])
        self._engine.counts.forward_seconds += time.perf_counter() - began
        pairs = _pairs(returned, len(batch))
        if isinstance(pairs, str):
            raise _WrongResultError(
                f"step() returned {pairs}",
                expected="a list with a pair (next state, outputs) for each stream",
            )
        results = [
            (outputs, pending.inputs)
            for pending, (_, outputs) in zip(batch, pairs, strict=True)
            if outputs is not None
        ]
        outcomes = iter(self._engine.stream_calls.outcomes(results))
        return [
            StepResult(state, None if outputs is None else next(outcomes))
            for state, outputs in pairs
        ]


def _pairs(returned: object, count: int) -> list[tuple[object, object]] | str:
    """Return a pair for each stream, or what step() returned instead."""
    if not isinstance(returned, list | tuple):
        return a_type(returned)
    if len(returned) != count:
        return f"a list of {len(returned)} for {counted(count, 'stream')}"
    for entry in returned:
        if not (isinstance(entry, tuple) and len(entry) == 2):  # noqa: PLR2004
            return f"{a_type(entry)} for a stream"
    return list(returned)
