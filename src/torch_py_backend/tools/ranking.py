"""What was measured becomes rows; which row is chosen, and which no other row beats."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from torch_py_backend.tools.candidates import Candidate

# Below the first a difference is none, whatever the spread of a few rounds says; above the second
# it is one, for a single disturbed round makes a spread as wide as one likes.
_NOISE, _MOST_NOISE = 0.03, 0.1


class Prefer(enum.Enum):
    """What a better candidate has more of."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"


@dataclass(frozen=True, slots=True)
class Measured:
    """One round of a candidate, its instances taken together.

    Attributes:
        latency_ms: median of calls with one row.
        p99_ms: the time that one call in a hundred exceeds.
        throughput: rows a second, by the rows of a batch.
        memory_mb: proportional set size of its processes.
        device_memory_mb: memory taken on the GPU.
        error: the largest difference from eager, see `trial`.
        load_s: from the start of the load to the end of the warm-up.
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
    """A candidate and what its rounds say together: medians, and how far they lie apart.

    `latency_spread` and `throughput_spread` are half the distance of the extremes over the median.
    The load is that of the first round, when nothing is in a cache; the error the largest.
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
        return asdict(self) | {"by_batch": {str(key): value for key, value in self._batches()}}

    def _batches(self) -> list[tuple[int, float]]:
        return sorted((self.by_batch or {}).items())


def row(candidate: Candidate, rounds: Sequence[Measured], failure: str = "") -> Row:
    """The rounds of a candidate as one row. One that has failed once has failed."""
    if failure or not rounds:
        return Row(candidate, failure=failure)
    by_batch = {
        size: median(one.throughput[size] for one in rounds) for size in rounds[0].throughput
    }
    best = max(by_batch, key=lambda size: by_batch[size])
    latencies = [one.latency_ms for one in rounds]
    return Row(
        candidate,
        rounds=len(rounds),
        latency_ms=median(latencies),
        p99_ms=median(one.p99_ms for one in rounds),
        latency_spread=_spread(latencies),
        batch=best,
        throughput=by_batch[best],
        throughput_spread=_spread([one.throughput[best] for one in rounds]),
        by_batch=by_batch,
        memory_mb=median(one.memory_mb for one in rounds),
        device_memory_mb=median(one.device_memory_mb for one in rounds),
        error=max(one.error for one in rounds),
        load_s=rounds[0].load_s,
    )


def _spread(values: Sequence[float]) -> float:
    middle = median(values)
    return (max(values) - min(values)) / 2 / middle if middle else 0.0


def fits(one: Row, max_error: float) -> bool:
    """Whether a row may be chosen: measured, and within the tolerance."""
    return one.rounds > 0 and not one.failure and one.error <= max_error


def order(rows: Sequence[Row], prefer: Prefer) -> list[Row]:
    """The best first."""
    return sorted(rows, key=lambda one: -_merit(prefer)(one)[0])


def choose(rows: Sequence[Row], max_error: float, prefer: Prefer) -> Row | None:
    """The best row within the tolerance; of rows within the noise of it, the simplest."""
    ranked = order([one for one in rows if fits(one, max_error)], prefer)
    if not ranked:
        return None
    merit = _merit(prefer)
    most, spread = merit(ranked[0])
    close = [
        one
        for one in ranked
        if (found := merit(one))[0] >= most * (1 - _noise(max(spread, found[1])))
    ]
    return min(close, key=lambda one: (one.candidate.complexity, -merit(one)[0]))


def _noise(spread: float) -> float:
    return min(max(_NOISE, spread), _MOST_NOISE)


def _merit(prefer: Prefer) -> Callable[[Row], tuple[float, float]]:
    """How good a row is, more being better, and how sure that is."""
    if prefer is Prefer.THROUGHPUT:
        return lambda one: (one.throughput, one.throughput_spread)
    return lambda one: (1 / one.latency_ms if one.latency_ms else 0.0, one.latency_spread)


def front(rows: Sequence[Row]) -> list[Row]:
    """The rows that no other beats in latency and throughput both, by latency."""
    best: list[Row] = []
    for one in sorted(rows, key=lambda one: (one.latency_ms, -one.throughput)):
        if not best or one.throughput > best[-1].throughput:
            best.append(one)
    return best
