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

from torch_py_backend import composition
from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.batching import gather_scatter, runtime
from torch_py_backend.batching.counters import Counts
from torch_py_backend.batching.gather_scatter import Item, Outcome, Value, rows_in
from torch_py_backend.batching.grouping import Group, Grouping
from torch_py_backend.batching.output_extraction import Finite, OutputExtractor
from torch_py_backend.batching.padding import Padding
from torch_py_backend.batching.stage import Around, Stage
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine import plain_call
from torch_py_backend.engine.batch_call import BatchCall
from torch_py_backend.engine.model_runner import Extract, ModelRunner
from torch_py_backend.engine.plain_call import Buffers, PlainCall
from torch_py_backend.engine.retry import Failure, RetryPolicy, reported
from torch_py_backend.engine.side_effects import SideEffects
from torch_py_backend.engine.stream_calls import StreamCalls
from torch_py_backend.errors import BackendError
from torch_py_backend.hooks import hooked_pipeline
from torch_py_backend.hooks.hooked_pipeline import HookedPipeline
from torch_py_backend.hooks.user_hooks import Hooks
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature.calls import InputBinding
from torch_py_backend.weights import gpu_sharing, sharing_report


class Engine:
    """One loaded model, called from one thread.

    Attributes:
        lock: the lock that each run holds, except the calls of a plain model; it is reentrant.
        hooks: the model's hooks; None: it has none.
        grouping: groups the items of a run.
        device: the device that the model runs on.
        guard: the context for work on tensors of the device.
        padding: pads inputs and cuts outputs; None: PAD is not set.
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
        self.hooks = hooks
        self.device, self.guard = device_runtime.device, device_runtime.guard
        self._runtime, self._clean = device_runtime, device_runtime.clean
        self.sharing = sharing_report.report(config, loaded)
        self.counts = Counts()
        padding = self.padding = Padding(config) if config.options.pad else None
        # PAD creates masks on the model's own stream.
        self._admitting = self.guard if padding else contextlib.nullcontext
        self._names = tuple(spec.name for spec in config.outputs)
        self._finite = Finite(config) if config.options.check_finite else None
        self._extractor = OutputExtractor(
            config, f"{loaded.returns}()", torchscript=loaded.signature.torchscript
        )
        extract: Extract = self._extractor.extract
        clone: Callable[[Value], Value] = gather_scatter.clone
        self.grouping: Grouping | HookedPipeline
        if hooks is None:
            dtype = config.options.weights_dtype
            cast = getattr(torch, dtype) if dtype else None
            self.grouping = Grouping(config, loaded.signature, padding, cast=cast)
        else:
            self.grouping = HookedPipeline(config, loaded.signature, hooks, device_runtime)
            if self.grouping.postprocesses:  # after scatter
                self._names, extract = hooked_pipeline.UNPROCESSED, self.grouping.split
                clone, self._finite = hooked_pipeline.copy_rows, None
        self.runner = ModelRunner(config, loaded, self.grouping, extract, self.counts, clone)
        self.side_effects = SideEffects(loaded.owner, captured=self.runner.captures)
        self.batch_call = BatchCall(
            config,
            self.runner,
            device_runtime,
            self.side_effects,
            padding=padding,
            outputs=self._names,
            finite=self._finite,
        )
        self._batch = Stage("call", self.batch_call.run)
        self.stream_calls = StreamCalls(config, self.grouping, self.batch_call, loaded.step)
        self._stages = [
            *self._make_stages(),
            *self.batch_call.stages,
            self.runner.extract,
            *self.stream_calls.stages,
        ]
        rows = self.runner.rows
        self.pads_batches = padding is not None or bool(rows.buckets) or rows.least > 1
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
        """Make the engine's own stages, and return them with those of the hooks and the runner."""
        grouping = self.grouping
        self._streamed = Stage("streamed", self._calling)
        self._hook = Stage("hook", self._call_hook)
        self._group = Stage("group", grouping.group)
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
        return [self._run, self._streamed, self._hook, self._group, self._batch, *others]

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
        if self.config.sequencing is not None and not self.config.states:
            return False  # the model keeps states itself
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
        options, grouping, runtime = self.config.options, self.grouping, self._runtime
        if not (
            grouping.passes_columns
            and runtime.host_inputs
            and options.inference_mode
            and self._finite is None
            and self._clean is None
            and not self.config.batch_outputs
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
                pipeline.send_back(outcome, item)
                for outcome, item in zip(outcomes, items, strict=True)
            ]
        if self._clean is not None:
            self.clean()
        return outcomes

    def _call_hook(self, place: int, stage: Callable[..., object], *args: Any) -> Any:  # noqa: ARG002  the position is for instrumentation
        """Return the result of a hook stage for the item at a position, or the item's error."""
        try:
            return stage(*args)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failure = self.recovery.classify(error)
        return self.recovery.refusal(failure)

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
            self.recovery.calls_before = composition.calls
            try:
                return self._batch.call(group, copy_outputs=copy_outputs)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                failure = self.recovery.classify(error)
            return self.recovery.retry_or_refuse(group, failure, copy_outputs=copy_outputs)
