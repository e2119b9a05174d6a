"""What Triton counted between two looks at its statistics: where the time went, which batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STAGES = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a server did for one model between two looks.

    Attributes:
        requests: requests that were answered.
        failures: requests that failed.
        stages: by name of the stage, its mean time for one request in seconds; Triton's own split.
            What no request went through (a composed model's or a cached answer's) is left out.
        batches: how many calls of the model there were, by their rows.
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
        """Rows in all calls of the model together."""
        return sum(size * count for size, count in self.batches.items())


def between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Measurement:
    """The difference of two answers of the statistics endpoint, of all versions of the model.

    Both protocols' answers will do: gRPC leaves zeros out and writes large numbers as strings.
    """
    changed = _totals(after)
    changed.subtract(_totals(before))
    batches = {
        key[1]: count for key, count in sorted(changed.items()) if key[0] == "batch" and count > 0
    }
    return Measurement(
        requests=changed["success", "count"],
        failures=changed["fail", "count"],
        stages={
            stage: changed[stage, "ns"] / changed[stage, "count"] / 1e9
            for stage in STAGES
            if changed[stage, "count"] > 0
        },
        batches=batches,
    )


def _totals(document: Mapping[str, Any]) -> Counter[tuple[str, Any]]:
    totals: Counter[tuple[str, Any]] = Counter()
    for version in document.get("model_stats", ()):
        spent = version.get("inference_stats", {})
        for stage in ("success", "fail", *STAGES):
            for unit in ("count", "ns"):
                totals[stage, unit] += int(spent.get(stage, {}).get(unit, 0))
        for batch in version.get("batch_stats", ()):
            calls = batch.get("compute_infer", {}).get("count", 0)
            totals["batch", int(batch.get("batch_size", 0))] += int(calls)
    return totals
