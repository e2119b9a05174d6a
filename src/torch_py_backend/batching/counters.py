"""What an instance counts as it works: plain numbers, read now and then by who tells them on.

Each field has one writer at a time, so that no count is lost, and a batch pays for a few additions.
What the families are that are told of them: `families`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Totals since the model was loaded, the warm-up included.

    Attributes:
        requests: that were answered, by the code of the answer.
        batches: that went well, by their rows; 1 where the model has no batch dimension.
        rows: that the model was called with, those that fill a bucket included.
        filled_rows: that only fill a bucket.
        values: of padded inputs that the model was called with.
        padded_values: that are only padding.
        retried_rows: that were run again because a batch with them had failed.
        memory_splits: batches that were taken apart because memory ran out.
        eager_calls: that would have needed a graph which was not there.
        compiled_graphs: that were made or found before READY.
        compile_cache: starts, by whether they found what was compiled earlier: hit or miss.
        responses: of streams.
        preprocess_seconds: spent there, as in the stages below, by batches that went well.
    """

    requests: dict[str, int] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)
    rows: int = 0
    filled_rows: int = 0
    values: int = 0
    padded_values: int = 0
    retried_rows: int = 0
    memory_splits: int = 0
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

    def answered(self, code: str, requests: int = 1) -> None:
        """Count requests that were answered."""
        self.requests[code] = self.requests.get(code, 0) + requests

    def batch(self, rows: int) -> None:
        """Count a batch that went well."""
        self.batches[rows] = self.batches.get(rows, 0) + 1
