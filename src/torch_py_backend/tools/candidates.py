"""Which settings are worth trying for a model on a machine: from facts to candidates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_py_backend.artifacts.discovery import Kind

# The parameters that tuning decides, beside the count of instances.
TUNED = ("OPTIMIZE", "TORCH_COMPILE_OPTIONAL_PARAMETERS", "BATCH_BUCKETS", "NUM_THREADS")
AS_CONFIGURED = "as configured"
_COMPILABLE = (Kind.MODULE, Kind.FACTORY, Kind.EXPORTED)
# How many runtimes are tried with other counts of threads and instances.
_FINALISTS = 2


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a model and its machine.

    Attributes:
        kind: what the artifact is.
        images: whether an input has the four dimensions of a batch of images.
        gpu: whether the model runs on a GPU.
        batched: whether it takes batches.
        cores: cores of the processor that each process of an instance may have.
        memory_mb: free memory of the machine.
        divided: whether an instance is spread over several devices or processes.
    """

    kind: Kind
    images: bool
    gpu: bool
    batched: bool
    cores: int
    memory_mb: float
    divided: bool = False


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the user allows to try.

    Attributes:
        reduced_precision: also 16-bit types.
        threads: intra-op threads of an instance; empty: what suits the machine.
        instances: counts of instances; empty: what suits the machine.
        quick: the runtimes only, each with one instance.
    """

    reduced_precision: bool = False
    threads: tuple[int, ...] = ()
    instances: tuple[int, ...] = ()
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings to try: parameters of config.pbtxt, and how many instances at the same time."""

    title: str
    parameters: Mapping[str, str]
    instances: int = 1

    @property
    def threads(self) -> str:
        return self.parameters.get("NUM_THREADS", "auto")

    @property
    def runtime(self) -> dict[str, str]:
        """The parameters that say how the model is run, not on how many threads."""
        return {key: value for key, value in self.parameters.items() if key != "NUM_THREADS"}

    @property
    def complexity(self) -> tuple[int, int]:
        """What is smaller is simpler: less that can go wrong, fewer processes."""
        words = sum(value.count(",") + 1 for value in self.runtime.values())
        return words, self.instances

    def __str__(self) -> str:
        plural = "" if self.threads == "1" else "s"
        return f"{self.title}, {self.threads} thread{plural} x {self.instances}"


class _Runtime(NamedTuple):
    """A way to run a model, and where it makes sense."""

    title: str
    where: Callable[[Facts], bool]
    optimize: tuple[str, ...] = ()
    compiled: Mapping[str, Any] | None = None
    buckets: str = ""

    @property
    def parameters(self) -> dict[str, str]:
        given = {
            "OPTIMIZE": ",".join(self.optimize),
            "BATCH_BUCKETS": self.buckets,
            "TORCH_COMPILE_OPTIONAL_PARAMETERS": ""
            if self.compiled is None
            else json.dumps(self.compiled),
        }
        return {key: value for key, value in given.items() if value}


def _plain(facts: Facts) -> bool:
    return facts.kind in _COMPILABLE


def _eager(facts: Facts) -> bool:
    return _plain(facts) and not facts.divided  # else the config refuses it


def _eager_images(facts: Facts) -> bool:
    return _eager(facts) and facts.images


def _eager_gpu(facts: Facts) -> bool:
    return _eager(facts) and facts.gpu


def _eager_batched(facts: Facts) -> bool:
    return _eager(facts) and facts.batched


def _torchscript(facts: Facts) -> bool:
    return facts.kind is Kind.TORCHSCRIPT


def _torchscript_images(facts: Facts) -> bool:
    return _torchscript(facts) and facts.images


def _aoti(facts: Facts) -> bool:
    return facts.kind is Kind.AOTI


def _autocast(facts: Facts) -> bool:
    return not _aoti(facts) and not facts.divided


# Small first: what is simple is measured even if the user loses patience.
_FULL = (
    _Runtime("eager", _plain),
    _Runtime("TorchScript", _torchscript),
    _Runtime("AOTInductor", _aoti),
    _Runtime("channels_last", _eager_images, ("channels_last",)),
    _Runtime("freeze", _torchscript, ("freeze",)),
    _Runtime("freeze + channels_last", _torchscript_images, ("freeze", "channels_last")),
    _Runtime("cuda_graphs", _eager_gpu, ("cuda_graphs",), buckets="auto"),
    _Runtime("compile", _eager, (), {}),
    _Runtime("compile + freeze", _eager, ("freeze",), {}),
    _Runtime("compile + channels_last", _eager_images, ("channels_last",), {}),
    _Runtime("compile, buckets", _eager_batched, (), {"dynamic": False}, "auto"),
    _Runtime("compile + cuda_graphs", _eager_gpu, ("cuda_graphs",), {}, "auto"),
)
_REDUCED = (
    _Runtime("bf16", _autocast, ("bf16",)),
    _Runtime("freeze + bf16", _torchscript, ("freeze", "bf16")),
    _Runtime("fp16", lambda facts: facts.gpu and _autocast(facts), ("fp16",)),
    _Runtime("compile + bf16", _eager, ("bf16",), {}),
    _Runtime("compile + freeze + bf16", _eager, ("freeze", "bf16"), {}),
    _Runtime("compile + fp16", _eager_gpu, ("fp16",), {}),
)


def screen(facts: Facts, allowed: Allowed, current: Candidate) -> list[Candidate]:
    """Every runtime that makes sense, with one count of threads and one instance.

    Args:
        facts: the model and the machine.
        allowed: what the user allows.
        current: the settings in config.pbtxt; they come first.
    """
    table = _FULL + (_REDUCED if allowed.reduced_precision else ())
    # Not all cores: where anything else runs beside the model, that is the slowest of all.
    counts = allowed.threads or (max(1, facts.cores // 2),)
    threads = {"NUM_THREADS": str(counts[len(counts) // 2])}
    first = min(allowed.instances, default=1)
    return _distinct(
        [
            current,
            *(
                Candidate(one.title, one.parameters | threads, first)
                for one in table
                if one.where(facts)
            ),
        ]
    )


def spread(
    facts: Facts, allowed: Allowed, best: Sequence[Candidate], memory_mb: Mapping[str, float]
) -> list[Candidate]:
    """The best runtimes, with other counts of threads and instances.

    Args:
        facts: the model and the machine.
        allowed: what the user allows.
        best: the screened candidates, the best first.
        memory_mb: what one instance of each takes, by its title: what cannot fit is not tried.
    """
    finalists: list[Candidate] = []
    for candidate in best:
        if all(candidate.runtime != one.runtime for one in finalists):
            finalists.append(candidate)
    return _distinct(
        Candidate(one.title, one.runtime | {"NUM_THREADS": str(threads)}, instances)
        for one in finalists[:_FINALISTS]
        for threads, instances in _shares(facts, allowed)
        if memory_mb.get(one.title, 0) * instances <= facts.memory_mb
    )


def _shares(facts: Facts, allowed: Allowed) -> Iterator[tuple[int, int]]:
    """Threads and instances that do not ask for more cores than there are."""
    counts = allowed.threads or _halves(facts.cores)
    for threads in counts:
        fitting = {1, max(1, facts.cores // threads)}
        if facts.gpu and not allowed.threads:
            fitting = {1, 2}  # the processor hardly matters; two instances hide each other's gaps
        for instances in allowed.instances or sorted(fitting):
            if threads * instances <= facts.cores:
                yield threads, instances


def contradiction(facts: Facts, allowed: Allowed) -> str:
    """Why nothing can be tried, as a clause; empty where something can."""
    if any(True for _ in _shares(facts, allowed)):
        return ""
    return (
        f"--threads {','.join(map(str, allowed.threads)) or 'any'} and --instances"
        f" {','.join(map(str, allowed.instances)) or 'any'} ask for more than the"
        f" {facts.cores} cores that there are"
    )


def _halves(cores: int) -> list[int]:
    """All cores, half of them, and so on, to one."""
    counts = [cores]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    return counts


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Each set of settings once; what config.pbtxt has goes by its own title."""
    kept: list[Candidate] = []
    for candidate in candidates:
        same = [
            position
            for position, one in enumerate(kept)
            if (one.parameters, one.instances) == (candidate.parameters, candidate.instances)
        ]
        if not same:
            kept.append(candidate)
        elif kept[same[0]].title == AS_CONFIGURED:
            kept[same[0]] = candidate
    return kept
