"""The inputs of a batch: checked, compared, gathered and converted by kinds chosen at load."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.config import dtypes
from torch_py_backend.config.model_config import ModelConfig, Origin, TensorSpec
from torch_py_backend.errors import BackendError, BindingError, InputError
from torch_py_backend.pipeline import batches, ragged
from torch_py_backend.pipeline.padding import Padding
from torch_py_backend.pipeline.run import Entries, Gather, Gathered, Group, Grouped, GroupStage
from torch_py_backend.signature.arguments import ArgumentType, Signature
from torch_py_backend.signature.binding import InputBinding, bind_inputs
from torch_py_backend.values import Call, Item, Items, Strings, Tree, Value, clone

# For how many sets of names bindings are kept: n optional inputs have 2^n sets.
MAX_SETS = 64
# Returns the function that calls the model with the arguments of a binding, in its order.
Caller: TypeAlias = "Callable[[InputBinding], Call]"
# Returns what the values of one call have in common.
Key: TypeAlias = "Callable[[Value], Hashable]"
# Makes an argument of a column, or of one value.
_Make: TypeAlias = "Callable[[Any], object]"
_HOST = torch.device("cpu")
# Takes the place of an input that a request leaves out: without rows, a value would be refused.
_MISSING = np.empty(())


class Kind(NamedTuple):
    """How values, of `axes` dimensions, become a column, and the column an argument.

    Each of `keys` is equal for the values of one call.
    """

    axes: int
    keys: Sequence[Key]
    gather: Callable[[Sequence[Value]], Value]
    argument: Argument


class Inputs:
    """Checks, groups and gathers items; BindingError if the config does not match the signature.

    Args:
        cast: the type that floating-point inputs are converted to, unless CAST_INPUTS names one.
        by_row: whether the function takes the inputs of one row; calls of groups get lists of them.

    Attributes:
        patterns: the sets of optional inputs that are left out at load: none of them, and all.
        binding: how a batch is passed whose items have all inputs.
    """

    def __init__(
        self,
        config: ModelConfig,
        signature: Signature,
        padding: Padding | None = None,
        cast: str | None = None,
        *,
        by_row: bool = False,
    ) -> None:
        self._signature, self._padding = signature, padding
        self._batched = config.max_batch_size > 0
        self._specs = {spec.name: spec for spec in config.inputs}
        # With names that are given twice, which binding refuses.
        self._names = [spec.name for spec in config.inputs]
        self._names += [made.name for made in config.batch_inputs]
        self._bound = functools.lru_cache(MAX_SETS)(self._bind)
        self.binding = self._bound(frozenset())
        takes = dict(zip(self.binding.names, self.binding.types, strict=True))
        if config.options.cast_inputs:
            cast = dtypes.from_triton(config.options.cast_inputs).torch
        to = getattr(torch, cast) if cast else None
        self._kinds: dict[str, Kind] = {}
        for spec in config.inputs:
            argument = _argument(signature, spec, takes[spec.name], to)
            if by_row and self._batched:
                argument = _for_rows(argument)
            self._kinds[spec.name] = _kind(config, spec, argument, padding)
        self._keys = [
            (repeat(name), key) for name, kind in self._kinds.items() for key in kind.keys
        ]
        # The input of requests that another one is made of.
        self._sources = {made.name: made.source for made in config.batch_inputs}
        for made in config.batch_inputs:
            self._kinds[made.name] = Kind(0, (), ragged.batch_input(made), TENSOR)
        masks = padding.masks if padding is not None else ()
        optional = frozenset(spec.name for spec in config.inputs if spec.optional).difference(masks)
        # Other sets are bound by a request that leaves them out, or refuse it.
        self.patterns = (frozenset(), optional) if optional else (frozenset[str](),)

    def refusal(self, items: Items) -> InputError | None:
        """Return why an item is refused, or why one of several is that can share a call."""
        first = items[0]
        if not first and self._batched:
            return InputError("the request has no inputs, and so no number of rows")
        for name, value in first.items():
            kind = self._kinds[name]
            # Triton checks that all inputs have as many rows; it drops a batch dimension of 0.
            if self._batched and value.ndim != kind.axes:
                return InputError(
                    f"input '{name}' has the shape {list(value.shape)} and no rows",
                    expected=f"{kind.axes} dimensions, the first of at least 1",
                )
            if kind.argument.check is not None:
                try:
                    kind.argument.check(kind.gather([item[name] for item in items]))
                except ValueError as error:
                    return InputError(f"input '{name}' {error}")
        if len(first) < len(self._specs):
            try:
                self._bound(self._left_out(first))
            except BindingError as error:
                return InputError(f"the request lacks inputs: {error}")
        return None

    def stage(self, caller: Caller) -> GroupStage:
        """Return the stage that refuses items and groups the others."""

        @functools.lru_cache(MAX_SETS)
        def call_of(left_out: frozenset[str]) -> tuple[Gather, Call]:
            binding = self._bound(left_out)
            return self._gather(binding), self._converting(binding, caller(binding))

        def group(entries: Entries) -> Grouped:
            if self._padding is not None:
                entries = list(map(self._padding.fill, entries))
            groups = batches.grouped(entries, self._keys_of)
            if any(self.refusal(items) for _, items in groups):  # find which items
                entries = [
                    entry if isinstance(entry, BackendError) else self.refusal((entry,)) or entry
                    for entry in entries
                ]
                groups = batches.grouped(entries, self._keys_of)
            if self._padding is not None:
                groups = [part for members in groups for part in self._padding.split(*members)]
            return entries, [
                Group(*call_of(self._left_out(items[0])), items, places) for places, items in groups
            ]

        return group

    def _keys_of(self, items: Items) -> Iterable[Hashable]:
        """Return keys that are equal for items that can share a call; quickly, without frames."""
        if not (self._batched and self._keys):
            return range(len(items))
        missing = repeat(_MISSING)
        keys = [map(key, map(dict.get, items, name, missing)) for name, key in self._keys]
        return zip(*keys, strict=True)

    def _left_out(self, item: Item) -> frozenset[str]:
        if len(item) == len(self._specs):
            return frozenset()
        return frozenset(self._specs).difference(item)

    def _bind(self, left_out: frozenset[str]) -> InputBinding:
        """Return how items without these inputs are passed; raise BindingError if one is needed."""
        # States and controls of sequences are bound by name only.
        kept = [name for name, spec in self._specs.items() if spec.origin is not Origin.CLIENT]
        return bind_inputs(self._names, self._signature, left_out, sequence_inputs=kept)

    def _gather(self, binding: InputBinding) -> Gather:
        """Return the function that makes the columns of items, and counts the rows of each."""
        gathered = [
            (itemgetter(self._sources.get(name, name)), self._kinds[name].gather)
            for name in binding.names
        ]
        sent = [name for name in binding.names if name in self._specs]
        first = itemgetter(sent[0]) if self._batched and sent else None

        def gather_items(items: Items) -> Gathered:
            columns = [gather(list(map(get, items))) for get, gather in gathered]
            if first is None:  # there is one item, which counts as one row
                return columns, (1,)
            return columns, list(map(len, map(first, items)))

        return gather_items

    def _converting(self, binding: InputBinding, call: Call) -> Call:
        """Return a function that makes arguments of columns and calls another one with them."""
        converts = [self._kinds[name].argument.convert for name in binding.names]
        if not any(converts):
            return call

        def convert_and_call(*columns: Value) -> Tree:
            passed = [
                column if convert is None else convert(column)
                for convert, column in zip(converts, columns, strict=False)
            ]
            return call(*passed, *columns[len(converts) :])  # those of hooks are not inputs

        return convert_and_call


def _kind(
    config: ModelConfig,
    spec: TensorSpec,
    argument: Argument,
    padding: Padding | None,
) -> Kind:
    """Return how the values of an input become a column: concatenated, padded or flat."""
    pad = padding.pads.get(spec.name) if padding is not None else None
    flat = spec.ragged and config.concatenates
    # Triton has checked fixed dims.
    fixed = pad is not None or flat or -1 not in spec.dims
    keys: list[Key] = [attrgetter("ndim") if fixed else _dims]
    if not config.options.force_cpu_only_input_tensors:  # inputs are where their clients sent them
        keys.append(_device)
    if argument.scalar:
        keys.append(_first)
    gather: Callable[[Sequence[Value]], Value] = batches.concatenate
    if pad is not None:
        gather = pad.gather
    elif spec.origin is Origin.STATE:
        gather = _copied
    elif flat:
        gather = ragged.flatten
    return Kind(1 + len(spec.dims), keys, gather, argument)


def _dims(value: Value) -> Hashable:
    return value.shape[1:]


def _first(value: Value) -> Hashable:
    return repr(value.reshape(-1)[:1].tolist())  # NaN does not equal itself


def _device(value: Value) -> Hashable:
    return value.device if isinstance(value, Tensor) else _HOST


def _copied(values: Sequence[Value]) -> Value:
    """Return a column that the model may write to: it keeps the states."""
    column = batches.concatenate(values)
    return clone(column) if len(values) == 1 else column


class Argument(NamedTuple):
    """How an argument is made of a column.

    Attributes:
        convert: makes it; None: it is the column.
        check: raises ValueError with what is wrong with a column; None: nothing can be.
        scalar: whether it is one value, which all items of a call have.
    """

    convert: _Make | None = None
    check: _Make | None = None
    scalar: bool = False


TENSOR = Argument()


def _argument(
    signature: Signature,
    spec: TensorSpec,
    takes: ArgumentType,
    cast: torch.dtype | None,
) -> Argument:
    """Return how an input's argument is made; BindingError if it does not take its type."""
    make, accepted, scalar = _KINDS[takes]
    if takes is ArgumentType.TENSOR and (signature.torchscript or signature.leaves is not None):
        accepted = ("BOOL", "INT", "UINT", "FP", "BF16")
    if not spec.dtype.triton.startswith(accepted):
        raise BindingError(
            f"input '{spec.name}' is {spec.dtype.triton}, and {signature.name}() takes"
            f" {takes.value}",
            expected=f"{' or '.join(accepted)} in config.pbtxt",
        )
    if signature.torchscript and make is _text:  # its strings hold bytes of any encoding
        make = _text_or_bytes
    if scalar:
        convert = partial(_one_value, f"{signature.name}() takes {takes.value}", make)
        return Argument(convert, convert, scalar=True)
    if spec.dtype.torch is None:
        return Argument(partial(_strings, takes, make), _check_text if make is _text else None)
    dtype: torch.dtype = getattr(torch, spec.dtype.torch)
    if cast is None or not dtype.is_floating_point:
        return TENSOR
    return Argument(lambda column: column.to(cast))


def _for_rows(argument: Argument) -> Argument:
    """Return how a list of the arguments of each row is made, for calls with one row each."""

    def convert_rows(column: Value) -> list[Any]:
        rows: list[Any] = [column[row, ...] for row in range(len(column))]
        return rows if argument.convert is None else list(map(argument.convert, rows))

    return Argument(convert_rows, convert_rows if argument.scalar else argument.check)


def _one_value(expected: str, make: _Make, column: Value) -> object:
    values = column.reshape(-1).tolist()
    distinct = len(set(map(repr, values)))  # repr, because NaN does not equal itself
    if distinct != 1:
        raise ValueError(f"holds {distinct} values; expected one value for all rows: {expected}")
    return make(values[0])


def _strings(takes: ArgumentType, make: _Make, column: Strings) -> object:
    """Return strings as a flat list, as LibTorch does, or in the shape of the column."""
    texts = list(map(make, column.reshape(-1).tolist()))
    if takes in (ArgumentType.STRINGS, ArgumentType.BYTES):
        return texts
    shaped: Strings = np.empty(column.shape, dtype=np.object_)
    shaped.ravel()[:] = texts
    return shaped if takes is ArgumentType.TENSOR else shaped.tolist()


def _check_text(column: Strings) -> None:
    """Check all strings at once, apart from each other; states are decoded already."""
    texts = [text for text in column.reshape(-1).tolist() if isinstance(text, bytes)]
    _text(b"\n".join(texts))


def _text(text: str | bytes) -> str:
    """Decode UTF-8; states are decoded already."""
    try:
        return text if isinstance(text, str) else text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: {error.reason}") from None


def _text_or_bytes(text: str | bytes) -> str | bytes:
    try:
        return _text(text)
    except ValueError:
        return text


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


class _Kind(NamedTuple):
    """A kind of argument: `make` makes it of one value, or a part of it of one string."""

    make: _Make
    accepts: tuple[str, ...] = ("BYTES",)  # how the names of Triton's types begin that it takes
    scalar: bool = False


# Parts of containers are tensors.
_KINDS = {
    ArgumentType.TENSOR: _Kind(_text, ("",)),  # any type
    ArgumentType.VALUE: _Kind(
        lambda value: _text(value) if isinstance(value, bytes) else value, ("",), scalar=True
    ),
    ArgumentType.INT: _Kind(int, ("INT", "UINT"), scalar=True),
    ArgumentType.FLOAT: _Kind(float, ("FP", "BF16", "INT", "UINT"), scalar=True),
    ArgumentType.BOOL: _Kind(bool, ("BOOL",), scalar=True),
    ArgumentType.STR: _Kind(_text, scalar=True),
    ArgumentType.RAW: _Kind(_bytes, scalar=True),
    ArgumentType.STRINGS: _Kind(_text),
    ArgumentType.BYTES: _Kind(_bytes),
    ArgumentType.NESTED_STRINGS: _Kind(_text),
    ArgumentType.NESTED_BYTES: _Kind(_bytes),
}
