"""What is decided at load: a model and its config become the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_py_backend.batching import gather_scatter
from torch_py_backend.batching.counters import Counts
from torch_py_backend.batching.gather_scatter import Gather, Item, Rows, Value
from torch_py_backend.batching.grouping import Grouping
from torch_py_backend.batching.output_extraction import Finite, OutputExtractor
from torch_py_backend.batching.padding import Padding
from torch_py_backend.batching.ragged import Ragged
from torch_py_backend.batching.runtime import Runtime
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import BackendError
from torch_py_backend.hooks import hooked_pipeline
from torch_py_backend.hooks.hooked_pipeline import HookedPipeline
from torch_py_backend.hooks.user_hooks import Hooks
from torch_py_backend.loading.loaded import Forward, Loaded
from torch_py_backend.pipeline import stages
from torch_py_backend.pipeline.failures import Failures
from torch_py_backend.pipeline.run import Entry, Group, Result, Stages
from torch_py_backend.pipeline.stages import Filled, Hooked, Scatter
from torch_py_backend.signature.calls import InputBinding


class Parts(NamedTuple):
    """The parts of one model's pipeline, which the warm-up and the served pipeline share.

    Attributes:
        grouping: checks, binds and groups items; with hooks, their pipeline.
        outputs: the names of the columns that `extract` returns.
        extract: returns the outputs of a result for a number of rows.
        only_tensor: returns the type and dims of the only output, if a result is that output; None:
            `extract` does not extract the model's outputs.
        copy: copies an output.
        rows: how many rows a call takes.
        padding: pads inputs and cuts outputs; None: PAD is not set.
        finite: checks outputs; None: they are not checked, or after hooks.
    """

    config: ModelConfig
    runtime: Runtime
    grouping: Grouping | HookedPipeline
    outputs: tuple[str, ...]
    extract: Callable[[Any, int], Sequence[Value]]
    only_tensor: Callable[[], tuple[torch.dtype, tuple[int, ...]] | None] | None
    copy: Callable[[Value], Value]
    rows: Rows
    padding: Padding | None
    finite: Finite | None
    counts: Counts
    failures: Failures


def parts(
    config: ModelConfig,
    loaded: Loaded,
    runtime: Runtime,
    hooks: Hooks | None,
    *,
    rows: Rows,
    counts: Counts,
) -> Parts:
    """Return the parts of a model's pipeline.

    Raises:
        BindingError: the config's inputs do not match the signature of the model or the hooks.
        ConfigError: PAD does not match the inputs and outputs.
    """
    padding = Padding(config) if config.options.pad else None
    finite = Finite(config) if config.options.check_finite else None
    extractor = OutputExtractor(
        config, f"{loaded.returns}()", torchscript=loaded.signature.torchscript
    )
    outputs = tuple(spec.name for spec in config.outputs)
    copy: Callable[[Value], Value] = gather_scatter.clone
    extract: Callable[[Any, int], Sequence[Value]] = extractor.extract
    grouping: Grouping | HookedPipeline
    if hooks is None:
        dtype = config.options.weights_dtype
        cast = getattr(torch, dtype) if dtype else None
        grouping = Grouping(config, loaded.signature, padding, cast=cast)
    else:
        grouping = HookedPipeline(config, loaded.signature, hooks, runtime)
        if grouping.postprocesses:  # after scatter
            outputs, extract, finite = hooked_pipeline.UNPROCESSED, grouping.split, None
            copy = hooked_pipeline.copy_rows
    repeats = config.options.retry_failed_batch
    if repeats is None and config.sequencing is not None and not config.states:
        repeats = False  # the model keeps states itself
    failures = Failures(
        config.name,
        loaded.signature.name,
        device=runtime.device,
        owner=loaded.owner,
        repeats=repeats,
    )
    batched = config.max_batch_size > 0 and extract == extractor.extract
    return Parts(
        config=config,
        runtime=runtime,
        grouping=grouping,
        outputs=outputs,
        extract=extract,
        only_tensor=extractor.only_tensor if batched else None,
        copy=copy,
        rows=rows,
        padding=padding,
        finite=finite,
        counts=counts,
        failures=failures,
    )


def chosen(made: Parts, forward: Forward, writer: Scatter | None = None) -> Stages:
    """Return the stages of a model's pipeline.

    Args:
        made: the model's parts.
        forward: the callable for inputs, compiled as configured.
        writer: takes the place of `scatter` for a model without features; None: results are outputs
            by name.
    """
    config, runtime = made.config, made.runtime
    before: tuple[Callable[[Sequence[Entry]], Sequence[Entry]], ...] = ()
    after: tuple[Callable[[Sequence[Result], Sequence[Entry]], Sequence[Result]], ...] = ()
    if isinstance(made.grouping, HookedPipeline):
        hooks, failures = made.grouping, made.failures
        if hooks.prepares:
            before = (Hooked(hooks.prepare, made.counts.count_preprocess, failures).before,)
        if hooks.postprocesses:
            after = (Hooked(hooks.finish, made.counts.count_postprocess, failures).after,)
    limited = made.rows.most is not None and made.rows.most < config.max_batch_size
    takes_any_rows = not limited and not made.rows.buckets and made.rows.least <= 1
    return Stages(
        before=before,
        group=_group(made, forward, served=writer is not None),
        send=None if runtime.on_cpu else runtime.to_device,
        extract=_extract(made),
        fill=None if takes_any_rows else Filled(made.rows, made.extract, made.copy, made.counts),
        copy=made.copy,
        fetch=_fetch(made),
        scatter=_scatter(made, writer if not after else None),
        after=after,
    )


# --- inputs ------------------------------------------------------------------------------------


def _group(
    made: Parts, forward: Forward, *, served: bool
) -> Callable[[Sequence[Entry]], tuple[Sequence[Entry], Sequence[Group]]]:
    grouping = made.grouping
    complete = grouping.binding
    gather, call = _bind(made, forward, complete)
    if served and grouping.takes_arrays and made.runtime.host_inputs:
        gather = gather_scatter.numbers(complete.names)

    def group(entries: Sequence[Entry]) -> tuple[Sequence[Entry], Sequence[Group]]:
        if grouping.alike(entries):
            return entries, (Group(gather, call, entries, range(len(entries))),)  # type: ignore[arg-type]
        admitted = [
            entry if isinstance(entry, BackendError) else grouping.admit(entry) for entry in entries
        ]
        items = [
            (place, entry)
            for place, entry in enumerate(admitted)
            if not isinstance(entry, BackendError)
        ]
        groups = []
        for inputs, members, places in grouping.group(items):
            bound = (gather, call) if inputs is complete else _bind(made, forward, inputs)
            groups.append(Group(*bound, members, places))
        return admitted, groups

    return group


def _bind(
    made: Parts, forward: Forward, inputs: InputBinding
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions that gather some inputs, and call the model with their columns."""
    config, names = made.config, inputs.names
    pads: Mapping[str, Gather] = {}
    if made.padding is not None:
        pads = {name: pad.gather for name, pad in made.padding.pads.items()}
    copied = frozenset(state.input for state in config.states)
    gather: Callable[..., Any] = partial(
        gather_scatter.gather, names=names, pads=pads, copied=copied
    )
    if config.concatenates:
        gather = partial(Ragged(config).gather, names=names, copied=copied)
    if not config.max_batch_size:
        gather = partial(stages.without_rows, gather)
    if isinstance(made.grouping, HookedPipeline):
        return gather, lambda *columns: inputs.call(forward, columns)
    call = _flat_call(inputs, forward)
    if not made.grouping.converts:
        return gather, call
    convert = partial(made.grouping.convert, inputs)
    return gather, lambda *columns: call(*convert(columns))


def _flat_call(binding: InputBinding, module: Forward) -> Forward:
    """Return a function that calls a module with columns, in as few Python frames as possible."""
    forward = _without_hooks(module)
    marks = [object() for _ in binding.names]
    passed: Any = binding.call(lambda *args, **kwargs: (args, kwargs), marks)
    if passed == (tuple(marks), {}):
        return forward
    return lambda *columns: binding.call(forward, columns)


def _without_hooks(module: Forward) -> Forward:
    """Return `forward` where `nn.Module.__call__` does nothing but call it."""
    if (
        not isinstance(module, nn.Module)
        or type(module).__call__ is not nn.Module.__call__
        or module._compiled_call_impl is not None  # noqa: SLF001
        or module._forward_hooks  # noqa: SLF001
        or module._forward_pre_hooks  # noqa: SLF001
        or module._backward_hooks  # noqa: SLF001
        or module._backward_pre_hooks  # noqa: SLF001
        or nn.modules.module._has_any_global_hook()  # noqa: SLF001
    ):
        return module
    forward: Forward = module.forward
    return forward


# --- outputs -----------------------------------------------------------------------------------


def _fetch(made: Parts) -> Callable[[Sequence[Value]], Sequence[Value]] | None:
    """Return the function that copies outputs to the host, where the config says so, and waits.

    States stay on their device.
    """
    device = made.runtime.device
    # A model that was placed on the CPU may itself use a GPU.
    if device.type == "cpu" and not torch.cuda.is_available():
        return None
    states = {state.output for state in made.config.states}
    kept = [name in states or not made.runtime.host_inputs for name in made.outputs]

    def fetch(outputs: Sequence[Value]) -> Sequence[Value]:
        fetched = [
            value.cpu() if isinstance(value, Tensor) and not keep else value
            for value, keep in zip(outputs, kept, strict=True)
        ]
        if device.type == "cuda":  # an error of a kernel belongs to this batch
            torch.cuda.synchronize(device)
        return fetched

    return fetch


def _extract(made: Parts) -> Callable[[Any, int], Sequence[Value]]:
    """Return `extract`; without most of its calls if a result is the only output, of fixed dims."""
    if made.only_tensor is None or (tensor := made.only_tensor()) is None:
        return made.extract
    extract, strided = made.extract, torch.strided
    dtype, dims = tensor

    def extract_tensor(result: Any, rows: int) -> Sequence[Value]:
        if (
            type(result) is Tensor
            and result.dtype is dtype
            and result.layout is strided
            and not result.is_nested  # has no shape
            and result.shape == (rows, *dims)
            and result.is_cpu
            and result.is_contiguous()
            and not result.requires_grad
            and not result.is_neg()
        ):
            return (result,)
        return extract(result, rows)

    return extract_tensor


def _scatter(made: Parts, writer: Scatter | None) -> Scatter:
    names = made.outputs

    def by_name(values: Sequence[Value], sizes: Sequence[int], _: Sequence[Item]) -> Any:
        return gather_scatter.scatter(values, names, sizes)

    scatter: Scatter = by_name
    states = {state.output for state in made.config.states}
    places = [place for place, name in enumerate(names) if name in states]
    if places:
        scatter = partial(stages.scatter_states, scatter, places)
    if made.config.batch_outputs:
        scatter = partial(stages.scatter_ragged, scatter, Ragged(made.config))
    if made.padding is not None:
        scatter = partial(stages.scatter_padded, scatter, made.padding)
    if made.finite is not None:
        scatter = partial(stages.scatter_finite, scatter, made.finite)
    return writer if scatter is by_name and writer is not None else scatter
