"""Candidates measured in turn, each in processes of its own; a crash or a hang is a row, no end.

Measuring is noisy, and a machine drifts within minutes. So the candidates take turns, A B C A B C,
in as many rounds as asked for, each time in a fresh process; a row has the median of its rounds,
and says how far they lie apart. Several instances run at the same time, and meet before each batch
size: their throughput is summed over the same span of time, and their latency is the one that each
has while the others are at work.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from torch_py_backend.artifacts.discovery import Kind
from torch_py_backend.config import options, pbtxt, threads
from torch_py_backend.config.options import TABLE
from torch_py_backend.errors import BackendError, TuneError
from torch_py_backend.processes import child_process
from torch_py_backend.tools import candidates, ranking
from torch_py_backend.tools.candidates import AS_CONFIGURED, TUNED, Allowed, Candidate, Facts
from torch_py_backend.tools.ranking import Measured, Prefer, Row

# The parameters that are tuned, by every key that means one of them.
_KEYS = {key: key for key in TUNED} | {
    other: row.key for row in TABLE if row.key in TUNED for other in row.also
}
# What the reference runs without: PyTorch's own optimisation of TorchScript, too.
_PLAIN = {"DISABLE_OPTIMIZED_EXECUTION": "true"}
# The share of the free memory that all instances of a candidate may take together.
_MEMORY = 0.8
# Rows, channels, height and width.
_IMAGE_RANK = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """What is tuned, and how.

    Attributes:
        folder: the model's folder.
        version: the version that is tried.
        document: its config, as Triton's JSON has it, complete.
        allowed: what may be tried.
        max_error: the largest error of a row that may be chosen.
        prefer: what a better row has more of.
        inputs: a file of safetensors; None: the model's examples, else made-up values.
        rounds: how often each candidate is measured.
        seconds: how long each batch size is measured.
        timeout_s: what one candidate may take in a round.
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
        """The settings that config.pbtxt has; what it leaves to tuned.json is none of them."""
        given = self._configured()
        if self.automatic:
            del given["OPTIMIZE"]
        return Candidate(AS_CONFIGURED, given, self.document["instance_group"][0]["count"])

    def _configured(self) -> dict[str, str]:
        return {
            _KEYS[key]: entry["string_value"]
            for key, entry in self.document.get("parameters", {}).items()
            if key in _KEYS
        }

    def arguments(
        self, parameters: Mapping[str, str], instances: int, number: int = 0
    ) -> dict[str, str]:
        """What Triton would pass to `initialize` with these settings."""
        given = self.document.get("parameters", {})
        kept = {key: value for key, value in given.items() if key not in _KEYS}
        (group, *_) = self.document["instance_group"]
        document = {
            **self.document,
            "parameters": kept
            | {key: {"string_value": value} for key, value in parameters.items()},
            "instance_group": [group | {"count": instances}],
        }
        told = pbtxt.arguments(self.folder, self.version, document)
        return told | {"model_instance_name": f"{document['name']}_0_{number}"}


class Tuning:
    """The measurements of a plan; what has been measured stays, whatever ends the run."""

    def __init__(self, plan: Plan, progress: Callable[[Candidate, int, int], None]) -> None:
        """`progress` is told the next candidate, the steps done, and all steps known."""
        self.plan = plan
        self.inputs = ""
        # Whether every runtime has been measured at least once: only then a choice is one.
        self.screened = False
        self._progress = progress
        self._measured: dict[str, list[Measured]] = {}
        self._failures: dict[str, str] = {}
        self._candidates: list[Candidate] = []
        self._steps = 0

    @property
    def rows(self) -> list[Row]:
        """What has been measured, in the order of the candidates."""
        return [
            ranking.row(one, self._measured.get(str(one), []), self._failures.get(str(one), ""))
            for one in self._candidates
            if str(one) in self._measured or str(one) in self._failures
        ]

    def run(self) -> None:
        """Measure everything.

        Raises:
            LoadError: the model cannot be run even without any optimisation.
            TuneError: what the user allows leaves nothing to try.
        """
        with tempfile.TemporaryDirectory(prefix="torch-py-backend-tune-") as folder:
            prepared = self._prepare(folder)
            facts = self._facts(Kind[prepared["kind"]])
            self.inputs = prepared["inputs"]
            allowed = self.plan.allowed
            why = candidates.contradiction(facts, allowed)
            if why:
                raise TuneError(f"{why}.")
            self._rounds(folder, candidates.screen(facts, allowed, self.plan.current()))
            if not allowed.quick:
                self._rounds(folder, self._spread(facts))

    def _prepare(self, folder: str) -> dict[str, Any]:
        inputs = None if self.plan.inputs is None else str(self.plan.inputs.absolute())
        # Not all cores, for the reason that `candidates.screen` gives.
        settings = _PLAIN | {"NUM_THREADS": str(max(1, threads.cores() // 2))}
        given = {"arguments": self.plan.arguments(settings, 1), "folder": folder, "inputs": inputs}
        (told,) = child_process.run_together(
            self.plan.document["name"],
            "torch_py_backend.tools.trial:prepare",
            [given],
            self.plan.timeout_s,
        )
        return dict(told)

    def _facts(self, kind: Kind) -> Facts:
        document = self.plan.document
        wished = options.parse(document["name"], document.get("parameters", {}))
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
            cores=threads.cores(),
            memory_mb=_MEMORY * psutil.virtual_memory().available / (1 << 20),
            divided=wished.device_map is not None,
        )

    def _spread(self, facts: Facts) -> list[Candidate]:
        fitting = [one for one in self.rows if ranking.fits(one, self.plan.max_error)]
        ranked = ranking.order(fitting, self.plan.prefer)
        memory = {one.candidate.title: one.memory_mb / one.candidate.instances for one in ranked}
        found = candidates.spread(
            facts, self.plan.allowed, [one.candidate for one in ranked], memory
        )
        known = {_settings(one): one for one in self._candidates}
        # Those of the screening are measured again: only turns in the same minutes compare.
        return [known.get(_settings(one), one) for one in found]

    def _rounds(self, folder: str, group: Sequence[Candidate]) -> None:
        self._candidates += [one for one in group if one not in self._candidates]
        total = self._steps + self.plan.rounds * len(group)
        for _ in range(self.plan.rounds):
            for one in group:
                if str(one) not in self._failures:
                    self._progress(one, self._steps, total)
                    self._measure(folder, one)
                self._steps += 1
            self.screened = True

    def _measure(self, folder: str, candidate: Candidate) -> None:
        # What is served today is measured as it is, with settings that have no effect, too.
        as_is = candidate.title == AS_CONFIGURED
        watched = [] if as_is else sorted(candidate.runtime)
        settings = dict(candidate.parameters) | {
            # What losers have compiled is no burden of the model's folder.
            "COMPILE_CACHE_DIR": str(Path(folder) / "compiled"),
            **({} if as_is else {"COMPILE_REQUIRED": "true"}),
        }
        given = [
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
            told = child_process.run_together(
                self.plan.document["name"],
                "torch_py_backend.tools.trial:measure",
                given,
                self.plan.timeout_s,
            )
        except BackendError as error:
            self._failures[str(candidate)] = str(error)
        else:
            self._measured.setdefault(str(candidate), []).append(_together(told))


def _settings(candidate: Candidate) -> tuple[str, int]:
    """What makes two candidates the same."""
    return json.dumps(candidate.parameters, sort_keys=True), candidate.instances


def _together(told: Sequence[Mapping[str, Any]]) -> Measured:
    """What the instances of one candidate have measured at the same time."""
    return Measured(
        latency_ms=median(one["latency_ms"] for one in told),
        p99_ms=max(one["p99_ms"] for one in told),
        throughput={
            int(rows): sum(one["throughput"][rows] for one in told)
            for rows in told[0]["throughput"]
        },
        memory_mb=sum(one["memory_mb"] for one in told),
        device_memory_mb=sum(one["device_memory_mb"] for one in told),
        error=max(one["error"] for one in told),
        load_s=max(one["load_s"] for one in told),
    )
