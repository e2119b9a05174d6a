"""The engine: admit → group → gather → call → extract outputs → scatter.

Inside the engine an error is a value: each item gets its result or its error.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.batching import gather_scatter, runtime
from torch_py_backend.batching.counters import Counts
from torch_py_backend.batching.gather_scatter import Batch, Item, ItemRows, Outcome, Value, rows_in
from torch_py_backend.batching.grouping import Group, Grouping
from torch_py_backend.batching.output_extraction import Finite, OutputExtractor
from torch_py_backend.batching.padding import Padding
from torch_py_backend.batching.ragged import Ragged
from torch_py_backend.batching.stage import Around, Stage
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine import plain_call, side_effects
from torch_py_backend.engine.model_runner import Extract, ModelRunner
from torch_py_backend.engine.plain_call import Buffers, PlainCall
from torch_py_backend.engine.retry import Failure, RetryPolicy, reported
from torch_py_backend.engine.side_effects import SideEffects
from torch_py_backend.engine.stream_calls import StreamCalls
from torch_py_backend.errors import BackendError, InputError
from torch_py_backend.hooks import hooked_pipeline
from torch_py_backend.hooks.hooked_pipeline import HookedPipeline
from torch_py_backend.hooks.user_hooks import Hooks
from torch_py_backend.loading import mapped_files
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.sequences.state_columns import StateColumns
from torch_py_backend.signature.calls import InputBinding
from torch_py_backend.weights import gpu_sharing, sharing_report


class Engine:
    """One loaded model, called from one thread.

    Attributes:
        lock: the lock that each run holds, except the calls of a plain model, whose weights are
            not swapped. Changes of the model hold it, too. It is reentrant:
            a caller may hold it to read the model's state before a run.
        hooks: the model's hooks; None: it has none.
        places: where each input goes: an argument, or a path in the call tree.
        patterns: the sets of optional inputs that may be left out together; the empty set is first.
        device: the device that the model runs on.
        guard: the context for work on tensors of the device.
        pads_batches: whether batches are padded or filled up to a bucket.
    """

    def __init__(
        self,
        config: ModelConfig,
        loaded: Loaded,
        device_runtime: runtime.Runtime,
        artifact: Artifact,
        hooks: Hooks | None = None,
    ) -> None:
        self.config = config
        self.artifact = artifact
        self.loaded = loaded
        self.lock = threading.RLock()
        self.kind = loaded.kind
        self.signature = str(loaded.signature)
        self.hooks = hooks
        self.device, self.guard = device_runtime.device, device_runtime.guard
        self._runtime, self._clean = device_runtime, device_runtime.clean
        self.sharing = sharing_report.report(config, loaded)
        self.counts = Counts()
        self._batched = config.max_batch_size > 0
        self._padding = Padding(config) if config.options.pad else None
        pads = self._padding.pads if self._padding else {}
        self._pads = {name: pad.gather for name, pad in pads.items()}
        self._ragged = Ragged(config) if config.concatenates else None
        columns = StateColumns(config)
        self._state_inputs, self._names = columns.inputs, columns.outputs
        self._states = columns if config.states else None
        # New weights may be swapped in between a call and its responses: see `WeightWatcher`.
        self._watched = config.options.watch_weights
        self._finite = Finite(config) if config.options.check_finite else None
        self._extractor = OutputExtractor(config, f"{loaded.returns}()")
        extract: Extract = self._extractor.extract
        self._clone: Callable[[Value], Value] = gather_scatter.clone
        self._grouping: Grouping | HookedPipeline
        if hooks is None:
            dtype = config.options.weights_dtype
            cast = getattr(torch, dtype) if dtype else None
            self._grouping = Grouping(config, loaded.signature, self._padding, cast=cast)
        else:
            self._grouping = HookedPipeline(config, loaded.signature, hooks, device_runtime)
            if self._grouping.postprocesses:  # after scatter
                self._names, extract = hooked_pipeline.UNPROCESSED, self._grouping.split
                self._clone, self._finite = hooked_pipeline.copy_rows, None
        self.places = self._grouping.places
        self.patterns = self._grouping.patterns
        self.runner = ModelRunner(
            config, loaded, self._grouping, extract, self.counts, clone=self._clone
        )
        rows = self.runner.rows
        self.pads_batches = self._padding is not None or bool(rows.buckets) or rows.least > 1
        # PAD creates masks on the model's own stream.
        self._admitting = self.guard if self._padding else contextlib.nullcontext
        self.stream_calls = StreamCalls(
            config,
            self._grouping,
            self.runner,
            device_runtime,
            self._finite,
            self.counts,
            loaded.step,
        )
        self._stages = self._make_stages()
        self.side_effects = SideEffects(loaded.owner, captured=self.runner.captures)
        self.recovery = RetryPolicy(
            config,
            self._batch,
            called=loaded.signature.name,
            rows=rows,
            repeats=self.repeats,
            device=self.device,
            counts=self.counts,
        )
        # Empty until memory runs out for the first time.
        self._limits = self.recovery.capacity.limits
        self._shared: gpu_sharing.SharedWeights | None = None
        self._prepares = False

    def _make_stages(self) -> list[Stage[Any]]:
        """Make the stages that batches run, and return them with those of all other parts."""
        grouping, device_runtime = self._grouping, self._runtime
        self._streamed = Stage("streamed", self._calling)
        self._hook = Stage("hook", self._call_hook)
        self._group = Stage("group", grouping.group)
        self._batch = Stage("call", self._attempt)
        self._gather: Stage[Callable[..., Batch]] = Stage(
            "gather", gather_scatter.gather if self._ragged is None else self._ragged.gather
        )
        self._to_device = Stage("host to device", device_runtime.to_device)
        self._to_host: Stage[Callable[..., Sequence[Value | ItemRows]]] = Stage(
            "device to host", device_runtime.to_host
        )
        self._scattered = Stage("scatter", self._scatter)
        self._run: Stage[Callable[[Sequence[Item]], Sequence[Outcome]]]
        if isinstance(grouping, Grouping):
            self._run = Stage("run", self._run_items)
            self._single_group = Stage("group", grouping.single_group)
            self._admit = Stage("admit", grouping.admit)
            others: list[Stage[Any]] = [
                self._single_group,
                self._admit,
                self.runner.convert,
                self.runner.forward,
            ]
        else:  # without `runner.forward`: hooks get the module itself and may read its attributes
            self._run = Stage("run", partial(self._run_hooked, grouping))
            self._begin = Stage("prepare", grouping.begin)
            self._finish = Stage("finish", grouping.finish)
            others = [self._begin, self._finish, *grouping.stages]
        return [
            *(self._run, self._streamed, self._hook, self._group, self._batch),
            *(self._gather, self._to_device, self._to_host, self._scattered),
            *others,
            self.runner.extract,
            *self.stream_calls.stages,
        ]

    def share(self, shared: gpu_sharing.SharedWeights) -> None:
        """Share one copy of the weights with other instances.

        Raises:
            ConfigError: the weights cannot be shared.
        """
        shared.share(self.loaded)
        self._shared, self.lock = shared, shared.lock
        self.side_effects.reset_baseline()

    def close(self) -> None:
        """Release weights that are shared with other processes, and files. May be called twice."""
        self.loaded.close()
        if self._shared is not None:
            self._shared.close()

    def memory(self) -> list[tuple[int, int, int]]:
        """Return the index and the allocated and reserved bytes of each GPU in use."""
        return runtime.memory()

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Allow compilation within the context; forbid it afterwards."""
        self._prepares = True
        with self.runner.preparing(self.artifact, self.device):
            yield
        self._prepares = False
        if self._shared is not None and self.side_effects.writes_buffers():
            raise gpu_sharing.not_shared_error(
                self.config, "the model writes to its buffers, which other instances share"
            )
        self.side_effects.reset_baseline()

    def repeats(self, items: int = 2) -> bool:
        """Return whether the model may be called again with items that were passed to it before.

        A batch of several items is a copy: a model that writes to its inputs leaves the items
        unchanged. A single item is passed without a copy.
        """
        configured = self.config.options.retry_failed_batch
        if configured is not None:
            return configured
        effects = self.side_effects
        return (items > 1 or not effects.writes_inputs) and not effects.writes_buffers()

    def calling(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a call of the model for a stream."""
        return self._streamed.call()

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        with self.lock:
            self.recovery.on_call()
            with self.guard():
                yield

    def instrument(self, around: Around) -> Callable[[], None]:
        """Wrap the stages with `around`; the returned function removes the wrappers."""
        for stage in self._stages:
            stage.add(around)

        def remove() -> None:
            for stage in self._stages:
                stage.remove(around)

        return remove

    def plain_call(self) -> PlainCall | None:
        """Return the call of a plain model; None: it is not plain, or no call was compared yet."""
        options, grouping, runtime = self.config.options, self._grouping, self._runtime
        if not (
            grouping.passes_columns
            and runtime.host_inputs
            and options.inference_mode
            and self._finite is None
            and self._clean is None
            and not self.config.batch_outputs
            and not self._watched
            and self._shared is None
            and self.side_effects.observed
        ):
            return None
        binding = grouping.binding
        buffers = (
            plain_call.page_locked(self.config, binding.names, runtime)
            if self.device.type == "cuda"
            else Buffers((), runtime.to_device)
        )
        ranks = {spec.name: len(spec.dims) + 1 for spec in self.config.inputs}
        direct = (
            isinstance(grouping, Grouping)
            and runtime.on_cpu
            and options.autocast is None
            and options.cast_inputs is None
            and options.weights_dtype is None
            and self.runner.takes_any_rows
        )

        def retry_or_refuse(items: Sequence[Item], failure: Failure) -> Sequence[Outcome]:
            group = Group(binding, items, range(len(items)))
            with self.guard():
                return self.recovery.retry_or_refuse(group, failure, copy_outputs=False)

        return PlainCall(
            binding.names,
            tuple(ranks[name] for name in binding.names),
            plain_call.bind(binding, self.runner.forward.call)
            if direct
            else partial(self._run_stages, binding, buffers.send),
            self.runner.extract.call if direct else None,
            runtime.to_host,
            self._names,
            self._extractor.only_tensor() if direct else None,
            buffers.columns,
            retry_or_refuse,
        )

    def _run_stages(
        self,
        binding: InputBinding,
        send: Callable[[Sequence[Tensor]], Sequence[Value]],
        *batch: Tensor,
    ) -> Sequence[Value]:
        """Return a plain model's outputs for a batch whose call has stages (`PlainCall`)."""
        with self.guard():
            began = time.perf_counter()
            columns = send(batch)
            sent = time.perf_counter()
            raw = self.runner.call(binding, columns, rows_in(columns))
            called = time.perf_counter()
            outputs = self._runtime.to_host(raw, batch)
            fetched = time.perf_counter()
        counts = self.counts
        counts.host_to_device_seconds += sent - began
        counts.forward_seconds += called - sent
        counts.device_to_host_seconds += fetched - called
        return outputs

    def clean(self) -> None:
        """Free cached device memory after an execution where the config enables that."""
        if self._clean is not None and self.recovery.fatal is None:
            self._clean()

    def run(self, items: Sequence[Item]) -> Sequence[Outcome]:
        """Return one outcome for each item, in order."""
        with self.lock:
            if self._shared is not None:
                return self._run_shared(self._shared, items)
            return self._run.call(items)

    def _run_shared(
        self, shared: gpu_sharing.SharedWeights, items: Sequence[Item]
    ) -> Sequence[Outcome]:
        """Return the outcomes, or a refusal for each item if the shared weights are gone."""
        while True:
            present = shared.present
            refusal = shared.ready()
            if refusal is None:
                if not present:  # the weights are at other addresses now
                    self.side_effects.reset_baseline()
                outcomes = self._run.call(items)
                refusal = shared.lost()
                if refusal is None:
                    return outcomes
            if shared.final or not self._prepares:
                break
        if shared.final:
            self.recovery.fatal = refusal
        return [reported(refusal)] * len(items)

    def _run_items(self, items: Sequence[Item]) -> Sequence[Outcome]:
        whole = self._single_group.call(items)
        if whole is not None:
            outcomes = self._run_group(whole)
        else:
            with self._admitting():
                outcomes = self._run_admitted([self._admit.call(item) for item in items])
        if self._clean is not None:
            self.clean()
        return outcomes

    def _run_hooked(self, pipeline: HookedPipeline, items: Sequence[Item]) -> Sequence[Outcome]:
        """Return the outcomes; hooks run before and after the engine's own stages."""
        # The result of a hook for one item is in use until all items are prepared and sent.
        copies = len(items) > 1
        with self.guard():
            began = time.perf_counter()
            begin = partial(self._begin.call, copies=copies)
            begun = [self._hook.call(place, begin, item) for place, item in enumerate(items)]
            prepared = [
                prepare if isinstance(prepare, BackendError) else self._hook.call(place, prepare)
                for place, prepare in enumerate(begun)
            ]
            self.counts.preprocess_seconds += time.perf_counter() - began
            outcomes: Sequence[Outcome] = self._run_admitted(list(prepared))
            if pipeline.postprocesses:
                ran = time.perf_counter()
                finish = partial(self._finish.call, copies=copies)
                outcomes = [
                    outcome
                    if isinstance(outcome, BackendError)
                    else self._hook.call(place, finish, outcome, prepared[place])
                    for place, outcome in enumerate(outcomes)
                ]
                self.counts.postprocess_seconds += time.perf_counter() - ran
            outcomes = [
                self._send_back(outcome, item)
                for outcome, item in zip(outcomes, items, strict=True)
            ]
        if self._clean is not None:
            self.clean()
        return outcomes

    def _send_back(self, outcome: Outcome, item: Item) -> Outcome:
        """Copy outputs to the host for a request from there: hooks may prepare it on a GPU."""
        if isinstance(outcome, BackendError) or not any(
            isinstance(value, Tensor) and value.is_cuda for value in outcome.values()
        ):
            return outcome
        sent = [gather_scatter.to_column(value) for value in item.values()]
        return dict(zip(outcome, self._runtime.to_host([*outcome.values()], sent), strict=True))

    def _call_hook(self, place: int, stage: Callable[..., object], *args: Any) -> Any:  # noqa: ARG002  the position is for instrumentation
        """Return the result of a hook stage for the item at a position, or the item's error."""
        try:
            return stage(*args)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failure = self.recovery.classify(error)
        return (
            failure.error
            if isinstance(failure.error, InputError)
            else self.recovery.refusal(failure)
        )

    def _run_admitted(self, items: Sequence[Item | BackendError]) -> Sequence[Outcome]:
        """Return the outcomes of admitted items, and the errors of those that were refused."""
        outcomes: list[Outcome] = list(items)
        admitted = [
            (position, item)
            for position, item in enumerate(items)
            if not isinstance(item, BackendError)
        ]
        groups = self._group.call(admitted)
        for number, group in enumerate(groups, 1):
            results = self._run_group(group, copy_outputs=number < len(groups))
            for position, outcome in zip(group.positions, results, strict=True):
                outcomes[position] = outcome
        return outcomes

    def _run_group(self, group: Group, *, copy_outputs: bool = False) -> Sequence[Outcome]:
        with self.guard():  # what retries copy and join is on the model's own stream, too
            if self._limits or self.recovery.fatal is not None:
                return self.recovery.run(group, copy_outputs=copy_outputs)
            try:
                return self._batch.call(group, copy_outputs=copy_outputs)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                failure = self.recovery.classify(error)
            return self.recovery.retry_or_refuse(group, failure, copy_outputs=copy_outputs)

    def _attempt(self, group: Group, *, copy_outputs: bool) -> Sequence[Outcome]:
        """Run a group as one batch; raise whatever the model raises. See `retry.Attempt`."""
        names = group.inputs.names
        began = time.perf_counter()
        observed = self.side_effects.observed
        copied = self._state_inputs if observed else names
        batch = self._gather.call(group.items, names, self._pads, copied)
        before = (
            {}
            if observed
            else side_effects.copy_tensors(dict(zip(names, batch.columns, strict=True)))
        )
        if self._padding is not None:
            self._padding.count(self.counts, group.items, names, batch.columns)
        gathered = time.perf_counter()
        columns = self._to_device.call(batch.columns)
        sent = time.perf_counter()
        rows = rows_in(columns) if self._ragged is None else sum(batch.sizes)
        self.counts.rows += rows
        raw = self.runner.call(group.inputs, columns, rows)
        called = time.perf_counter()
        if not observed:
            self.side_effects.compare(before, dict(zip(names, batch.columns, strict=True)))
        owned: Sequence[Value | ItemRows] = raw
        inputs = batch.columns
        if self._states is not None:
            owned = self._states.clone_states(raw, batch)
            inputs = self._states.sent_columns(names, batch)
        outputs = self._to_host.call(owned, inputs)
        if copy_outputs or self._watched:
            outputs = self._kept(owned, outputs, copy_outputs=copy_outputs)
        fetched = time.perf_counter()
        outcomes = self._scattered.call(group, batch, outputs)
        # Inline: a method call would cost more than these additions.
        counts = self.counts
        counts.gather_seconds += gathered - began
        counts.host_to_device_seconds += sent - gathered
        counts.forward_seconds += called - sent
        counts.device_to_host_seconds += fetched - called
        size = rows if self._batched else 1
        counts.batches[size] = counts.batches.get(size, 0) + 1
        if self._finite is None or self._finite.holds(outputs):
            return outcomes
        checked: list[Outcome] = []
        for outcome in outcomes:
            refusal = None if isinstance(outcome, BackendError) else self._finite.refusal(outcome)
            checked.append(outcome if refusal is None else reported(refusal))
        return checked

    def _kept(
        self,
        before: Sequence[Value | ItemRows],
        outputs: Sequence[Value | ItemRows],
        *,
        copy_outputs: bool,
    ) -> Sequence[Value | ItemRows]:
        """Copy outputs whose memory a later call or new weights may change.

        Outputs that `to_host` has copied are not those that the model returned (`before`).
        """
        kept = [
            self._clone(value)
            if value is raw
            and not isinstance(value, ItemRows)
            and (
                copy_outputs
                or not (
                    mapped_files.has_plain_storage(value) and mapped_files.has_no_other_views(value)
                )
            )
            else value
            for raw, value in zip(before, outputs, strict=True)
        ]
        gather_scatter.wait(kept)  # Triton reads GPU outputs without synchronizing with a stream
        return kept

    def _scatter(
        self, group: Group, batch: Batch, outputs: Sequence[Value | ItemRows]
    ) -> Sequence[Outcome]:
        if self._ragged is not None:
            outputs = self._ragged.split(group.items, outputs)
        outcomes = gather_scatter.scatter(outputs, self._names, batch.sizes)
        if self._padding is not None:
            columns = zip(group.inputs.names, batch.columns, strict=True)
            shapes = {name: column.shape for name, column in columns}
            self._padding.cut(outcomes, group.items, shapes)
            if not self._runtime.host_inputs:  # outputs may be on a GPU, where Triton reads them
                for outcome in outcomes:
                    gather_scatter.wait(outcome.values())
        return outcomes
