"""Read items from Triton's requests; write outcomes to its responses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from itertools import repeat
from typing import Any, TypeAlias

import torch
import triton_python_backend_utils as pb_utils
from torch import Tensor
from torch.utils import dlpack

from torch_py_backend.config.model_config import Origin
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError, named, printable
from torch_py_backend.pipeline import batches, sequences
from torch_py_backend.pipeline.sequences import Sequences, Slots
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


def read_some(request: Request, names: Collection[str]) -> Item:
    """Return a request's tensors with the given names; do not access the memory of others."""
    tensors = ((name, pb_utils.get_input_tensor_by_name(request, name)) for name in names)
    return {name: read_tensor(tensor) for name, tensor in tensors if tensor is not None}


class SequenceReader:
    """Reads the requests of one instance's sequences.

    If the config has no states (the model keeps its own, by CORRID or by the position in the
    batch), all requests are run as they come, including those that only fill a slot.

    Attributes:
        sequences: the states of the sequences; None: the config has no states.
        steps: the stages that the pipeline needs; None: none.
    """

    def __init__(self, engine: Engine) -> None:
        config = engine.config
        # Without states: Triton passes uninitialized memory for them.
        self._names = frozenset(
            spec.name for spec in config.inputs if spec.origin is not Origin.STATE
        )
        self._sent = [spec.name for spec in config.inputs if spec.origin is Origin.CLIENT]
        # Whether any request so far only filled a slot: reading each one's ID again takes time.
        self._fills = False
        self._starts = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        self._ends = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
        self._failures = engine.failures
        self.sequences: Sequences | None = None
        self.steps: Sequences | Slots | None = None
        if config.states:
            self.steps = self.sequences = Sequences(config, engine.device)
        elif config.keeps_slots:
            self.steps = Slots(config, engine.inputs.admit)

    def read(self, requests: Sequence[Request]) -> list[Item]:
        """Return the items of requests with their steps."""
        return [self._read(request) for request in requests]

    def _read(self, request: Request) -> Item:
        """Return a request's item with its step.

        A request that cannot be read still begins and ends its sequence: the next request must not
        get the state of an older sequence with the same ID. In slots it is returned with its error.
        """
        flags = request.flags()
        name = request.correlation_id()
        step = Step(name, bool(flags & self._starts), bool(flags & self._ends))
        self._fills |= not name
        if self.sequences is not None and not name:
            return RequestItem({}, step=step)
        try:
            item = read_some(request, self._names)
        except Exception as error:
            if self.sequences is not None:
                self.sequences.skip(step)
            if self.sequences is not None or self.steps is None:
                raise
            step = step._replace(error=self._failures.unreadable(error))
            item = read_some(request, self._names.difference(self._sent))
        if not name:
            sequences.blank(item, self._sent)
        return RequestItem(item, step=step)

    def count_sent(self, requests: Sequence[Request]) -> int:
        """Return how many of the requests were sent by clients and do not only fill a slot."""
        if not self._fills:
            return len(requests)
        return sum(1 for request in requests if request.correlation_id())


def has_traces() -> bool:
    """Return whether this server's requests have traces: 24.04 and later."""
    return hasattr(getattr(pb_utils, "InferenceRequest", None), "trace")


def traced(
    read_items: Read, carry: Callable[[Item, str, Any], Item], *, kept: bool = False
) -> Read:
    """Return a function that adds the traces of traced requests to their items.

    Args:
        read_items: reads requests.
        carry: adds a trace's context and Triton's handle of it to an item.
        kept: whether items are used after execute() has returned; Triton owns the handle.
    """

    def read_traced(requests: Sequence[Request]) -> list[Item]:
        items = read_items(requests)
        for place, request in enumerate(requests):
            trace = request.trace()
            context = trace.get_context()
            if context:
                items[place] = carry(items[place], context, None if kept else trace)
        return items

    return read_traced


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
    """Return a request's ID, shortened and without unprintable characters, for the log."""
    return printable(request.request_id()[:_MAX_ID_LENGTH])


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
                    write_one = write_tensor if isinstance(output, Tensor) else from_array
                    values = batches.split(output, sizes)
                    written.append(list(map(write_one, repeat(name), values)))
                    continue
                parts = (output,) if count == 1 else output.split_with_sizes(list(sizes))
                if output.nbytes < DLPACK_BYTES * count or output.dtype is torch.bfloat16:
                    written.append(list(map(from_dlpack, repeat(name), map(to_capsule, parts))))
                else:
                    written.append(list(map(from_array, repeat(name), map(Tensor.numpy, parts))))
            return Responses(map(response, map(list, zip(*written, strict=True))))
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
