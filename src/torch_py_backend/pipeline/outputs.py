"""Extract the config's outputs from a result: check, reshape and make contiguous."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from torch_py_backend.config import dtypes
from torch_py_backend.config.model_config import ModelConfig, Origin, TensorSpec
from torch_py_backend.config.pbtxt import fits
from torch_py_backend.errors import (
    BackendError,
    OutputError,
    a_type,
    counted,
    join_names,
    summarize,
)
from torch_py_backend.pipeline import batches
from torch_py_backend.pipeline.failures import reported
from torch_py_backend.pipeline.padding import Padding
from torch_py_backend.pipeline.ragged import Split
from torch_py_backend.pipeline.run import Extract, Result, Results, Scatter
from torch_py_backend.signature import results
from torch_py_backend.values import Columns, Items, Value

log = logging.getLogger(__name__)


def extractor(
    config: ModelConfig,
    of: str = "forward()",
    *,
    torchscript: bool = False,
) -> Extract:
    """Return the function that extracts the config's outputs from results of the function `of`.

    It raises BindingError if the first result does not have the outputs, and OutputError if a
    result contradicts the config, or its structure differs from that of the first. Shapes of
    TorchScript are served as Triton's LibTorch backend does.
    """
    names = tuple(spec.name for spec in config.outputs)
    verify = [Output(config, spec, any_shape=torchscript).verify for spec in config.outputs]
    bound: results.OutputBinding | None = None

    def extract(result: object, rows: int) -> Columns:
        nonlocal bound
        if bound is None:
            bound = results.bind_outputs(names, result, of)
        try:
            return [check(part, rows) for check, part in zip(verify, bound(result), strict=True)]
        except BackendError:
            raise
        except Exception as error:  # another structure, nested or fake tensors, subclasses
            raise OutputError(
                f"{of} returned {a_type(result)} that cannot be read: {summarize(error)}",
                expected=f"the outputs {join_names(names)} where its first result has them",
            ) from error

    return extract


def scatter_by_name(
    names: Sequence[str],
    split: Split | None,
    padding: Padding | None,
) -> Scatter:
    """Return what makes a result for each item from the outputs of a batch."""

    def scatter(
        outputs: Columns,
        sizes: Sequence[int],
        items: Items,
    ) -> Results:
        parts = list(outputs) if split is None else split(items, outputs)
        results = batches.scatter(parts, names, sizes)
        if padding is not None:
            padding.cut(results, items)
        return results

    return scatter


def finite_only(config: ModelConfig) -> Callable[[Result], Result]:
    """CHECK_FINITE: return the function that refuses a result that holds NaN or infinity."""
    names = []
    for spec in config.outputs:
        dtype: torch.dtype | None = getattr(torch, spec.dtype.torch or "", None)
        if spec.origin is Origin.CLIENT and dtype is not None and dtype.is_floating_point:
            names.append(spec.name)

    def check(result: Result) -> Result:
        for name in () if isinstance(result, BackendError) else names:
            value = result[name]
            # Faster than isfinite(). A sum is finite only if all values are; it may overflow.
            if not math.isfinite(value.sum()) and not torch.isfinite(value).all():
                return reported(
                    OutputError(
                        f"output '{name}' holds NaN or infinity",
                        expected="finite values: CHECK_FINITE is set",
                    )
                )
        return result

    return check


class Output:
    """One output of the config; `any_shape` serves other shapes, as LibTorch's backend does."""

    def __init__(
        self,
        config: ModelConfig,
        spec: TensorSpec,
        *,
        any_shape: bool = False,
    ) -> None:
        self._name = spec.name
        # A batch output is verified in one dimension, and split later.
        self._flat = spec.name in config.batch_outputs
        self._batched = config.max_batch_size > 0 and not self._flat
        self._sizes = (-1,) if self._flat else spec.dims
        self._dims = (-1, *spec.dims) if self._batched else self._sizes
        # Triton's reshape needs the config's shape, and so do the states of sequences.
        self._any_shape = any_shape and not spec.reshaped and spec.origin is Origin.CLIENT
        self._warned = False
        self._dtype: torch.dtype | None = getattr(torch, spec.dtype.torch or "", None)
        # 16-bit weights and inputs change the type of outputs; the config has the type without.
        options = config.options
        converts = options.weights_dtype is not None or options.cast_inputs is not None
        self._casts = converts and self._dtype is not None and self._dtype.is_floating_point

    def verify(self, part: object, rows: int) -> Value:
        """Return a part of a result, converted where nothing is lost; else raise OutputError."""
        dims = (rows, *self._sizes) if self._batched else self._sizes
        if (  # most outputs need nothing else
            type(part) is Tensor
            and part.dtype is self._dtype
            and part.layout is torch.strided
            and not (part.is_nested or part.is_meta or part.requires_grad or part.is_neg())
            and (part.shape == dims or fits(part.shape, dims))
            and part.is_contiguous()
        ):
            return part
        value = self._typed(to_value(self._name, part))
        if not fits(value.shape, dims):
            value = self._reshaped(value, dims)
            self._check_shape(value, rows)
        if not isinstance(value, Tensor):
            return value
        # Triton requires contiguous memory; numpy rejects a pending gradient or negation.
        if value.requires_grad or value.is_neg():
            value = value.detach().resolve_neg()
        return value.contiguous()

    def _typed(self, value: Value) -> Value:
        """Return a value of the output's type, or raise an error."""
        dtype: torch.dtype | None = None
        if isinstance(value, Tensor):
            if value.is_nested or value.layout is not torch.strided or value.is_meta:
                raise OutputError(
                    f"output '{self._name}' is a nested, sparse or empty tensor: {value.layout} on"
                    f" {value.device}",
                    expected="a dense tensor with values",
                )
            if self._casts and value.is_floating_point():
                value = value.to(self._dtype)
            dtype = value.dtype
        if dtype is not self._dtype:
            raise self._unlike(value)
        return value.reshape(-1) if self._flat else value

    def _reshaped(self, value: Value, dims: tuple[int, ...]) -> Value:
        """Return a value in the shape of the config if only dims of 1 are missing.

        They are [rows] for [-1, 1], a scalar for [1]. Strings may be a flat list, as LibTorch's.
        """
        if isinstance(value, Tensor):
            is_short = value.ndim == len(dims) - len(self._sizes)
            ones = set(self._sizes) <= {1}
            return value.reshape(*value.shape, *self._sizes) if is_short and ones else value
        with contextlib.suppress(ValueError):
            return value.reshape(dims) if value.ndim <= 1 else value
        return value

    def _check_shape(self, value: Value, rows: int) -> None:
        """Raise OutputError unless a shape is served; log a warning for the first of another."""
        shape = value.shape
        if not fits(shape, self._dims):
            if not (self._any_shape and shape):
                raise self._unlike(value)
            if not self._warned:
                self._warned = True
                log.warning(
                    "output '%s' is %s, and config.pbtxt says %s; it is served as it is.",
                    self._name,
                    list(shape),
                    list(self._dims),
                )
        if self._batched and shape[0] != rows:
            raise OutputError(
                f"output '{self._name}' has {counted(shape[0], 'row')} for a batch of {rows}",
                expected="as many rows as the inputs have",
                cure="If the model takes no batches, write max_batch_size: 0 and all dims into"
                " config.pbtxt.",
            )

    def _unlike(self, value: Value) -> OutputError:
        """Return the error of a value of another type or shape, with what to write."""
        kind, data_type = "strings", "TYPE_STRING"
        if isinstance(value, Tensor):
            kind, data_type = _short(value.dtype), dtypes.config_name(value.dtype)
        expected = "strings" if self._dtype is None else _short(self._dtype)
        dims = ", ".join(map(str, value.shape[int(self._batched) :] or [1]))
        return OutputError(
            f"output '{self._name}' is {kind} {list(value.shape)}",
            expected=f"{expected} {list(self._dims)} as in config.pbtxt",
            cure=f"Write what the model returns: data_type: {data_type} dims: [ {dims} ].",
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def to_value(name: str, part: object) -> Value:
    """Convert a part of a result to a tensor, or strings to an array of objects, as Triton's are.

    OutputError if it is neither, UnicodeEncodeError if it would fail the whole batch's responses.
    """
    if isinstance(part, Tensor):
        kind = type(part)
        operators = kind.__torch_function__ is not nn.Parameter.__torch_function__  # which has none
        wraps = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
        if kind is not Tensor and operators and not wraps:  # they are all that it adds
            return part.as_subclass(Tensor)
        return part
    if isinstance(part, np.ndarray | np.generic) and part.dtype.kind not in "OUS":
        # torch takes neither negative strides nor, without a warning, read-only memory.
        return torch.from_numpy(np.require(part, requirements=["C", "W"]))
    if isinstance(part, bool | int | float):
        return torch.tensor(part)
    if isinstance(part, str | bytes | list | tuple | np.ndarray):
        array = np.array(part, dtype=np.object_)
        texts = array.reshape(-1).tolist()
        if all(issubclass(kind, str | bytes) for kind in set(map(type, texts))):
            "".join([text for text in texts if not isinstance(text, bytes)]).encode()
            return array
    raise OutputError(
        f"output '{name}' is {a_type(part)}",
        expected="a tensor, an array, or a list of str or bytes; a generator needs"
        " model_transaction_policy { decoupled: true } in config.pbtxt",
    )
