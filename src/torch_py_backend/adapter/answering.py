"""Answer a batch of requests; a failure of one does not affect the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch_py_backend.adapter import messages
from torch_py_backend.adapter.messages import Request, Response, Responses
from torch_py_backend.engine.engine import Engine
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
from torch_py_backend.pipeline.counters import OK
from torch_py_backend.pipeline.failures import reported
from torch_py_backend.pipeline.run import Result

log = logging.getLogger(__name__)

# The server process answers whether a request was cancelled, which takes about 0.1 ms. Requests are
# checked only if the last batch took a hundred times as long as their checks.
CHECK_CANCELLED_S = 100 * 1e-4
# The most reports of one batch in the log; equal ones are merged.
_MAX_LOGGED = 8


class Answering:
    """Answers the requests of one instance.

    Attributes:
        last_batch_seconds: the duration of the last batch.

    Args:
        on_fatal: called with the reason when the process cannot use its device any more.
        read: reads a request; raises if that fails.
        run: runs what was read, returns one result for each.
        read_all: reads all requests of a batch; None: one by one with `read`.
        count_sent: returns how many of the requests were sent by clients.
        skips_cancelled: whether to skip cancelled requests.
    """

    def __init__(
        self,
        engine: Engine,
        on_fatal: Callable[[str], None],
        read: Callable[[Request], Any],
        run: Callable[[Sequence[Any]], Sequence[Result]],
        *,
        read_all: Callable[[Sequence[Request]], Sequence[Any]] | None = None,
        count_sent: Callable[[Sequence[Request]], int] = len,
        skips_cancelled: bool = True,
    ) -> None:
        self.last_batch_seconds = 0.0
        self._failures, self._counts = engine.failures, engine.counts
        self._model = engine.config.name
        self._on_fatal = on_fatal
        self._read, self._run = read, run
        self._read_all = read_all or (lambda requests: [read(request) for request in requests])
        self._count_sent = count_sent
        self._skips_cancelled = skips_cancelled

    def answer(self, requests: Sequence[Request]) -> Sequence[Response]:
        """Return one response for each request, in order."""
        began = time.perf_counter()
        if self._failures.fatal is not None or (
            self.last_batch_seconds > len(requests) * CHECK_CANCELLED_S
            and self._skips_cancelled
            and any(request.is_cancelled() for request in requests)
        ):
            return self._answer_some(requests)
        try:
            items = self._read_all(requests)
        except Exception:  # it is found by reading the requests one by one
            return self._answer_some(requests)
        try:
            results = self._run(items)
        except BaseException as error:  # Triton would send the traceback to every client
            results = self._internal_errors(error, len(items))
        if type(results) is Responses:
            answered = self._counts.requests
            answered[OK] = answered.get(OK, 0) + len(results)
            responses: Sequence[Response] = results
        else:
            responses = self._respond(requests, results)
        self.last_batch_seconds = time.perf_counter() - began
        return responses

    def _internal_errors(self, error: BaseException, count: int) -> Sequence[BackendError]:
        failure = self._failures.classify(error)
        internal = self._failures.fatal or reported(InternalError(), failure.text)
        return [internal] * count

    def _answer_some(self, requests: Sequence[Request]) -> Sequence[Response]:
        """Answer requests of which some are refused: cancelled or unreadable ones, or all."""
        fatal = self._failures.fatal
        if fatal is not None:  # it is in the log
            self._counts.count_requests(fatal.code, self._count_sent(requests))
            return [messages.write(fatal, self._model) for _ in requests]
        checks = self._skips_cancelled and (
            self.last_batch_seconds > len(requests) * CHECK_CANCELLED_S
        )
        entries = [self._read_or_refuse(request, checks_cancelled=checks) for request in requests]
        if self._failures.fatal is not None:
            entries = [self._failures.fatal] * len(requests)
        items = [entry for entry in entries if not isinstance(entry, BackendError)]
        try:
            results = iter(self._run(items) if items else ())
        except BaseException as error:
            results = iter(self._internal_errors(error, len(items)))
        outcomes = [
            entry if isinstance(entry, BackendError) else next(results) for entry in entries
        ]
        return self._respond(requests, outcomes)

    def _read_or_refuse(self, request: Request, *, checks_cancelled: bool) -> Any:
        """Return what was read of a request, or its error."""
        if self._failures.fatal is not None:  # its tensors may be on the device
            return self._failures.fatal
        try:
            if checks_cancelled and request.is_cancelled():
                return CancelledError()
            return self._read(request)
        except Exception as error:
            return self._failures.unreadable(error)

    def _respond(
        self, requests: Sequence[Request], results: Sequence[Result]
    ) -> Sequence[Response]:
        """Return a response for each result; count them, and log failures."""
        try:
            responses = [messages.write(result, self._model) for result in results]
        except Exception:
            pairs = [self._write_or_refuse(result) for result in results]
            responses, results = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if any(isinstance(result, BackendError) for result in results):
            self._record(requests, results)
        else:
            self._counts.count_requests(OK, self._count_sent(requests))
        return responses

    def _write_or_refuse(self, result: Result) -> tuple[Response, Result]:
        """Return a response and its result, which is an error if it cannot be written."""
        failures = self._failures
        try:
            return messages.write(result, self._model), result
        except Exception as error:
            reason, failure = summarize(error), failures.classify(error)
        if failures.fatal is not None or isinstance(failure.error, OutOfMemoryError):
            refusal = failures.refusal(failure)
        else:
            unsent = OutputError(f"the outputs cannot be sent: {reason}")
            refusal = reported(unsent, failure.text)
        return messages.write(refusal, self._model), refusal

    def _record(self, requests: Sequence[Request], results: Sequence[Result]) -> None:
        """Count results of which some are errors, log those, and report a fatal one."""
        reports: dict[tuple[str, str], list[Request]] = {}
        answered = 0
        for request, result in zip(requests, results, strict=True):
            sent = self._count_sent((request,))  # 0 for a request that only fills a slot
            if not isinstance(result, BackendError):
                answered += sent
                continue
            if sent:
                self._counts.count_requests(result.code)
            if result.reported:
                reports.setdefault((str(result), result.traceback), []).append(request)
        self._counts.count_requests(OK, answered)
        for (sentence, text), failed in list(reports.items())[:_MAX_LOGGED]:
            log.error("%s%s%s", sentence, _names(failed), f"\n{text}" if text else "")
        if len(reports) > _MAX_LOGGED:
            log.error(
                "the log does not show %s of the same batch.",
                counted(len(reports) - _MAX_LOGGED, "more failure"),
            )
        if self._failures.fatal is not None:
            self._on_fatal(self._failures.reason)


def _names(requests: Sequence[Request]) -> str:
    """Return the IDs of a failure's requests for the log, where clients set them."""
    known = [name for name in map(messages.request_id, requests) if name]
    if not known:
        return f" ({counted(len(requests), 'request')} without an id)"
    unknown = len(requests) - len(known)
    others = f", {unknown} without an id" if unknown else ""
    return f" (requests {join_names(known)}{others})"
