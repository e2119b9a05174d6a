"""Answer a batch of requests; a failure of one does not affect the others.

Imported when an instance starts: it needs torch and the complete Triton utilities.
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
from torch_py_backend.engine.weight_watcher import WeightWatcher
from torch_py_backend.errors import (
    BackendError,
    CancelledError,
    InputError,
    InternalError,
    OutputError,
    join_names,
    summarize,
)
from torch_py_backend.observability.metric_families import OK

log = logging.getLogger(__name__)

# Checking whether a request was cancelled takes 26 microseconds. Check only if the last batch took
# twenty times as long for each request: that costs at most a twentieth of the time.
_CHECK_CANCELLED_S = 20 * 26e-6
# The most reports of one batch in the log; equal ones are merged.
_MOST_LOGGED = 8
# The types of outcomes without an error among them.
_RESULTS = {dict}


class WeightsParameter:
    """Adds the digest of the weights to responses as a parameter, if the server supports it."""

    def __init__(self, watch: WeightWatcher) -> None:
        self._watch = watch
        self._takes_parameters = messages.takes_parameters()

    def writer(self) -> Callable[[Outcome], Any]:
        """Return the function that writes responses of the current weights."""
        if not self._takes_parameters:
            return messages.write
        parameters = {"weights": self._watch.digest}
        return partial(messages.write_with_parameters, parameters=parameters)


class Answering:
    """Answers the requests of one instance.

    Args:
        engine: the model.
        end: called once, with the reason, when the process cannot use its device any more.
        weights: adds the digest of the weights to responses; None: responses have none.
        read: reads a request; raises if that fails.
        run: runs the read requests, returns one outcome for each; None: `engine.run`.
        count_sent: returns how many of the requests were sent by clients.
        leaves_out: whether to skip cancelled requests.
    """

    def __init__(
        self,
        engine: Engine,
        end: Callable[[str], None],
        weights: WeightsParameter | None = None,
        *,
        read: Callable[[Any], Any] = messages.read,
        run: Callable[[Sequence[Any]], Sequence[Outcome]] | None = None,
        count_sent: Callable[[Sequence[Any]], int] = len,
        leaves_out: bool = True,
    ) -> None:
        self._engine = engine
        self._leaves_out = leaves_out
        self._read = read
        self._run_all = run or engine.run
        self._count_sent = count_sent
        self._counts = engine.counts
        self._weights = weights
        self._model = engine.config.name
        self._end = end
        self._duration = 0.0

    def answer(self, requests: Sequence[Any]) -> list[Any]:
        """Return one response for each request, in order."""
        fatal = self._engine.recovery.fatal
        if fatal is not None:  # reading requests could fail: their tensors may be on the device
            self._counts.answered(fatal.code, self._count_sent(requests))
            return [messages.write(fatal) for _ in requests]
        if self._leaves_out and self._duration > len(requests) * _CHECK_CANCELLED_S:
            return self._answer_uncancelled(requests)
        return self._answer_all(requests)

    def _answer_uncancelled(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests; refuse those cancelled while they waited for the previous batch."""
        cancelled = CancelledError(self._model)
        refused: dict[int, BackendError] = {
            place: cancelled for place, request in enumerate(requests) if request.is_cancelled()
        }
        return self._answer_others(requests, refused) if refused else self._answer_all(requests)

    def _answer_others(
        self, requests: Sequence[Any], refused: Mapping[int, BackendError]
    ) -> list[Any]:
        """Answer requests of which some are refused already."""
        for place, error in refused.items():
            self._count(requests[place], error)
        others = [request for place, request in enumerate(requests) if place not in refused]
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
            with self._engine.turn:  # new weights must not be swapped in meanwhile
                outcomes = self._run(items)
                write = self._weights.writer()
        failed = 0
        if set(map(type, outcomes)) != _RESULTS:
            failed += self._count_errors(requests, outcomes)
        try:
            responses = [write(outcome) for outcome in outcomes]
        except Exception:
            responses, unsent = self._write_sendable(requests, outcomes)
            failed += unsent
        self._counts.answered(OK, self._count_sent(requests) - failed)
        if self._engine.recovery.reports:
            self._log_reports(requests)
        # Not set for a batch that was cancelled as a whole: its duration predicts nothing.
        self._duration = time.perf_counter() - began
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
        """Answer requests of which at least one cannot be read."""
        refused = {}
        for place, request in enumerate(requests):
            error = self._unreadable(request)
            if error is not None:
                refused[place] = error
        fatal = self._engine.recovery.fatal
        if fatal is not None:
            refused = dict.fromkeys(range(len(requests)), fatal)
        self._log_reports(requests)
        return self._answer_others(requests, refused)

    def _unreadable(self, request: Any) -> BackendError | None:
        recovery = self._engine.recovery
        try:
            self._read(request)
        except Exception as error:
            reason, failure = summarize(error), recovery.judge(error)
        else:
            return None
        if recovery.fatal is not None or failure.memory:
            recovery.report(failure.error, failure.text, ())
            return failure.error
        return InputError(self._model, f"the request cannot be read: {reason}")

    def _count(self, request: Any, error: BackendError) -> int:
        """Count an error unless the request only fills a slot; return the number counted."""
        count = self._count_sent((request,))
        if count:
            self._counts.answered(error.code)
        return count

    def _count_errors(self, requests: Sequence[Any], outcomes: Sequence[Outcome]) -> int:
        return sum(
            self._count(request, outcome)
            for request, outcome in zip(requests, outcomes, strict=True)
            if isinstance(outcome, BackendError)
        )

    def _write_sendable(
        self, requests: Sequence[Any], outcomes: Sequence[Outcome]
    ) -> tuple[list[Any], int]:
        """Write responses of which at least one fails; return them and the number of failures."""
        recovery = self._engine.recovery
        responses, unsent = [], 0
        for place, outcome in enumerate(outcomes):
            try:
                responses.append(messages.write(outcome))
                continue
            except Exception as error:
                reason, failure = summarize(error), recovery.judge(error)
            refusal: BackendError = failure.error
            if recovery.fatal is None and not failure.memory:
                refusal = OutputError(self._model, f"the outputs cannot be sent: {reason}")
            recovery.report(refusal, failure.text, (place,))
            unsent += self._count(requests[place], refusal)
            responses.append(messages.write(refusal))
        return responses, unsent

    def _log_reports(self, requests: Sequence[Any]) -> None:
        """Log the failures with the IDs of their requests; report a fatal one."""
        recovery = self._engine.recovery
        reports = list(recovery.reports.items())
        recovery.reports.clear()
        for (sentence, text), places in reports[:_MOST_LOGGED]:
            names = _names(requests[place] for place in places)
            log.error("%s%s%s", sentence, names, f"\n{text}" if text else "")
        if len(reports) > _MOST_LOGGED:
            log.error(
                "model '%s': %d more failures in the same batch are not shown.",
                self._model,
                len(reports) - _MOST_LOGGED,
            )
        if recovery.fatal is not None:
            self._end(recovery.reason)


def _names(requests: Iterable[Any]) -> str:
    """Return the IDs of a failure's requests for the log, where clients set them."""
    ids = [messages.request_id(request) for request in requests]
    known = [name for name in ids if name]
    if not known:
        return f" ({len(ids)} requests without an id)" if ids else ""
    others = f", {len(ids) - len(known)} without an id" if len(known) < len(ids) else ""
    return f" (requests {join_names(known)}{others})"
