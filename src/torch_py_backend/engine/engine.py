"""Runs items: admit → group → gather → call → outputs → scatter.

Inside the engine an error is a value: each item gets a result or the error that is its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.batching import gather_scatter, output_extraction, runtime
from torch_py_backend.batching.counters import Counts
from torch_py_backend.batching.gather_scatter import Batch, Item, Outcome, Owned, Value, rows_in
from torch_py_backend.batching.grouping import Group, Intake
from torch_py_backend.batching.padding import Padding
from torch_py_backend.batching.ragged import Ragged
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine import instrumentation, side_effects
from torch_py_backend.engine.instrumentation import Around, Stage
from torch_py_backend.engine.model_runner import Callee, Take
from torch_py_backend.engine.retry import Recovery
from torch_py_backend.engine.side_effects import Purity
from torch_py_backend.engine.stream_calls import StreamCalls
from torch_py_backend.errors import BackendError, InputError, UnavailableError
from torch_py_backend.hooks import hooked_pipeline
from torch_py_backend.hooks.hooked_pipeline import Stages
from torch_py_backend.hooks.user_hooks import Hooks
from torch_py_backend.loading import example_inputs, mapped_files
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.sequences.state_columns import StateColumns
from torch_py_backend.weights import gpu_sharing, sharing

# The stages of every engine that are its own, and where they stand in it.
_STAGES = {
    "run": "_run",
    "streamed": "calling",
    "hook": "_staged",
    "call": "_attempt",
    "gather": "_gather",
    "host to device": "_to_device",
    "device to host": "_to_host",
    "scatter": "_scatter",
}


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
        self._batched = config.max_batch_size > 0
        columns = StateColumns(config)
        self._state_inputs, self._owned, self._sent = columns.inputs, columns.owned, columns.sent
        # New weights may come between a call and its responses: see `Watch`.
        self._watched = config.options.watch_weights
        self._finite = output_extraction.Finite(config) if config.options.check_finite else None
        take: Take = output_extraction.Taker(config, f"{loaded.returns}()").take
        self._names = columns.outputs
        self._own: Callable[[Value], Value] = gather_scatter.own
        if isinstance(self._intake, Stages) and self._intake.finishes:  # after scatter
            self._names, take, self._finite = hooked_pipeline.UNREAD, self._intake.split, None
            self._own = hooked_pipeline.own_rows
        self.callee = Callee(config, loaded, self._intake, take, self.counts, own=self._own)
        self._runtime = surroundings
        # The masks of PAD are made on the model's own stream.
        self._admitting = surroundings.guard if self._padding else contextlib.nullcontext
        self._ragged = Ragged(config) if config.concatenates else None
        self._gather = gather_scatter.gather if self._ragged is None else self._ragged.gather
        self._to_device = surroundings.to_device
        self._call = self.callee.call
        self._to_host: Callable[..., Sequence[Any]] = surroundings.to_host
        self.stream_calls = StreamCalls(
            config,
            self._intake,
            self.callee,
            surroundings,
            self._finite,
            self.counts,
            loaded.step,
        )
        self.purity = Purity(loaded.owner, captured=self.callee.captures)
        self.recovery = Recovery(
            config.name,
            lambda group: self._attempt(group, more=True),  # what stands around it by then
            called=loaded.signature.name,
            rows=self.callee.rows if config.max_batch_size else None,
            repeats=self.repeats,
            divides=not config.concatenates,
            free=runtime.free,
            probe=partial(runtime.probe, surroundings.device),
            counts=self.counts,
        )
        # Empty, as long as memory has never run out.
        self._limits = self.recovery.capacity.limits
        self._shared: gpu_sharing.Shared | None = None
        self._prepares = False

    def share(self, shared: gpu_sharing.Shared) -> None:
        """Use one copy of the weights with other instances.

        Raises:
            ConfigError: they cannot be shared.
        """
        shared.hold(self.loaded.owner, self.kind)
        self._shared, self.turn = shared, shared.lock
        self.purity.settle()

    def leave(self) -> None:
        """Let go of what is other processes', too; to leave twice is no error."""
        if self._shared is not None:
            self._shared.leave()

    @property
    def fills(self) -> bool:
        """Whether batches are filled up or padded."""
        rows = self.callee.rows
        return self._padding is not None or bool(rows.buckets) or rows.least > 1

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._runtime.device

    @property
    def guard(self) -> runtime.Guard:
        """What surrounds whatever works on the device's tensors."""
        return self._runtime.guard

    def memory(self) -> list[tuple[int, int, int]]:
        """Of each GPU that is used: its index, and bytes that are allocated and reserved."""
        return runtime.memory()

    def example(self) -> Item:
        """Valid inputs that lie beside the model; empty where none do."""
        return example_inputs.find(self.config, self.artifact) or {}

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """The calls within may compile; once they are done, nothing is compiled any more."""
        self._prepares = True
        with self.callee.preparing(self.artifact, self._runtime.device):
            yield
        self._prepares = False
        if self._shared is not None and self.purity.writes_buffers():
            raise gpu_sharing.refused(
                self.config, "the model writes to its buffers, which would be the others' as well"
            )
        self.purity.settle()

    def repeats(self, items: int = 2) -> bool:
        """Whether the model may be called again with so many items that it has seen.

        Several items are a batch in memory of its own, and are not changed where the model writes
        into what it is given; a single one is passed as it is.
        """
        wished = self.config.options.retry_failed_batch
        if wished is not None:
            return wished
        return (items > 1 or not self.purity.writes_inputs()) and not self.purity.writes_buffers()

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """What every call of the model for a stream has around it."""
        with self.turn:
            self.recovery.begins()
            with self._runtime.guard():
                yield

    def surround(self, around: Around) -> Callable[[], None]:
        """Let something stand around stages, until what is returned is called."""
        found: list[Stage] = [
            *((name, self, attribute) for name, attribute in _STAGES.items()),
            *self.callee.stages(),
            *self.stream_calls.stages(),
            *self._intake.stages(),
        ]
        if self.hooks is None:  # else hooks have the module itself, whose attributes they may want
            found.append(("forward", self.callee, "module"))
        return instrumentation.wrap(found, around)

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

    def _run_shared(self, shared: gpu_sharing.Shared, items: Sequence[Item]) -> Sequence[Outcome]:
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
        self, shared: gpu_sharing.Shared, items: Sequence[Item]
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
            if whole is not None:
                outcomes = self._run_group(whole)
            else:
                with self._admitting():
                    outcomes = self._run_admitted([self._intake.admit(item) for item in items])
        self.clean()
        return outcomes

    def _run_staged(self, around: Stages, items: Sequence[Item]) -> Sequence[Outcome]:
        """The outcomes, with the stages of hooks before and after the engine's own."""
        began = time.perf_counter()
        # What hooks return for one item is in use until all have been prepared, and sent.
        more = len(items) > 1
        begin, finish = partial(around.begin, more=more), partial(around.finish, more=more)
        begun = [self._staged(place, begin, item) for place, item in enumerate(items)]
        prepared = [
            one if isinstance(one, BackendError) else self._staged(place, one)
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
            else self._staged(place, finish, one, prepared[place])
            for place, one in enumerate(outcomes)
        ]
        self.counts.postprocess_seconds += time.perf_counter() - came
        return finished

    def _staged(self, place: int, stage: Callable[..., Any], *given: Any) -> Any:
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
        groups = self._intake.group(sound)
        for number, group in enumerate(groups, 1):
            made = self._run_group(group, more=number < len(groups))
            for position, outcome in zip(group.positions, made, strict=True):
                outcomes[position] = outcome
        return outcomes

    def _run_group(self, group: Group, *, more: bool = False) -> Sequence[Outcome]:
        if self._limits or self.recovery.fatal is not None:
            return self.recovery.run(group)
        try:
            return self._attempt(group, more=more)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failure = self.recovery.judge(error)
        return self.recovery.settle(group, failure)

    def _attempt(self, group: Group, *, more: bool) -> Sequence[Outcome]:
        """The outcomes of a group that is run as it is; raises whatever the model raises.

        Args:
            group: the group.
            more: whether the model may be called again before the outcomes are sent. They are
                copies then: a model may return views of memory that its next call overwrites.
        """
        with self._runtime.guard():
            names = group.inputs.names
            began = time.perf_counter()
            known = self.purity.known
            copied = self._state_inputs if known else names
            batch = self._gather(group.items, names, self._pads, copied)
            before = (
                {} if known else side_effects.copied(dict(zip(names, batch.columns, strict=True)))
            )
            if self._padding is not None:
                self._padding.count(self.counts, group.items, names, batch.columns)
            gathered = time.perf_counter()
            columns = self._to_device(batch.columns)
            sent = time.perf_counter()
            rows = rows_in(columns) if self._ragged is None else sum(batch.sizes)
            raw = self._call(group.inputs, columns, rows)
            called = time.perf_counter()
            if not known:
                self.purity.compare(before, dict(zip(names, batch.columns, strict=True)))
            owned = self._owned(raw, batch)
            made = self._to_host(owned, self._sent(names, batch))
            if more or self._watched:
                made = self._kept(owned, made, more=more)
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

    def _kept(
        self, before: Sequence[Any], made: Sequence[Any], *, more: bool
    ) -> Sequence[Value | Owned]:
        """The outputs of a call in memory that no later call and no new weights change.

        Args:
            before: the outputs as the model made them; `to_host` may have copied some.
            made: the outputs.
            more: as for `_attempt`.
        """
        kept = [
            self._own(value)
            if value is raw
            and not isinstance(value, Owned)
            and (more or not (mapped_files.is_plain(value) and mapped_files.is_alone(value)))
            else value
            for raw, value in zip(before, made, strict=True)
        ]
        gather_scatter.wait(kept)  # Triton reads what stays on a GPU without a stream
        return kept

    def _checked(
        self, finite: output_extraction.Finite, outcome: Outcome, position: int
    ) -> Outcome:
        refusal = None if isinstance(outcome, BackendError) else finite.refusal(outcome)
        if refusal is None:
            return outcome
        self.recovery.report(refusal, "", [position])
        return refusal

    def _scatter(
        self, group: Group, batch: Batch, made: Sequence[Value | Owned]
    ) -> Sequence[Outcome]:
        if self._ragged is not None:
            made = self._ragged.split(group.items, made)
        outcomes = gather_scatter.scatter(made, self._names, batch.sizes)
        if self._padding is not None:
            seen = zip(group.inputs.names, batch.columns, strict=True)
            self._padding.cut(outcomes, group.items, {name: one.shape for name, one in seen})
        return outcomes
