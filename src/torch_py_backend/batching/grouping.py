"""Check, decode and group items; convert columns to the arguments of forward()."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.batching import input_types, traced_item
from torch_py_backend.batching.gather_scatter import Item, Strings, Value
from torch_py_backend.batching.padding import Pad, Padding
from torch_py_backend.config import dtypes
from torch_py_backend.config.model_config import ModelConfig, Origin
from torch_py_backend.errors import BindingError, InputError
from torch_py_backend.signature.arguments import ArgumentType, Signature
from torch_py_backend.signature.binding import bind_inputs
from torch_py_backend.signature.calls import InputBinding


class Group(NamedTuple):
    """Items that can share a call.

    Attributes:
        inputs: how the inputs are passed; depends on the optional inputs that the items have.
        items: the items.
        positions: the positions of the items among all items of the run.
    """

    inputs: InputBinding
    items: Sequence[Item]
    positions: Sequence[int]


class Grouping:
    """Checks and groups a model's items, and converts them to arguments.

    Attributes:
        patterns: the sets of optional inputs that are left out at load: none of them, and all.
        binding: how a batch is passed whose items have all inputs.
        takes_arrays: whether items that are `alike` hold arrays of numbers, and nothing is added.

    Raises:
        BindingError: the config's inputs do not match the signature.
    """

    def __init__(
        self,
        config: ModelConfig,
        signature: Signature,
        padding: Padding | None = None,
        *,
        cast: torch.dtype | None = None,
    ) -> None:
        self._padding = padding
        self._pads: Mapping[str, Pad] = padding.pads if padding else {}
        masks = frozenset(padding.masks if padding else ())
        self._model = config.name
        self._batched = config.max_batch_size > 0
        self._signature = signature
        self._names = [spec.name for spec in config.inputs]
        # Created from the batch, not sent by requests.
        self._batch_inputs = [batch_input.name for batch_input in config.batch_inputs]
        self._flattened = frozenset(
            spec.name for spec in config.inputs if spec.ragged and config.concatenates
        )
        self._required = [spec.name for spec in config.inputs if not spec.optional]
        self._axes = {spec.name: len(spec.dims) + 1 for spec in config.inputs}
        # The inputs to compare rows of. A state always has as many rows as its step.
        self._sent = [
            (spec.name, len(spec.dims) + 1)
            for spec in config.inputs
            if spec.origin is not Origin.STATE
        ]
        # States and controls of sequences are bound by name only.
        self._kept = frozenset(
            spec.name for spec in config.inputs if spec.origin is not Origin.CLIENT
        )
        names = [*self._names, *self._batch_inputs]
        self.binding = bind_inputs(config.name, names, signature, sequence_inputs=self._kept)
        self._special = {
            name: takes
            for name, takes in zip(self.binding.names, self.binding.types, strict=True)
            if takes.scalar or takes in _LISTS
        }
        input_types.check_arguments(config, signature, self._special)
        # Triton checks fixed dims: items with all inputs can share a call without further checks.
        self._uniform = (
            self._batched
            and not self._special
            and padding is None
            and bool(self._sent)
            and all(
                spec.dtype.torch and (-1 not in spec.dims or spec.name in self._flattened)
                for spec in config.inputs
            )
        )
        self.takes_arrays = (
            self._uniform
            and not self._flattened
            and all(spec.dtype.numpy and spec.origin is Origin.CLIENT for spec in config.inputs)
        )
        # Triton leaves inputs on their device then, so items may be on different devices.
        self._any_device = not config.options.force_cpu_only_input_tensors
        self._strings = {spec.name for spec in config.inputs if spec.dtype.torch is None}
        self._partial: dict[frozenset[str], InputBinding] = {}
        configured = config.options.cast_inputs
        self._cast: torch.dtype | None = (
            getattr(torch, dtypes.from_triton(configured).torch or "") if configured else cast
        )
        input_types.check_leaves(config, signature, self.binding.names, self._cast)
        optional = frozenset(self._names) - frozenset(self._required) - masks
        # Other sets are bound by the first request that leaves them out, or refuse it.
        self.patterns = (frozenset(), optional) if optional else (frozenset(),)
        for pattern in self.patterns[1:]:
            self._bound(pattern)

    @property
    def places(self) -> dict[str, str]:
        """Where each input goes: an argument, or a path in the call tree."""
        return dict(zip(self.binding.names, self.binding.places, strict=True))

    @property
    def converts(self) -> bool:
        """Whether `convert` changes any column."""
        return self._cast is not None or bool(self._special)

    def alike(self, items: Sequence[Any]) -> bool:
        """Return whether the config alone shows that all items are valid and can share a call.

        Some may be errors of refused requests instead.
        """
        if not self._uniform:
            return False
        try:
            # Triton drops the batch dimension of a request whose shape says 0 rows.
            for name, axes in self._sent:
                for item in items:
                    if item[name].ndim != axes:
                        return False
            (first, _), *others = self._sent
            if others:
                rows = [item[first].shape[0] for item in items]
                for name, _ in others:
                    if [item[name].shape[0] for item in items] != rows:
                        return False
        except (LookupError, TypeError):  # an input is missing, or an item was refused
            return False
        return not self._any_device or self._on_one_device(items)

    def _on_one_device(self, items: Sequence[Item]) -> bool:
        return all(len({_device(item[name]) for item in items}) == 1 for name, _ in self._sent)

    def admit(self, item: Item) -> Item | InputError:
        """Return the item with masks added and strings decoded, or the reason to refuse it."""
        for name in self._required:
            if name not in item:
                return InputError(self._model, f"the request lacks the input '{name}'")
        if self._batched:
            rows = count_rows(self._model, item, self._axes)
            if isinstance(rows, InputError):
                return rows
        if self._padding is not None:
            mismatch = self._padding.mismatch(item)
            if mismatch is not None:
                return mismatch
            item = self._padding.fill(item)
        if len(item) < len(self._names):
            try:
                self._inputs(item)
            except BindingError as error:
                return InputError(self._model, f"the request lacks inputs: {error}")
        return self._admit_values(item) if self._special or self._strings else item

    def _admit_values(self, item: Item) -> Item | InputError:
        admitted = traced_item.like(item, dict(item))
        for name, value in item.items():
            takes = self._special.get(name, ArgumentType.TENSOR)
            if name in self._strings and not takes.raw:
                try:
                    # A TorchScript string holds bytes of any encoding.
                    admitted[name] = _decode(value, any_bytes=self._signature.torchscript)
                except UnicodeDecodeError as error:
                    return InputError(self._model, f"input '{name}' is not UTF-8: {error.reason}")
            if not takes.scalar or math.prod(value.shape) == 1:
                continue
            distinct = set(map(repr, _flat(value)))  # repr, because NaN does not equal itself
            if len(distinct) != 1:
                return InputError(
                    self._model,
                    f"input '{name}' holds {len(distinct)} values",
                    expected="one value for all rows:"
                    f" {self._signature.name}() takes {takes.value}",
                )
        return admitted

    def group(self, items: Sequence[tuple[int, Item]]) -> list[Group]:
        """Group items with the same inputs, shapes without rows, devices and scalars."""
        if not self._batched or len(items) <= 1:
            return [Group(self._inputs(item), [item], [position]) for position, item in items]
        groups: dict[tuple[object, ...], list[tuple[int, Item]]] = {}
        for position, item in items:
            groups.setdefault(self._group_key(item), []).append((position, item))
        split = self._padding.split if self._padding is not None else lambda members: [members]
        return [
            Group(self._inputs(part[0][1]), [item for _, item in part], [at for at, _ in part])
            for members in groups.values()
            for part in split(members)
        ]

    def _group_key(self, item: Item) -> tuple[object, ...]:
        """Return what items of one batch have in common."""
        names = self._names if len(item) == len(self._names) else sorted(item)
        key: list[object] = [len(item), *names]
        for name in names:
            value, pad = item[name], self._pads.get(name)
            if name not in self._flattened:
                key.append(value.shape[1:] if pad is None else pad.fixed(value.shape))
            key.append(_device(value))
        for name, takes in self._special.items():
            if takes.scalar and name in item:
                key.append(_flat(item[name])[0])
        return tuple(key)

    def _inputs(self, item: Item) -> InputBinding:
        if len(item) == len(self._names):
            return self.binding
        return self._bound(frozenset(self._names).difference(item))

    def _bound(self, left_out: frozenset[str]) -> InputBinding:
        """Return how items without these inputs are passed.

        Raises:
            BindingError: the signature requires one of them, or there are too many such sets.
        """
        if left_out not in self._partial:
            if len(self._partial) == MAX_SETS:
                raise BindingError(
                    self._model,
                    f"earlier requests left out {MAX_SETS} other sets of optional inputs",
                    cure="Send all optional inputs, or none.",
                )
            self._partial[left_out] = bind_inputs(
                self._model,
                [*self._names, *self._batch_inputs],
                self._signature,
                left_out,
                sequence_inputs=self._kept,
            )
        return self._partial[left_out]

    def convert(self, inputs: InputBinding, columns: Sequence[Value]) -> Sequence[object]:
        """Convert columns to arguments of forward(): cast them, make scalars and lists of them."""
        if not self.converts:
            return columns
        arguments: list[object] = []
        for name, column, takes in zip(inputs.names, columns, inputs.types, strict=True):
            argument: object = column
            if takes.scalar:
                argument = _SCALARS[takes](_flat(column)[0])
            elif not isinstance(column, Tensor):
                argument = _LISTS[takes](column) if takes in _LISTS else column
            elif self._cast and column.is_floating_point() and name not in self._batch_inputs:
                argument = column.to(self._cast)
            arguments.append(argument)
        return arguments


_HOST = torch.device("cpu")


def _device(value: Value) -> torch.device:
    return value.device if isinstance(value, Tensor) else _HOST


def count_rows(model: str, item: Item, axes: Mapping[str, int]) -> int | InputError:
    """Return the number of rows of an item, or how its inputs' shapes contradict each other.

    `axes` is the number of dimensions of inputs, including rows; other inputs may have any.
    """
    if not item:
        return InputError(model, "the request has no inputs, and so no number of rows")
    rows = -1
    for name, value in item.items():
        # Triton drops the batch dimension of a request whose shape says 0 rows.
        if value.ndim != axes.get(name, value.ndim):
            return InputError(
                model,
                f"input '{name}' has the shape {list(value.shape)} and no rows",
                expected=f"{axes[name]} dimensions, the first of at least 1",
            )
        if rows not in (-1, value.shape[0]):
            return InputError(
                model,
                f"the request's inputs have {rows} and {value.shape[0]} rows",
                expected="the same number of rows in each",
            )
        rows = value.shape[0]
    return rows


# Strings are passed as a flat list, as LibTorch does, unless the annotation is a nested list.
_LISTS: Mapping[ArgumentType, Callable[[Strings], list[object]]] = {
    ArgumentType.STRINGS: lambda column: column.ravel().tolist(),
    ArgumentType.BYTES: lambda column: column.ravel().tolist(),
    ArgumentType.NESTED_STRINGS: lambda column: column.tolist(),
    ArgumentType.NESTED_BYTES: lambda column: column.tolist(),
}


_SCALARS: Mapping[ArgumentType, Callable[[Any], object]] = {
    ArgumentType.INT: int,
    ArgumentType.FLOAT: float,
    ArgumentType.BOOL: bool,
    ArgumentType.STR: lambda value: value if isinstance(value, bytes) else str(value),
    ArgumentType.RAW: lambda value: value if isinstance(value, bytes) else value.encode(),
    ArgumentType.VALUE: lambda value: value,
}


# The most sets of optional inputs that requests may leave out: n inputs have 2^n sets.
MAX_SETS = 64


def _flat(value: Value) -> list[Any]:
    return value.reshape(-1).tolist()


def _decode(value: Value, *, any_bytes: bool) -> Strings:
    """Decode UTF-8 strings to str; with `any_bytes`, keep others as bytes.

    Raises:
        UnicodeDecodeError: a string is not UTF-8, and `any_bytes` is false.
    """
    decode: Callable[[bytes], str | bytes] = _decode_utf8 if any_bytes else bytes.decode
    decoded: Strings = np.empty(value.shape, dtype=np.object_)
    decoded.ravel()[:] = [
        decode(text) if isinstance(text, bytes) else str(text) for text in _flat(value)
    ]
    return decoded


def _decode_utf8(text: bytes) -> str | bytes:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text
