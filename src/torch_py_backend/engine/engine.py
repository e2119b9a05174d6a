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
from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.batching import gather_scatter, runtime, traced_item
from torch_py_backend.batching.counters import Counts
from torch_py_backend.batching.gather_scatter import Item, Outcome, Value, rows_in
from torch_py_backend.batching.grouping import Group, Grouping
from torch_py_backend.batching.output_extraction import Finite, OutputExtractor
from torch_py_backend.batching.padding import Padding
from torch_py_backend.batching.traced_item import EnterContext
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine import plain_call
from torch_py_backend.engine.batch_call import BatchCall
from torch_py_backend.engine.model_runner import Extract, ModelRunner
from torch_py_backend.engine.plain_call import PlainCall
from torch_py_backend.engine.retry import Failure, RetryPolicy, reported
from torch_py_backend.engine.side_effects import SideEffects
from torch_py_backend.engine.stream_calls import StreamCalls
from torch_py_backend.errors import BackendError, UnavailableError
from torch_py_backend.hooks import hooked_pipeline
from torch_py_backend.hooks.hooked_pipeline import HookedPipeline
from torch_py_backend.hooks.user_hooks import Hooks
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature.calls import InputBinding
from torch_py_backend.weights import gpu_sharing, sharing_report

_NO_CONTEXT = contextlib.nullcontext()


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
        self._names = tuple(spec.name for spec in config.outputs)
        self._finite = Finite(config) if config.options.check_finite else None
        self._extractor = OutputExtractor(
            config, f"{loaded.returns}()", torchscript=loaded.signature.torchscript
        )
        extract: Extract = self._extractor.extract
        clone: Callable[[Value], Value] = gather_scatter.clone
        self.grouping: Grouping | HookedPipeline
        self._run: Callable[[Sequence[Item]], Sequence[Outcome]]
        if hooks is None:
            dtype = config.options.weights_dtype
            cast = getattr(torch, dtype) if dtype else None
            grouping = Grouping(config, loaded.signature, padding, cast=cast)
            self.grouping, self._run = grouping, partial(self._run_items, grouping)
        else:
            pipeline = HookedPipeline(config, loaded.signature, hooks, device_runtime)
            self.grouping, self._run = pipeline, partial(self._run_hooked, pipeline)
            if pipeline.postprocesses:  # after scatter
                self._names, extract = hooked_pipeline.UNPROCESSED, pipeline.split
                clone, self._finite = hooked_pipeline.copy_rows, None
        self.runner = ModelRunner(config, loaded, self.grouping, extract, self.counts, clone)
        self.side_effects = SideEffects(loaded.owner)
        self.batch_call = BatchCall(
            config,
            self.runner,
            device_runtime,
            padding=padding,
            outputs=self._names,
            finite=self._finite,
        )
        self.stream_calls = StreamCalls(config, self.grouping, self.batch_call, loaded.step)
        # For each item of the current run, if Triton traces one of their requests.
        self._contexts: Sequence[EnterContext] = ()
        rows = self.runner.rows
        self.pads_batches = padding is not None or bool(rows.buckets) or rows.least > 1
        self.recovery = RetryPolicy(
            config,
            self._call_model,
            called=loaded.signature.name,
            repeats=self.repeats,
            device=self.device,
            counts=self.counts,
        )
        self._shared: gpu_sharing.SharedWeights | None = None

    def share(self, shared: gpu_sharing.SharedWeights) -> None:
        """Share one copy of the weights with other instances.

        Raises:
            ConfigError: the weights cannot be shared.
        """
        if self.kind is ArtifactType.AOTI:
            raise gpu_sharing.not_shared_error(self.config, "the AOTInductor package contains them")
        shared.share(self.loaded.owner)
        self._shared = shared
        self.side_effects.reset_baseline()

    def close(self) -> None:
        """Release weights that are shared with other processes, and files. May be called twice."""
        self.loaded.close()
        if self._shared is not None:
            self._shared.close()

    def memory(self) -> list[tuple[int, int]]:
        """Return the index and the allocated bytes of each GPU in use."""
        return runtime.memory()

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Allow compilation within the context; forbid it afterwards."""
        with self.runner.preparing():
            yield
        if self._shared is not None and self.side_effects.writes_buffers():
            raise gpu_sharing.not_shared_error(
                self.config, "the model writes to its buffers, which other instances share"
            )
        self.side_effects.reset_baseline()

    def repeats(self) -> bool:
        """Return whether the model may be called again with items that were passed to it before.

        A batch of several items is a copy: a model that writes to its inputs leaves the items
        unchanged. A single item, which is passed without a copy, is never run again.
        """
        configured = self.config.options.retry_failed_batch
        if configured is not None:
            return configured
        if self.config.sequencing is not None and not self.config.states:
            return False  # the model keeps states itself
        return not self.side_effects.writes_buffers()

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Enter the context of a call of the model for a stream."""
        with self.lock:
            self.recovery.on_call()
            with self.guard():
                yield

    def plain_call(self) -> PlainCall | None:
        """Return the call of a plain model; None: it is not plain."""
        options, grouping, runtime = self.config.options, self.grouping, self._runtime
        if not (
            grouping.passes_columns
            and runtime.host_inputs
            and options.inference_mode
            and self._finite is None
            and self._clean is None
            and not self.config.batch_outputs
            and self._shared is None
        ):
            return None
        binding = grouping.binding
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
                return self.recovery.retry_or_refuse(group, failure)

        return PlainCall(
            binding.names,
            tuple(ranks[name] for name in binding.names),
            plain_call.bind(binding, self.runner.forward)
            if direct
            else partial(self._run_stages, binding),
            self.runner.extract if direct else None,
            runtime.to_host,
            self._names,
            self._extractor.only_tensor() if direct else None,
            retry_or_refuse,
        )

    def _run_stages(self, binding: InputBinding, *batch: Tensor) -> Sequence[Value]:
        """Return a plain model's outputs for a batch whose call has stages (`PlainCall`)."""
        with self.guard():
            began = time.perf_counter()
            columns = self._runtime.to_device(batch)
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
            contexts = traced_item.contexts(items)
            if not contexts:
                return self._run_all(items)
            self._contexts = contexts
            try:
                return self._run_all(items)
            finally:
                self._contexts = ()

    def _run_all(self, items: Sequence[Item]) -> Sequence[Outcome]:
        if self._shared is not None:
            return self._run_shared(self._shared, items)
        return self._run(items)

    def _run_shared(
        self, shared: gpu_sharing.SharedWeights, items: Sequence[Item]
    ) -> Sequence[Outcome]:
        """Return the outcomes, or a refusal for each item if the shared weights are gone.

        Results may be wrong if their owner has ended meanwhile.
        """
        outcomes = () if shared.lost() else self._run(items)
        if not shared.lost():
            return outcomes
        recovery = self.recovery
        recovery.reason = "the instance that owned the weights has ended"
        recovery.fatal = reported(UnavailableError.fatal(self.config.name, recovery.reason))
        return [recovery.fatal] * len(items)

    def _run_items(self, grouping: Grouping, items: Sequence[Item]) -> Sequence[Outcome]:
        whole = grouping.single_group(items)
        if whole is not None:
            outcomes = self._run_group(whole)
        else:
            outcomes = self._run_admitted([grouping.admit(item) for item in items])
        if self._clean is not None:
            self.clean()
        return outcomes

    def _run_hooked(self, pipeline: HookedPipeline, items: Sequence[Item]) -> Sequence[Outcome]:
        """Return the outcomes; hooks run before and after the engine's own stages."""
        with self.guard():
            began = time.perf_counter()
            prepared = [
                self._call_hook(place, pipeline.prepare, item) for place, item in enumerate(items)
            ]
            self.counts.preprocess_seconds += time.perf_counter() - began
            outcomes: Sequence[Outcome] = self._run_admitted(list(prepared))
            if pipeline.postprocesses:
                ran = time.perf_counter()
                outcomes = [
                    outcome
                    if isinstance(outcome, BackendError)
                    else self._call_hook(place, pipeline.finish, outcome, prepared[place])
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

    def _call_hook(self, place: int, hook: Callable[..., object], *args: Any) -> Any:
        """Return the result of a hook for the item at a position, or the item's error."""
        try:
            with self._context((place,)):
                return hook(*args)
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
        groups = self.grouping.group(admitted)
        for number, group in enumerate(groups, 1):
            results = self._run_group(group, copy_outputs=number < len(groups))
            for position, outcome in zip(group.positions, results, strict=True):
                outcomes[position] = outcome
        return outcomes

    def _call_model(self, group: Group, *, copy_outputs: bool) -> Sequence[Outcome]:
        """Run a group; raise whatever the model raises. See `retry.Attempt`."""
        with self._context(group.positions):
            return self.batch_call.run(group, copy_outputs=copy_outputs)

    def _context(self, positions: Sequence[int]) -> contextlib.AbstractContextManager[None]:
        """Return the context of the first traced request among those at some positions."""
        if not self._contexts:
            return _NO_CONTEXT
        contexts = (self._contexts[position] for position in positions)
        return next((enter for enter in contexts if enter is not None), lambda: _NO_CONTEXT)()

    def _run_group(self, group: Group, *, copy_outputs: bool = False) -> Sequence[Outcome]:
        with self.guard():
            if self.recovery.fatal is not None:
                return [self.recovery.fatal] * len(group.items)
            self.recovery.calls_before = composition.calls
            try:
                return self._call_model(group, copy_outputs=copy_outputs)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                failure = self.recovery.classify(error)
            return self.recovery.retry_or_refuse(group, failure)
