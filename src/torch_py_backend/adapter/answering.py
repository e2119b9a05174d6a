"""Answer a batch of requests; a failure of one does not affect the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch_py_backend.adapter import logs, messages, tracing
from torch_py_backend.adapter.messages import Request, Response, Responses
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import (
    BackendError,
    CancelledError,
    InternalError,
    OutputError,
    summarize,
)
from torch_py_backend.pipeline.run import OK, Entry
from torch_py_backend.pipeline.sequences import Sequences

# The server process answers whether a request was cancelled, which takes about 0.1 ms. Requests are
# checked only if the last batch took a hundred times as long as their checks.
CHECK_CANCELLED_S = 100 * 1e-4


class Answering:
    """Answers the requests of one instance.

    Attributes:
        sequences: the states of its sequences; None: it keeps none.
    """

    def __init__(self, engine: Engine) -> None:
        config = engine.config
        self._failures, self._counts, self._model = engine.failures, engine.counts, config.name
        self._last_seconds = 0.0  # of the last batch
        self._in_sequences = config.sequencing is not None
        read: messages.Read = messages.read
        if self._in_sequences:
            read = messages.sequence_reader(engine)
        elif engine.hooks is not None and engine.hooks.takes_parameters:  # which take time
            read = messages.read_with_parameters
        self._read = tracing.traced(read) or read
        self.sequences = Sequences(config, engine.device) if config.states else None
        # A writer counts all requests, also those that only fill a slot of a sequence.
        outputs = [spec.name for spec in config.outputs]
        writer = None if self._in_sequences else messages.writer(outputs)
        self._run = engine.pipeline(writer, self.sequences)

    def answer(self, requests: Sequence[Request]) -> Sequence[Response]:
        """Return one response for each request, in order."""
        began = time.perf_counter()
        fatal = self._failures.fatal
        if fatal is not None:
            fatal.reported = False  # it is in the log
            return self._respond(requests, [fatal] * len(requests))
        # Cancelled steps of a sequence run, too: the next step needs their states.
        checks = not self._in_sequences and self._last_seconds > len(requests) * CHECK_CANCELLED_S
        all_read = not (checks and any(request.is_cancelled() for request in requests))
        try:
            entries: Sequence[Entry] = self._read(requests) if all_read else ()
        except Exception:  # it is found by reading the requests one by one
            all_read = False
        if not all_read:
            entries = [self._read_one(request, checks) for request in requests]
        try:
            results = self._run(entries)
        except BaseException as error:  # Triton would send the traceback to every client
            results = [self._failures.instead(InternalError(), error)] * len(entries)
        if type(results) is Responses:
            self._counts.count_requests(OK, len(results))
            responses: Sequence[Response] = results
        else:
            responses = self._respond(requests, results)
        if all_read:  # what was refused says nothing of how long the next batch takes
            self._last_seconds = time.perf_counter() - began
        return responses

    def _read_one(self, request: Request, checks_cancelled: bool) -> Entry:  # noqa: FBT001
        """Return what is read of a request, or why it is refused."""
        try:
            if checks_cancelled and request.is_cancelled():
                return CancelledError()
            (item,) = self._read((request,))
        except Exception as error:
            return self._failures.unreadable(error)
        return item

    def _respond(
        self,
        requests: Sequence[Request],
        results: Sequence[Any],
    ) -> Sequence[Response]:
        """Return a response for each result; count them, and log failures."""
        responses: list[Response] = []
        failed: list[tuple[BackendError, str]] = []
        for request, outcome in zip(requests, results, strict=True):
            result = outcome
            try:
                response = messages.write(result, self._model)
            except Exception as error:
                unsent = OutputError(f"the outputs cannot be sent: {summarize(error)}")
                result = self._failures.instead(unsent, error)
                response = messages.write(result, self._model)
            responses.append(response)
            code = OK
            if isinstance(result, BackendError):
                code = result.code
                if result.reported:
                    failed.append((result, messages.request_id(request)))
            if not self._in_sequences or request.correlation_id():  # not one that fills a slot
                self._counts.count_requests(code)
        logs.report(failed)
        return responses
