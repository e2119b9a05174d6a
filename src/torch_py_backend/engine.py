"""Builds a model once; then runs items: admit → group → gather → call → outputs → scatter.

Inside the engine an error is a value: each item gets a result or the error that is its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torch_py_backend import (
    artifacts,
    batching,
    buckets,
    compilation,
    compile_cache,
    device_sharing,
    examples,
    hooks,
    loaders,
    loading,
    optimization,
    outputs,
    ranks,
    runtime,
    sequences,
    sharing,
    stages,
)
from torch_py_backend.artifacts import Artifact, Kind
from torch_py_backend.batching import Batch, Item, Outcome, Owned, Value
from torch_py_backend.config import ModelConfig
from torch_py_backend.counts import Counts
from torch_py_backend.errors import (
    BackendError,
    InputError,
    OutputError,
    UnavailableError,
    WorkerError,
)
from torch_py_backend.graphs import Graphs
from torch_py_backend.hooks import Hooks
from torch_py_backend.intake import Group, Intake
from torch_py_backend.loaders import Loaded
from torch_py_backend.padding import Padding
from torch_py_backend.purity import Purity
from torch_py_backend.ranks import Ranks
from torch_py_backend.recovery import Recovery
from torch_py_backend.stages import Stages
from torch_py_backend.threads import Threads

if TYPE_CHECKING:
    import torch

# Given a stage's name and what does it, what does it instead; the same, where nothing shall.
Around: TypeAlias = "Callable[[str, Callable[..., Any]], Callable[..., Any]]"
# The stages of every engine, and where they stand in it.
_STAGES = {
    "run": "_run",
    "streamed": "calling",
    "hook": "_own",
    "call": "_attempt",
    "gather": "_gather",
    "host to device": "_to_device",
    "outputs": "_take",
    "device to host": "_to_host",
    "scatter": "_scatter",
}


def build(config: ModelConfig, threads: Threads) -> Engine:
    """Load what the config describes.

    Raises:
        LoadError: it cannot be served; the message says why.
    """
    runtime.settle(config.options, threads)
    device = runtime.placement(config)
    artifact = artifacts.find(config)
    if not device_sharing.wished(config):
        return _build(config, artifact, device, device)
    shared = device_sharing.start(
        config, artifact, device, lambda: _load(config, artifact, device).owner
    )
    try:
        # A module is built on the CPU, and what it shares need never have been on the device. The
        # constants of a graph, which are not shared, must be.
        movable = artifact.kind in (Kind.MODULE, Kind.FACTORY) and not shared.owns
        onto = torch.device("cpu") if movable else device
        made = _build(config, artifact, device, onto)
        made.share(shared)
    except BaseException:
        shared.leave()
        raise
    return made


def _build(
    config: ModelConfig, artifact: Artifact, device: torch.device | None, onto: torch.device | None
) -> Engine:
    """An engine for a device, with its weights on that one or on another."""
    loaded = _load(config, artifact, onto)
    try:
        config = sequences.bound(config, loaded.signature)
        surroundings = runtime.surround(config.options, device, loaded.weights)
        return Engine(config, loaded, surroundings, artifact, hooks.load(config, artifact))
    except BaseException:
        loaded.leave()
        raise


def _load(config: ModelConfig, artifact: Artifact, onto: torch.device | None) -> Loaded:
    """The model, as OPTIMIZE wants it."""
    # What allocates for all the model's life happens here. The warm-up, which may compile for
    # minutes and whose memory the files' sizes do not tell, keeps nobody waiting.
    on_gpu = onto is not None and onto.type == "cuda"
    claim = loading.claim(config, artifact, on_gpu=on_gpu)
    with loading.turn(config, claim, runtime.free_memory(onto)):
        if config.options.tensor_parallel is not None:
            return ranks.load(config, artifact)
        loaded = loaders.load(artifact, config, onto)
        return dataclasses.replace(loaded, module=optimization.apply(config, loaded))


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """What a stream was begun with, which its outputs are measured by.

    Attributes:
        rows: the rows of its request.
        columns: its inputs, on the device.
    """

    rows: int
    columns: Sequence[Value]


class Engine:
    """One model, ready to be called from one thread."""

    def __init__(
        self,
        config: ModelConfig,
        loaded: Loaded,
        surroundings: runtime.Runtime,
        artifact: Artifact,
        around: Hooks | None = None,
    ) -> None:
        self.config = config
        self.artifact = artifact
        self.loaded = loaded
        # Taken for each run; who changes the model meanwhile waits for it. Who runs may hold it
        # already, to tell what the model was like then.
        self.turn = threading.RLock()
        self.kind = loaded.kind
        self.signature = str(loaded.signature)
        self._padding = Padding(config) if config.options.pad else None
        self._pads = (
            {name: pad.gather for name, pad in self._padding.pads.items()} if self._padding else {}
        )
        self.hooks = around
        self._intake: Intake | Stages
        if around is None:
            self._intake = Intake(config, loaded.signature, self._padding)
        else:
            self._intake = Stages(config, loaded.signature, around, surroundings)
        self.places = self._intake.places
        self.patterns = self._intake.patterns
        self.sharing = sharing.settle(config, artifact, loaded)
        self.counts = Counts()
        self._compiled = compilation.apply(config, loaded.kind, loaded.module, self.counts)
        self._eager = loaded.module
        self._module = self._compiled or loaded.module
        captured = "cuda_graphs" in config.options.optimize
        self._graphs = Graphs(config.name, self._module, self.counts) if captured else None
        self._module = self._graphs or self._module
        fixed = compilation.static(config) or captured
        self.rows = buckets.plan(config, loaded.rows, fixed=fixed)
        self._runtime = surroundings
        self._batched = config.max_batch_size > 0
        self._gather = batching.gather
        self._to_device = surroundings.to_device
        self._to_host: Callable[..., Sequence[Any]] = surroundings.to_host
        told, carried = [spec.name for spec in config.outputs], config.carried
        self._names = (*told, *(state.output for state in carried))
        # What is kept between calls: by the names of inputs, and the places of outputs.
        self._state_inputs = frozenset(state.input for state in config.states)
        self._state_places = (
            range(len(told), len(self._names))
            if carried
            else [told.index(state.output) for state in config.states]
        )
        self._take: Callable[[Any, int], list[Value]] = outputs.Taker(
            config, f"{loaded.returns}()"
        ).take
        self._finite = outputs.Finite(config) if config.options.check_finite else None
        if isinstance(self._intake, Stages) and self._intake.finishes:  # after scatter
            self._names, self._take, self._finite = stages.UNREAD, self._intake.split, None
        self.purity = Purity(loaded.owner)
        self.recovery = Recovery(
            config.name,
            lambda group: self._attempt(group),  # noqa: PLW0108  what stands around it by then
            called=loaded.signature.name,
            rows=self.rows if config.max_batch_size else None,
            repeats=self.repeats,
            free=runtime.free,
            probe=runtime.probe,
            counts=self.counts,
        )
        # Empty, as long as memory has never run out.
        self._limits = self.recovery.capacity.limits
        self._shared: device_sharing.Shared | None = None
        self._prepares = False

    def share(self, shared: device_sharing.Shared) -> None:
        """Use one copy of the weights with other instances.

        Raises:
            ConfigError: they cannot be shared.
        """
        shared.hold(self.loaded.owner, self.kind)
        self._shared, self.turn = shared, shared.lock
        self.purity.settle()

    def watch(self, end: Callable[[str], None]) -> None:
        """Have `end` called, with the reason, when the model is lost while nobody calls it."""

        def lost(error: WorkerError) -> None:
            self.recovery.judge(error)
            end(self.recovery.reason)

        if isinstance(self.loaded.module, Ranks):
            self.loaded.module.watch(lost)

    def leave(self) -> None:
        """Let go of what is other processes', too; to leave twice is no error."""
        self.loaded.leave()
        if self._shared is not None:
            self._shared.leave()

    @property
    def fills(self) -> bool:
        """Whether batches are filled up or padded."""
        return self._padding is not None or bool(self.rows.buckets) or self.rows.least > 1

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._runtime.device

    @property
    def guard(self) -> runtime.Guard:
        """What surrounds whatever works on the device's tensors."""
        return self._runtime.guard

    @property
    def captures(self) -> bool:
        """Whether calls are replayed from CUDA graphs."""
        return self._graphs is not None

    @property
    def compiles(self) -> bool:
        """Whether a new shape may cost a compilation."""
        return self._compiled is not None

    def memory(self) -> list[tuple[int, int, int]]:
        """Of each GPU that is used: its index, and bytes that are allocated and reserved."""
        return runtime.memory()

    def example(self) -> Item:
        """Valid inputs that lie beside the model; empty where none do."""
        return examples.find(self.config, self.artifact) or {}

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """The calls within may compile; once they are done, nothing is compiled any more."""
        self._prepares = True
        if self._compiled is None:
            yield
            sealed = self._eager
        else:
            bundle = compile_cache.at(self.config, self.artifact, self._runtime.device)
            before = compilation.graphs()
            with contextlib.nullcontext() if bundle is None else bundle.used() as found:
                yield
            self.counts.compiled_graphs += compilation.graphs() - before
            if found is not None:
                self.counts.compile_cache["hit" if found else "miss"] = 1
            sealed = self._compiled.seal()
        self._prepares = False
        self._module = sealed if self._graphs is None else self._graphs.seal(sealed)
        if self._shared is not None and self.purity.writes_buffers():
            raise device_sharing.refused(
                self.config, "the model writes to its buffers, which would be the others' as well"
            )
        self.purity.settle()

    def repeats(self) -> bool:
        """Whether the model may be called again with what it has seen."""
        wished = self.config.options.retry_failed_batch
        return not self.purity.broken() if wished is None else wished

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """What every call of the model for a stream has around it."""
        with self.turn:
            self.recovery.begins()
            with self._runtime.guard():
                yield

    def begin(self, item: Item) -> tuple[Any, Given]:
        """What the model returns for one item, as it is: a stream. Called within `calling`.

        Raises:
            InputError: the item is not what the model takes.
        """
        assert isinstance(self._intake, Intake)  # noqa: S101  hooks around streams are refused
        admitted = self._intake.admit(item)
        if isinstance(admitted, BackendError):
            raise admitted
        (group,) = self._intake.group([(0, admitted)])
        began = time.perf_counter()
        batch = self._gather(group.items, group.inputs.names)
        gathered = time.perf_counter()
        columns = self._to_device(batch.columns)
        sent = time.perf_counter()
        given = Given(_rows(columns), columns)
        result = group.inputs.call(self._module, self._intake.convert(group.inputs, columns))
        counts = self.counts
        counts.forward_seconds += time.perf_counter() - sent
        counts.gather_seconds += gathered - began
        counts.host_to_device_seconds += sent - gathered
        counts.batch(given.rows if self._batched else 1)
        return result, given

    def outcomes(self, results: Sequence[tuple[Any, Given]]) -> list[Outcome]:
        """What streams have made, each as the config says. Called within `calling`."""
        taken = [self._taken(result, given.rows) for result, given in results]
        made = [
            value for values in taken if not isinstance(values, OutputError) for value in values
        ]
        came = [column for _, given in results for column in given.columns]
        began = time.perf_counter()
        sent = iter(self._to_host(made, came))
        self.counts.device_to_host_seconds += time.perf_counter() - began
        return [
            values
            if isinstance(values, OutputError)
            else self._finite_only({name: next(sent) for name in self._names})
            for values in taken
        ]

    def _taken(self, result: Any, rows: int) -> list[Value] | OutputError:
        try:
            return self._take(result, rows)
        except OutputError as error:
            return error

    def _finite_only(self, outcome: dict[str, Value]) -> Outcome:
        refusal = None if self._finite is None else self._finite.refusal(outcome)
        return outcome if refusal is None else refusal

    def surround(self, around: Around) -> Callable[[], None]:
        """Let something stand around stages, until what is returned is called.

        Stages are replaced, so that nothing is asked on the way of a batch where nothing stands.
        """
        places: list[tuple[str, Any, str]] = [
            *((name, self, attribute) for name, attribute in _STAGES.items()),
            *self._intake.stages(),
        ]
        if self.hooks is None:  # else hooks have the module itself, whose attributes they may want
            places.append(("forward", self, "_module"))
        replaced = contextlib.ExitStack()
        for name, owner, attribute in places:
            stage = getattr(owner, attribute)
            made = around(name, stage)
            if made is not stage:
                replaced.callback(_replace(owner, attribute, made))
        return replaced.close

    def clean(self) -> None:
        """What the config asks for after each execution."""
        if self._runtime.clean is not None and self.recovery.fatal is None:
            self._runtime.clean()

    def run_some(self, items: Sequence[Item], places: Sequence[int]) -> Sequence[Outcome]:
        """As `run`, for items that stand at these places among a batch's requests."""
        self.recovery.places = places
        try:
            return self.run(items)
        finally:
            self.recovery.places = None

    def run(self, items: Sequence[Item]) -> Sequence[Outcome]:
        """One outcome for each item, in their order."""
        if self._shared is not None:
            return self._run_shared(self._shared, items)
        with self.turn:
            return self._run(items)

    def _run_shared(
        self, shared: device_sharing.Shared, items: Sequence[Item]
    ) -> Sequence[Outcome]:
        """The outcomes, unless the weights have gone meanwhile."""
        with self.turn:
            outcomes, refusal = self._run_once(shared, items)
            while refusal is not None and self._prepares and not shared.final:
                outcomes, refusal = self._run_once(shared, items)
        if refusal is None:
            return outcomes
        if shared.final:
            self.recovery.fatal = refusal
        self.recovery.report(refusal, "", range(len(items)))
        return [refusal] * len(items)

    def _run_once(
        self, shared: device_sharing.Shared, items: Sequence[Item]
    ) -> tuple[Sequence[Outcome], UnavailableError | None]:
        present = shared.present
        refusal = shared.ready()
        if refusal is not None:
            return (), refusal
        if not present:  # they are elsewhere now
            self.purity.settle()
        outcomes = self._run(items)
        return outcomes, shared.lost()

    def _run(self, items: Sequence[Item]) -> Sequence[Outcome]:
        outcomes: Sequence[Outcome]
        if isinstance(self._intake, Stages):
            with self._runtime.guard():
                outcomes = self._run_staged(self._intake, items)
        else:
            whole = self._intake.whole(items)
            outcomes = (
                self._run_group(whole)
                if whole is not None
                else self._run_admitted([self._intake.admit(item) for item in items])
            )
        self.clean()
        return outcomes

    def _run_staged(self, around: Stages, items: Sequence[Item]) -> Sequence[Outcome]:
        """The outcomes, with the stages of hooks before and after the engine's own."""
        began = time.perf_counter()
        begun = [self._own(place, around.begin, item) for place, item in enumerate(items)]
        prepared = [
            one if isinstance(one, BackendError) else self._own(place, one)
            for place, one in enumerate(begun)
        ]
        self.counts.preprocess_seconds += time.perf_counter() - began
        outcomes = self._run_admitted(list(prepared))
        if not around.finishes:
            return outcomes
        came = time.perf_counter()
        finished = [
            one
            if isinstance(one, BackendError)
            else self._own(place, around.finish, one, prepared[place])
            for place, one in enumerate(outcomes)
        ]
        self.counts.postprocess_seconds += time.perf_counter() - came
        return finished

    def _own(self, place: int, stage: Callable[..., Any], *given: Any) -> Any:
        """What a stage makes of one item, or the error that is this item's own."""
        try:
            return stage(*given)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failure = self.recovery.judge(error)
        if not isinstance(failure.error, InputError):
            self.recovery.report(failure.error, failure.text, [place])
        return failure.error

    def _run_admitted(self, outcomes: list[Any]) -> list[Outcome]:
        """The outcomes, where what is refused already has its own."""
        sound = [
            (position, item)
            for position, item in enumerate(outcomes)
            if not isinstance(item, BackendError)
        ]
        for group in self._intake.group(sound):
            for position, outcome in zip(group.positions, self._run_group(group), strict=True):
                outcomes[position] = outcome
        return outcomes

    def _run_group(self, group: Group) -> Sequence[Outcome]:
        if self._limits or self.recovery.fatal is not None:
            return self.recovery.run(group)
        try:
            return self._attempt(group)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failure = self.recovery.judge(error)
        return self.recovery.settle(group, failure)

    def _attempt(self, group: Group) -> Sequence[Outcome]:
        """The outcomes of a group that is run as it is; raises whatever the model raises."""
        with self._runtime.guard():
            names = group.inputs.names
            began = time.perf_counter()
            batch = self._gather(group.items, names, self._pads, self._state_inputs)
            if self._padding is not None:
                self._count_padding(group, batch)
            gathered = time.perf_counter()
            columns = self._to_device(batch.columns)
            sent = time.perf_counter()
            rows = _rows(columns)
            raw = self._call(group, columns, rows)
            called = time.perf_counter()
            made = self._to_host(self._owned(raw, batch), self._sent(names, batch))
            fetched = time.perf_counter()
        # In place: a call would cost more than all of it.
        counts = self.counts
        counts.gather_seconds += gathered - began
        counts.host_to_device_seconds += sent - gathered
        counts.forward_seconds += called - sent
        counts.device_to_host_seconds += fetched - called
        seen = rows if self._batched else 1
        counts.batches[seen] = counts.batches.get(seen, 0) + 1
        outcomes = self._scatter(group, batch, made)
        if self._finite is not None and not self._finite.holds(made):
            return [
                self._checked(self._finite, *one)
                for one in zip(outcomes, group.positions, strict=True)
            ]
        return outcomes

    def _owned(self, made: Sequence[Value], batch: Batch) -> Sequence[Value | Owned]:
        """What the model made; each item gets a state of its own, which outlives the batch."""
        if not self._state_places:
            return made
        whole: list[Value | Owned] = list(made)
        for place in self._state_places:
            whole[place] = batching.owned(made[place], batch.sizes)
        return whole

    def _sent(self, names: Sequence[str], batch: Batch) -> Sequence[Value]:
        """The columns that requests brought."""
        if not self._state_inputs:
            return batch.columns
        columns = zip(names, batch.columns, strict=True)
        return [column for name, column in columns if name not in self._state_inputs]

    def _checked(self, finite: outputs.Finite, outcome: Outcome, position: int) -> Outcome:
        refusal = None if isinstance(outcome, BackendError) else finite.refusal(outcome)
        if refusal is None:
            return outcome
        self.recovery.report(refusal, "", [position])
        return refusal

    def _scatter(
        self, group: Group, batch: Batch, made: Sequence[Value | Owned]
    ) -> Sequence[Outcome]:
        outcomes = batching.scatter(made, self._names, batch.sizes)
        if self._padding is not None:
            seen = zip(group.inputs.names, batch.columns, strict=True)
            self._padding.cut(outcomes, group.items, {name: one.shape for name, one in seen})
        return outcomes

    def _count_padding(self, group: Group, batch: Batch) -> None:
        for name, column in zip(group.inputs.names, batch.columns, strict=True):
            if name in self._pads:
                values = math.prod(column.shape)
                self.counts.values += values
                sent = sum(math.prod(item[name].shape) for item in group.items)
                self.counts.padded_values += values - sent

    def _call(self, group: Group, columns: Sequence[Value], rows: int) -> Sequence[Value]:
        """The model's outputs for a batch, in as many calls as the model needs."""
        if self.rows.take(rows):
            return self._call_once(group, columns, rows)
        pieces = []
        for piece, present in batching.fit(columns, self.rows):
            made = self._call_once(group, piece, piece[0].shape[0])
            self.counts.filled_rows += piece[0].shape[0] - present
            pieces.append([value[:present] for value in made])
        return batching.join(pieces)

    def _call_once(self, group: Group, columns: Sequence[Value], rows: int) -> Sequence[Value]:
        passed = self._intake.convert(group.inputs, columns)
        self.counts.rows += rows
        return self._take(group.inputs.call(self._module, passed), rows)


def _replace(owner: Any, attribute: str, made: Any) -> Callable[[], None]:
    """Set an attribute; what is returned makes it what it was."""
    own = vars(owner)
    # A method is the class's own, and is seen again once nothing hides it.
    before = own.get(attribute, own)
    setattr(owner, attribute, made)
    if before is own:
        return partial(delattr, owner, attribute)
    return partial(setattr, owner, attribute, before)


def _rows(columns: Sequence[Value]) -> int:
    return columns[0].shape[0] if columns and columns[0].ndim else 0
