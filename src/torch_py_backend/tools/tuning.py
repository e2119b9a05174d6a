"""Measure candidates in turn, each in processes of its own.

The speed of a machine drifts within minutes. So candidates are measured in turn (A B C A B C), once
in each round and in fresh processes, and a row has the medians of its rounds and their spread. The
instances of a candidate run at the same time and wait for each other before each batch size: their
throughput is summed over the same span of time, and their latency is that under the load of the
others. A candidate that crashes or hangs is a row with its failure.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from torch_py_backend.artifacts.discovery import ArtifactType
from torch_py_backend.config import options, pbtxt, threads
from torch_py_backend.config.options import TABLE
from torch_py_backend.errors import BackendError, TuneError
from torch_py_backend.processes import child_process
from torch_py_backend.tools import candidates, ranking
from torch_py_backend.tools.candidates import AS_CONFIGURED, TUNED, Allowed, Candidate, Facts
from torch_py_backend.tools.ranking import Measured, Prefer, Row

# The tuned parameters by each of their keys.
_KEYS = {key: key for key in TUNED} | {
    other: row.key for row in TABLE if row.key in TUNED for other in row.also
}
# The reference runs without PyTorch's own optimization of TorchScript, too.
_REFERENCE = {"DISABLE_OPTIMIZED_EXECUTION": "true"}
# The share of the free memory that all instances of a candidate may take together.
_MEMORY = 0.8
# Rows, channels, height and width.
_IMAGE_RANK = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """The model to tune, and how.

    Attributes:
        folder: the model's folder.
        version: the version to measure.
        document: the complete config as Triton's JSON.
        allowed: the user's limits.
        max_error: the largest error of a row that may be chosen.
        prefer: the quantity by which a row is chosen.
        inputs: a safetensors file; None for the model's examples, else made-up values.
        rounds: measurements of each candidate.
        seconds: duration of the measurement of each batch size.
        timeout_s: time limit of a candidate in a round.
    """

    folder: Path
    version: str
    document: Mapping[str, Any]
    allowed: Allowed
    max_error: float
    prefer: Prefer
    inputs: Path | None
    rounds: int
    seconds: float
    timeout_s: float

    @property
    def automatic(self) -> bool:
        """Whether config.pbtxt leaves the choice to tuned.json."""
        return self._configured().get("OPTIMIZE", "").strip().lower() == "auto"

    def current(self) -> Candidate:
        """Return the settings in config.pbtxt, without `OPTIMIZE: "auto"`."""
        parameters = self._configured()
        if self.automatic:
            del parameters["OPTIMIZE"]
        return Candidate(AS_CONFIGURED, parameters, self.document["instance_group"][0]["count"])

    def _configured(self) -> dict[str, str]:
        return {
            _KEYS[key]: entry["string_value"]
            for key, entry in self.document.get("parameters", {}).items()
            if key in _KEYS
        }

    def arguments(
        self, parameters: Mapping[str, str], instances: int, number: int = 0
    ) -> dict[str, str]:
        """Return Triton's arguments of `initialize` with these settings."""
        configured = self.document.get("parameters", {})
        kept = {key: value for key, value in configured.items() if key not in _KEYS}
        changed = {key: {"string_value": value} for key, value in parameters.items()}
        document = {
            **self.document,
            "parameters": kept | changed,
            "instance_group": [self.document["instance_group"][0] | {"count": instances}],
        }
        name = f"{document['name']}_0_{number}"
        arguments = pbtxt.arguments(self.folder, self.version, document)
        return arguments | {"model_instance_name": name}


class Tuning:
    """The measurements of a plan; an exception leaves those made so far in `rows`.

    Attributes:
        inputs: the source of the inputs.
        screened: whether every runtime has been measured, which a choice requires.
    """

    def __init__(self, plan: Plan, progress: Callable[[Candidate, int, int], None]) -> None:
        """`progress` is called with the next candidate, the steps done and their known total."""
        self.plan = plan
        self.inputs = ""
        self.screened = False
        self._progress = progress
        self._measured: dict[str, list[Measured]] = {}
        self._failures: dict[str, str] = {}
        self._candidates: list[Candidate] = []
        self._steps = 0

    @property
    def rows(self) -> list[Row]:
        """The measured candidates, in their order."""
        rows = []
        for candidate in self._candidates:
            rounds = self._measured.get(str(candidate), [])
            failure = self._failures.get(str(candidate), "")
            if rounds or failure:
                rows.append(ranking.row(candidate, rounds, failure))
        return rows

    def run(self) -> None:
        """Measure everything.

        Raises:
            LoadError: the model cannot be run even without optimization.
            TuneError: the user's limits leave nothing to try.
        """
        with tempfile.TemporaryDirectory(prefix="torch-py-backend-tune-") as folder:
            prepared = self._prepare(folder)
            facts = self._facts(ArtifactType[prepared["kind"]])
            self.inputs = prepared["inputs"]
            allowed = self.plan.allowed
            if reason := candidates.contradiction(facts, allowed):
                raise TuneError(f"{reason}.")
            self._rounds(folder, candidates.screen(facts, allowed, self.plan.current()))
            if not allowed.quick:
                self._rounds(folder, self._spread(facts))

    def _prepare(self, folder: str) -> dict[str, Any]:
        inputs = None if self.plan.inputs is None else str(self.plan.inputs.absolute())
        # Not all cores, as in `candidates.screen`.
        settings = _REFERENCE | {"NUM_THREADS": str(max(1, threads.available_cores() // 2))}
        arguments = self.plan.arguments(settings, 1)
        (prepared,) = child_process.run_together(
            self.plan.document["name"],
            "torch_py_backend.tools.trial:prepare",
            [{"arguments": arguments, "folder": folder, "inputs": inputs}],
            self.plan.timeout_s,
        )
        return dict(prepared)

    def _facts(self, kind: ArtifactType) -> Facts:
        document = self.plan.document
        configured = options.parse(document["name"], document.get("parameters", {}))
        batched = document["max_batch_size"] > 0
        ranks = [
            len(entry.get("reshape", {"shape": entry["dims"]})["shape"]) + batched
            for entry in document["input"]
            if entry["data_type"].startswith("TYPE_FP")
        ]
        return Facts(
            kind=kind,
            images=_IMAGE_RANK in ranks,
            gpu=document["instance_group"][0]["kind"] == "KIND_GPU",
            batched=batched,
            cores=threads.available_cores(),
            memory_mb=_MEMORY * psutil.virtual_memory().available / (1 << 20),
            divided=configured.device_map is not None,
        )

    def _spread(self, facts: Facts) -> list[Candidate]:
        fitting = [row for row in self.rows if ranking.fits(row, self.plan.max_error)]
        ranked = ranking.order(fitting, self.plan.prefer)
        memory = {row.candidate.title: row.memory_mb / row.candidate.instances for row in ranked}
        best = [row.candidate for row in ranked]
        # Screened candidates are measured again: only measurements of the same minutes compare.
        screened = {candidate.settings: candidate for candidate in self._candidates}
        return [
            screened.get(candidate.settings, candidate)
            for candidate in candidates.spread(facts, self.plan.allowed, best, memory)
        ]

    def _rounds(self, folder: str, group: Sequence[Candidate]) -> None:
        self._candidates += [new for new in group if new not in self._candidates]
        total = self._steps + self.plan.rounds * len(group)
        for _ in range(self.plan.rounds):
            for candidate in group:
                if str(candidate) not in self._failures:
                    self._progress(candidate, self._steps, total)
                    self._measure(folder, candidate)
                self._steps += 1
            self.screened = True

    def _measure(self, folder: str, candidate: Candidate) -> None:
        # The compiled code of candidates stays out of the model's folder.
        settings = {**candidate.parameters, "COMPILE_CACHE_DIR": str(Path(folder) / "compiled")}
        watched: list[str] = []
        # The current settings are measured even if some of them have no effect.
        if candidate.title != AS_CONFIGURED:
            settings["COMPILE_REQUIRED"] = "true"
            watched = sorted(candidate.runtime)
        arguments = [
            {
                "arguments": self.plan.arguments(settings, candidate.instances, number),
                "folder": folder,
                "seconds": self.plan.seconds,
                "watched": watched,
                "place": (number, candidate.instances, f"step{self._steps}"),
            }
            for number in range(candidate.instances)
        ]
        try:
            instances = child_process.run_together(
                self.plan.document["name"],
                "torch_py_backend.tools.trial:measure",
                arguments,
                self.plan.timeout_s,
            )
        except BackendError as error:
            self._failures[str(candidate)] = str(error)
        else:
            self._measured.setdefault(str(candidate), []).append(_combined(instances))


def _combined(instances: Sequence[Mapping[str, Any]]) -> Measured:
    """Return one measurement of instances that ran at the same time."""

    def values(key: str) -> list[float]:
        return [instance[key] for instance in instances]

    return Measured(
        latency_ms=median(values("latency_ms")),
        p99_ms=max(values("p99_ms")),
        throughput={
            int(rows): sum(instance["throughput"][rows] for instance in instances)
            for rows in instances[0]["throughput"]
        },
        memory_mb=sum(values("memory_mb")),
        device_memory_mb=sum(values("device_memory_mb")),
        error=max(values("error")),
        load_s=max(values("load_s")),
    )
