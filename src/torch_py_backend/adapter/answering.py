"""Answer a batch of requests; a failure of one does not affect the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch_py_backend.adapter import messages
from torch_py_backend.adapter.messages import Read, Request, Response, Responses
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import (
    BackendError,
    CancelledError,
    InternalError,
    OutOfMemoryError,
    OutputError,
    join_names,
    summarize,
)
from torch_py_backend.pipeline.failures import reported
from torch_py_backend.pipeline.run import OK, Entry, Run

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
        read: reads requests; raises if that fails for one of them.
        run: runs what was read, returns one result for each.
        count_sent: returns how many of the requests were sent by clients.
        skips_cancelled: whether to skip cancelled requests.
    """

    def __init__(
        self,
        engine: Engine,
        on_fatal: Callable[[str], None],
        read: Read,
        run: Run,
        *,
        count_sent: Callable[[Sequence[Request]], int] = len,
        skips_cancelled: bool = True,
    ) -> None:
        self.last_batch_seconds = 0.0
        self._failures, self._counts = engine.failures, engine.counts
        self._model = engine.config.name
        self._on_fatal = on_fatal
        self._read, self._run = read, run
        self._count_sent = count_sent
        self._skips_cancelled = skips_cancelled

    def answer(self, requests: Sequence[Request]) -> Sequence[Response]:
        """Return one response for each request, in order."""
        began = time.perf_counter()
        if self._failures.fatal is not None:  # it is in the log
            self._counts.count_requests(self._failures.fatal.code, self._count_sent(requests))
            return [messages.write(self._failures.fatal, self._model) for _ in requests]
        checks = self._skips_cancelled and (
            self.last_batch_seconds > len(requests) * CHECK_CANCELLED_S
        )
        entries: Sequence[Entry] = ()
        if not (checks and any(request.is_cancelled() for request in requests)):
            try:
                entries = self._read(requests)
            except Exception:  # it is found by reading the requests one by one
                entries = ()
        all_read = bool(entries)
        if not all_read:
            entries = self._read_each(requests, checks_cancelled=checks)
        try:
            results = self._run(entries)
        except BaseException as error:  # Triton would send the traceback to every client
            failure = self._failures.classify(error)
            internal = self._failures.fatal or reported(InternalError(), failure.text)
            results = [internal] * len(entries)
        if type(results) is Responses:
            answered = self._counts.requests
            answered[OK] = answered.get(OK, 0) + len(results)
            responses: Sequence[Response] = results
        else:
            responses = self._respond(requests, results)
        if all_read:  # what was refused says nothing of how long the next batch takes
            self.last_batch_seconds = time.perf_counter() - began
        return responses

    def _read_each(self, requests: Sequence[Request], *, checks_cancelled: bool) -> Sequence[Entry]:
        """Return what was read of each request, or why it is refused."""
        entries: list[Entry] = []
        for request in requests:
            try:
                if checks_cancelled and request.is_cancelled():
                    entries.append(CancelledError())
                else:
                    entries += self._read((request,))
            except Exception as error:
                entries.append(self._failures.unreadable(error))
            if self._failures.fatal is not None:  # tensors of others may be on the device
                return [self._failures.fatal] * len(requests)
        return entries

    def _respond(self, requests: Sequence[Request], results: Sequence[Any]) -> Sequence[Response]:
        """Return a response for each result; count them, and log failures."""
        responses: list[Response] = []
        failed: list[tuple[Request, BackendError]] = []
        for request, result in zip(requests, results, strict=True):
            try:
                responses.append(messages.write(result, self._model))
            except Exception as error:
                refusal = self._unsent(error)
                responses.append(messages.write(refusal, self._model))
                failed.append((request, refusal))
            else:
                if isinstance(result, BackendError):
                    failed.append((request, result))
        if failed:
            self._report(failed)
        answered = self._count_sent(requests) - self._count_sent([request for request, _ in failed])
        self._counts.count_requests(OK, answered)
        return responses

    def _unsent(self, error: Exception) -> BackendError:
        """Return the error of a request whose response cannot be written."""
        reason, failure = summarize(error), self._failures.classify(error)
        if self._failures.fatal is not None or isinstance(failure.error, OutOfMemoryError):
            return self._failures.refusal(failure)
        return reported(OutputError(f"the outputs cannot be sent: {reason}"), failure.text)

    def _report(self, failed: Sequence[tuple[Request, BackendError]]) -> None:
        """Count errors, log those that the model or the backend caused, and report a fatal one."""
        reports: dict[tuple[str, str], list[Request]] = {}
        for request, error in failed:
            self._counts.count_requests(error.code, self._count_sent((request,)))
            if error.reported:
                reports.setdefault((str(error), error.traceback), []).append(request)
        for (sentence, text), requests in list(reports.items())[:_MAX_LOGGED]:
            log.error("%s%s%s", sentence, _names(requests), f"\n{text}" if text else "")
        if len(reports) > _MAX_LOGGED:
            log.error("%d more failures of the same batch.", len(reports) - _MAX_LOGGED)
        if self._failures.fatal is not None:
            self._on_fatal(self._failures.reason)


def _names(requests: Sequence[Request]) -> str:
    """Return the IDs of a failure's requests for the log, where clients set them."""
    names = [messages.request_id(request) or "without an id" for request in requests]
    return f" (requests {join_names(dict.fromkeys(names))})"
