"""Measure settings for a model beside the untuned ones, and choose the best.

The speed of a machine drifts within minutes. So the untuned configuration stays loaded while each
candidate is measured, and the two are measured in turn (A B B A): a row's gains are medians of the
ratios of such rounds. What compiles comes last, and a candidate that is clearly behind is dropped
after a few rounds. Each instance of a candidate is a process of its own. A candidate that crashes
or hangs is a row with its failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from torch_py_backend.artifacts.discovery import ArtifactType
from torch_py_backend.config import model_config, options, pbtxt, threads
from torch_py_backend.errors import LoadError, ToolError
from torch_py_backend.processes import child_process
from torch_py_backend.processes.child_process import Workers
from torch_py_backend.tools import candidates, ranking
from torch_py_backend.tools.candidates import AS_CONFIGURED, TUNED, Allowed, Candidate, Facts
from torch_py_backend.tools.ranking import Figures, Goal, Limits, Row

# The tuned parameters by each of their keys.
_KEYS = {key: key for key in TUNED} | {
    other: row.key for row in options.TABLE if row.key in TUNED for other in row.aliases
}
# The reference runs without PyTorch's own optimization of TorchScript, too.
_REFERENCE = {"DISABLE_OPTIMIZED_EXECUTION": "true", "FLOAT32_MATMUL_PRECISION": "highest"}
# The share of the free memory that all processes may take together.
_MEMORY = 0.8
# The memory of a candidate with as many instances as the untuned configuration, divided by that of
# the untuned configuration: compilers copy weights.
_GROWTH = 1.5
# Rows, channels, height and width.
_IMAGE_RANK = 4
# The rounds of a candidate that is clearly behind.
_MIN_ROUNDS = 3
# The duration of each measurement of one figure.
SECONDS = 0.1
_MEASURE = "torch_py_backend.tools.trial:measure"


@dataclass(frozen=True, slots=True)
class Plan:
    """The model to tune, and how.

    Attributes:
        folder: the model's folder.
        version: the version to measure.
        document: the complete config as Triton's JSON.
        allowed: the user's limits.
        limits: those of a row that may be chosen.
        goal: what a row is chosen by.
        inputs: a safetensors file; None for the model's examples, else made-up values.
        timeout_s: time limit of a candidate's load, and of each of its measurements.
    """

    folder: Path
    version: str
    document: Mapping[str, Any]
    allowed: Allowed
    limits: Limits
    goal: Goal
    inputs: Path | None
    timeout_s: float

    @property
    def rounds(self) -> int:
        """The most measurements of each candidate."""
        return 5 if self.allowed.quick else 9

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
            if key in _KEYS and not options.is_unset(key, entry["string_value"])
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


class _Loaded(NamedTuple):
    """A candidate whose instances are loaded."""

    workers: Workers
    instances: int

    def measure(self, batch: int, timeout_s: float) -> Figures:
        """Measure one instance with one request in flight, then all instances with full batches."""
        (latency,) = self.workers.ask([{"rows": 1, "seconds": SECONDS}], timeout_s)
        full = {"rows": batch, "seconds": SECONDS}
        answers = self.workers.ask([full] * self.instances, timeout_s)
        return Figures(
            latency["latency_ms"],
            sum(answer["throughput"] for answer in answers),
            max(answer["p99_ms"] for answer in answers),
        )


class Tuning:
    """The measurements of a plan; an exception leaves those made so far in `rows`.

    Attributes:
        rows: the untuned configuration, then the measured candidates in their order.
        inputs: the source of the inputs.
        batch: the number of rows of a full batch.
        sizes: the figures of the choice with batches of other sizes, if p99 is limited.
        screened: whether every runtime has been measured.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rows: list[Row] = []
        self.inputs = ""
        self.batch = 1
        self.sizes: dict[int, Figures] = {}
        self.screened = False
        self._folder = ""
        # The untuned configuration, if it is loaded beside the candidates, and its figures alone.
        self._untuned: _Loaded | None = None
        self._untuned_figures: list[Figures] = []
        self._kept = contextlib.ExitStack()

    def choice(self) -> Row | None:
        """Return the best row so far; None if no measured candidate is within the limits."""
        return ranking.choose(self.rows, self.plan.limits, self.plan.goal)

    def run(self, begin: Callable[[Candidate], None], end: Callable[[Row], None]) -> None:
        """Measure everything; call `begin` before a candidate is loaded, and `end` with its row.

        Raises:
            LoadError: the model cannot be run even without optimization.
            ToolError: the user's limits leave nothing to try.
        """
        threads.limit_spinning()  # as in an instance
        with (
            tempfile.TemporaryDirectory(prefix="torch-py-backend-tune-") as self._folder,
            self._kept,
        ):
            facts = self._prepare()
            measured = set()
            for candidate in self._candidates(facts):
                settings = candidates.settings(facts, candidate)
                if settings not in measured:
                    measured.add(settings)
                    begin(candidate)
                    self.rows.append(self._measure(candidate, facts.memory_mb))
                    end(self.rows[-1])
            self._confirm(begin, end, facts.memory_mb)
            choice = self.choice()
            if choice is not None and not math.isinf(self.plan.limits.p99_ms):
                self._measure_sizes(choice)

    def _confirm(
        self, begin: Callable[[Candidate], None], end: Callable[[Row], None], memory_mb: float
    ) -> None:
        """Measure the choice once more, until the second measurement of a choice confirms it.

        Other load on the machine can slow the untuned configuration down while a single candidate
        is measured, and the best of many noisy gains is too high.
        """
        again: list[Row] = []
        while (choice := self.choice()) is not None and choice is not self.rows[0]:
            if any(choice is row for row in again):
                return
            begin(choice.candidate)
            again.append(self._measure(choice.candidate, memory_mb))
            self.rows[self.rows.index(choice)] = again[-1]
            end(again[-1])

    def _candidates(self, facts: Facts) -> Iterator[Candidate]:
        """Yield what to measure; later candidates depend on the rows of earlier ones."""
        plan, allowed = self.plan, self.plan.allowed
        if not any(True for _ in candidates.shares(facts, allowed)):
            raise ToolError(
                f"--threads {','.join(map(str, allowed.threads)) or 'any'} and --instances"
                f" {','.join(map(str, allowed.instances)) or 'any'} ask for more than the"
                f" {facts.cores} cores that there are."
            )
        current = plan.current()
        if plan.goal is Goal.LATENCY and not allowed.instances:
            # One request in flight needs one instance: the configured count stays.
            allowed = dataclasses.replace(allowed, keep_instances=current.instances)
        untuned = candidates.configured(facts, current.parameters, current.instances)
        yield untuned
        if self._untuned is not None:
            free = facts.memory_mb - self.rows[0].memory_mb
            facts = dataclasses.replace(facts, memory_mb=free)
        yield from candidates.screen(facts, allowed, untuned, compiled=False)
        yield from candidates.spread(facts, allowed, self._best())
        base = next((candidate for candidate, _ in self._best()), untuned)
        yield from candidates.screen(facts, allowed, base, compiled=True)
        self.screened = True
        yield from candidates.spread(facts, allowed, self._best())

    def _best(self) -> list[tuple[Candidate, float]]:
        """Return the candidates within the limits, the best first, with MB of an instance."""
        rows = ranking.ranked(self.rows, self.plan.limits, self.plan.goal)
        return [(row.candidate, row.memory_mb / row.candidate.instances) for row in rows]

    def _prepare(self) -> Facts:
        """Run the reference, and return the facts of the model and the machine."""
        plan, cores = self.plan, threads.available_cores()
        # Not all cores: any other load on the machine would slow it down.
        settings = _REFERENCE | {"NUM_THREADS": str(max(1, cores // 2))}
        prepared = child_process.run(
            plan.document["name"],
            "torch_py_backend.tools.trial:prepare",
            {
                "arguments": plan.arguments(settings, 1),
                "folder": self._folder,
                "inputs": plan.inputs and str(plan.inputs.absolute()),
                "longest_s": None if math.isinf(longest := plan.limits.p99_ms) else longest / 1e3,
            },
            plan.timeout_s,
            quiet=True,
        )
        self.inputs, self.batch = prepared["inputs"], prepared["batch"]
        # Without the tuned parameters, which may be invalid.
        config = model_config.parse(plan.arguments({}, plan.current().instances))
        batched = config.max_batch_size > 0
        return Facts(
            kind=ArtifactType[prepared["kind"]],
            images=any(
                len(spec.dims) + batched == _IMAGE_RANK and spec.dtype.triton.startswith("FP")
                for spec in config.inputs
            ),
            gpu=config.kind == "GPU",
            batched=batched,
            cores=cores,
            threads=threads.budget(config).intra_op,
            memory_mb=_MEMORY * psutil.virtual_memory().available / (1 << 20),
            divided=config.options.device_map is not None,
        )

    def _measure_sizes(self, choice: Row) -> None:
        """Measure batches of all sizes, up to the first one whose p99 is too long."""
        plan, candidate = self.plan, choice.candidate
        sizes = candidates.batch_sizes(plan.document["max_batch_size"])
        loads = self._loads(candidate, is_untuned=choice is self.rows[0])
        with contextlib.suppress(LoadError), self._workers(candidate) as workers:
            workers.ask([load | {"others": sizes} for load in loads], plan.timeout_s)
            loaded = _Loaded(workers, candidate.instances)
            for rows in sizes:
                self.sizes[rows] = loaded.measure(rows, plan.timeout_s)
                if self.sizes[rows].p99_ms > plan.limits.p99_ms:
                    break

    def _workers(self, candidate: Candidate) -> Workers:
        return Workers(self.plan.document["name"], _MEASURE, candidate.instances)

    def _loads(self, candidate: Candidate, *, is_untuned: bool) -> list[dict[str, Any]]:
        """Return the messages with which the instances of a candidate are loaded."""
        # The compiled code of candidates stays out of the model's folder.
        settings = {**candidate.parameters, "COMPILE_CACHE_DIR": f"{self._folder}/compiled"}
        watched: list[str] = []
        # The current settings are measured even if some of them have no effect.
        if not is_untuned:
            settings["COMPILE_REQUIRED"] = "true"
            watched = sorted(candidate.runtime)
        return [
            {
                "arguments": self.plan.arguments(settings, candidate.instances, number),
                "folder": self._folder,
                "batch": self.batch,
                "watched": watched,
            }
            for number in range(candidate.instances)
        ]

    def _measure(self, candidate: Candidate, memory_mb: float) -> Row:
        """Measure a candidate; the first one that can be measured stays loaded beside the others.

        `memory_mb` is for the untuned configuration and a candidate together.
        """
        with contextlib.ExitStack() as stack:
            try:
                workers = stack.enter_context(self._workers(candidate))
                messages = self._loads(candidate, is_untuned=not self.rows)
                loads = workers.ask(messages, self.plan.timeout_s)
                loaded = _Loaded(workers, candidate.instances)
                first = not self._untuned_figures
                row = self._compare(candidate, loaded, loads)
            except LoadError as error:
                if self._untuned is not None and not self._untuned.workers.alive:
                    self._untuned = None  # the memory did not suffice for both
                return Row(candidate, failure=str(error))
            fits_twice = row.memory_mb * (1 + _GROWTH) <= memory_mb and all(
                load["device_memory_mb"] * _GROWTH <= load["device_free_mb"] for load in loads
            )
            if first and fits_twice:
                self._untuned = loaded
                self._kept.enter_context(stack.pop_all())
            return row

    def _compare(
        self, candidate: Candidate, loaded: _Loaded, loads: Sequence[Mapping[str, float]]
    ) -> Row:
        """Measure a candidate and the untuned configuration in turn."""
        plan, best = self.plan, self.choice()
        alone, untuned = self._untuned_figures, self._untuned
        beside = untuned.instances if untuned is not None else 0
        rounds: list[tuple[Figures, Figures]] = []

        def figures(of: _Loaded) -> Figures:
            return of.measure(self.batch, plan.timeout_s)

        for number in range(plan.rounds):
            if untuned is None:
                own = figures(loaded)
                rounds.append((alone[number % len(alone)] if alone else own, own))
            elif number % 2:
                own = figures(loaded)
                rounds.append((figures(untuned), own))
            else:
                rounds.append((figures(untuned), figures(loaded)))
            row = ranking.summarize(candidate, self.batch, loads, rounds, beside)
            if number + 1 < _MIN_ROUNDS:
                continue
            behind = best is not None and ranking.is_behind(row, best, plan.goal)
            if behind or not plan.limits.keeps(row) or not alone:
                break
        if not alone:
            self._untuned_figures = [own for _, own in rounds]
        return row
