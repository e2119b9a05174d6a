"""A loaded model: its pipeline, its devices, and what is decided once it is warmed up."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_py_backend import values
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine import compilation, sharing
from torch_py_backend.errors import BackendError
from torch_py_backend.loading import example_inputs
from torch_py_backend.loading.hooks import Hooks
from torch_py_backend.loading.loaded import Forward, Loaded
from torch_py_backend.pipeline import batches, ragged, run, sequences
from torch_py_backend.pipeline.failures import Failures
from torch_py_backend.pipeline.hooks import ROWS, HookedPipeline, copy_rows
from torch_py_backend.pipeline.inputs import Inputs
from torch_py_backend.pipeline.outputs import extractor, finite_only, scatter_by_name
from torch_py_backend.pipeline.padding import Padding
from torch_py_backend.pipeline.run import (
    After,
    Before,
    Counts,
    Entries,
    Results,
    Run,
    Scatter,
    Stages,
)
from torch_py_backend.pipeline.sequences import Sequences
from torch_py_backend.processes.instance_status import Selector
from torch_py_backend.signature.binding import InputBinding
from torch_py_backend.values import Columns, Item, Value

log = logging.getLogger(__name__)


class Engine:
    """One loaded model, called from one thread; it places itself without a `device`.

    `shared` shares its weights on a GPU; None: they are not shared there.

    Attributes:
        run: returns one outcome for each item, in order.
        stages: the stages of a call for one request, for streams.
        inputs: checks, binds and groups items; with hooks for rows, those of a row.
        hooked: the stages of hooks; None: the model has none.
        extract: returns the outputs of a result for a number of rows.
        finite: checks outputs; None: they are not checked.
        rows: how many rows a call takes.
        device: that of the inputs: given, or that of the model's first weight.
        host_inputs: whether Triton copies all inputs to host memory.
        padding: pads inputs and cuts outputs; None: PAD is not set.
        mapped: the weights that the instances share because they are in mapped files.
    """

    def __init__(
        self,
        config: ModelConfig,
        loaded: Loaded,
        device: torch.device | None,
        hooks: Hooks | None = None,
        shared: sharing.SharedWeights | None = None,
    ) -> None:
        self._shared = shared
        self.config = config
        self.loaded = loaded
        self.hooks = hooks
        if device is None:
            device = next((weight.device for weight in loaded.weights), torch.device("cpu"))
        self.device = device
        self.host_inputs = config.options.force_cpu_only_input_tensors
        self._cleans = config.options.enable_cache_cleaning and device.type == "cuda"
        self.mapped = sharing.mapped(config, loaded)
        maps = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
        # Not memory that the model writes, such as numpy's memmap.
        paths = {line.split(maxsplit=5)[-1] for line in maps if " rw-s " not in line}
        known = {*config.version_folder.rglob("*"), *loaded.artifact.weight_files()}
        mapped = {Path(path) for path in map(os.path.realpath, known) if path in paths}
        self._mapped_files = {path: path.stat() for path in mapped if path.suffix != ".so"}
        self._looks_at = 0.0
        self.counts = Counts()
        self.compiles = config.options.compilation is not None
        self._compiled = compilation.Compiled(config, loaded.module) if self.compiles else None
        fixed = config.options.static_shapes or compilation.captures(config)
        self.rows = batches.row_counts(config, loaded.rows, fixed=fixed)
        self.padding = Padding(config) if config.options.pad else None
        self.hooked: HookedPipeline | None = None
        if hooks is not None:
            self.hooked = HookedPipeline(config, loaded.signature, hooks, self.device)
            self.inputs = self.hooked.inputs
        else:
            cast = config.options.weights_dtype
            self.inputs = Inputs(config, loaded.signature, self.padding, cast)
        self.output_names = tuple(spec.name for spec in config.outputs)
        returns, torchscript = f"{loaded.returns}()", loaded.signature.torchscript
        self.extract = extractor(config, returns, torchscript=torchscript)
        self.finite = finite_only(config) if config.options.check_finite else None
        repeats = config.options.retry_failed_batch
        if repeats is None and config.sequencing is not None and not config.states:
            repeats = False  # the model keeps states itself
        self.failures = Failures(
            loaded.signature.name, device=device, owner=loaded.owner, repeats=repeats
        )
        self.use(self._compiled or loaded.module)

    def use(self, forward: Forward) -> None:
        """Call another function in the place of the module."""
        self._forward = _without_hooks(forward)
        self.run = self.pipeline()
        self.stages = self._stages()

    def pipeline(
        self,
        writer: Scatter | None = None,
        steps: Sequences | None = None,
    ) -> Run:
        """Return the function that runs a batch of items, within `runtime.mode`; see `_stages`."""
        # Each response is for the host or the GPU, or a state that clients get is on the GPU.
        returns = not self.host_inputs or (steps is not None and not self.on_cpu)
        chosen = self._stages(None if returns else writer, steps)
        run_batch = run.build(chosen, self.failures, self.counts)
        return partial(_run_and_return, run_batch) if returns else run_batch

    @functools.cached_property
    def example(self) -> Item:
        """The example values beside the model that fit its config."""
        example = dict(example_inputs.find(self.config, self.loaded.artifact) or {})
        for spec in self.config.inputs:
            value = example.get(spec.name)
            if value is not None and not example_inputs.fits(self.config, spec, value):
                given = f"{value.dtype} {list(value.shape)}"
                log.warning(
                    "the example of input '%s' is %s, not %s; it is unused.", spec.name, given, spec
                )
                del example[spec.name]
        return example

    @property
    def on_cpu(self) -> bool:
        """Whether the instance and all inputs are on the CPU; the model itself may use a GPU."""
        return self.host_inputs and self.device.type == "cpu"

    def to_device(self, columns: Columns) -> Columns:
        """Copy tensors to this instance's device where they are elsewhere."""
        # A copy to the host is read without synchronization, so it must not be asynchronous.
        place = partial(Tensor.to, device=self.device, non_blocking=self.device.type != "cpu")
        return [place(column) if isinstance(column, Tensor) else column for column in columns]

    @functools.cached_property
    def selector(self) -> Selector:
        return Selector()

    @functools.cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of all streams, also in the warm-up: objects of asyncio belong to one."""
        return asyncio.SelectorEventLoop(self.selector)

    def close(self) -> None:
        """Release weights that are shared with other processes, and files. May be called twice."""
        self.loaded.close()
        if "loop" in vars(self) and not self.loop.is_running():
            self.loop.close()
        if self._shared is not None:
            self._shared.close()

    def check_files(self) -> None:
        """Refuse all requests from now on if a file was written in place whose pages are in use.

        A file that is replaced by renaming keeps them. To be called often: it looks once a second.
        """
        if time.monotonic() < self._looks_at:
            return
        self._looks_at = time.monotonic() + 1.0
        for path, before in self._mapped_files.items():
            with contextlib.suppress(OSError):  # it was removed
                now = path.stat()
                if os.path.samestat(now, before) and now.st_mtime_ns != before.st_mtime_ns:
                    reason = f"{path.name} was written in place while its pages were in use"
                    self.failures.poison(reason)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Allow compilation within the context; forbid it, and begin to count, afterwards."""
        forward, counts = self.loaded.module, Counts()
        if self._compiled is None:
            yield
        else:
            with compilation.cached(self.config):
                yield
            forward = self._compiled.seal(counts)
        self.failures.reset()
        self.counts = counts  # without those of the warm-up
        self.use(forward)

    def clean(self, results: Results = (), _: Entries = ()) -> Results:
        """Free cached device memory where the config enables that; return the results."""
        if self._cleans and self.failures.fatal is None:
            torch.cuda.empty_cache()
        return results

    def _check(self, results: Results, _: Entries) -> Results:
        return list(map(self.finite, results)) if self.finite is not None else results

    def refusal(self) -> BackendError | None:
        """Return why no result counts: a lost device, or the end of the owner of the weights."""
        if self._shared is not None and self._shared.lost():
            self.failures.poison("the instance that owned the weights has ended")
        return self.failures.fatal

    def _unless_lost(self, results: Results, _: Entries) -> Results:
        lost = self.refusal()
        return results if lost is None else [lost] * len(results)

    def _stages(
        self,
        writer: Scatter | None = None,
        steps: Sequences | None = None,
    ) -> Stages:
        """Return the stages of the pipeline; `writer` is the `scatter` of a plain model."""
        config, hooked, counts, rows = self.config, self.hooked, self.counts, self.rows
        before: tuple[Before, ...] = ()
        after: tuple[After, ...] = ()
        names, extract = self.output_names, self.extract
        copy: Callable[[Value], Value] = values.clone
        guarded = self.failures.guarded
        if steps is not None:
            before, after = (steps.attach,), (partial(steps.keep, guarded),)
        if hooked is not None and hooked.by_row:
            before = (partial(hooked.prepare, guarded),)
        if hooked is not None and hooked.hooks.postprocess is not None:
            names, extract, copy = (ROWS,), hooked.split, copy_rows
            after = (partial(hooked.finish, guarded),)
        if self.finite is not None:  # after hooks, and before states are kept
            after = (*after, self._check) if steps is None else (self._check, *after)
        takes_any_rows = rows.least <= 1 and not rows.buckets and rows.accept(config.max_batch_size)
        split = ragged.splitter(config) if config.batch_outputs else None
        scatter: Scatter = scatter_by_name(names, split, self.padding)
        if writer is not None and not after and split is None and self.padding is None:
            scatter = writer
        if self._shared is not None:
            after = (*after, self._unless_lost)
        if self._cleans:
            after = (*after, self.clean)
        if hooked is not None:
            group = hooked.stage(self._forward)
        else:
            group = self.inputs.stage(partial(_flat_call, self._forward))
        # A model that was placed on the CPU may itself use a GPU.
        on_host = self.device.type == "cpu" and not torch.cuda.is_available()
        states = {state.output for state in config.states}
        kept = [name in states or not self.host_inputs for name in names]
        return Stages(
            before=before,
            group=sequences.whole(group) if config.keeps_slots else group,
            send=None if self.on_cpu else self.to_device,
            extract=extract,
            fill=None if takes_any_rows else batches.filled(rows, extract, copy, counts),
            copy=copy,
            fetch=None if on_host else partial(self._fetch, kept),
            scatter=scatter,
            after=after,
        )

    def _fetch(self, kept: Sequence[bool], columns: Columns) -> Columns:
        """Copy outputs to the host, but those that are kept on their device, and wait for it."""
        fetched = [
            value if keep else values.on_host(value)
            for value, keep in zip(columns, kept, strict=True)
        ]
        if self.device.type == "cuda":  # an error of a kernel belongs to this batch
            torch.cuda.synchronize(self.device)
        return fetched


def _run_and_return(run_batch: Run, entries: Entries) -> Results:
    """Return outputs where the inputs were: on the GPU if all of them were there."""
    results = run_batch(entries)
    for result, entry in zip(results, entries, strict=True):
        if isinstance(result, dict) and isinstance(entry, dict) and not values.on_gpu(entry):
            result.update({name: values.on_host(value) for name, value in result.items()})
    return results


def _flat_call(forward: Forward, binding: InputBinding) -> Forward:
    """Return a function that calls a module with columns, in as few Python frames as possible."""
    marks = [object() for _ in binding.names]
    passed: Any = binding.call(lambda *args, **kwargs: (args, kwargs), marks)
    if passed == (tuple(marks), {}):
        return forward
    return lambda *columns: binding.call(forward, columns)


def _without_hooks(module: Forward) -> Forward:
    """Return `forward` where `nn.Module.__call__` does nothing but call it."""
    hooks = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    if (
        not isinstance(module, nn.Module)
        or type(module).__call__ is not nn.Module.__call__
        or module._compiled_call_impl is not None  # noqa: SLF001
        or any(getattr(module, f"_{name}") for name in hooks)
        or nn.modules.module._has_any_global_hook()  # noqa: SLF001
    ):
        return module
    forward: Forward = module.forward
    return forward
