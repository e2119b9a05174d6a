"""Read items from Triton's requests; write outcomes to its responses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import triton_python_backend_utils as pb_utils
from torch import Tensor
from torch.utils import dlpack

from torch_py_backend.errors import BackendError, named, printable
from torch_py_backend.pipeline import batches
from torch_py_backend.values import Array, Item, RequestItem, Value

# Below this size a DLPack capsule is cheaper to pass to Triton than a numpy array.
DLPACK_BYTES = 4096
_MAX_ID_LENGTH = 64

# `pb_utils.InferenceResponse` and `pb_utils.Tensor`, which only Triton reads.
Response: TypeAlias = Any
OutputTensor: TypeAlias = Any


class Responses(list[Response]):
    """The responses of a batch without errors."""


class TritonTensor(Protocol):
    """`pb_utils.Tensor`."""

    def name(self) -> str: ...
    def is_cpu(self) -> bool: ...
    def as_numpy(self) -> Array: ...
    def to_dlpack(self) -> object: ...


class Trace(Protocol):
    """`pb_utils.InferenceTrace`."""

    def get_context(self) -> str | None: ...


class Sender(Protocol):
    """`pb_utils.InferenceResponseSender`."""

    def send(self, response: Response = ..., flags: int = ...) -> None: ...
    def is_cancelled(self) -> bool: ...


class Request(Protocol):
    """`pb_utils.InferenceRequest`, as Triton passes it to execute()."""

    def inputs(self) -> Sequence[TritonTensor]: ...
    def request_id(self) -> str: ...
    def correlation_id(self) -> int | str: ...
    def flags(self) -> int: ...
    def parameters(self) -> str: ...
    def trace(self) -> Trace: ...
    def is_cancelled(self) -> bool: ...
    def get_response_sender(self) -> Sender: ...


def read(request: Request) -> Item:
    """Return a request's tensors by name: arrays with their own memory, or tensors on the GPU."""
    return {tensor.name(): read_tensor(tensor) for tensor in request.inputs()}


def read_some(request: Request, names: Collection[str]) -> Item:
    """Return a request's tensors with the given names; do not access the memory of others."""
    tensors = ((name, pb_utils.get_input_tensor_by_name(request, name)) for name in names)
    return {name: read_tensor(tensor) for name, tensor in tensors if tensor is not None}


def read_kept(request: Request) -> Item:
    """Return a request's tensors for use after execute() has returned.

    Triton owns the memory of tensors on the GPU. They are copied before Triton reuses that memory.
    """
    item = read(request)
    for name, value in item.items():
        if isinstance(value, Tensor) and value.is_cuda:
            item[name] = value.clone()
            torch.cuda.synchronize(value.device)
    return item


def read_with_parameters(request: Request) -> Item:
    """Return a request's tensors by name, with its parameters."""
    text = request.parameters()  # JSON; empty if there are none
    return RequestItem(read(request), parameters=json.loads(text) if text else {})


def read_numbers(requests: Sequence[Request]) -> list[Item]:
    """Return the tensors of each request of a batch; all are numbers in host memory, none BF16.

    Raises:
        Exception: Triton's utilities cannot read a request.
    """
    return [
        {tensor.name(): tensor.as_numpy() for tensor in request.inputs()} for request in requests
    ]


def has_traces() -> bool:
    """Return whether this server's requests have traces: 24.04 and later."""
    return hasattr(getattr(pb_utils, "InferenceRequest", None), "trace")


def any_traced(requests: Sequence[Request]) -> bool:
    """Return whether Triton traces one of the requests and passes the context on."""
    for request in requests:  # noqa: SIM110  a generator costs a call for each
        if request.trace().get_context():
            return True
    return False


def traced(
    read: Callable[[Request], Item],
    carry: Callable[[Item, str, Trace | None], Item],
    *,
    kept: bool = False,
) -> Callable[[Request], Item]:
    """Return a `read` that adds the trace of a traced request to its item.

    Args:
        read: reads a request.
        carry: adds a trace's context and Triton's handle of it to an item.
        kept: whether items are used after execute() has returned; Triton owns the handle.
    """

    def read_traced(request: Request) -> Item:
        item = read(request)
        trace = request.trace()
        context = trace.get_context()
        return carry(item, context, None if kept else trace) if context else item

    return read_traced


def unless_traced(
    read_all: Callable[[Sequence[Request]], list[Item]] | None, read: Callable[[Request], Item]
) -> Callable[[Sequence[Request]], list[Item]]:
    """Return a function that reads a batch with `read_all`, and one with traced requests by `read`.

    Args:
        read_all: None: every batch is read by `read`.
        read: reads a request and its trace.
    """

    def read_batch(requests: Sequence[Request]) -> list[Item]:
        if read_all is None or any_traced(requests):
            return [read(request) for request in requests]
        return read_all(requests)

    return read_batch


def read_tensor(tensor: TritonTensor) -> Value:
    """Convert one of Triton's tensors to an array with its own memory, or to a tensor."""
    if not tensor.is_cpu():
        return dlpack.from_dlpack(tensor)
    try:
        return tensor.as_numpy()
    except pb_utils.TritonModelException:  # BF16, which numpy does not have
        # The memory is Triton's: it is unaligned and invalid after execute() has returned.
        return dlpack.from_dlpack(tensor.to_dlpack()).clone()


def request_id(request: Request) -> str:
    """Return a request's ID, shortened and without unprintable characters, for the log."""
    return printable(request.request_id()[:_MAX_ID_LENGTH])


def write(result: Any, model: str) -> Response:
    """Return a response with outputs by name, or with an error; a response as it is."""
    if isinstance(result, dict):
        return pb_utils.InferenceResponse(
            [write_tensor(name, value) for name, value in result.items()]
        )
    if isinstance(result, BackendError):
        code = getattr(pb_utils.TritonError, result.code)
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(named(model, result), code))
    return result


def writer(names: Sequence[str]) -> Callable[..., Sequence[Any]]:
    """Return a function that makes responses of a batch's outputs in as few calls as possible.

    It takes the place of `scatter` of a pipeline. If Triton refuses an output, it returns outputs
    by name: writing each response alone finds which.
    """
    to_capsule = dlpack.to_dlpack  # type: ignore[attr-defined]
    from_array, from_dlpack = pb_utils.Tensor, pb_utils.Tensor.from_dlpack
    response = pb_utils.InferenceResponse

    def write_batch(
        outputs: Sequence[Value], sizes: Sequence[int], _: Sequence[Item]
    ) -> Sequence[Any]:
        count = len(sizes)
        try:
            written = []
            for name, output in zip(names, outputs, strict=True):
                if not isinstance(output, Tensor) or not output.nbytes or output.is_cuda:
                    values = batches.split(output, sizes)
                    written.append([write_tensor(name, value) for value in values])
                    continue
                parts = (output,) if count == 1 else output.split_with_sizes(list(sizes))
                if output.nbytes < DLPACK_BYTES * count or output.dtype is torch.bfloat16:
                    written.append([from_dlpack(name, to_capsule(part)) for part in parts])
                else:
                    written.append([from_array(name, part.numpy()) for part in parts])
            return Responses([response(list(tensors)) for tensors in zip(*written, strict=True)])
        except Exception:
            return batches.scatter(outputs, names, sizes)

    return write_batch


def write_tensor(name: str, value: Value) -> OutputTensor:
    """Convert a contiguous value to one of Triton's tensors."""
    if not isinstance(value, Tensor):
        return pb_utils.Tensor(name, value)
    if not value.numel():  # Triton requires contiguous strides even of empty tensors
        strides = [math.prod(value.shape[axis + 1 :]) for axis in range(value.ndim)]
        value = value.as_strided(value.shape, strides)
    if value.is_cuda:
        torch.cuda.synchronize(value.device)  # Triton reads the memory without a stream
        return pb_utils.Tensor.from_dlpack(name, value)
    if value.dtype is torch.bfloat16 or value.nbytes < DLPACK_BYTES:
        # A capsule from torch: Triton renames capsules, and a renamed one of numpy's crashes.
        return pb_utils.Tensor.from_dlpack(name, dlpack.to_dlpack(value))  # type: ignore[attr-defined]
    return pb_utils.Tensor(name, value.numpy())
