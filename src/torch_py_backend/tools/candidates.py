"""The settings to try for a model on a machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_py_backend.artifacts.discovery import ArtifactType

# The parameters that tuning chooses, beside the instance count.
_COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
TUNED = ("OPTIMIZE", _COMPILE, "BATCH_BUCKETS", "NUM_THREADS")
AS_CONFIGURED = "as configured"
# How many runtimes are tried with other counts of threads and instances.
_FINALISTS = 2


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a model and its machine.

    Attributes:
        kind: type of the artifact.
        images: whether an input has the four dimensions of a batch of images.
        gpu: whether the model runs on a GPU.
        batched: whether the model has a batch dimension.
        cores: cores that each process of an instance may use.
        memory_mb: free memory of the machine.
        divided: whether an instance is spread over several devices.
    """

    kind: ArtifactType
    images: bool
    gpu: bool
    batched: bool
    cores: int
    memory_mb: float
    divided: bool = False


@dataclass(frozen=True, slots=True)
class Allowed:
    """The user's limits of the search.

    Attributes:
        reduced_precision: whether 16-bit types are tried.
        threads: numbers of intra-op threads of an instance; empty for the default.
        instances: instance counts; empty for the default.
        quick: whether only the runtimes are tried, each with one instance.
    """

    reduced_precision: bool = False
    threads: tuple[int, ...] = ()
    instances: tuple[int, ...] = ()
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings to try: parameters of config.pbtxt and an instance count."""

    title: str
    parameters: Mapping[str, str]
    instances: int = 1

    @property
    def threads(self) -> str:
        return self.parameters.get("NUM_THREADS", "auto")

    @property
    def runtime(self) -> dict[str, str]:
        """The parameters without the number of threads."""
        return {key: value for key, value in self.parameters.items() if key != "NUM_THREADS"}

    @property
    def settings(self) -> tuple[str, int]:
        """A key that is equal for candidates of equal settings."""
        return json.dumps(self.parameters, sort_keys=True), self.instances

    @property
    def complexity(self) -> tuple[int, int]:
        """A key for sorting: the number of words in the parameters, then the instances."""
        words = sum(value.count(",") + 1 for value in self.runtime.values())
        return words, self.instances

    def __str__(self) -> str:
        plural = "" if self.threads == "1" else "s"
        return f"{self.title}, {self.threads} thread{plural} x {self.instances}"


class _Runtime(NamedTuple):
    """A way to run a model.

    Attributes:
        title: its name in the table.
        kinds: the artifacts that can be run this way.
        parameters: the parameters of config.pbtxt.
        needs: the fact that must be true.
        divisible: whether a divided model can be run this way; the config refuses the others.
    """

    title: str
    kinds: Sequence[ArtifactType]
    parameters: Mapping[str, str]
    needs: str = ""
    divisible: bool = False


_EAGER = (ArtifactType.MODULE, ArtifactType.FACTORY, ArtifactType.EXPORTED)
_SCRIPT = (ArtifactType.TORCHSCRIPT,)
_AOTI = (ArtifactType.AOTI,)
_AUTOCAST = [kind for kind in ArtifactType if kind is not ArtifactType.AOTI]
_COMPILED = {_COMPILE: "{}"}
_GRAPHS = {"OPTIMIZE": "cuda_graphs", "BATCH_BUCKETS": "auto"}
_BUCKETS = {_COMPILE: '{"dynamic": false}', "BATCH_BUCKETS": "auto"}
# Simple ones first, so that an interrupted run has measured them.
_FULL_PRECISION = (
    _Runtime("eager", _EAGER, {}, divisible=True),
    _Runtime("TorchScript", _SCRIPT, {}, divisible=True),
    _Runtime("AOTInductor", _AOTI, {}, divisible=True),
    _Runtime("channels_last", _EAGER, {"OPTIMIZE": "channels_last"}, "images"),
    _Runtime("freeze", _SCRIPT, {"OPTIMIZE": "freeze"}, divisible=True),
    _Runtime(
        "freeze + channels_last",
        _SCRIPT,
        {"OPTIMIZE": "freeze,channels_last"},
        "images",
        divisible=True,
    ),
    _Runtime("cuda_graphs", _EAGER, _GRAPHS, "gpu"),
    _Runtime("compile", _EAGER, _COMPILED),
    _Runtime("compile + freeze", _EAGER, {"OPTIMIZE": "freeze"} | _COMPILED),
    _Runtime(
        "compile + channels_last", _EAGER, {"OPTIMIZE": "channels_last"} | _COMPILED, "images"
    ),
    _Runtime("compile, buckets", _EAGER, _BUCKETS, "batched"),
    _Runtime("compile + cuda_graphs", _EAGER, _GRAPHS | _COMPILED, "gpu"),
)
_REDUCED_PRECISION = (
    _Runtime("bf16", _AUTOCAST, {"OPTIMIZE": "bf16"}),
    _Runtime("freeze + bf16", _SCRIPT, {"OPTIMIZE": "freeze,bf16"}, divisible=True),
    _Runtime("fp16", _AUTOCAST, {"OPTIMIZE": "fp16"}, "gpu"),
    _Runtime("compile + bf16", _EAGER, {"OPTIMIZE": "bf16"} | _COMPILED),
    _Runtime("compile + freeze + bf16", _EAGER, {"OPTIMIZE": "freeze,bf16"} | _COMPILED),
    _Runtime("compile + fp16", _EAGER, {"OPTIMIZE": "fp16"} | _COMPILED, "gpu"),
)


def screen(facts: Facts, allowed: Allowed, current: Candidate) -> list[Candidate]:
    """Return every runtime that suits the model, with one number of threads and one instance.

    Args:
        facts: the model and the machine.
        allowed: the user's limits.
        current: the settings in config.pbtxt; they come first.
    """
    # Not all cores: any other load on the machine would make that the slowest choice.
    counts = allowed.threads or (max(1, facts.cores // 2),)
    threads = {"NUM_THREADS": str(counts[len(counts) // 2])}
    instances = min(allowed.instances, default=1)
    suitable = [
        Candidate(runtime.title, {**runtime.parameters, **threads}, instances)
        for runtime in _FULL_PRECISION + _REDUCED_PRECISION * allowed.reduced_precision
        if facts.kind in runtime.kinds
        and (not runtime.needs or getattr(facts, runtime.needs))
        and (runtime.divisible or not facts.divided)
    ]
    return _distinct([current, *suitable])


def spread(
    facts: Facts, allowed: Allowed, best: Sequence[Candidate], memory_mb: Mapping[str, float]
) -> list[Candidate]:
    """Return the best runtimes with other counts of threads and instances.

    Args:
        facts: the model and the machine.
        allowed: the user's limits.
        best: the screened candidates, the best first.
        memory_mb: memory of one instance of each, by title; what does not fit is left out.
    """
    finalists: list[Candidate] = []
    for candidate in best:
        if all(candidate.runtime != finalist.runtime for finalist in finalists):
            finalists.append(candidate)
    return _distinct(
        Candidate(finalist.title, finalist.runtime | {"NUM_THREADS": str(threads)}, instances)
        for finalist in finalists[:_FINALISTS]
        for threads, instances in shares(facts, allowed)
        if memory_mb.get(finalist.title, 0) * instances <= facts.memory_mb
    )


def shares(facts: Facts, allowed: Allowed) -> Iterator[tuple[int, int]]:
    """Yield numbers of threads and instances that need no more cores than there are."""
    # By default all cores, half of them, and so on, down to one.
    halves = (facts.cores >> power for power in range(facts.cores.bit_length()))
    for threads in allowed.threads or halves:
        fitting = {1, max(1, facts.cores // threads)}
        if facts.gpu and not allowed.threads:
            fitting = {1, 2}  # cores hardly matter; two instances overlap on the GPU
        for instances in allowed.instances or sorted(fitting):
            if threads * instances <= facts.cores:
                yield threads, instances


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Drop repeated settings; a runtime's title replaces "as configured"."""
    by_settings: dict[tuple[str, int], Candidate] = {}
    for candidate in candidates:
        earlier = by_settings.setdefault(candidate.settings, candidate)
        if earlier.title == AS_CONFIGURED:
            by_settings[candidate.settings] = candidate
    return list(by_settings.values())
