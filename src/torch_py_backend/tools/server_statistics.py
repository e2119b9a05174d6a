"""The difference between two readings of Triton's statistics of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STAGES = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True, slots=True)
class Measurement:
    """The work of a server for one model between two readings.

    Attributes:
        requests: answered requests.
        failures: failed requests.
        stages: the mean seconds of a request in each of Triton's stages. A stage that no request
            passed (in a composed model, or with a cached answer) is left out.
        batches: calls of the model by their number of rows.
    """

    requests: int
    failures: int
    stages: dict[str, float]
    batches: dict[int, int]

    @property
    def calls(self) -> int:
        """Calls of the model."""
        return sum(self.batches.values())

    @property
    def rows(self) -> int:
        """Rows of all calls of the model."""
        return sum(size * count for size, count in self.batches.items())


def between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Measurement:
    """Return the difference of two statistics, summed over the model's versions.

    Statistics of gRPC leave zeros out and hold large numbers as strings; both forms are read.
    """
    change = _totals(after)
    change.subtract(_totals(before))
    return Measurement(
        requests=change["success", "count"],
        failures=change["fail", "count"],
        stages={
            stage: change[stage, "ns"] / change[stage, "count"] / 1e9
            for stage in STAGES
            if change[stage, "count"] > 0
        },
        batches={
            key[1]: count
            for key, count in sorted(change.items())
            if key[0] == "batch" and count > 0
        },
    )


def _totals(statistics: Mapping[str, Any]) -> Counter[tuple[str, Any]]:
    totals: Counter[tuple[str, Any]] = Counter()
    for version in statistics.get("model_stats", ()):
        inference = version.get("inference_stats", {})
        for stage in ("success", "fail", *STAGES):
            for unit in ("count", "ns"):
                totals[stage, unit] += int(inference.get(stage, {}).get(unit, 0))
        for batch in version.get("batch_stats", ()):
            calls = batch.get("compute_infer", {}).get("count", 0)
            totals["batch", int(batch.get("batch_size", 0))] += int(calls)
    return totals
