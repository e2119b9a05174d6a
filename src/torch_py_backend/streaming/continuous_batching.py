"""The live streams of a module with begin() and step(), advanced together: continuous batching.

`begin(...)` takes one request's inputs and returns the state of its stream, whatever that is.
`step(states)` takes a list of states, of all streams that are live, and returns a pair for each:

    (the stream's next state, None at its end;  its outputs, None for no response this time)

A state that step() replaces, rather than changes, can be stepped again: where a step fails, its
halves are run, and theirs, until only the streams at fault end with the error.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch_py_backend.batching.gather_scatter import ANY_ROWS, Outcome
from torch_py_backend.engine.bisection import Budget, narrow
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.memory_limits import Capacity
from torch_py_backend.engine.retry import Failure
from torch_py_backend.engine.stream_calls import Given
from torch_py_backend.errors import BackendError, OutputError

# Calls that finding the streams at fault may take: enough for every step of up to 64 streams.
_CALLS = 128
# What memory depends on is in the states, which nobody can look into: all steps are of one shape.
_SHAPE = "step"


class FailedError(Exception):
    """A step failed for a stream; carries why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Stepped:
    """A stream after a step: its next state, None at its end; and its outcome, if it has one."""

    state: Any
    outcome: Outcome | None


@dataclass(frozen=True, slots=True)
class _Wish:
    """A stream that waits for its next step."""

    state: Any
    given: Given
    stepped: asyncio.Future[Stepped]
    context: contextvars.Context


class Steps:
    """One model's steps, each of all streams that wait for one. Used within one event loop.

    Attributes:
        calls: how often step() was called.
        streams: how many streams it was called with, all in all.

    Args:
        engine: the model.
        calling: what every call of it has around it.
    """

    def __init__(self, engine: Engine, calling: Callable[[], AbstractContextManager[None]]) -> None:
        self.calls = self.streams = 0
        self._engine = engine
        self._calling = calling
        self._capacity = Capacity(ANY_ROWS)
        self._wishes: list[_Wish] = []
        self._running: asyncio.Task[None] | None = None

    async def next(self, state: Any, given: Given) -> Stepped:
        """A stream's next step, shared with all that wait for one by then.

        Raises:
            FailedError: it failed.
        """
        loop = asyncio.get_running_loop()
        stepped: asyncio.Future[Stepped] = loop.create_future()
        self._wishes.append(_Wish(state, given, stepped, contextvars.copy_context()))
        if self._running is None or self._running.done():
            self._running = loop.create_task(self._run())
        return await stepped

    async def _run(self) -> None:
        """Steps, as long as there are streams that wait for one."""
        while self._wishes:
            wishes, self._wishes = self._wishes, []
            self._grant([one for one in wishes if not one.stepped.done()])
            # Streams take what was made, new ones begin, and all say whether they want another.
            await asyncio.sleep(0)

    def _grant(self, wishes: Sequence[_Wish]) -> None:
        most = self._capacity.most(_SHAPE) or max(len(wishes), 1)
        for start in range(0, len(wishes), most):
            some = wishes[start : start + most]
            for one, made in zip(some, self._results(some), strict=True):
                if isinstance(made, Failure):
                    one.stepped.set_exception(FailedError(made))
                else:
                    one.stepped.set_result(made)

    def _results(self, wishes: Sequence[_Wish]) -> Sequence[Stepped | Failure]:
        made = self._attempt(wishes)
        if not isinstance(made, Failure):
            self._capacity.fitted(_SHAPE, len(wishes))
            return made
        engine = self._engine
        if made.memory and self._capacity.failed(_SHAPE, len(wishes)) is not None:
            engine.counts.memory_splits += 1
        hopeless = made.repeats or engine.recovery.fatal is not None or not engine.repeats()
        if len(wishes) == 1 or hopeless:
            return [made] * len(wishes)
        return narrow(
            wishes,
            self._again,
            made,
            calls=Budget(_CALLS),
            hopeless=lambda: engine.recovery.fatal is not None,
        )

    def _again(self, wishes: Sequence[_Wish]) -> Sequence[Stepped] | Failure:
        self._engine.counts.retried_rows += len(wishes)
        return self._attempt(wishes)

    def _attempt(self, wishes: Sequence[_Wish]) -> Sequence[Stepped] | Failure:
        try:
            with self._calling():
                # What is current in a call for several, a trace's context say, is the first one's.
                return wishes[0].context.run(self._step, wishes)
        except BaseException as error:  # nobody else would tell the streams
            return self._engine.recovery.judge(error, self._engine.loaded.returns)

    def _step(self, wishes: Sequence[_Wish]) -> Sequence[Stepped] | Failure:
        step = self._engine.stream_calls.step
        assert step is not None  # noqa: S101  of a model that has one
        self.calls += 1
        self.streams += len(wishes)
        began = time.perf_counter()
        pairs = step([one.state for one in wishes])
        self._engine.counts.forward_seconds += time.perf_counter() - began
        misfit = _misfit(pairs, len(wishes))
        if misfit:  # not to be tried again with fewer streams, for which it may fit
            return Failure(
                OutputError(
                    self._engine.config.name,
                    f"step() returned {misfit}",
                    expected="a list with a pair (next state, outputs) for each stream",
                ),
                repeats=True,
            )
        made = [
            (outputs, one.given)
            for one, (_, outputs) in zip(wishes, pairs, strict=True)
            if outputs is not None
        ]
        outcomes = iter(self._engine.stream_calls.outcomes(made))
        return [
            Stepped(state, None if outputs is None else next(outcomes)) for state, outputs in pairs
        ]


def _misfit(returned: Any, count: int) -> str:
    """What step() has returned instead of a pair for each stream; empty: nothing else."""
    if not isinstance(returned, list | tuple):
        return f"a {type(returned).__name__}"
    if len(returned) != count:
        return f"{len(returned)} entries for {count} streams"
    odd = [one for one in returned if not (isinstance(one, tuple) and len(one) == 2)]  # noqa: PLR2004
    return f"a {type(odd[0]).__name__} for a stream" if odd else ""


def first(model: str, step: Callable[[list[Any]], Any], state: Any, most: int) -> Any:
    """The first outputs of a stream that is stepped alone.

    Raises:
        BackendError: there are none within `most` steps.
    """
    for _ in range(most):
        if state is None:
            break
        ((state, outputs),) = step([state])
        if outputs is not None:
            return outputs
    raise no_outputs(model, most)


def no_outputs(model: str, most: int) -> BackendError:
    return OutputError(
        model,
        f"the stream of the example inputs ended, or took {most} steps, without a response",
        expected="a response, which tells the outputs",
    )
