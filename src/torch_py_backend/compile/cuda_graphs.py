"""CUDA graphs: one for each shape of the warm-up, with input and output memory of its own.

The graphs share a memory pool for what is computed in between. That is safe while no two run at the
same time and the result of one is copied before the next one runs:
https://docs.pytorch.org/docs/stable/notes/cuda.html#graph-memory-management
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_py_backend.batching import runtime
from torch_py_backend.batching.counters import Counts
from torch_py_backend.errors import summarize

log = logging.getLogger(__name__)

# A call of the model as a function of its tensors.
Call: TypeAlias = "Callable[[Sequence[Tensor]], object]"
# Replays a captured call for tensors of the captured shapes; returns a copy of the result.
Replay: TypeAlias = Call
# A handle of memory that several graphs use.
Pool: TypeAlias = "tuple[int, int]"
# A replay may choose other kernels than the eager call, for values that differ by rounding.
_MAX_ERROR = 1e-2
_WARM_UP = 2  # first calls, whose allocations and tuning are not to be captured


class CaptureError(Exception):
    """A capture that had begun failed."""


class Graphs:
    """A model that captures a graph for each new shape until it is sealed.

    A graph is replayed once and compared with the eager call. What cannot be captured, or has
    other values then, is called eagerly, with a warning.

    Raises:
        RuntimeError: a capture has made the GPU unusable.
    """

    def __init__(self, model: str, call: Callable[..., object], counts: Counts) -> None:
        self._model = model
        self._counts = counts
        self._call = call
        self._replays: dict[object, Replay] = {}
        self._refused: set[object] = set()
        self._pool: Pool | None = None
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
        try:
            replay = self._replays.get(key)
        except TypeError as error:  # a leaf without a hash, such as an array of strings
            return self._call_eagerly(error, tensors, args, kwargs)
        if replay is not None:
            return replay(tensors)
        expected = self._call(*args, **kwargs)
        if self._sealed:
            self._counts.eager_calls += 1
        elif key not in self._refused:
            self._capture(key, _tensor_function(self._call, leaves, spec), tensors, expected)
        return expected

    def _call_eagerly(
        self,
        error: TypeError,
        tensors: Sequence[Tensor],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        """Call the model for arguments that no graph can be found by."""
        key = tuple(tensor.shape for tensor in tensors)
        if self._sealed:
            self._counts.eager_calls += 1
        elif key not in self._refused:
            self._refused.add(key)
            self._warn(tensors, error)
        return self._call(*args, **kwargs)

    def _capture(
        self,
        key: object,
        call: Call,
        tensors: Sequence[Tensor],
        expected: object,
    ) -> None:
        try:
            _refuse_opaque(expected)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            replay = capture(call, tensors, self._pool)
            _compare(replay(tensors), expected)
        except Exception as error:  # of any class: the model's code runs
            self._refused.add(key)
            failed = isinstance(error, CaptureError)
            for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
                if failed:
                    _end_capture(device, self._pool)
                runtime.probe(device)  # raises if the error has made the GPU unusable
            if failed:
                _reset_generator()
            # torch takes the pool of a failed capture for in use, and refuses it to the next one.
            # A pool of no graph may be freed.
            if failed or not self._replays:
                self._pool = None
            self._warn(tensors, error)
        else:
            self._replays[key] = replay

    def _warn(self, tensors: Sequence[Tensor], error: Exception) -> None:
        log.warning(
            "model '%s': inputs of %s are called without a CUDA graph: %s",
            self._model,
            [list(tensor.shape) for tensor in tensors],
            summarize(_cause(error)),
        )

    def seal(self, call: Callable[..., object]) -> Graphs:
        """Capture no more graphs, and return the model.

        `call` is called for shapes that were not captured.
        """
        log.info("model '%s': %d CUDA graphs were captured.", self._model, len(self._replays))
        self._call = call
        self._sealed = True
        return self


def _tensor_function(
    call: Callable[..., object], leaves: list[object], spec: pytree.TreeSpec
) -> Call:
    """Return a call as a function of its tensors only."""

    def function(tensors: Sequence[Tensor]) -> object:
        remaining = iter(tensors)
        filled = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return call(*args, **kwargs)

    return function


def _cause(error: Exception) -> Exception:
    """Return why a graph was not made.

    The end of a capture that has failed fails, too, with an error that says only that.
    """
    last = error.__cause__ if isinstance(error, CaptureError) else error
    first = None if last is None else last.__context__
    return next((link for link in (first, last) if isinstance(link, Exception)), error)


def _refuse_opaque(result: object) -> None:
    """Raise TypeError if torch does not find all tensors of a result: it copies those it finds."""
    leaves = pytree.tree_leaves(result)
    for leaf in leaves:
        if not isinstance(leaf, Tensor | bool | int | float | str | bytes | None):
            raise TypeError(
                f"the result holds {type(leaf).__name__} objects, which torch cannot copy"
            )
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise TypeError("the result has no tensors")


def _compare(actual: object, expected: object) -> None:
    """Raise AssertionError if the tensors of two results differ by more than rounding."""
    pairs = [
        [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        for result in (actual, expected)
    ]
    for replayed, eager in zip(*pairs, strict=True):
        scale = 0.0
        if eager.is_floating_point() and eager.numel():
            scale = eager.abs().nan_to_num(nan=0.0, posinf=0.0).max().item()
        torch.testing.assert_close(
            replayed, eager, rtol=_MAX_ERROR, atol=_MAX_ERROR * scale, equal_nan=True
        )


def _end_capture(device: torch.device, pool: Pool | None) -> None:
    """End the recording of allocations, which older versions of torch continue after a failure.

    The allocator would release no memory any more: https://github.com/pytorch/pytorch/pull/180395
    """
    if pool is not None:
        with contextlib.suppress(RuntimeError):  # it has ended
            torch._C._cuda_endAllocateToPool(device.index, pool)  # noqa: SLF001  torch's own does it


def _reset_generator() -> None:
    """End the capture that the GPU's random generator takes part in, for torch up to 2.11.

    There a failed capture leaves the generator in it, and random operations outside of a graph
    fail. The end of the next capture resets it: https://github.com/pytorch/pytorch/issues/171263
    """
    with contextlib.suppress(RuntimeError):  # needed by models with random operations only
        value = torch.zeros(1, device="cuda")
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        with torch.cuda.graph(graph, stream=stream):
            value.add_(1)  # torch warns about an empty graph


@contextlib.contextmanager
def _synchronization_refused() -> Iterator[None]:
    """Let calls that wait for the GPU fail: they cannot be captured, and a capture cannot say why.

    Not all of them are known to torch.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def capture(call: Call, tensors: Sequence[Tensor], pool: Pool) -> Replay:
    """Capture a call on the current stream, which must not be the default one.

    Inputs are copied into memory that the graph owns, and results are copied out of it, because the
    next replay overwrites both.

    Args:
        call: the call.
        tensors: its arguments.
        pool: the memory that graphs share which never run at the same time.

    Raises:
        CaptureError: the capture failed, because of the exception's cause.
        Exception: the call failed before it.
    """
    inputs = [tensor.clone() for tensor in tensors]
    for _ in range(_WARM_UP):
        call(inputs)
    with _synchronization_refused():
        call(inputs)
    stream = torch.cuda.current_stream()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # torch's name for the type of a pool is private.
        with torch.cuda.graph(graph, pool=pool, stream=stream):  # type: ignore[arg-type]
            result = call(inputs)
    except Exception as error:
        raise CaptureError from error

    def replay(tensors: Sequence[Tensor]) -> object:
        for buffer, tensor in zip(inputs, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        graph.replay()
        return pytree.tree_map_only(Tensor, torch.clone, result)

    return replay
