"""The measurements of a candidate as a row, and the choice among rows."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from torch_py_backend.tools.candidates import Candidate

# A difference below the first share is always noise, whatever the spread of a few rounds; one above
# the second never is, because disturbed rounds can make the spread arbitrarily wide.
_NOISE, _MAX_NOISE = 0.02, 0.05


class Goal(enum.Enum):
    """What candidates are chosen by."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    BOTH = "both"


class Figures(NamedTuple):
    """A measurement of a candidate.

    Attributes:
        latency_ms: duration of a call with one row, while no other request is in flight.
        throughput: rows per second of all instances together, with full batches.
        p99_ms: the 99th percentile of the durations of these batches.
    """

    latency_ms: float
    throughput: float
    p99_ms: float


class Gain(NamedTuple):
    """How many times better than the untuned configuration; its standard error."""

    value: float
    spread: float

    @property
    def noise(self) -> float:
        """The difference that may be due to noise."""
        return min(max(_NOISE, self.spread), _MAX_NOISE)


@dataclass(frozen=True, slots=True)
class Row:
    """The medians of a candidate's rounds, as in tuned.json.

    Attributes:
        latency_gain: latency of the untuned configuration, divided by the candidate's.
        throughput_gain: throughput, divided by that of the untuned configuration.
        latency_spread: standard error of `latency_gain`.
        throughput_spread: standard error of `throughput_gain`.
        p99_ms: 99th percentile of the durations of full batches.
        batch: rows of a full batch.
        memory_mb: memory of all processes; what they share counts once.
        device_memory_mb: reserved memory on the GPU.
        error: the largest difference from eager, see `differences`.
        load_s: seconds until the candidate was loaded, compiled and warmed up.
        failure: why it could not be measured.
    """

    candidate: Candidate
    rounds: int = 0
    latency_ms: float = 0.0
    latency_gain: float = 1.0
    latency_spread: float = 0.0
    batch: int = 0
    throughput: float = 0.0
    throughput_gain: float = 1.0
    throughput_spread: float = 0.0
    p99_ms: float = 0.0
    memory_mb: float = 0.0
    device_memory_mb: float = 0.0
    error: float = 0.0
    load_s: float = 0.0
    failure: str = ""

    def gain(self, goal: Goal) -> Gain:
        """Return the gain by which the row is chosen; for both figures their geometric mean."""
        latency = Gain(self.latency_gain, self.latency_spread)
        throughput = Gain(self.throughput_gain, self.throughput_spread)
        if goal is Goal.LATENCY:
            return latency
        if goal is Goal.THROUGHPUT:
            return throughput
        return Gain(
            math.sqrt(latency.value * throughput.value),
            math.hypot(latency.spread, throughput.spread) / 2,
        )

    def loses(self) -> bool:
        """Return whether the untuned configuration is better in latency or in throughput."""
        gains = map(self.gain, (Goal.LATENCY, Goal.THROUGHPUT))
        return any(gain.value < 1 - gain.noise for gain in gains)


def summarize(
    candidate: Candidate,
    batch: int,
    loads: Sequence[Mapping[str, float]],
    rounds: Sequence[tuple[Figures, Figures]],
    beside: int,
) -> Row:
    """Return a candidate's measurements as one row.

    Args:
        candidate: the candidate.
        batch: rows of a full batch.
        loads: the first answer of each instance, see `trial.measure`.
        rounds: the figures of the untuned configuration and of the candidate.
        beside: the number of processes of the untuned configuration at that time.
    """
    # Pages that several processes map, such as libraries, are divided among all of them.
    share = (beside + len(loads)) / len(loads)
    latency = _gain([untuned.latency_ms / own.latency_ms for untuned, own in rounds])
    throughput = _gain([own.throughput / untuned.throughput for untuned, own in rounds])
    return Row(
        candidate,
        rounds=len(rounds),
        latency_ms=median(own.latency_ms for _, own in rounds),
        latency_gain=latency.value,
        latency_spread=latency.spread,
        batch=batch,
        throughput=median(own.throughput for _, own in rounds),
        throughput_gain=throughput.value,
        throughput_spread=throughput.spread,
        p99_ms=median(own.p99_ms for _, own in rounds),
        memory_mb=sum(
            load["private_mb"] + share * (load["memory_mb"] - load["private_mb"]) for load in loads
        ),
        device_memory_mb=sum(load["device_memory_mb"] for load in loads),
        error=max(load["error"] for load in loads),
        load_s=max(load["load_s"] for load in loads),
    )


def _gain(ratios: Sequence[float]) -> Gain:
    """Return the median of the rounds' ratios, and the standard error of that median."""
    middle = median(ratios)
    # 1.4826 times the median absolute deviation is the standard deviation of a normal
    # distribution; the standard error of a median is 1.2533 times that of a mean.
    deviation = 1.4826 * median(abs(ratio - middle) for ratio in ratios)
    return Gain(middle, 1.2533 * deviation / math.sqrt(len(ratios)))


class Limits(NamedTuple):
    """What a row must keep to be chosen.

    Attributes:
        error: the largest error.
        p99_ms: the longest `Row.p99_ms`.
    """

    error: float
    p99_ms: float = math.inf

    def keeps(self, row: Row) -> bool:
        """Return whether a row was measured and is within the limits."""
        return row.rounds > 0 and row.error <= self.error and row.p99_ms <= self.p99_ms


def ranked(rows: Sequence[Row], limits: Limits, goal: Goal) -> list[Row]:
    """Return the rows within the limits, the best first."""
    fitting = [row for row in rows if limits.keeps(row)]
    return sorted(fitting, key=lambda row: -row.gain(goal).value)


def choose(rows: Sequence[Row], limits: Limits, goal: Goal) -> Row | None:
    """Return the simplest of the rows whose gain is near the best.

    The first row is the untuned configuration. For both figures, only rows that lose in neither may
    be chosen, unless the untuned configuration is outside the limits.
    """
    fitting = ranked(rows, limits, goal)
    if goal is Goal.BOTH and rows and rows[0] in fitting:
        fitting = [row for row in fitting if not row.loses()]
    if not fitting:
        return None
    best = fitting[0].gain(goal)

    def is_close(own: Gain) -> bool:
        return own.value >= best.value * (1 - max(best.noise, own.noise))

    # Of equals, the untuned configuration stays.
    return min(
        (row for row in fitting if is_close(row.gain(goal))),
        key=lambda row: (row.candidate.complexity, row is not rows[0], -row.gain(goal).value),
    )


def is_behind(row: Row, best: Row, goal: Goal) -> bool:
    """Return whether more rounds are unlikely to make a row better than another one."""
    own, other = row.gain(goal), best.gain(goal)
    if goal is Goal.BOTH and min(row.latency_gain, row.throughput_gain) < 1 - 2 * _MAX_NOISE:
        return True
    return own.value * (1 + 2 * own.noise) < other.value * (1 - other.noise)
