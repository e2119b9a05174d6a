"""Read items from Triton's requests; write outcomes to its responses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, TypeAlias

import torch
import triton_python_backend_utils as pb_utils
from torch import Tensor
from torch.utils import dlpack

from torch_py_backend.config.model_config import Origin
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError, named, printable
from torch_py_backend.pipeline import batches
from torch_py_backend.values import Item, RequestItem, Step, Value

# Below this size a DLPack capsule is cheaper to pass to Triton than a numpy array.
DLPACK_BYTES = 4096
_MAX_ID_LENGTH = 64

# `pb_utils.InferenceRequest`, `InferenceResponse` and `Tensor`.
Request: TypeAlias = Any
Response: TypeAlias = Any
OutputTensor: TypeAlias = Any


class Responses(list[Response]):
    """The responses of a batch without errors."""


# Returns the item of each request; raises what Triton's utilities raise.
Read: TypeAlias = "Callable[[Sequence[Request]], list[Item]]"


def read(requests: Sequence[Request]) -> list[Item]:
    """Return each request's tensors by name: arrays with their own memory, or tensors on a GPU."""
    return [
        {tensor.name(): read_tensor(tensor) for tensor in request.inputs()} for request in requests
    ]


def read_numbers(requests: Sequence[Request]) -> list[Item]:
    """Return each request's tensors, all of which are numbers in host memory, none BF16."""
    items: list[Item] = []
    for request in requests:  # loops, because a comprehension has a frame
        item: Item = {}
        for tensor in request.inputs():
            item[tensor.name()] = tensor.as_numpy()
        items.append(item)
    return items


def read_with_parameters(requests: Sequence[Request]) -> list[Item]:
    """Return each request's tensors by name, with its parameters: JSON, empty without any."""
    return [
        RequestItem(item, parameters=json.loads(request.parameters() or "{}"))
        for item, request in zip(read(requests), requests, strict=True)
    ]


def reader(engine: Engine) -> Read:
    """Return the function that reads a model's requests."""
    if engine.config.sequencing is not None:
        return _sequence_reader(engine)
    # Reading parameters takes time, so do it only for hooks that take them.
    if engine.hooks is not None and engine.hooks.takes_parameters:
        return read_with_parameters
    if engine.host_inputs and all(spec.dtype.numpy for spec in engine.config.inputs):
        return read_numbers
    return read


def read_kept(requests: Sequence[Request]) -> list[Item]:
    """Return requests' tensors for use after execute() has returned.

    Triton owns the memory of tensors on the GPU. They are copied before Triton reuses that memory.
    """
    items = read(requests)
    for item in items:
        for name, value in item.items():
            if isinstance(value, Tensor) and value.is_cuda:
                item[name] = value.clone()
                torch.cuda.synchronize(value.device)
    return items


def _sequence_reader(engine: Engine) -> Read:
    """Return the function that reads requests of sequences.

    If the config has no states (the model keeps its own, by CORRID or by the position in the
    batch), all requests are run as they come, including those that only fill a slot.
    """
    config = engine.config
    # Not states, for which Triton passes uninitialized memory.
    inputs = [spec for spec in config.inputs if spec.origin is not Origin.STATE]
    starts = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
    ends = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END

    def read_one(request: Request) -> Item:
        """Return a request's item with its step, which has the error of a state's request."""
        flags, name = request.flags(), request.correlation_id()
        step = Step(name, bool(flags & starts), bool(flags & ends))
        item: Item = {}
        try:
            for spec in inputs:
                tensor = pb_utils.get_input_tensor_by_name(request, spec.name)
                if tensor is not None:
                    value = item[spec.name] = read_tensor(tensor)
                    if not name and spec.origin is Origin.CLIENT:
                        _blank(value)
        except Exception as error:
            if not config.states:
                raise
            step, item = step._replace(error=engine.failures.unreadable(error)), {}
        return RequestItem(item, step=step)

    return lambda requests: list(map(read_one, requests))


def _blank(value: Any) -> None:
    """Zero an input of a request that only fills a slot: its memory is uninitialized."""
    if isinstance(value, Tensor):
        value.zero_()
    else:
        value.fill(b"" if value.dtype.hasobject else 0)


def read_tensor(tensor: Any) -> Any:
    """Convert one of Triton's tensors to an array with its own memory, or to a tensor."""
    if not tensor.is_cpu():
        return dlpack.from_dlpack(tensor)
    try:
        return tensor.as_numpy()
    except pb_utils.TritonModelException:  # BF16, which numpy does not have
        # The memory is Triton's: it is unaligned and invalid after execute() has returned.
        return dlpack.from_dlpack(tensor.to_dlpack()).clone()


def request_id(request: Request) -> str:
    """Return a request's ID for the log, shortened and without unprintable characters."""
    return printable(request.request_id()[:_MAX_ID_LENGTH]) or "without an id"


def write(result: Any, model: str) -> Response:
    """Return a response with outputs by name, or with an error; a response as it is."""
    if isinstance(result, dict):
        return pb_utils.InferenceResponse(list(map(write_tensor, result, result.values())))
    if isinstance(result, BackendError):
        # The code of a model's own CallError may be any.
        code = getattr(pb_utils.TritonError, result.code, pb_utils.TritonError.INTERNAL)
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(named(model, result), code))
    return result


def writer(names: Sequence[str]) -> Callable[..., Sequence[Any]]:
    """Return a function that makes responses of a batch's outputs in as few calls as possible.

    It takes the place of `scatter` of a pipeline. If Triton refuses an output, it returns outputs
    by name: writing each response alone finds which.
    """
    response = pb_utils.InferenceResponse

    def write_batch(
        outputs: Sequence[Value], sizes: Sequence[int], _: Sequence[Item]
    ) -> Sequence[Any]:
        try:
            written = [
                _written(name, output, sizes) for name, output in zip(names, outputs, strict=True)
            ]
            return Responses(map(response, map(list, zip(*written, strict=True))))
        except Exception:
            return batches.scatter(outputs, names, sizes)

    return write_batch


def write_tensor(name: str, value: Value) -> OutputTensor:
    """Convert a contiguous value to one of Triton's tensors."""
    if isinstance(value, Tensor) and 0 < value.nbytes < DLPACK_BYTES and not value.is_cuda:
        # As `_written`, in fewer calls: a stream has such a response for each token.
        return pb_utils.Tensor.from_dlpack(name, dlpack.to_dlpack(value))  # type: ignore[attr-defined]
    return _written(name, value, (1,))[0]


def _written(name: str, output: Value, sizes: Sequence[int]) -> list[OutputTensor]:
    """Convert a contiguous output to one of Triton's tensors for each number of rows."""
    parts: Iterable[Any] = (output,) if len(sizes) == 1 else batches.split(output, sizes)
    if not isinstance(output, Tensor):
        return list(map(pb_utils.Tensor, repeat(name), parts))
    if not output.nbytes:
        parts = map(_restrided, parts)
    if output.is_cuda:
        torch.cuda.synchronize(output.device)  # Triton reads the memory without a stream
    elif output.nbytes < DLPACK_BYTES * len(sizes) or output.dtype is torch.bfloat16:
        # A capsule from torch: Triton renames capsules, and a renamed one of numpy's crashes.
        parts = map(dlpack.to_dlpack, parts)  # type: ignore[attr-defined]
    else:
        return list(map(pb_utils.Tensor, repeat(name), map(Tensor.numpy, parts)))
    return list(map(pb_utils.Tensor.from_dlpack, repeat(name), parts))


def _restrided(value: Tensor) -> Tensor:
    """Return a tensor with contiguous strides, which Triton requires even of empty ones."""
    strides = [math.prod(value.shape[axis + 1 :]) for axis in range(value.ndim)]
    return value.as_strided(value.shape, strides)
