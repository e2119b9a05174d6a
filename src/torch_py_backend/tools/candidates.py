"""The settings to try for a model on a machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_py_backend.artifacts.discovery import ArtifactType

# The parameters that tuning chooses, beside the instance count.
_COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
_MATMUL = "FLOAT32_MATMUL_PRECISION"
TUNED = ("OPTIMIZE", _COMPILE, "BATCH_BUCKETS", "NUM_THREADS", _MATMUL)
AS_CONFIGURED = "as configured"


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a model and its machine.

    Attributes:
        kind: type of the artifact.
        images: whether an input has the four dimensions of a batch of images.
        gpu: whether the model runs on a GPU.
        batched: whether the model has a batch dimension.
        cores: cores that each process of an instance may use.
        threads: threads of an instance as configured.
        memory_mb: free memory of the machine.
        divided: whether an instance is spread over several devices.
    """

    kind: ArtifactType
    images: bool
    gpu: bool
    batched: bool
    cores: int
    threads: int
    memory_mb: float
    divided: bool = False


@dataclass(frozen=True, slots=True)
class Allowed:
    """The user's limits of the search.

    Attributes:
        reduced_precision: whether 16-bit types are tried, and TF32 on a GPU.
        threads: numbers of intra-op threads of an instance; empty for the default, which on a GPU
            is an equal share of the cores.
        instances: instance counts; empty for the default.
        keep_instances: the only instance count, in spite of the cores; 0 for any.
        quick: whether fewer counts of threads and fewer runtimes are tried with other counts.
    """

    reduced_precision: bool = False
    threads: tuple[int, ...] = ()
    instances: tuple[int, ...] = ()
    keep_instances: int = 0
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
    """

    title: str
    kinds: Sequence[ArtifactType]
    parameters: Mapping[str, str]
    needs: str = ""

    def suits(self, facts: Facts) -> bool:
        return (
            facts.kind in self.kinds
            and (not self.needs or getattr(facts, self.needs))
            # The config refuses the others for a divided model.
            and (not self.parameters or not facts.divided)
        )


_EAGER = (ArtifactType.MODULE, ArtifactType.FACTORY, ArtifactType.EXPORTED)
_SCRIPT = (ArtifactType.TORCHSCRIPT,)
_CONVERTED = (ArtifactType.MODULE, ArtifactType.FACTORY, ArtifactType.TORCHSCRIPT)
_MODULES = (ArtifactType.MODULE, ArtifactType.FACTORY)
_AUTOCAST = [kind for kind in ArtifactType if kind is not ArtifactType.AOTI]
_COMPILED = {_COMPILE: "{}"}
_GRAPHS = {"OPTIMIZE": "cuda_graphs", "BATCH_BUCKETS": "auto"}
_BUCKETS = {_COMPILE: '{"dynamic": false}', "BATCH_BUCKETS": "auto"}
# Inductor captures CUDA graphs in these modes, one for each bucket.
_MODES = {
    mode: {_COMPILE: f'{{"mode": "{mode}", "dynamic": false}}', "BATCH_BUCKETS": "auto"}
    for mode in ("reduce-overhead", "max-autotune")
}
_CHANNELS_LAST = {"OPTIMIZE": "channels_last"}
_TF32 = {_MATMUL: "high"}
# Those that often are the fastest come first: a run may end before all are measured.
_FULL_PRECISION = (
    _Runtime("eager", _EAGER, {}),
    _Runtime("TorchScript", _SCRIPT, {}),
    _Runtime("AOTInductor", (ArtifactType.AOTI,), {}),
    _Runtime("channels_last", _EAGER, _CHANNELS_LAST, "images"),
    _Runtime("freeze", _SCRIPT, {"OPTIMIZE": "freeze"}),
    _Runtime("freeze + channels_last", _SCRIPT, {"OPTIMIZE": "freeze,channels_last"}, "images"),
    _Runtime("cuda_graphs", _EAGER, _GRAPHS, "gpu"),
    _Runtime("compile + cuda_graphs", _EAGER, _GRAPHS | _COMPILED, "gpu"),
    _Runtime("compile + freeze", _EAGER, {"OPTIMIZE": "freeze"} | _COMPILED),
    _Runtime("compile", _EAGER, _COMPILED),
    _Runtime("compile + channels_last", _EAGER, _CHANNELS_LAST | _COMPILED, "images"),
    _Runtime("compile, buckets", _EAGER, _BUCKETS, "batched"),
    *(_Runtime(f"compile, {mode}", _EAGER, words, "gpu") for mode, words in _MODES.items()),
)
_REDUCED_PRECISION = (
    _Runtime("TF32", _AUTOCAST, _TF32, "gpu"),
    _Runtime("bf16", _AUTOCAST, {"OPTIMIZE": "bf16"}),
    _Runtime("freeze + bf16", _SCRIPT, {"OPTIMIZE": "freeze,bf16"}),
    _Runtime("bf16 weights", _CONVERTED, {"OPTIMIZE": "bf16_weights"}),
    _Runtime("fp16", _AUTOCAST, {"OPTIMIZE": "fp16"}, "gpu"),
    _Runtime("fp16 weights", _CONVERTED, {"OPTIMIZE": "fp16_weights"}, "gpu"),
    _Runtime(
        "cuda_graphs + fp16 weights",
        _MODULES,
        _GRAPHS | {"OPTIMIZE": "cuda_graphs,fp16_weights"},
        "gpu",
    ),
    _Runtime("compile + TF32", _EAGER, _TF32 | _COMPILED, "gpu"),
    _Runtime("compile + fp16", _EAGER, {"OPTIMIZE": "fp16"} | _COMPILED, "gpu"),
    _Runtime("compile + freeze + bf16", _EAGER, {"OPTIMIZE": "freeze,bf16"} | _COMPILED),
    _Runtime("compile + bf16", _EAGER, {"OPTIMIZE": "bf16"} | _COMPILED),
    _Runtime("compile + bf16 weights", _MODULES, {"OPTIMIZE": "bf16_weights"} | _COMPILED),
    _Runtime("compile + fp16 weights", _MODULES, {"OPTIMIZE": "fp16_weights"} | _COMPILED, "gpu"),
)


def configured(facts: Facts, parameters: Mapping[str, str], instances: int) -> Candidate:
    """Return the settings in config.pbtxt as a candidate, with the title of their runtime."""
    candidate = Candidate(AS_CONFIGURED, parameters, instances)
    for runtime in _FULL_PRECISION + _REDUCED_PRECISION:
        if facts.kind in runtime.kinds and runtime.parameters == candidate.runtime:
            return Candidate(runtime.title, parameters, instances)
    return candidate


def screen(facts: Facts, allowed: Allowed, base: Candidate, *, compiled: bool) -> list[Candidate]:
    """Return the runtimes that suit the model: those that compile, or the others.

    All have the counts of threads and instances of `base`, if these are allowed.
    """
    threads, instances = int(base.parameters.get("NUM_THREADS", facts.threads)), base.instances
    if allowed.threads and threads not in allowed.threads:
        threads = allowed.threads[len(allowed.threads) // 2]
    if allowed.instances and instances not in allowed.instances:
        instances = min(allowed.instances)
    return [
        Candidate(runtime.title, {**runtime.parameters, "NUM_THREADS": str(threads)}, instances)
        for runtime in _FULL_PRECISION + _REDUCED_PRECISION * allowed.reduced_precision
        if runtime.suits(facts) and compiled == (_COMPILE in runtime.parameters)
    ]


def spread(
    facts: Facts, allowed: Allowed, best: Sequence[tuple[Candidate, float]]
) -> list[Candidate]:
    """Return the best runtimes with other counts of threads and instances.

    `best` has the measured candidates, the best first, with the memory of one instance in MB; what
    does not fit into the machine's memory is left out.
    """
    finalists: dict[frozenset[tuple[str, str]], tuple[Candidate, float]] = {}
    for candidate, memory_mb in best:
        finalists.setdefault(frozenset(candidate.runtime.items()), (candidate, memory_mb))
    return [
        Candidate(finalist.title, finalist.runtime | {"NUM_THREADS": str(threads)}, instances)
        for finalist, memory_mb in [*finalists.values()][: 1 if allowed.quick else 2]
        for threads, instances in shares(facts, allowed)
        if memory_mb * instances <= facts.memory_mb
    ]


def batch_sizes(largest: int) -> list[int]:
    """Return the powers of two up to max_batch_size, and that."""
    return sorted({*(1 << power for power in range(largest.bit_length())), max(1, largest)})


def settings(facts: Facts, candidate: Candidate) -> tuple[frozenset[tuple[str, str]], int]:
    """Return a key that is equal for candidates with the same settings."""
    parameters = {"NUM_THREADS": str(facts.threads), **candidate.parameters}
    return frozenset(parameters.items()), candidate.instances


def shares(facts: Facts, allowed: Allowed) -> Iterator[tuple[int, int]]:
    """Yield numbers of threads and instances that need no more cores than there are."""
    if facts.gpu and not allowed.threads:
        # Instances overlap on the GPU, and the number of their threads hardly matters.
        kept = (allowed.keep_instances,) if allowed.keep_instances else ()
        for instances in kept or allowed.instances or (1, 2, 4):
            if kept or instances <= facts.cores:
                yield max(1, facts.cores // instances), instances
        return
    # By default all cores, half of them, and so on, down to one.
    halves = [facts.cores >> power for power in range(facts.cores.bit_length())]
    if allowed.quick:
        halves = sorted({facts.cores, max(1, facts.cores // 2), 1}, reverse=True)
    for threads in allowed.threads or halves:
        fitting = {1, max(1, facts.cores // threads)}
        if allowed.keep_instances:
            yield threads, allowed.keep_instances
        else:
            for instances in allowed.instances or sorted(fitting):
                if threads * instances <= facts.cores:
                    yield threads, instances
