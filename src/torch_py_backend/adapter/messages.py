"""Read items from Triton's requests; write outcomes to its responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, TypeAlias, TypeVar

import torch
import triton_python_backend_utils as pb_utils
from torch import Tensor
from torch.utils import dlpack

from torch_py_backend.config.model_config import Origin
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError, named, printable
from torch_py_backend.pipeline import batches
from torch_py_backend.pipeline.run import Entries, Results, Scatter
from torch_py_backend.values import Columns, Item, Items, RequestItem, Step, Value

# Below this size a DLPack capsule is cheaper to pass to Triton than a numpy array.
DLPACK_BYTES = 4096
_MAX_ID_LENGTH = 64
_T = TypeVar("_T")

# `pb_utils.InferenceRequest` and `InferenceResponse`.
Request: TypeAlias = Any
Requests: TypeAlias = "Sequence[Request]"
Response: TypeAlias = Any
# Returns the item of a request, or raises.
_Read: TypeAlias = "Callable[[Request], Item]"
# Returns the item of each request, or why it is refused.
Read: TypeAlias = "Callable[[Requests], Entries]"


class Responses(list[Response]):
    """The responses of a batch without errors."""


def reader(engine: Engine) -> Read:
    """Return the function that reads requests for a model."""
    read: _Read = _read
    if engine.config.sequencing is not None:
        read = _sequence_reader(engine)
    elif engine.hooks is not None and engine.hooks.takes_parameters:  # which take time
        read = _read_with_parameters
    read = _traced(read)

    def read_each(requests: Requests) -> Entries:
        try:
            return list(map(read, requests))
        except Exception as error:  # from Triton's utilities, or because of a lost device
            if len(requests) == 1:
                return [engine.failures.unreadable(error)]
        return [entry for request in requests for entry in read_each([request])]

    return read_each


def _read(request: Request) -> Item:
    """Return a request's tensors by name."""
    item: Item = {}
    for tensor in request.inputs():  # a loop, because a comprehension has a frame
        item[tensor.name()] = read_tensor(tensor)
    return item


def _read_with_parameters(request: Request) -> Item:
    """Return a request's tensors by name, with its parameters: JSON, empty without any."""
    return RequestItem(_read(request), parameters=json.loads(request.parameters() or "{}"))


def _sequence_reader(engine: Engine) -> _Read:
    """Return a function that reads a step of a sequence, without its states.

    A step of a model with states that cannot be read has the error. Otherwise the model keeps its
    own, by CORRID or by the position in the batch: also requests that only fill a slot are run.
    """
    config = engine.config
    origins = {spec.name: spec.origin for spec in config.inputs if spec.origin is not Origin.STATE}
    starts = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
    ends = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END

    def read_step(request: Request) -> Item:
        item: Item = {}
        flags = request.flags()
        step = Step(request.correlation_id(), bool(flags & starts), bool(flags & ends))
        try:
            for tensor in request.inputs():
                name = tensor.name()
                if name in origins:  # Triton passes uninitialized memory for states
                    item[name] = value = read_tensor(tensor)
                    if not step.id and origins[name] is Origin.CLIENT:  # and here
                        blank: Any = b"" if getattr(value.dtype, "hasobject", False) else 0
                        value[...] = blank
        except Exception as error:
            if not config.states:
                raise
            step, item = step._replace(error=engine.failures.unreadable(error)), {}
        return RequestItem(item, step=step)

    return read_step


def _traced(read: _Read) -> _Read:
    """Return a function that reads a request and adds its trace context, if it has one.

    Triton makes the spans of a request. Its context is OpenTelemetry's current one in the model's
    code, which continues the trace. Servers before 24.04 have no traces.
    """
    try:
        from opentelemetry import trace  # noqa: PLC0415
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415
    except ImportError:
        return read
    if not hasattr(pb_utils.InferenceRequest, "trace"):
        return read
    extract = tracecontext.TraceContextTextMapPropagator().extract

    def read_traced(request: Request) -> Item:
        item = read(request)
        fields = request.trace().get_context()
        if fields:
            span = trace.get_current_span(extract(json.loads(fields)))
            item = item if isinstance(item, RequestItem) else RequestItem(item)
            item.context = partial(trace.use_span, span)
        return item

    return read_traced


def read_tensor(tensor: Any) -> Value:
    """Convert one of Triton's tensors to an array or a tensor with its own memory."""
    try:
        array: Value = tensor.as_numpy()
    except pb_utils.TritonModelException:  # on a GPU, or BF16, which numpy does not have
        # Triton's memory is unaligned on the host, and may be used again after execute().
        value = dlpack.from_dlpack(tensor.to_dlpack()).clone()
        if value.is_cuda:
            torch.cuda.synchronize(value.device)
        return value
    return array


def decoded(read: Callable[[], _T]) -> _T | str:
    """Return an ID; "?" for one that is not UTF-8, which HTTP lets through."""
    try:
        return read()
    except UnicodeDecodeError:
        return "?"


def request_id(request: Request) -> str:
    """Return a request's ID for the log, shortened and without unprintable characters."""
    return printable(decoded(request.request_id)[:_MAX_ID_LENGTH]) or "without an id"


def write(result: Any, model: str) -> Response:
    """Return a response with outputs by name, or with an error; a response, or None, as it is."""
    if isinstance(result, dict):
        return pb_utils.InferenceResponse(list(map(write_tensor, result, result.values())))
    if isinstance(result, BackendError):
        # The code of a model's own CallError may be any.
        code = getattr(pb_utils.TritonError, result.code, pb_utils.TritonError.INTERNAL)
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(named(model, result), code))
    return result


def writer(names: Sequence[str]) -> Scatter:
    """Return a `scatter` that makes responses in few calls, or outputs where Triton refuses one."""
    response = pb_utils.InferenceResponse

    def write_batch(
        outputs: Columns,
        sizes: Sequence[int],
        _: Items,
    ) -> Results:
        try:
            written = map(_written, names, outputs, repeat(sizes))
            return Responses(map(response, map(list, zip(*written, strict=True))))
        except Exception:
            return batches.scatter(outputs, names, sizes)

    return write_batch


def write_tensor(name: str, value: Value) -> Any:
    """Convert a contiguous value to one of Triton's tensors."""
    return _written(name, value, (1,))[0]


def _written(name: str, output: Value, sizes: Sequence[int]) -> list[Any]:
    """Convert a contiguous output to one of Triton's tensors for each number of rows."""
    if isinstance(output, Tensor) and not output.nbytes:
        output = output.cpu()  # as an array: Triton compares the strides even of an empty capsule
    parts: Iterable[Any] = (output,) if len(sizes) == 1 else batches.split(output, sizes)
    if not isinstance(output, Tensor):
        return list(map(pb_utils.Tensor, repeat(name), parts))
    if output.is_cuda:
        torch.cuda.synchronize(output.device)  # Triton reads the memory without a stream
    # A capsule from torch: Triton renames capsules, and a renamed one of numpy's crashes.
    elif 0 < output.nbytes < DLPACK_BYTES * len(sizes) or output.dtype is torch.bfloat16:
        parts = map(dlpack.to_dlpack, parts)  # type: ignore[attr-defined]
    else:
        return list(map(pb_utils.Tensor, repeat(name), map(Tensor.numpy, parts)))
    return list(map(pb_utils.Tensor.from_dlpack, repeat(name), parts))
