"""Extract the config's outputs from a result: check, reshape and make contiguous."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from torch_py_backend.config import dtypes, pbtxt
from torch_py_backend.config.model_config import ModelConfig, Origin, TensorSpec
from torch_py_backend.errors import BackendError, OutputError, a_type, counted, summarize
from torch_py_backend.pipeline.failures import reported
from torch_py_backend.pipeline.run import Entries, Result, Results
from torch_py_backend.signature import results
from torch_py_backend.values import Strings, Value

log = logging.getLogger(__name__)

# Up to this size, the outputs of a batch are checked by CHECK_FINITE in one call.
_CHECKED_TOGETHER_BYTES = 1 << 20

# Converts a part of a result, for a number of rows, to an output; raises OutputError.
Verify: TypeAlias = "Callable[[object, int], Value]"


class OutputExtractor:
    """Extracts the config's outputs from results and checks them.

    Args:
        of: the name of the function that returns the results, for messages.
        torchscript: the function is TorchScript's, which follows Triton's LibTorch backend.
    """

    def __init__(
        self, config: ModelConfig, of: str = "forward()", *, torchscript: bool = False
    ) -> None:
        self._of = of
        self._names = tuple(spec.name for spec in config.outputs)
        self._verify = [verifier(config, spec, any_shape=torchscript) for spec in config.outputs]
        # Bound to the structure of the first result.
        self._outputs: results.OutputBinding | None = None

    def extract(self, result: object, rows: int) -> list[Value]:
        """Return the config's outputs of a result for `rows` rows.

        Raises:
            BindingError: the first result does not have the outputs.
            OutputError: the result contradicts the config, or its structure differs from the first.
        """
        if self._outputs is None:
            self._outputs = results.bind_outputs(self._names, result, self._of)
        try:
            parts = self._outputs(result)
        except (LookupError, AttributeError, TypeError):
            raise OutputError(
                f"{self._of} returned {a_type(result)} unlike its first result",
                expected=f"the outputs {', '.join(self._names)}",
            ) from None
        try:
            return [verify(part, rows) for verify, part in zip(self._verify, parts, strict=True)]
        except BackendError:
            raise
        except Exception as error:  # nested tensors, fake tensors, subclasses
            raise OutputError(
                f"the outputs cannot be read: {summarize(error)}",
                expected="dense tensors",
            ) from error


class Finite:
    """CHECK_FINITE: refuses results that hold NaN or infinity."""

    def __init__(self, config: ModelConfig) -> None:
        self._names = []
        for spec in config.outputs:
            dtype: torch.dtype | None = getattr(torch, spec.dtype.torch or "", None)
            if spec.origin is Origin.CLIENT and dtype is not None and dtype.is_floating_point:
                self._names.append(spec.name)

    def finish(self, results: Results, _: Entries) -> Results:
        """Return results, with an error in the place of each that is not finite."""
        return results if self._all_finite(results) else list(map(self.checked, results))

    def _all_finite(self, results: Results) -> bool:
        """Return whether all results are finite; False, too, if copying them would take long."""
        outcomes = [result for result in results if not isinstance(result, BackendError)]
        for name in self._names if outcomes else ():
            values = [outcome[name].reshape(-1) for outcome in outcomes]
            if len(values) * values[0].nbytes > _CHECKED_TOGETHER_BYTES:
                return False
            if not torch.isfinite(torch.cat(values)).all():
                return False
        return True

    def checked(self, result: Result) -> Result:
        """Return a request's result, or an error if an output is not finite."""
        if isinstance(result, BackendError):
            return result
        for name in self._names:
            if not torch.isfinite(result[name]).all():
                return reported(
                    OutputError(
                        f"output '{name}' holds NaN or infinity",
                        expected="finite values: CHECK_FINITE is set",
                    )
                )
        return result


def verifier(
    config: ModelConfig,
    spec: TensorSpec,
    *,
    any_shape: bool = False,
) -> Verify:
    """Return what verifies an output.

    With `any_shape`, shapes that differ from the config's are served, as LibTorch's backend does.
    """
    output = _Output(config, spec, any_shape=any_shape)
    return output.strings if spec.dtype.torch is None else output.tensor


class _Output:
    """One output, as the config describes it."""

    def __init__(
        self,
        config: ModelConfig,
        spec: TensorSpec,
        *,
        any_shape: bool,
    ) -> None:
        self.name = spec.name
        # A batch output is verified in one dimension, and split later.
        self.flat = any(output.name == spec.name for output in config.batch_outputs)
        self.batched = config.max_batch_size > 0 and not self.flat
        self.dims = (-1, *spec.dims) if self.batched else spec.dims
        if self.flat:
            self.dims = (-1,)
        # Triton's reshape needs the config's shape, and so do the states of sequences.
        self.any_shape = any_shape and not spec.reshaped and spec.origin is Origin.CLIENT
        self.warned = False
        self.dtype: torch.dtype | None = getattr(torch, spec.dtype.torch or "", None)
        # 16-bit weights and inputs change the type of outputs; the config has the type without.
        options = config.options
        converts = options.weights_dtype is not None or options.cast_inputs is not None
        self.cast = converts and self.dtype is not None and self.dtype.is_floating_point
        self.start = int(self.batched)
        # Compared first, because most outputs have fixed dims. None if there is only the batch.
        self.fixed: tuple[int, ...] | None = None
        if len(self.dims) > self.start:
            self.fixed = self.dims[self.start :]

    def serves(self, shape: tuple[int, ...]) -> bool:
        """Return whether a shape that does not fit is served; log a warning for the first."""
        if not self.any_shape or not shape:
            return False
        if not self.warned:
            self.warned = True
            log.warning(
                "output '%s' is %s, and config.pbtxt says %s; it is served as it is.",
                self.name,
                list(shape),
                list(self.dims),
            )
        return True

    def cure(self, shape: Sequence[int], data_type: str) -> str:
        """Return a sentence with what to write into config.pbtxt for a result of this shape."""
        sizes = ", ".join(map(str, shape[self.start :] or [1]))
        return f"Write what the model returns: data_type: {data_type} dims: [ {sizes} ]."

    def wrong_rows(self, size: int, rows: int) -> OutputError:
        return OutputError(
            f"output '{self.name}' has {counted(size, 'row')} for a batch of {rows}",
            expected="as many rows as the inputs have",
            cure="If the model takes no batches, write max_batch_size: 0 and all dims into"
            " config.pbtxt.",
        )

    def mismatch(self, actual: str, kind: str, cure: str = "") -> OutputError:
        dims = ", ".join(map(str, self.dims))
        return OutputError(
            f"output '{self.name}' is {actual}",
            expected=f"{kind} [{dims}] as in config.pbtxt",
            cure=cure,
        )

    def tensor(self, part: object, rows: int) -> Tensor:
        if (  # most outputs need nothing else
            type(part) is Tensor
            and part.dtype is self.dtype
            and part.layout is torch.strided
            and not (part.is_nested or part.is_meta or part.requires_grad or part.is_neg())
            and (part.shape[self.start :] == self.fixed or pbtxt.fits(part.shape, self.dims))
            and (not self.batched or part.shape[0] == rows)
            and part.is_contiguous()
        ):
            return part
        return self._converted(part, rows)

    def _converted(self, part: object, rows: int) -> Tensor:
        """Return a part as the output, converted where nothing is lost."""
        tensor = self._dense(part)
        shape = tensor.shape
        if shape[self.start :] != self.fixed and not pbtxt.fits(shape, self.dims):
            ones = self.dims[self.start :]
            if len(shape) == self.start and all(size == 1 for size in ones):
                # Only dims of 1 are missing: [rows] for [-1, 1], a scalar for [1].
                tensor = tensor.reshape(*shape, *ones)
            elif not self.serves(shape):
                raise self._unlike(tensor)
        if self.batched and shape[0] != rows:
            raise self.wrong_rows(shape[0], rows)
        # Triton's utilities require contiguous memory. numpy rejects tensors that require a
        # gradient or have a pending negation.
        if tensor.requires_grad or tensor.is_neg():
            tensor = tensor.detach().resolve_neg()
        return tensor.contiguous()

    def _dense(self, part: object) -> Tensor:
        """Return a part as a dense tensor of the output's type."""
        if isinstance(part, np.ndarray | np.generic) and part.dtype.kind not in "OUS":
            part = _from_numpy(part)
        if not isinstance(part, Tensor):
            raise OutputError(
                f"output '{self.name}' is {a_type(part)}",
                expected="a torch.Tensor or an array of numpy",
            )
        if type(part) is not Tensor:
            part = _without_operators(part)
        if part.is_nested or part.layout is not torch.strided or part.is_meta:
            raise self.mismatch(
                f"a nested, sparse or empty tensor: {part.layout} on {part.device}",
                "a dense tensor with values",
            )
        if part.dtype is not self.dtype:
            if not (self.cast and part.is_floating_point()):
                raise self._unlike(part)
            part = part.to(self.dtype)
        return part.reshape(-1) if self.flat else part

    def _unlike(self, part: Tensor) -> OutputError:
        """Return the error of a tensor whose type or shape is another."""
        cure = self.cure(part.shape, dtypes.config_name(part.dtype))
        return self.mismatch(f"{_short(part.dtype)} {list(part.shape)}", _short(self.dtype), cure)

    def strings(self, part: object, rows: int) -> Strings:
        strings = _strings(self.name, part)
        try:  # strings that cannot be encoded would fail the responses of the whole batch
            texts = strings.reshape(-1).tolist()
            "".join([text for text in texts if not isinstance(text, bytes)]).encode()
        except (TypeError, UnicodeEncodeError) as error:
            raise self.mismatch(f"no strings: {error}", "strings") from None
        if not pbtxt.fits(strings.shape, self.dims):
            # A flat list holds the strings of all rows, as LibTorch's does.
            dims = (rows, *self.dims[1:]) if self.batched else self.dims
            if strings.ndim <= 1 and dims.count(-1) <= 1:
                with contextlib.suppress(ValueError):
                    strings = strings.reshape(dims)
            shape = strings.shape
            if not (pbtxt.fits(shape, self.dims) or self.serves(shape)):
                cure = self.cure(shape, "TYPE_STRING")
                raise self.mismatch(f"strings {list(shape)}", "strings", cure)
        if self.batched and strings.shape[0] != rows:
            raise self.wrong_rows(strings.shape[0], rows)
        return strings


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def unchecked(name: str, part: object) -> Value:
    """Convert a part of a result to a tensor or an array of strings, without checks.

    Raises:
        OutputError: the part is neither numbers nor strings.
    """
    if isinstance(part, Tensor):
        return part.detach()
    if isinstance(part, np.ndarray | np.generic) and part.dtype.kind not in "OUS":
        return _from_numpy(part)
    if isinstance(part, bool | int | float):
        return torch.tensor(part)
    return _strings(name, part)


def _from_numpy(part: np.ndarray[Any, Any] | np.generic) -> Tensor:
    """Convert numpy's numbers; those of types that torch does not have raise TypeError."""
    # torch takes neither negative strides nor, without a warning, memory that cannot be written.
    return torch.from_numpy(np.require(part, requirements=["C", "W"]))


def _without_operators(part: Tensor) -> Tensor:
    """Return a tensor of a subclass without the subclass, if its operators are all that it adds."""
    kind = type(part)
    operators = kind.__torch_function__ is not nn.Parameter.__torch_function__  # which has none
    wraps = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    return part.as_subclass(Tensor) if operators and not wraps else part


def _strings(name: str, part: object) -> Strings:
    """Convert strings to an array of objects: Triton's utilities refuse other string types."""
    if isinstance(part, np.ndarray) and part.dtype.kind in "OUS":
        return part.astype(np.object_)
    if isinstance(part, str | bytes):
        return np.array(part, dtype=np.object_)
    if isinstance(part, list | tuple):
        array = np.array(part, dtype=np.object_)
        kinds = set(map(type, array.reshape(-1).tolist()))
        if all(issubclass(kind, str | bytes) for kind in kinds):
            return array
    raise OutputError(
        f"output '{name}' is {a_type(part)}",
        expected="a list of str or bytes",
    )
