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
from torch_py_backend.batching.runtime import Runtime
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine.retry import Failure
from torch_py_backend.errors import summarize
from torch_py_backend.signature.calls import InputBinding

log = logging.getLogger(__name__)

# Each instance of a model keeps that memory: larger batches are gathered in new memory.
_MAX_PAGE_LOCKED_BYTES = 256 << 20
# The most bytes that are copied at once, unused rows included: a few µs at PCIe's rates, about what
# starting a copy takes. Not measured on a GPU yet: `make gpu` does, as "copies of small inputs".
_MAX_BLOCK_BYTES = 128 << 10
# torch aligns its GPU memory to so many bytes; kernels depend on 16 of them.
_ALIGNMENT = 512


class Buffers(NamedTuple):
    """Page-locked memory in which batches are gathered, and from which a GPU copies them.

    One memory for all batches is enough: the outputs of a batch are waited for before the next one
    is gathered, and the copy to the GPU precedes them on the stream.

    Attributes:
        columns: memory for `max_batch_size` rows of each input; empty: batches are gathered in new
            memory.
        send: copies columns to the device: the first rows of `columns`, unless that is empty.
    """

    columns: tuple[Tensor, ...]
    send: Callable[[Sequence[Tensor]], Sequence[Value]]


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
        buffers: page-locked memory that the columns must be the first rows of; empty: columns are
            gathered in new memory.
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


class _Column(NamedTuple):
    """The type and dims of an input; its bytes for the largest batch, aligned."""

    dtype: torch.dtype
    dims: tuple[int, ...]
    size: int

    def view(self, memory: Tensor, rows: int) -> Tensor:
        """Return the memory's first bytes as a number of rows."""
        row_bytes = math.prod(self.dims) * self.dtype.itemsize
        return memory[: rows * row_bytes].view(self.dtype).view(rows, *self.dims)


def page_locked(config: ModelConfig, names: Sequence[str], runtime: Runtime) -> Buffers:
    """Return page-locked memory for batches; small inputs share a block, which one copy sends.

    `columns` is empty if a dim is -1, for BF16, which numpy does not have, if the inputs need more
    than 256 MiB in all, and if page-locked memory runs out.
    """
    specs = {spec.name: spec for spec in config.inputs}
    layout = []
    for name in names:
        dtype, dims = getattr(torch, specs[name].dtype.torch or ""), tuple(specs[name].dims)
        size = config.max_batch_size * math.prod(dims) * dtype.itemsize
        layout.append(_Column(dtype, dims, -(-size // _ALIGNMENT) * _ALIGNMENT))
    unsuited = any(-1 in column.dims or column.dtype is torch.bfloat16 for column in layout)
    small = len(layout) > 1 and sum(column.size for column in layout) <= _MAX_BLOCK_BYTES
    sizes = [column.size for column in layout]
    # torch page-locks the next power of two.
    if unsuited or sum(1 << (size - 1).bit_length() for size in sizes) > _MAX_PAGE_LOCKED_BYTES:
        return Buffers((), runtime.to_device)
    pins = torch.cuda.is_available()
    try:
        blocks = [
            torch.empty(size, dtype=torch.uint8, pin_memory=pins)
            for size in ([sum(sizes)] if small else sizes)
        ]
    except RuntimeError as error:  # torch's only class for memory that runs out here
        log.warning(
            "model '%s': batches are gathered without page-locked memory: %s",
            config.name,
            summarize(error),
        )
        return Buffers((), runtime.to_device)

    def views(memory: Sequence[Tensor], rows: int) -> list[Tensor]:
        return [column.view(part, rows) for column, part in zip(layout, memory, strict=True)]

    def send(columns: Sequence[Tensor]) -> list[Tensor]:
        copy = blocks[0].to(runtime.device, non_blocking=True, copy=True)
        return views(copy.split(sizes), columns[0].shape[0])

    memory = blocks[0].split(sizes) if small else blocks
    columns = tuple(views(memory, config.max_batch_size))
    return Buffers(columns, send if small else runtime.to_device)


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
