"""The counters of an instance: plain numbers, read periodically by the metrics publisher.

Each field has one writer at a time, so that no count is lost without a lock. The metrics made from
them are in `engine.metrics`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# The code of a request without an error.
OK = "OK"
CODES = (OK, "INVALID_ARG", "INTERNAL", "UNAVAILABLE", "CANCELLED")


@dataclass(slots=True)
class Counts:
    """Totals since the model was loaded, including the warm-up.

    Attributes:
        requests: answered requests, by the code of the answer.
        rows: rows of the model's calls, including rows that fill a bucket.
        filled_rows: rows that only fill a bucket.
        retried_rows: rows that were run again because a batch with them had failed.
        eager_calls: calls that ran without a graph because none was compiled for them.
        compiled_graphs: graphs that were compiled or loaded from the cache before READY.
        compile_cache: loads, by whether the compile cache had an entry: hit or miss.
        responses: responses of streams.
        preprocess_seconds: the time of successful batches in this stage; likewise below.
    """

    requests: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    filled_rows: int = 0
    retried_rows: int = 0
    eager_calls: int = 0
    compiled_graphs: int = 0
    compile_cache: dict[str, int] = field(default_factory=dict)
    responses: int = 0
    preprocess_seconds: float = 0.0
    gather_seconds: float = 0.0
    host_to_device_seconds: float = 0.0
    forward_seconds: float = 0.0
    device_to_host_seconds: float = 0.0
    postprocess_seconds: float = 0.0

    def count_requests(self, code: str, requests: int = 1) -> None:
        """Count answered requests."""
        self.requests[code] = self.requests.get(code, 0) + requests
