"""Triton's requests become items, outcomes become its responses.

Imported when an instance starts, not before: it needs torch, and Triton's utilities complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import triton_python_backend_utils as pb_utils
from torch import Tensor
from torch.utils import dlpack

from torch_py_backend.batching.gather_scatter import Item, Outcome, Value
from torch_py_backend.batching.runtime import Guard
from torch_py_backend.config import request_parameters
from torch_py_backend.errors import BackendError
from torch_py_backend.sequences.state_store import Step

# Below this size a DLPack capsule is cheaper to hand over than a numpy array, above it dearer.
_SMALL_BYTES = 4096
_LONGEST_ID = 64


def read(request: Any) -> Item:
    """A request's tensors by name: arrays in host memory of their own, or tensors on the GPU."""
    return {tensor.name(): read_tensor(tensor) for tensor in request.inputs()}


def read_some(request: Any, names: Collection[str]) -> Item:
    """Those of a request's tensors that have one of these names; of others not even memory."""
    found = ((name, pb_utils.get_input_tensor_by_name(request, name)) for name in names)
    return {name: read_tensor(tensor) for name, tensor in found if tensor is not None}


def read_kept(request: Any, guard: Guard) -> Item:
    """As `read`, for who needs the tensors after execute() has returned: the GPU's are Triton's.

    They are copied on the stream that the model reads them on, before Triton uses its memory again.
    """
    item = read(request)
    on_gpu = {name: one for name, one in item.items() if isinstance(one, Tensor) and one.is_cuda}
    if on_gpu:
        with guard():
            item.update((name, one.clone()) for name, one in on_gpu.items())
            for device in {one.device for one in on_gpu.values()}:
                torch.cuda.current_stream(device).synchronize()
    return item


def read_with_parameters(request: Any) -> Item:
    """As `read`, with the request's parameters for who asks."""
    item = read(request)
    told = request_parameters.parse(request.parameters())
    return {**item, request_parameters.KEY: request_parameters.column([told])}


def tells_traces() -> bool:
    """Whether this server's requests can be asked for their traces: 24.04 and later."""
    return hasattr(getattr(pb_utils, "InferenceRequest", None), "trace")


def traced(
    read: Callable[[Any], Any], carry: Callable[[Item, str, Any], Item], *, kept: bool = False
) -> Callable[[Any], Any]:
    """As `read`, for requests that may be traced: what was read then carries that.

    Args:
        read: what a request is for those who run it.
        carry: an item with a trace's context and Triton's handle of it.
        kept: whether items are needed after execute() has returned: the handle is Triton's.
    """

    def read_traced(request: Any) -> Any:
        found = read(request)
        trace = request.trace()
        told = trace.get_context()
        if not told:
            return found
        handle = None if kept else trace
        if isinstance(found, Step):
            return found._replace(item=carry(found.item, told, handle))
        return carry(found, told, handle)

    return read_traced


def read_tensor(tensor: Any) -> Value:
    """A tensor of Triton's: an array of its own in host memory, or a tensor."""
    if not tensor.is_cpu():
        return dlpack.from_dlpack(tensor)
    try:
        array: Value = tensor.as_numpy()
    except pb_utils.TritonModelException:  # BF16, which numpy lacks
        # The memory is Triton's, unaligned, and gone when execute() returns.
        array = dlpack.from_dlpack(tensor.to_dlpack()).clone()
    return array


def write_with_parameters(outcome: Outcome, told: Mapping[str, str]) -> Any:
    """As `write`, and a result comes with parameters for the client."""
    if isinstance(outcome, BackendError):
        return write(outcome)
    tensors = [write_tensor(name, value) for name, value in outcome.items()]
    return pb_utils.InferenceResponse(tensors, parameters=dict(told))


def takes_parameters() -> bool:
    """Whether this server's responses can have parameters: 25.02 and later."""
    try:
        pb_utils.InferenceResponse([], parameters={})
    except TypeError:
        return False
    return True


def request_id(request: Any) -> str:
    """What the client calls its request, fit for a log: one short line, whatever was sent."""
    name: str = request.request_id()
    return "".join(one if one.isprintable() else "?" for one in name[:_LONGEST_ID])


def write(outcome: Outcome) -> Any:
    """A response with the result or the error."""
    if isinstance(outcome, BackendError):
        code = getattr(pb_utils.TritonError, outcome.code)
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(outcome), code))
    tensors = [write_tensor(name, value) for name, value in outcome.items()]
    return pb_utils.InferenceResponse(tensors)


def write_tensor(name: str, value: Value) -> Any:
    """A tensor of Triton's for a contiguous value."""
    if not isinstance(value, Tensor):
        return pb_utils.Tensor(name, value)
    if not value.numel():
        value = _laid_out(value)
    if value.is_cuda:
        return pb_utils.Tensor.from_dlpack(name, value)
    if value.dtype is torch.bfloat16 or value.nbytes < _SMALL_BYTES:
        # Of torch's making: a capsule of numpy's, which Triton renames, brings the process down.
        return pb_utils.Tensor.from_dlpack(name, dlpack.to_dlpack(value))  # type: ignore[attr-defined]
    return pb_utils.Tensor(name, value.numpy())


def _laid_out(empty: Tensor) -> Tensor:
    """A tensor that holds nothing, with the strides that Triton expects even of that."""
    strides = [math.prod(empty.shape[axis + 1 :]) for axis in range(empty.ndim)]
    return empty.as_strided(empty.shape, strides)
