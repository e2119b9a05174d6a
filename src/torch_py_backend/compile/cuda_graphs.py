"""CUDA graphs: one for each shape of the warm-up, replayed on memory of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_py_backend.batching.counters import Counts

log = logging.getLogger(__name__)

# A captured call: takes tensors like those that it was captured with, gives a result of its own.
Replay: TypeAlias = "Callable[[Sequence[Tensor]], Any]"
_WARM_UP = 3  # calls before a capture: what a first call allocates or tunes must not be captured


class Graphs:
    """A model whose calls are captured as they come, until it is sealed.

    Args:
        model: the model's name.
        call: what is called with the inputs.
        counts: where calls are counted that are not replayed, once the model is sealed.
    """

    def __init__(self, model: str, call: Callable[..., Any], counts: Counts) -> None:
        self._model = model
        self._counts = counts
        self._call = call
        self._replays: dict[Any, Replay] = {}
        self._sealed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns; a shape that was not captured is called as it is."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = (spec, *(_kind(leaf) for leaf in leaves))
        replay = self._replays.get(key)
        if replay is not None:
            return replay(tensors)
        if self._sealed:
            self._counts.eager_calls += 1
        else:
            self._replays[key] = capture(_closed(self._call, leaves, spec), tensors)
        return self._call(*args, **kwargs)

    def seal(self, call: Callable[..., Any]) -> Graphs:
        """The model as requests call it: nothing is captured any more.

        Args:
            call: what is called for shapes that were not captured.
        """
        log.info("model '%s': %d CUDA graphs were captured.", self._model, len(self._replays))
        self._call = call
        self._sealed = True
        return self


def _kind(leaf: Any) -> Any:
    """What a graph is bound to: of a tensor all but its values, of anything else itself."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return type(leaf), leaf


def _closed(call: Callable[..., Any], leaves: list[Any], spec: Any) -> Callable[..., Any]:
    """The call as a function of its tensors alone."""

    def closed(tensors: Sequence[Tensor]) -> Any:
        given = iter(tensors)
        filled = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return call(*args, **kwargs)

    return closed


def capture(call: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor]) -> Replay:
    """Capture a call on the current stream, which must not be the default one.

    Inputs are copied into memory that the graph owns, results are copied out of it: the next
    replay overwrites both.
    """
    owned = [tensor.clone() for tensor in tensors]
    for _ in range(_WARM_UP):
        call(owned)
    stream = torch.cuda.current_stream()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call(owned)

    def replay(given: Sequence[Tensor]) -> Any:
        for own, one in zip(owned, given, strict=True):
            own.copy_(one, non_blocking=True)
        graph.replay()
        return pytree.tree_map_only(Tensor, torch.clone, result)

    return replay
