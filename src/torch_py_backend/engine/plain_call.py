"""The call of a plain model, reduced at load to what one flat function needs.

A plain model takes batches of numbers, all inputs in each request. Its call is direct if the batch
is passed to the module as it is and the outputs are on the CPU. Otherwise it has stages: copies
between devices, rows that fill a bucket, casts, or hooks for batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_py_backend.batching.gather_scatter import Item, Outcome, Value
from torch_py_backend.engine.retry import Failure
from torch_py_backend.signature.calls import InputBinding


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
        retry_or_refuse: returns the outcomes of items after a failed call: retries or refuses them.
    """

    inputs: tuple[str, ...]
    ranks: tuple[int, ...]
    forward: Callable[..., Any]
    extract: Callable[[Any, int], Sequence[Value]] | None
    to_host: Callable[[Sequence[Value], Sequence[Value]], Sequence[Value]]
    outputs: tuple[str, ...]
    tensor: tuple[torch.dtype, tuple[int, ...]] | None
    retry_or_refuse: Callable[[Sequence[Item], Failure], Sequence[Outcome]]


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
