"""Measure settings for a model in turn, each in processes of its own, and choose the best.

The speed of a machine drifts within minutes. So candidates are measured in turn (A B C A B C), once
in each round and in fresh processes, and a row has the medians of its rounds and their spread. The
instances of a candidate run at the same time and wait for each other before each batch size: their
throughput is summed over the same span of time, and their latency is that under the load of the
others. A candidate that crashes or hangs is a row with its failure.
"""

from __future__ import annotations

import enum
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import psutil

from torch_py_backend.artifacts.discovery import ArtifactType
from torch_py_backend.config import options, pbtxt, threads
from torch_py_backend.config.options import TABLE
from torch_py_backend.errors import BackendError, TuneError
from torch_py_backend.processes import child_process
from torch_py_backend.tools import candidates
from torch_py_backend.tools.candidates import AS_CONFIGURED, TUNED, Allowed, Candidate, Facts

Progress: TypeAlias = Callable[[Candidate, int, int], None]
# The tuned parameters by each of their keys.
_KEYS = {key: key for key in TUNED} | {
    other: row.key for row in TABLE if row.key in TUNED for other in row.aliases
}
# The reference runs without PyTorch's own optimization of TorchScript, too.
_REFERENCE = {"DISABLE_OPTIMIZED_EXECUTION": "true"}
# The share of the free memory that all instances of a candidate may take together.
_MEMORY = 0.8
# Rows, channels, height and width.
_IMAGE_RANK = 4
# A difference below the first share is always noise, whatever the spread of a few rounds; one above
# the second never is, because a single disturbed round can make the spread arbitrarily wide.
_NOISE, _MOST_NOISE = 0.03, 0.1


# --- rows and the choice ---------------------------------------------------------------------


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
    """The medians of a candidate's rounds, as in tuned.json.

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
    by_batch: Mapping[int, float] = field(default_factory=dict)
    memory_mb: float = 0.0
    device_memory_mb: float = 0.0
    error: float = 0.0
    load_s: float = 0.0
    failure: str = ""

    def score(self, prefer: Prefer) -> tuple[float, float]:
        """Return the score, of which more is better, and its spread."""
        if prefer is Prefer.THROUGHPUT:
            return self.throughput, self.throughput_spread
        return 1 / self.latency_ms if self.latency_ms else 0.0, self.latency_spread


def summarize(candidate: Candidate, rounds: Sequence[Measured], failure: str = "") -> Row:
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
        latency_spread=_relative_spread(latencies),
        batch=best,
        throughput=by_batch[best],
        throughput_spread=_relative_spread([measured.throughput[best] for measured in rounds]),
        by_batch=by_batch,
        memory_mb=median(measured.memory_mb for measured in rounds),
        device_memory_mb=median(measured.device_memory_mb for measured in rounds),
        error=max(measured.error for measured in rounds),
        load_s=rounds[0].load_s,
    )


def _relative_spread(values: Sequence[float]) -> float:
    middle = median(values)
    return (max(values) - min(values)) / 2 / middle if middle else 0.0


def fits(row: Row, max_error: float) -> bool:
    """Return whether a row may be chosen: it was measured and is within the tolerance."""
    return row.rounds > 0 and not row.failure and row.error <= max_error


def ranked(rows: Sequence[Row], max_error: float, prefer: Prefer) -> list[Row]:
    """Return the rows within the tolerance, the best first."""
    fitting = [row for row in rows if fits(row, max_error)]
    return sorted(fitting, key=lambda row: -row.score(prefer)[0])


def choose(rows: Sequence[Row], max_error: float, prefer: Prefer) -> Row | None:
    """Return the simplest of the rows within the tolerance whose score is near the best."""
    fitting = ranked(rows, max_error, prefer)
    if not fitting:
        return None
    best, best_spread = fitting[0].score(prefer)
    close = []
    for row in fitting:
        score, row_spread = row.score(prefer)
        noise = min(max(_NOISE, best_spread, row_spread), _MOST_NOISE)
        if score >= best * (1 - noise):
            close.append(row)
    return min(close, key=lambda row: (row.candidate.complexity, -row.score(prefer)[0]))


def front(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that no other row beats in both latency and throughput, by latency."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.latency_ms, -row.throughput)):
        if not best or row.throughput > best[-1].throughput:
            best.append(row)
    return best


# --- measuring -------------------------------------------------------------------------------


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


@dataclass(slots=True)
class _Trial:
    """A candidate and its measurements so far."""

    candidate: Candidate
    rounds: list[Measured] = field(default_factory=list)
    failure: str = ""


class Tuning:
    """The measurements of a plan; an exception leaves those made so far in `rows`.

    Attributes:
        inputs: the source of the inputs.
        screened: whether every runtime has been measured.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.inputs = ""
        self.screened = False
        self._trials: list[_Trial] = []
        self._steps = 0

    @property
    def rows(self) -> list[Row]:
        """The measured candidates, in their order."""
        return [
            summarize(trial.candidate, trial.rounds, trial.failure)
            for trial in self._trials
            if trial.rounds or trial.failure
        ]

    def choice(self) -> Row | None:
        """Return the best row so far; None if no measured candidate is within the tolerance."""
        return choose(self.rows, self.plan.max_error, self.plan.prefer)

    def run(self, progress: Progress) -> None:
        """Measure everything.

        Args:
            progress: called with the next candidate, the steps done and their known total.

        Raises:
            LoadError: the model cannot be run even without optimization.
            TuneError: the user's limits leave nothing to try.
        """
        plan, allowed = self.plan, self.plan.allowed
        with tempfile.TemporaryDirectory(prefix="torch-py-backend-tune-") as folder:
            facts = self._prepare(folder)
            if not any(True for _ in candidates.shares(facts, allowed)):
                raise TuneError(
                    f"--threads {','.join(map(str, allowed.threads)) or 'any'} and --instances"
                    f" {','.join(map(str, allowed.instances)) or 'any'} ask for more than the"
                    f" {facts.cores} cores that there are."
                )
            self._measure_in_turn(
                folder, progress, candidates.screen(facts, allowed, plan.current())
            )
            if not allowed.quick:
                rows = ranked(self.rows, plan.max_error, plan.prefer)
                memory = {
                    row.candidate.title: row.memory_mb / row.candidate.instances for row in rows
                }
                best = [row.candidate for row in rows]
                self._measure_in_turn(
                    folder, progress, candidates.spread(facts, allowed, best, memory)
                )

    def _prepare(self, folder: str) -> Facts:
        """Run the reference, and return the facts of the model and the machine."""
        cores = threads.available_cores()
        # Not all cores, as in `candidates.screen`.
        settings = _REFERENCE | {"NUM_THREADS": str(max(1, cores // 2))}
        (prepared,) = child_process.run_together(
            self.plan.document["name"],
            "torch_py_backend.tools.trial:prepare",
            [
                {
                    "arguments": self.plan.arguments(settings, 1),
                    "folder": folder,
                    "inputs": self.plan.inputs and str(self.plan.inputs.absolute()),
                }
            ],
            self.plan.timeout_s,
        )
        self.inputs = prepared["inputs"]
        document = self.plan.document
        configured = options.parse(document["name"], document.get("parameters", {}))
        batched = document["max_batch_size"] > 0
        ranks = [
            len(entry.get("reshape", {"shape": entry["dims"]})["shape"]) + batched
            for entry in document["input"]
            if entry["data_type"].startswith("TYPE_FP")
        ]
        return Facts(
            kind=ArtifactType[prepared["kind"]],
            images=_IMAGE_RANK in ranks,
            gpu=document["instance_group"][0]["kind"] == "KIND_GPU",
            batched=batched,
            cores=cores,
            memory_mb=_MEMORY * psutil.virtual_memory().available / (1 << 20),
            divided=configured.device_map is not None,
        )

    def _measure_in_turn(self, folder: str, progress: Progress, group: Sequence[Candidate]) -> None:
        # Screened candidates are measured again: only measurements of the same minutes compare.
        known = {trial.candidate.settings: trial for trial in self._trials}
        trials = [known.get(candidate.settings) or _Trial(candidate) for candidate in group]
        self._trials += [trial for trial in trials if trial.candidate.settings not in known]
        total = self._steps + self.plan.rounds * len(trials)
        for _ in range(self.plan.rounds):
            for trial in trials:
                if not trial.failure:
                    progress(trial.candidate, self._steps, total)
                    self._measure(folder, trial)
                self._steps += 1
            self.screened = True

    def _measure(self, folder: str, trial: _Trial) -> None:
        candidate = trial.candidate
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
            trial.failure = str(error)
        else:
            trial.rounds.append(_combined(instances))


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
