"""A batch of requests becomes their responses; what is wrong with one harms no other.

Imported when an instance starts, not before: it needs torch, and Triton's utilities complete.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch_py_backend.adapter import messages
from torch_py_backend.batching.gather_scatter import Outcome
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.retry import Failure
from torch_py_backend.engine.weight_watcher import Watch
from torch_py_backend.errors import (
    BackendError,
    CancelledError,
    InputError,
    InternalError,
    OutputError,
    brief,
    shown,
)
from torch_py_backend.observability.metric_families import OK

log = logging.getLogger(__name__)

# To ask Triton whether a request was cancelled takes 26 microseconds. It is asked where the last
# batch took twenty times as long for each request: a twentieth is spent, to save a whole one.
_WORTH_ASKING = 20 * 26e-6
# Tracebacks of one batch in the log; those that are alike are one.
_MOST_TOLD = 8
# What outcomes are where none is an error.
_RESULTS = {dict}


class Weights:
    """Tells which weights answered, by a parameter, where responses have some."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._takes_parameters = messages.takes_parameters()

    def told(self) -> Callable[[Outcome], Any]:
        """What writes the responses of a batch that the weights of this moment answered."""
        if not self._takes_parameters:
            return messages.write
        return partial(messages.write_with_parameters, told={"weights": self._watch.digest})


class Answering:
    """One instance's way from requests to responses.

    Args:
        engine: the model.
        end: called once, with the reason, when the process has become useless.
        weights: who tells which weights answered; None: nobody.
        read: what a request is for those who run it; raises if it cannot be read.
        run: one outcome for each that was read; None: the engine runs items.
        asked: how many of the requests clients have sent.
        leaves_out: whether requests that were cancelled meanwhile are left out.
    """

    def __init__(
        self,
        engine: Engine,
        end: Callable[[str], None],
        weights: Weights | None = None,
        *,
        read: Callable[[Any], Any] = messages.read,
        run: Callable[[Sequence[Any]], Sequence[Outcome]] | None = None,
        asked: Callable[[Sequence[Any]], int] = len,
        leaves_out: bool = True,
    ) -> None:
        self._engine = engine
        self._leaves_out = leaves_out
        self._read = read
        self._run_all = run or engine.run
        self._asked = asked
        self._counts = engine.counts
        self._weights = weights
        self._model = engine.config.name
        self._end = end
        self._took = 0.0

    def answer(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request, in their order."""
        fatal = self._engine.recovery.fatal
        if fatal is not None:  # not even the requests are read: their tensors may be on the device
            self._counts.answered(fatal.code, self._asked(requests))
            return [messages.write(fatal) for _ in requests]
        if self._leaves_out and self._took > len(requests) * _WORTH_ASKING:
            return self._answer_wanted(requests)
        return self._answer_all(requests)

    def _answer_wanted(self, requests: Sequence[Any]) -> list[Any]:
        """The cancelled ones are not run: requests wait in Triton while a batch is run."""
        cancelled = CancelledError(self._model)
        refused: dict[int, BackendError] = {
            place: cancelled for place, request in enumerate(requests) if request.is_cancelled()
        }
        return self._answer_others(requests, refused) if refused else self._answer_all(requests)

    def _answer_others(
        self, requests: Sequence[Any], refused: Mapping[int, BackendError]
    ) -> list[Any]:
        """The responses of all, where some are refused already."""
        for place, error in refused.items():
            self._count(requests[place], error)
        others = [one for place, one in enumerate(requests) if place not in refused]
        answered = iter(self._answer_all(others) if others else ())
        return [
            messages.write(refused[place]) if place in refused else next(answered)
            for place in range(len(requests))
        ]

    def _answer_all(self, requests: Sequence[Any]) -> list[Any]:
        began = time.perf_counter()
        try:
            items = [self._read(request) for request in requests]
        except Exception:
            return self._answer_readable(requests)
        write: Callable[[Outcome], Any] = messages.write
        if self._weights is None:
            outcomes = self._run(items)
        else:
            with self._engine.turn:  # no others are swapped in meanwhile
                outcomes = self._run(items)
                write = self._weights.told()
        failed = 0
        if set(map(type, outcomes)) != _RESULTS:
            failed += self._count_errors(requests, outcomes)
        try:
            responses = [write(outcome) for outcome in outcomes]
        except Exception:
            responses, unsent = self._write_sendable(requests, outcomes)
            failed += unsent
        self._counts.answered(OK, self._asked(requests) - failed)
        if self._engine.recovery.reports:
            self._tell(requests)
        # Not of a batch that was cancelled as a whole: it says nothing of the next one.
        self._took = time.perf_counter() - began
        return responses

    def _run(self, items: Sequence[Any]) -> Sequence[Outcome]:
        try:
            return self._run_all(items)
        except BaseException as error:  # Triton would send the traceback to every client
            failure = self._engine.recovery.judge(error)
        internal = self._engine.recovery.fatal or InternalError(self._model)
        self._engine.recovery.report(internal, failure.text, range(len(items)))
        return [internal] * len(items)

    def _answer_readable(self, requests: Sequence[Any]) -> list[Any]:
        """The responses, where at least one request cannot be read."""
        refused = {}
        for place, request in enumerate(requests):
            error = self._unreadable(request)
            if error is not None:
                refused[place] = error
        fatal = self._engine.recovery.fatal
        if fatal is not None:
            refused = dict.fromkeys(range(len(requests)), fatal)
        self._tell(requests)
        return self._answer_others(requests, refused)

    def _unreadable(self, request: Any) -> BackendError | None:
        recovery = self._engine.recovery
        try:
            self._read(request)
        except Exception as error:
            said, failure = brief(error), recovery.judge(error)
        else:
            return None
        if recovery.fatal is not None or failure.memory:
            recovery.report(failure.error, failure.text, ())
            return failure.error
        return InputError(self._model, f"the request cannot be read: {said}")

    def _count(self, request: Any, error: BackendError) -> int:
        """Count an error, if a client is told it; how many that are."""
        told = self._asked((request,))
        if told:
            self._counts.answered(error.code)
        return told

    def _count_errors(self, requests: Sequence[Any], outcomes: Sequence[Outcome]) -> int:
        return sum(
            self._count(request, one)
            for request, one in zip(requests, outcomes, strict=True)
            if isinstance(one, BackendError)
        )

    def _write_sendable(
        self, requests: Sequence[Any], outcomes: Sequence[Outcome]
    ) -> tuple[list[Any], int]:
        """The responses, where at least one cannot be made, and how many cannot."""
        responses, unsent = [], 0
        for place, outcome in enumerate(outcomes):
            try:
                responses.append(messages.write(outcome))
                continue
            except Exception as error:
                said, failure = brief(error), self._engine.recovery.judge(error)
            refusal = self._unsendable(place, said, failure)
            unsent += self._count(requests[place], refusal)
            responses.append(messages.write(refusal))
        return responses, unsent

    def _unsendable(self, place: int, said: str, failure: Failure) -> BackendError:
        recovery = self._engine.recovery
        refusal: BackendError = failure.error
        if recovery.fatal is None and not failure.memory:
            refusal = OutputError(self._model, f"the outputs cannot be sent: {said}")
        recovery.report(refusal, failure.text, (place,))
        return refusal

    def _tell(self, requests: Sequence[Any]) -> None:
        """Write to the server's log what failed and for whom, and act on what is fatal."""
        recovery = self._engine.recovery
        reports = list(recovery.reports.items())
        recovery.reports.clear()
        for (sentence, text), places in reports[:_MOST_TOLD]:
            names = _names(requests[place] for place in places)
            log.error("%s%s%s", sentence, names, f"\n{text}" if text else "")
        if len(reports) > _MOST_TOLD:
            log.error(
                "model '%s': %d more failures in the same batch are not shown.",
                self._model,
                len(reports) - _MOST_TOLD,
            )
        if recovery.fatal is not None:
            self._end(recovery.reason)


def _names(requests: Iterable[Any]) -> str:
    """The requests of a failure, for the log: their ids, where clients gave them some."""
    named = [messages.request_id(request) for request in requests]
    known = [name for name in named if name]
    if not known:
        return f" ({len(named)} requests without an id)" if named else ""
    nameless = f", {len(named) - len(known)} without an id" if len(known) < len(named) else ""
    return f" (requests {shown(known)}{nameless})"
