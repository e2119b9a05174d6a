"""CUDA graphs: one for each shape of the warm-up, with input and output memory of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_py_backend.batching.counters import Counts

log = logging.getLogger(__name__)

# Replays a captured call for tensors of the captured shapes; returns a copy of the result.
Replay: TypeAlias = "Callable[[Sequence[Tensor]], Any]"
_WARM_UP = 3  # calls before a capture: allocations and tuning of first calls are not captured


class Graphs:
    """A model that captures a graph for each new shape until it is sealed."""

    def __init__(self, model: str, call: Callable[..., object], counts: Counts) -> None:
        self._model = model
        self._counts = counts
        self._call = call
        self._replays: dict[Any, Replay] = {}
        self._sealed = False

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the model, by replaying a graph if its shapes were captured."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # What a graph depends on: all of a tensor but its values, and other leaves themselves.
        key = (
            spec,
            *(
                (leaf.shape, leaf.dtype, leaf.device)
                if isinstance(leaf, Tensor)
                else (type(leaf), leaf)
                for leaf in leaves
            ),
        )
        replay = self._replays.get(key)
        if replay is not None:
            return replay(tensors)
        if self._sealed:
            self._counts.eager_calls += 1
        else:
            self._replays[key] = capture(_tensor_function(self._call, leaves, spec), tensors)
        return self._call(*args, **kwargs)

    def seal(self, call: Callable[..., object]) -> Graphs:
        """Capture no more graphs, and return the model.

        `call` is called for shapes that were not captured.
        """
        log.info("model '%s': %d CUDA graphs were captured.", self._model, len(self._replays))
        self._call = call
        self._sealed = True
        return self


def _tensor_function(
    call: Callable[..., object], leaves: list[Any], spec: Any
) -> Callable[..., object]:
    """Return a call as a function of its tensors only."""

    def function(tensors: Sequence[Tensor]) -> Any:
        remaining = iter(tensors)
        filled = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return call(*args, **kwargs)

    return function


def capture(call: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor]) -> Replay:
    """Capture a call on the current stream, which must not be the default one.

    Inputs are copied into memory that the graph owns, and results are copied out of it, because the
    next replay overwrites both.
    """
    inputs = [tensor.clone() for tensor in tensors]
    for _ in range(_WARM_UP):
        call(inputs)
    stream = torch.cuda.current_stream()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call(inputs)

    def replay(tensors: Sequence[Tensor]) -> Any:
        for buffer, tensor in zip(inputs, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        graph.replay()
        return pytree.tree_map_only(Tensor, torch.clone, result)

    return replay
