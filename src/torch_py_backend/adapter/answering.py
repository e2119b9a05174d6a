"""Answer a batch of requests; a failure of one does not affect the others."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch_py_backend.adapter import logs, messages
from torch_py_backend.adapter.messages import Requests, Response, Responses
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import (
    BackendError,
    CancelledError,
    InternalError,
    OutputError,
    summarize,
)
from torch_py_backend.pipeline.run import OK, Results
from torch_py_backend.pipeline.sequences import Sequences

# The server process answers whether a request was cancelled, which takes about 0.1 ms. Requests are
# checked only if the last batch took a hundred times as long as their checks.
CHECK_CANCELLED_S = 100 * 1e-4


class Answering:
    """Answers the requests of one instance; `sequences` are the states that it keeps, or None."""

    def __init__(self, engine: Engine) -> None:
        config = engine.config
        self._failures, self._counts, self._model = engine.failures, engine.counts, config.name
        self._last_seconds = 0.0  # of the last batch
        self._in_sequences = config.sequencing is not None
        self._read = messages.reader(engine)
        self.sequences = Sequences(config, engine.device) if config.states else None
        # A writer counts all requests, also those that only fill a slot of a sequence.
        outputs = [spec.name for spec in config.outputs]
        writer = None if self._in_sequences else messages.writer(outputs)
        self._run = engine.pipeline(writer, self.sequences)

    def answer(self, requests: Requests) -> Sequence[Response]:
        """Return one response for each request, in order."""
        began = time.perf_counter()
        if self._failures.fatal is not None:
            return self._respond(requests, [self._failures.fatal] * len(requests))
        entries = self._read(requests)
        # Cancelled steps of a sequence run, too: the next step needs their states.
        checks = not self._in_sequences and self._last_seconds > len(requests) * CHECK_CANCELLED_S
        left = [request.is_cancelled() for request in requests] if checks else []
        if any(left):
            gone = CancelledError("the request was cancelled before it ran")
            entries = [gone if one else entry for entry, one in zip(entries, left, strict=True)]
        try:
            results = self._run(entries)
        except BaseException as error:  # Triton would send the traceback to every client
            results = [self._failures.instead(InternalError(), error)] * len(entries)
        if type(results) is Responses:
            self._counts.count_requests(OK, len(results))
            responses: Sequence[Response] = results
        else:
            responses = self._respond(requests, results)
        if not any(left):  # what is not run says nothing of how long the next batch takes
            self._last_seconds = time.perf_counter() - began
        return responses

    def _respond(
        self,
        requests: Requests,
        results: Results,
    ) -> list[Response]:
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
                failed.append((result, messages.request_id(request)))
            # Not one that fills a slot.
            if not self._in_sequences or messages.decoded(request.correlation_id):
                self._counts.count_requests(code)
        logs.report(failed)
        if self._failures.fatal is not None:  # it is in the log
            self._failures.fatal.reported = False
        return responses
