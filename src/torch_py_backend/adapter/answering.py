"""Answer a batch of requests; a failure of one does not affect the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

from torch_py_backend.adapter import messages
from torch_py_backend.adapter.messages import Request, Response
from torch_py_backend.batching.gather_scatter import Outcome
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.retry import Failure, reported
from torch_py_backend.errors import (
    BackendError,
    CancelledError,
    InternalError,
    OutOfMemoryError,
    OutputError,
    counted,
    join_names,
    summarize,
)
from torch_py_backend.observability.metric_families import OK

log = logging.getLogger(__name__)

# What `read` returns and `run` takes: an item, or a step of a sequence.
T = TypeVar("T")

# The server process answers whether a request was cancelled, which takes about 0.1 ms. Requests are
# checked only if the last batch took a hundred times as long as their checks.
CHECK_CANCELLED_S = 100 * 1e-4
# The most reports of one batch in the log; equal ones are merged.
_MAX_LOGGED = 8
# The types of outcomes without an error among them.
_RESULTS = {dict}


class Answering(Generic[T]):
    """Answers the requests of one instance.

    Attributes:
        last_batch_seconds: the duration of the last batch, whichever path it took.

    Args:
        on_fatal: called with the reason when the process cannot use its device any more.
        read: reads a request; raises if that fails.
        run: runs the read requests, returns one outcome for each.
        count_sent: returns how many of the requests were sent by clients.
        skips_cancelled: whether to skip cancelled requests.
    """

    def __init__(
        self,
        engine: Engine,
        on_fatal: Callable[[str], None],
        read: Callable[[Request], T],
        run: Callable[[Sequence[T]], Sequence[Outcome]],
        *,
        count_sent: Callable[[Sequence[Request]], int] = len,
        skips_cancelled: bool = True,
    ) -> None:
        self._engine = engine
        self._skips_cancelled = skips_cancelled
        self._read = read
        self._run_all = run
        self._count_sent = count_sent
        self._counts = engine.counts
        self._model = engine.config.name
        self._on_fatal = on_fatal
        self.last_batch_seconds = 0.0

    def answer(self, requests: Sequence[Request]) -> list[Response]:
        """Return one response for each request, in order."""
        fatal = self._engine.recovery.fatal
        if fatal is not None:  # reading requests could fail: their tensors may be on the device
            self._counts.count_requests(fatal.code, self._count_sent(requests))
            return [messages.write(fatal) for _ in requests]
        if self._skips_cancelled and self.last_batch_seconds > len(requests) * CHECK_CANCELLED_S:
            return self.check_and_answer(requests)
        return self._answer_all(requests)

    def check_and_answer(self, requests: Sequence[Request]) -> list[Response]:
        """Answer requests; refuse those that were cancelled."""
        cancelled = CancelledError(self._model)
        refused = {at: cancelled for at, request in enumerate(requests) if request.is_cancelled()}
        return self._answer_others(requests, refused) if refused else self._answer_all(requests)

    def classify(self, error: BaseException) -> Failure:
        """Return what a failed call means; never raise.

        Neither an interrupt nor a failure of the classification itself is retried.
        """
        text, interrupted = "", isinstance(error, KeyboardInterrupt)
        try:
            failure = self._engine.recovery.classify(error)
            text = failure.text
        except BaseException as second:  # such as no memory for the traceback
            text, interrupted = text or summarize(second), True
        if not interrupted:
            return failure
        return Failure(InternalError(self._model), text, repeats=True)

    def answer_failed(
        self, requests: Sequence[Request], resolve: Callable[[], Sequence[Outcome]], began: float
    ) -> list[Response]:
        """Answer requests whose call failed.

        Args:
            requests: the requests of the batch.
            resolve: runs them again or refuses them.
            began: when the batch began, in seconds of the performance counter.
        """
        responses = self.respond(requests, self._guarded(resolve, len(requests)))
        self.last_batch_seconds = time.perf_counter() - began
        return responses

    def _answer_others(
        self, requests: Sequence[Request], refused: Mapping[int, BackendError]
    ) -> list[Response]:
        """Answer requests of which some are refused already, by their positions."""
        self._record([requests[at] for at in refused], list(refused.values()))
        others = [request for at, request in enumerate(requests) if at not in refused]
        answered = iter(self._answer_all(others) if others else ())
        return [
            messages.write(refused[at]) if at in refused else next(answered)
            for at in range(len(requests))
        ]

    def _answer_all(self, requests: Sequence[Request]) -> list[Response]:
        began = time.perf_counter()
        try:
            items = [self._read(request) for request in requests]
        except Exception:
            refused = {
                at: error
                for at, request in enumerate(requests)
                if (error := self._unreadable(request)) is not None
            }
            fatal = self._engine.recovery.fatal
            if fatal is not None:
                refused = dict.fromkeys(range(len(requests)), fatal)
            return self._answer_others(requests, refused)
        responses = self.respond(requests, self._guarded(partial(self._run_all, items), len(items)))
        # Unset for a batch of refused requests only (`_answer_others`): it predicts nothing.
        self.last_batch_seconds = time.perf_counter() - began
        return responses

    def respond(
        self,
        requests: Sequence[Request],
        outcomes: Sequence[Outcome],
    ) -> list[Response]:
        """Return a response for each outcome; count them, and log failures."""
        try:
            responses = [messages.write(outcome) for outcome in outcomes]
        except Exception:
            pairs = [self._write_or_refuse(outcome) for outcome in outcomes]
            responses, outcomes = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if set(map(type, outcomes)) == _RESULTS:
            self._counts.count_requests(OK, self._count_sent(requests))
        else:
            self._record(requests, outcomes)
        return responses

    def _guarded(self, run: Callable[[], Sequence[Outcome]], count: int) -> Sequence[Outcome]:
        try:
            return run()
        except BaseException as error:  # Triton would send the traceback to every client
            failure = self.classify(error)
        internal = self._engine.recovery.fatal or InternalError(self._model)
        return [reported(internal, failure.text)] * count

    def _unreadable(self, request: Request) -> BackendError | None:
        try:
            self._read(request)
        except Exception as error:
            return self._engine.recovery.unreadable(error)
        return None

    def _write_or_refuse(self, outcome: Outcome) -> tuple[Response, Outcome]:
        """Return a response and its outcome, which is an error if the result cannot be written."""
        recovery = self._engine.recovery
        try:
            return messages.write(outcome), outcome
        except Exception as error:
            reason, failure = summarize(error), recovery.classify(error)
        if recovery.fatal is not None or isinstance(failure.error, OutOfMemoryError):
            refusal = recovery.refusal(failure)
        else:
            unsent = OutputError(self._model, f"the outputs cannot be sent: {reason}")
            refusal = reported(unsent, failure.text)
        return messages.write(refusal), refusal

    def _record(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
        """Count outcomes of which some are errors, log those, and report a fatal one."""
        reports: dict[tuple[str, str], list[Request]] = {}
        results = 0
        for request, outcome in zip(requests, outcomes, strict=True):
            sent = self._count_sent((request,))  # 0 for a request that only fills a slot
            if not isinstance(outcome, BackendError):
                results += sent
                continue
            if sent:
                self._counts.count_requests(outcome.code)
            if outcome.reported:
                reports.setdefault((str(outcome), outcome.traceback), []).append(request)
        self._counts.count_requests(OK, results)
        for (sentence, text), failed in list(reports.items())[:_MAX_LOGGED]:
            log.error("%s%s%s", sentence, _names(failed), f"\n{text}" if text else "")
        if len(reports) > _MAX_LOGGED:
            log.error(
                "model '%s': the log does not show %s of the same batch.",
                self._model,
                counted(len(reports) - _MAX_LOGGED, "more failure"),
            )
        recovery = self._engine.recovery
        if recovery.fatal is not None:
            self._on_fatal(recovery.reason)


def _names(requests: Sequence[Request]) -> str:
    """Return the IDs of a failure's requests for the log, where clients set them."""
    known = [name for name in map(messages.request_id, requests) if name]
    if not known:
        return f" ({counted(len(requests), 'request')} without an id)"
    unknown = len(requests) - len(known)
    others = f", {unknown} without an id" if unknown else ""
    return f" (requests {join_names(known)}{others})"
