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
from typing import NamedTuple, TypeAlias

from torch_py_backend import composition
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError, OutputError, a_type, counted
from torch_py_backend.values import Outcome

# The next state, None at the end of the stream, and the response, None for none.
StepResult: TypeAlias = "tuple[object, Outcome | None]"


class StreamInputs(NamedTuple):
    """The inputs of a stream, which its outputs are checked against.

    Attributes:
        rows: the rows of the request.
        on_gpu: whether its outputs stay on the GPU, where all inputs were.
    """

    rows: int
    on_gpu: bool


class _WrongResultError(OutputError):
    """step() returned no pairs. With fewer streams, the wrong value may look right: no retry."""


class _Waiting(NamedTuple):
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
        calling: returns the context manager for calls of the model.
        outcome: makes the response of outputs.
    """

    def __init__(
        self,
        engine: Engine,
        step: Callable[[list[object]], object],
        calling: Callable[[], AbstractContextManager[None]],
        outcome: Callable[[object, StreamInputs], Outcome],
    ) -> None:
        self.streams = 0
        self._engine, self._step = engine, step
        self._calling, self._outcome = calling, outcome
        self._waiting: list[_Waiting] = []

    async def next(self, state: object, inputs: StreamInputs) -> StepResult:
        """Return the result of a stream's next step, shared with all streams that wait by then.

        Raises:
            BackendError: the step failed.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[StepResult] = loop.create_future()
        if not self._waiting:
            # After the streams that got results in this iteration of the loop have sent them.
            loop.call_soon(loop.call_soon, self._run)
        self._waiting.append(_Waiting(state, inputs, result, contextvars.copy_context()))
        return await result

    def _run(self) -> None:
        # A result that is done has been cancelled: the stream's client has left.
        batch = [stream for stream in self._waiting if not stream.result.done()]
        self._waiting = []
        for stream, result in zip(batch, self._results(batch) if batch else (), strict=True):
            if isinstance(result, BackendError):
                stream.result.set_exception(result)
            else:
                stream.result.set_result(result)

    def _results(self, batch: Sequence[_Waiting]) -> Sequence[StepResult | BackendError]:
        failures, called = self._engine.failures, self._engine.loaded.returns
        failures.calls_before = composition.calls
        try:
            return self._attempt(batch)
        except BaseException as error:  # its streams wait for a result, whatever was raised
            failure = failures.classify(error, called)
        if isinstance(failure.error, _WrongResultError):
            failure = dataclasses.replace(failure, final=True)
        return failures.halve(batch, self._retry, failure, called)

    def _retry(self, batch: Sequence[_Waiting]) -> Sequence[StepResult]:
        self._engine.counts.retried_rows += len(batch)
        return self._attempt(batch)

    def _attempt(self, batch: Sequence[_Waiting]) -> Sequence[StepResult]:
        with self._calling():
            # Context variables, such as a trace's context, are those of the first stream.
            return batch[0].context.run(self._call, batch)

    def _call(self, batch: Sequence[_Waiting]) -> Sequence[StepResult]:
        self.streams += len(batch)
        began = time.perf_counter()
        returned = self._step([stream.state for stream in batch])
        self._engine.counts.forward_seconds += time.perf_counter() - began
        pairs = _pairs(returned, len(batch))
        if isinstance(pairs, str):
            raise _WrongResultError(
                f"step() returned {pairs}",
                expected="a list with a pair (next state, outputs) for each stream",
            )
        return [
            (state, None if outputs is None else self._outcome(outputs, stream.inputs))
            for stream, (state, outputs) in zip(batch, pairs, strict=True)
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
