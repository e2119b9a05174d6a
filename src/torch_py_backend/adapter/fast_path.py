"""The answers of a plain model by one fast path, chosen at load.

It crosses as few Python frames as possible: in a stub, whose caches are cold, each costs more than
in a loop. Whatever is unusual (a cancelled or traced request, several shapes in a batch, a failure)
takes the general path of `answering`. Only the retry policy repeats a call of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from torch import Tensor
from torch.utils import dlpack

from torch_py_backend import composition
from torch_py_backend.adapter import answering, messages
from torch_py_backend.adapter.messages import Request, Response
from torch_py_backend.batching import gather_scatter
from torch_py_backend.batching.gather_scatter import Array, Value
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.plain_call import PlainCall
from torch_py_backend.engine.retry import Failure
from torch_py_backend.observability.metric_families import OK

# Returns one response for each request, in order.
Answer: TypeAlias = "Callable[[Sequence[Request]], list[Response]]"
# The inputs of a batch: the arguments of forward(), in order; the rows of each request; the
# requests' arrays of each argument.
_Batch: TypeAlias = "tuple[list[Tensor], list[int], list[list[Array]]]"


def build(
    engine: Engine,
    general: answering.Answering[Any],
    plain: PlainCall,
    is_traced: Callable[[Sequence[Request]], bool] | None = None,
) -> Answer:
    """Return the function that answers the requests of a plain model.

    Args:
        engine: the model, warmed up.
        general: the path for all other batches.
        plain: the model's call.
        is_traced: returns whether a batch has a traced request; None: requests have no traces.
    """
    # Locals: each attribute that a call looks up costs time.
    read, write = reader(plain.inputs, plain.ranks), writer(plain.outputs)
    forward, extract, to_host = plain.forward, plain.extract, plain.to_host
    dtype, dims = plain.tensor or (None, ())
    recovery, counts = engine.recovery, engine.counts
    answered = counts.requests
    clock, strided = time.perf_counter, torch.strided
    in_inference_mode = torch.is_inference_mode_enabled

    def answer(requests: Sequence[Request]) -> list[Response]:
        if (
            recovery.fatal is not None
            or not in_inference_mode()  # the model has left it
            or (is_traced is not None and is_traced(requests))
        ):
            return general.answer(requests)
        count = len(requests)
        if general.last_batch_seconds > count * answering.CHECK_CANCELLED_S and any(
            request.is_cancelled() for request in requests
        ):
            return general.check_and_answer(requests)
        began = clock()
        batch = read(requests)
        if batch is None:
            return general.answer(requests)
        columns, sizes, arrays = batch
        rows = columns[0].shape[0]
        counts.rows += rows
        failure: Failure | None = None
        recovery.calls_before = composition.calls
        gathered = clock()
        try:
            result = forward(*columns)
            called = fetched = clock()
            outputs: Sequence[Value] = (result,)
            if extract is None:
                outputs = result
            elif not (
                type(result) is Tensor
                and result.dtype is dtype
                and result.layout is strided
                and not result.is_nested  # has no shape
                and result.shape == (rows, *dims)
                and result.is_cpu
                and result.is_contiguous()
                and not result.requires_grad
                and not result.is_neg()
            ):
                outputs = to_host(extract(result, rows), columns)
                fetched = clock()
            responses = write(outputs, sizes)
            if responses is None:
                outcomes = gather_scatter.scatter(outputs, plain.outputs, sizes)
        except BaseException as error:
            failure = general.classify(error)
        if failure is not None:
            # A retry needs the memory of the failed batch.
            del batch, columns
            result = outputs = ()
            items = [
                dict(zip(plain.inputs, item, strict=True)) for item in zip(*arrays, strict=True)
            ]
            resolve = partial(plain.retry_or_refuse, items, failure)
            return general.answer_failed(requests, resolve, began)
        counts.gather_seconds += gathered - began
        if extract is not None:
            counts.forward_seconds += called - gathered
            counts.device_to_host_seconds += fetched - called
        if responses is None:
            responses = general.respond(requests, outcomes)
        else:
            answered[OK] = answered.get(OK, 0) + count
        general.last_batch_seconds = clock() - began
        return responses

    return answer


def reader(
    names: Sequence[str], ranks: Sequence[int]
) -> Callable[[Sequence[Request]], _Batch | None]:
    """Return a function that reads a batch; it returns None for what `general` must answer.

    Args:
        names: the inputs in the order of forward()'s arguments; each request has all of them.
        ranks: the number of dimensions of each, rows included.
    """
    concatenate, from_numpy = np.concatenate, torch.from_numpy
    several = len(names) > 1
    axes = tuple(ranks)

    def read(requests: Sequence[Request]) -> _Batch | None:
        try:
            if several:
                items = [
                    {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                    for request in requests
                ]
                arrays = [[item[name] for item in items] for name in names]
            else:
                arrays = [[request.inputs()[0].as_numpy() for request in requests]]
            sizes = [value.shape[0] for value in arrays[0]]
            if len(requests) == 1:
                columns = [from_numpy(values[0]) for values in arrays]
            else:
                columns = [from_numpy(concatenate(values)) for values in arrays]
            for values in arrays[1:]:
                if [value.shape[0] for value in values] != sizes:
                    return None
        except Exception:  # several shapes, or a request that cannot be read
            return None
        # After the concatenation, which refuses arrays of different ranks.
        if tuple([column.ndim for column in columns]) != axes:
            return None
        return columns, sizes, arrays

    return read


def writer(
    names: Sequence[str],
) -> Callable[[Sequence[Value], list[int]], list[Response] | None]:
    """Return a function that writes a batch; it returns None if Triton refuses an output."""
    to_capsule = dlpack.to_dlpack  # type: ignore[attr-defined]
    from_array, from_dlpack = pb_utils.Tensor, pb_utils.Tensor.from_dlpack
    response = pb_utils.InferenceResponse

    def write(outputs: Sequence[Value], sizes: list[int]) -> list[Response] | None:
        count = len(sizes)
        try:
            written = []
            for name, output in zip(names, outputs, strict=True):
                if not isinstance(output, Tensor) or not output.nbytes:
                    values = gather_scatter.split(output, sizes)
                    written.append([messages.write_tensor(name, value) for value in values])
                    continue
                parts = (output,) if count == 1 else output.split_with_sizes(sizes)
                if output.nbytes < messages.DLPACK_BYTES * count or output.dtype is torch.bfloat16:
                    written.append([from_dlpack(name, to_capsule(part)) for part in parts])
                else:
                    written.append([from_array(name, part.numpy()) for part in parts])
            return [response(list(tensors)) for tensors in zip(*written, strict=True)]
        except Exception:  # `answering` finds the output, and sends the others
            return None

    return write
