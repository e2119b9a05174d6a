"""What is decided at load: a model and its config become the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.loading.loaded import Forward, Loaded
from torch_py_backend.pipeline import hooks as hook_stages
from torch_py_backend.pipeline import stages
from torch_py_backend.pipeline.hooks import HookedPipeline
from torch_py_backend.pipeline.outputs import Finite, OutputExtractor
from torch_py_backend.pipeline.postprocessing import ROWS, Postprocessing
from torch_py_backend.pipeline.ragged import Ragged
from torch_py_backend.pipeline.run import (
    After,
    Before,
    Extract,
    GroupStage,
    Scatter,
    Stages,
)
from torch_py_backend.pipeline.sequences import Sequences, Slots
from torch_py_backend.signature.binding import InputBinding
from torch_py_backend.values import Columns, Value, clone

if TYPE_CHECKING:
    from torch_py_backend.engine.engine import Engine


class Outputs(NamedTuple):
    """How the result of a call becomes the columns of a batch.

    Attributes:
        names: the names of the columns.
        extract: returns them for a number of rows.
        copy: copies a column.
        finite: checks results; None: they are not checked.
    """

    names: tuple[str, ...]
    extract: Extract
    copy: Callable[[Value], Value] = clone
    finite: Finite | None = None


def outputs_of(config: ModelConfig, loaded: Loaded, hooked: HookedPipeline | None) -> Outputs:
    """Return how the results of a model become outputs."""
    finite = Finite(config) if config.options.check_finite else None
    if hooked is not None and hooked.hooks.postprocess is not None:  # after scatter
        return Outputs((ROWS,), hooked.split, hook_stages.copy_rows, finite)
    extractor = OutputExtractor(
        config, f"{loaded.returns}()", torchscript=loaded.signature.torchscript
    )
    return Outputs(
        tuple(spec.name for spec in config.outputs),
        extractor.extract,
        finite=finite,
    )


def chosen(
    made: Engine,
    forward: Forward,
    writer: Scatter | None = None,
    steps: Sequences | Slots | None = None,
) -> Stages:
    """Return the stages of a model's pipeline.

    Args:
        made: the model.
        forward: the callable for inputs, compiled as configured.
        writer: takes the place of `scatter` for a model without features; None: results are outputs
            by name.
        steps: the states of sequences; None: items have them.
    """
    config = made.config
    before: tuple[Before, ...] = ()
    after: tuple[After, ...] = ()
    hooked, counts = made.hooked, made.counts
    finite = None
    if made.outputs.finite is not None:
        finite, writer = made.outputs.finite.finish, None
    if steps is not None:
        before, after = (steps.attach,), (steps.keep,)
    guarded = partial(stages.guarded, made.failures)
    if hooked is not None and hooked.by_row:
        before = (stages.timed(counts, "preprocess_seconds", partial(hooked.prepare, guarded)),)
    if hooked is not None and (hook := hooked.hooks.postprocess) is not None:
        finish = Postprocessing(config, hook, guarded, writer).finish
        after = (stages.timed(counts, "postprocess_seconds", finish),)
    if finite is not None:  # after hooks, and before states are kept
        after = (*after, finite) if steps is None else (finite, *after)
    outputs = made.outputs
    fill = stages.filled(made.rows, outputs.extract, outputs.copy, counts)
    limited = made.rows.most is not None and made.rows.most < config.max_batch_size
    takes_any_rows = not limited and not made.rows.buckets and made.rows.least <= 1
    return Stages(
        before=before,
        group=_group(made, forward),
        send=None if made.on_cpu else made.to_device,
        extract=outputs.extract,
        fill=None if takes_any_rows else fill,
        copy=outputs.copy,
        fetch=_fetch(made),
        scatter=_scatter(made, writer if not after else None),
        after=after,
    )


# --- inputs ------------------------------------------------------------------------------------


def _group(made: Engine, forward: Forward) -> GroupStage:
    if made.hooked is not None:
        return made.hooked.stage(forward)
    return made.inputs.stage(lambda binding: _flat_call(binding, forward))


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


def _fetch(made: Engine) -> Callable[[Columns], Columns] | None:
    """Return the function that copies outputs to the host, where the config says so, and waits.

    States stay on their device.
    """
    device = made.device
    # A model that was placed on the CPU may itself use a GPU.
    if device.type == "cpu" and not torch.cuda.is_available():
        return None
    states = {state.output for state in made.config.states}
    kept = [name in states or not made.host_inputs for name in made.outputs.names]

    def fetch(columns: Columns) -> Columns:
        fetched = [
            value.cpu() if isinstance(value, Tensor) and not keep else value
            for value, keep in zip(columns, kept, strict=True)
        ]
        if device.type == "cuda":  # an error of a kernel belongs to this batch
            torch.cuda.synchronize(device)
        return fetched

    return fetch


def _scatter(made: Engine, writer: Scatter | None) -> Scatter:
    config, names = made.config, made.outputs.names
    ragged = Ragged(config) if config.batch_outputs else None
    is_plain = ragged is None and made.padding is None
    if is_plain and writer is not None:
        return writer
    return stages.ScatterByName(names, ragged, made.padding)
