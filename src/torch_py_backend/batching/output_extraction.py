"""Extract the config's outputs from a result: check, reshape and make contiguous."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.batching import gather_scatter
from torch_py_backend.batching.gather_scatter import Owned, Part, Strings, Value
from torch_py_backend.config.model_config import ModelConfig, Origin, TensorSpec
from torch_py_backend.errors import BackendError, OutputError, summarize
from torch_py_backend.signature import results

log = logging.getLogger(__name__)

# Converts a part of a result, for a number of rows, to an output; raises OutputError.
Verify: TypeAlias = "Callable[[Any, int], Value]"


def verifiers(config: ModelConfig) -> tuple[Verify, ...]:
    """Return one for each output, in the config's order, then one for each state of STATE."""
    batched = config.max_batch_size > 0
    carried = (_Expected(config.name, state.output, (), batched) for state in config.carried)
    split = {batch_output.name for batch_output in config.batch_outputs}
    return (
        *(
            _of_values(config, spec) if spec.name in split else _verifier(config, spec)
            for spec in config.outputs
        ),
        *(_Carried(expected).verify for expected in carried),
    )


def _of_values(config: ModelConfig, spec: TensorSpec) -> Verify:
    """Return what flattens a batch output to one dimension, which is split later."""
    unbatched = dataclasses.replace(config, max_batch_size=0)
    verify = _verifier(unbatched, dataclasses.replace(spec, dims=(-1,)))
    return lambda part, rows: verify(part.reshape(-1) if isinstance(part, Tensor) else part, rows)


def _verifier(config: ModelConfig, spec: TensorSpec) -> Verify:
    batched = config.max_batch_size > 0
    dims = (-1, *spec.dims) if batched else spec.dims
    # Triton's reshape needs the config's shape, and so do the states of sequences.
    any_shape = not (
        config.options.check_outputs or spec.reshaped or spec.origin is not Origin.CLIENT
    )
    expected = _Expected(config.name, spec.name, dims, batched, any_shape=any_shape)
    if spec.dtype.torch is None:
        return _Strings(expected).verify
    dtype: torch.dtype = getattr(torch, spec.dtype.torch)
    # Autocast changes the type of outputs; the config has the type without it.
    cast = config.options.cast_outputs or (
        config.options.autocast is not None and dtype.is_floating_point
    )
    start = int(batched)
    # Compared first, because most outputs have fixed dims. None if there is only the batch.
    fixed = dims[start:] if len(dims) > start else None
    return _Tensors(expected, dtype, cast, start, fixed).verify


class OutputExtractor:
    """Extracts the config's outputs from results and checks them.

    Args:
        config: the model's config.
        of: the name of the function that returns the results, for messages.
    """

    def __init__(self, config: ModelConfig, of: str = "forward()") -> None:
        self._model = config.name
        self._of = of
        self._names = tuple(spec.name for spec in config.outputs)
        self._carried = tuple(state.output for state in config.carried)
        self._verify = verifiers(config)
        # Bound to the structure of the first result.
        self._outputs: results.OutputBinding | None = None

    def take(self, result: Any, rows: int) -> list[Value]:
        """Return the outputs of a result for `rows` rows, in the config's order.

        Raises:
            BindingError: the first result does not have the outputs.
            OutputError: the result contradicts the config, or its structure differs from the first.
        """
        if self._outputs is None:
            self._outputs = self._bind(result)
        try:
            parts = self._outputs(result)
        except (LookupError, AttributeError, TypeError):
            raise OutputError(
                self._model,
                f"{self._of} returned a {type(result).__name__} unlike its first result",
                expected=f"the outputs {', '.join(self._names)}",
            ) from None
        try:
            return [verify(part, rows) for verify, part in zip(self._verify, parts, strict=True)]
        except BackendError:
            raise
        except Exception as error:  # nested tensors, fake tensors, subclasses
            raise OutputError(
                self._model,
                f"the outputs cannot be read: {summarize(error)}",
                expected="dense tensors",
            ) from error

    def _bind(self, result: Any) -> results.OutputBinding:
        """Return what reads the outputs from a result, followed by the states of STATE."""
        outputs = results.bind_outputs(self._model, self._names, result, self._of)
        if not self._carried:
            return outputs
        states = results.bind_outputs(self._model, self._carried, result, self._of)
        return lambda result: [*outputs(result), *states(result)]


class Finite:
    """CHECK_FINITE: refuses items whose outputs hold NaN or infinity."""

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._places = [
            (place, spec.name)
            for place, spec in enumerate(config.outputs)
            if spec.origin is Origin.CLIENT
            and spec.dtype.torch
            and getattr(torch, spec.dtype.torch).is_floating_point
        ]

    def holds(self, outputs: Sequence[Value | Owned]) -> bool:
        """Return whether all outputs of a batch are finite."""
        return all(_finite(outputs[place]) for place, _ in self._places)

    def refusal(self, outcome: Mapping[str, Value]) -> OutputError | None:
        """Return the error for one item's outputs; None: they are finite."""
        for _, name in self._places:
            if not _finite(outcome[name]):
                return OutputError(
                    self._model,
                    f"output '{name}' holds NaN or infinity",
                    expected="finite values: CHECK_FINITE is set",
                )
        return None


def _finite(value: Value | Owned | Part) -> bool:
    if isinstance(value, Owned):
        return all(map(_finite, value))
    value = gather_scatter.taken(value)
    return not isinstance(value, Tensor) or bool(torch.isfinite(value).all())


def plain(model: str, name: str, part: Any) -> Value:
    """Convert a part of a result to a tensor or an array of strings, without checks.

    Raises:
        OutputError: the part is neither numbers nor strings.
    """
    if isinstance(part, Tensor):
        return part.detach()
    if isinstance(part, bool | int | float):
        return torch.tensor(part)
    return _Strings(_Expected(model, name, (), batched=False)).array(part)


@dataclass(slots=True)
class _Expected:
    """What the config says about an output.

    Attributes:
        dims: the output's dims, with the batch dimension as -1.
        any_shape: whether other shapes are served with a warning, not refused.
        warned: whether that warning was logged.
    """

    model: str
    name: str
    dims: tuple[int, ...]
    batched: bool
    any_shape: bool = False
    warned: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.dims) and all(
            dim in (-1, size) for size, dim in zip(shape, self.dims, strict=True)
        )

    def serves(self, shape: tuple[int, ...]) -> bool:
        """Return whether a shape that does not fit is served; log a warning for the first."""
        if not self.any_shape or not shape:
            return False
        if not self.warned:
            self.warned = True
            log.warning(
                "model '%s': output '%s' is %s, and config.pbtxt says %s; it is served as it is,"
                " because CHECK_OUTPUTS is false.",
                self.model,
                self.name,
                list(shape),
                list(self.dims),
            )
        return True

    def lacks_ones(self, shape: tuple[int, ...]) -> bool:
        """Return whether only dims of 1 are missing: [rows] for [-1, 1], a scalar for [1]."""
        ones = self.dims[1:] if self.batched else self.dims
        return len(shape) == int(self.batched) and all(size == 1 for size in ones)

    def check_rows(self, size: int, rows: int) -> None:
        if self.batched and size != rows:
            raise OutputError(
                self.model,
                f"output '{self.name}' has {size} rows for a batch of {rows}",
                expected="as many rows as the inputs have",
            )

    def mismatch(self, actual: str, kind: str) -> OutputError:
        dims = ", ".join(map(str, self.dims))
        return OutputError(
            self.model,
            f"output '{self.name}' is {actual}",
            expected=f"{kind} [{dims}] as in config.pbtxt",
        )


@dataclass(frozen=True, slots=True)
class _Tensors:
    expected: _Expected
    dtype: torch.dtype
    cast: bool
    start: int
    fixed: tuple[int, ...] | None

    def verify(self, part: Any, rows: int) -> Tensor:
        if not isinstance(part, Tensor):
            part = self._from_number(part)
        if part.dtype is not self.dtype:
            part = self._cast(part)
        if part.layout is not torch.strided or part.is_meta:
            raise self.expected.mismatch(_form(part), "a dense tensor with values")
        shape = part.shape
        if shape[self.start :] != self.fixed and not self.expected.fits(shape):
            if self.expected.lacks_ones(shape):
                part = part.reshape(*shape, *(1,) * (len(self.expected.dims) - len(shape)))
            elif not self.expected.serves(shape):
                raise self._mismatch(part)
        self.expected.check_rows(part.shape[0] if part.ndim else rows, rows)
        # Triton's utilities require contiguous memory. numpy rejects tensors that require a
        # gradient or have a pending negation.
        if part.requires_grad or part.is_neg():
            part = part.detach().resolve_neg()
        contiguous: Tensor = part.contiguous()
        return contiguous

    def _cast(self, part: Tensor) -> Tensor:
        special = part.is_complex() or part.is_quantized or part.is_nested
        if self.cast and not special and part.layout is torch.strided:
            return part.to(self.dtype)
        raise self._mismatch(part)

    def _from_number(self, part: Any) -> Tensor:
        """Convert a Python number, allowed only for a model without a batch dimension."""
        if isinstance(part, bool | int | float) and not self.expected.batched:
            return self._exactly(part)
        raise OutputError(
            self.expected.model,
            f"output '{self.expected.name}' is a {type(part).__name__}",
            expected="a torch.Tensor",
        )

    def _exactly(self, number: float) -> Tensor:
        """Convert a number to the output's type without loss."""
        if isinstance(number, bool) or self.dtype is torch.bool:
            fits = isinstance(number, bool)
        elif self.dtype.is_floating_point:
            number, fits = float(number), True
        else:
            limits = torch.iinfo(self.dtype)
            fits = isinstance(number, int) and limits.min <= number <= limits.max
        if fits:
            return torch.tensor(number, dtype=self.dtype)
        raise self.expected.mismatch(f"the number {number}", _short(self.dtype))

    def _mismatch(self, part: Tensor) -> OutputError:
        return self.expected.mismatch(_form(part), _short(self.dtype))


def _form(part: Tensor) -> str:
    """Describe a tensor in a message."""
    if part.is_nested:  # has no shape
        return f"a nested tensor of {_short(part.dtype)}"
    kind = f"{_short(part.dtype)} {list(part.shape)}"
    if part.layout is not torch.strided:
        return f"a tensor of layout {_short(part.layout)}, {kind}"
    return f"a tensor on the device meta, {kind}" if part.is_meta else kind


def _short(of: torch.dtype | torch.layout) -> str:
    return str(of).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class _Carried:
    """A state of STATE: a tensor of any type, with as many rows as the batch."""

    expected: _Expected

    def verify(self, part: Any, rows: int) -> Tensor:
        dense = isinstance(part, Tensor) and part.layout is torch.strided and not part.is_meta
        if not dense or (self.expected.batched and not part.ndim):
            form = _form(part) if isinstance(part, Tensor) else f"a {type(part).__name__}"
            raise OutputError(
                self.expected.model,
                f"the state '{self.expected.name}' is {form}",
                expected="a dense tensor, whose first dimension is the batch",
            )
        self.expected.check_rows(part.shape[0] if part.ndim else rows, rows)
        detached: Tensor = part.detach()
        return detached.resolve_neg().resolve_conj().contiguous()


@dataclass(frozen=True, slots=True)
class _Strings:
    expected: _Expected

    def verify(self, part: Any, rows: int) -> Value:
        strings = self.array(part)
        self._check_text(strings)
        if not self.expected.fits(strings.shape):
            shaped = self._shaped(strings, rows)
            if shaped is None and not self.expected.serves(strings.shape):
                raise self.expected.mismatch(f"strings {list(strings.shape)}", "strings")
            strings = strings if shaped is None else shaped
        self.expected.check_rows(strings.shape[0] if strings.ndim else rows, rows)
        return strings

    def array(self, part: Any) -> Strings:
        """Convert strings to an array of objects: Triton's utilities refuse other string types."""
        if isinstance(part, np.ndarray) and part.dtype.kind in "OUS":
            return part.astype(np.object_)
        if isinstance(part, str | bytes):
            return np.array(part, dtype=np.object_)
        if isinstance(part, list | tuple):
            array = np.array(part, dtype=np.object_)
            if all(isinstance(text, str | bytes) for text in array.flat):
                return array
        raise OutputError(
            self.expected.model,
            f"output '{self.expected.name}' is a {type(part).__name__}",
            expected="a list of str or bytes",
        )

    def _check_text(self, strings: Strings) -> None:
        """Refuse strings that cannot be encoded: writing them would fail the whole batch."""
        try:
            for text in strings.reshape(-1).tolist():
                if not isinstance(text, bytes):
                    text.encode()
        except (AttributeError, UnicodeEncodeError) as error:
            raise self.expected.mismatch(f"no strings: {error}", "strings") from None

    def _shaped(self, strings: Strings, rows: int) -> Strings | None:
        """Reshape a flat list of all rows' strings, as LibTorch does; None: that does not fit."""
        dims = (rows, *self.expected.dims[1:]) if self.expected.batched else self.expected.dims
        if strings.ndim > 1 or dims.count(-1) > 1:
            return None
        try:
            return strings.reshape(dims)
        except ValueError:
            return None
