"""Rows of measurements, their order, the choice and the Pareto front."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from torch_py_backend.tools.candidates import Candidate

# A difference below the first share is always noise, whatever the spread of a few rounds; one above
# the second never is, because a single disturbed round can make the spread arbitrarily wide.
_NOISE, _MOST_NOISE = 0.03, 0.1


class Prefer(enum.Enum):
    """The quantity by which candidates are chosen."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"


@dataclass(frozen=True, slots=True)
class Measured:
    """One round of a candidate with all its instances.

    Attributes:
        latency_ms: median of calls with one row.
        p99_ms: 99th percentile of calls with one row.
        throughput: rows per second by batch size.
        memory_mb: proportional set size of the processes.
        device_memory_mb: reserved memory on the GPU.
        error: the largest difference from eager, see `trial`.
        load_s: seconds from the start of the load to the end of the warm-up.
    """

    latency_ms: float
    p99_ms: float
    throughput: Mapping[int, float]
    memory_mb: float
    device_memory_mb: float
    error: float
    load_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """The medians of a candidate's rounds.

    Attributes:
        latency_spread: half the distance of the extremes, divided by the median.
        batch: the batch size of the highest throughput.
        throughput: rows per second at that batch size.
        throughput_spread: as `latency_spread`.
        by_batch: throughput by batch size.
        error: the largest error of the rounds.
        load_s: seconds of the first round, in which caches are empty.
        failure: message of the round that failed.
    """

    candidate: Candidate
    rounds: int = 0
    latency_ms: float = 0.0
    p99_ms: float = 0.0
    latency_spread: float = 0.0
    batch: int = 0
    throughput: float = 0.0
    throughput_spread: float = 0.0
    by_batch: Mapping[int, float] | None = None
    memory_mb: float = 0.0
    device_memory_mb: float = 0.0
    error: float = 0.0
    load_s: float = 0.0
    failure: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON."""
        batches = sorted((self.by_batch or {}).items())
        return asdict(self) | {"by_batch": {str(size): value for size, value in batches}}


def row(candidate: Candidate, rounds: Sequence[Measured], failure: str = "") -> Row:
    """Return a candidate's rounds as one row; one failed round makes it a failure."""
    if failure or not rounds:
        return Row(candidate, failure=failure)
    by_batch = {
        size: median(measured.throughput[size] for measured in rounds)
        for size in rounds[0].throughput
    }
    best = max(by_batch, key=lambda size: by_batch[size])
    latencies = [measured.latency_ms for measured in rounds]
    return Row(
        candidate,
        rounds=len(rounds),
        latency_ms=median(latencies),
        p99_ms=median(measured.p99_ms for measured in rounds),
        latency_spread=_spread(latencies),
        batch=best,
        throughput=by_batch[best],
        throughput_spread=_spread([measured.throughput[best] for measured in rounds]),
        by_batch=by_batch,
        memory_mb=median(measured.memory_mb for measured in rounds),
        device_memory_mb=median(measured.device_memory_mb for measured in rounds),
        error=max(measured.error for measured in rounds),
        load_s=rounds[0].load_s,
    )


def _spread(values: Sequence[float]) -> float:
    middle = median(values)
    return (max(values) - min(values)) / 2 / middle if middle else 0.0


def fits(row: Row, max_error: float) -> bool:
    """Whether a row may be chosen: it was measured and is within the tolerance."""
    return row.rounds > 0 and not row.failure and row.error <= max_error


def order(rows: Sequence[Row], prefer: Prefer) -> list[Row]:
    """Return the rows, the best first."""
    return sorted(rows, key=lambda row: -_score(row, prefer)[0])


def choose(rows: Sequence[Row], max_error: float, prefer: Prefer) -> Row | None:
    """Return the simplest of the rows within the tolerance whose score is near the best."""
    ranked = order([row for row in rows if fits(row, max_error)], prefer)
    if not ranked:
        return None
    best, best_spread = _score(ranked[0], prefer)
    close = []
    for row in ranked:
        score, spread = _score(row, prefer)
        noise = min(max(_NOISE, best_spread, spread), _MOST_NOISE)
        if score >= best * (1 - noise):
            close.append(row)
    return min(close, key=lambda row: (row.candidate.complexity, -_score(row, prefer)[0]))


def _score(row: Row, prefer: Prefer) -> tuple[float, float]:
    """Return a row's score, of which more is better, and its spread."""
    if prefer is Prefer.THROUGHPUT:
        return row.throughput, row.throughput_spread
    return 1 / row.latency_ms if row.latency_ms else 0.0, row.latency_spread


def front(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that no other row beats in both latency and throughput, by latency."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.latency_ms, -row.throughput)):
        if not best or row.throughput > best[-1].throughput:
            best.append(row)
    return best
