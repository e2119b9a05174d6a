"""The call of a plain model, reduced at load to what one flat function needs.

A plain model takes batches of numbers, all inputs in each request. Its call is direct if the batch
is passed to the module as it is and the outputs are on the CPU. Otherwise it has stages: copies
between devices, rows that fill a bucket, casts, or hooks for batches.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_py_backend.batching.gather_scatter import Item, Outcome, Value
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine.retry import Failure
from torch_py_backend.errors import summarize
from torch_py_backend.signature.calls import InputBinding

log = logging.getLogger(__name__)

# Each instance of a model keeps that memory: larger batches are gathered in new memory.
_MOST_PAGE_LOCKED_BYTES = 256 << 20


class PlainCall(NamedTuple):
    """The parts of a plain model's call.

    Attributes:
        inputs: the names of the inputs, in the order in which `forward` takes their columns.
        ranks: the number of dimensions of each column, rows included.
        forward: calls the model with the columns. If the call has stages, it returns the outputs,
            checked, contiguous and on the host, and counts rows and times.
        extract: returns the outputs of a result for a number of rows, checked and contiguous;
            None: the call has stages.
        to_host: waits for outputs that the model computed on a GPU, and copies them.
        outputs: the names of the outputs, in the order in which `extract` returns them.
        tensor: the type and dims of the only output, if the result itself is that output, with
            fixed dims; None: each result has to be passed to `extract`.
        buffers: page-locked memory for the columns of the largest batch, from which a copy to a GPU
            is asynchronous; empty: columns are gathered in new memory.
        retry_or_refuse: returns the outcomes of items after a failed call: retries or refuses them.
    """

    inputs: tuple[str, ...]
    ranks: tuple[int, ...]
    forward: Callable[..., Any]
    extract: Callable[[Any, int], Sequence[Value]] | None
    to_host: Callable[[Sequence[Value], Sequence[Value]], Sequence[Value]]
    outputs: tuple[str, ...]
    tensor: tuple[torch.dtype, tuple[int, ...]] | None
    buffers: tuple[Tensor, ...]
    retry_or_refuse: Callable[[Sequence[Item], Failure], Sequence[Outcome]]


def page_locked(config: ModelConfig, names: Sequence[str]) -> tuple[Tensor, ...]:
    """Return page-locked memory for a batch of `max_batch_size` rows, for each input.

    Empty if dims are not fixed, for BF16, which numpy does not have, for more than 256 MiB in all,
    and if there is not that much memory.

    One memory for all batches is enough: the outputs of a batch are waited for before the next one
    is gathered, and the copy to the GPU precedes them on the stream.
    """
    specs = {spec.name: spec for spec in config.inputs}
    if any(-1 in specs[name].dims for name in names):
        return ()
    buffers = [
        (
            (config.max_batch_size, *specs[name].dims),
            getattr(torch, specs[name].dtype.torch or ""),
        )
        for name in names
    ]
    if any(dtype is torch.bfloat16 for _, dtype in buffers) or (
        sum(_pinned_bytes(shape, dtype) for shape, dtype in buffers) > _MOST_PAGE_LOCKED_BYTES
    ):
        return ()
    try:
        pins = torch.cuda.is_available()
        return tuple(torch.empty(shape, dtype=dtype, pin_memory=pins) for shape, dtype in buffers)
    except RuntimeError as error:  # torch's only class for memory that runs out here
        log.warning(
            "model '%s': batches are gathered without page-locked memory: %s",
            config.name,
            summarize(error),
        )
        return ()


def _pinned_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return what torch allocates: the next power of two."""
    return 1 << (math.prod(shape) * dtype.itemsize - 1).bit_length()


def bind(binding: InputBinding, module: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a module with columns, in as few Python frames as possible."""
    forward = _without_hooks(module)
    marks = [object() for _ in binding.names]
    passed: Any = binding.call(lambda *args, **kwargs: (args, kwargs), marks)
    if passed == (tuple(marks), {}):
        return forward
    return lambda *columns: binding.call(forward, columns)


def _without_hooks(module: Callable[..., Any]) -> Callable[..., Any]:
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
    forward: Callable[..., Any] = module.forward
    return forward
