"""The inputs of a batch: each is checked, compared, gathered and converted as its kind says.

`Inputs` chooses the kinds at load, from the config and the signature: how values of several items
become a column (`Shape`), and what forward() gets of the column (`arguments`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor

from torch_py_backend.config import dtypes
from torch_py_backend.config.model_config import ModelConfig, Origin, TensorSpec
from torch_py_backend.errors import BackendError, BindingError, InputError
from torch_py_backend.pipeline import arguments, batches, ragged
from torch_py_backend.pipeline.padding import Pad, Padding, Placed
from torch_py_backend.pipeline.run import Entries, Gather, Gathered, Group, GroupStage
from torch_py_backend.signature.arguments import Signature
from torch_py_backend.signature.binding import InputBinding, bind_inputs
from torch_py_backend.values import Call, Item, Items, Tree, Value, clone

# For how many sets of names bindings are kept: n optional inputs have 2^n sets.
MAX_SETS = 64
# Returns the function that calls the model with the arguments of a binding, in its order.
Caller: TypeAlias = "Callable[[InputBinding], Call]"
_HOST = torch.device("cpu")
_AXES = attrgetter("ndim")


class Inputs:
    """Checks and groups a model's items, and gathers them.

    Args:
        cast: the type that floating-point inputs are converted to, unless CAST_INPUTS names one.
        by_row: whether the function takes the inputs of one row; the calls of groups get a list of
            them for each input.

    Attributes:
        patterns: the sets of optional inputs that are left out at load: none of them, and all.
        binding: how a batch is passed whose items have all inputs.

    Raises:
        BindingError: the config's inputs do not match the signature.
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
        self._required = [spec.name for spec in config.inputs if not spec.optional]
        # States stay on the device.
        self._sent = [spec.name for spec in config.inputs if spec.origin is not Origin.STATE]
        self._bound = functools.lru_cache(MAX_SETS)(self._bind)
        self.binding = self._bound(frozenset())
        takes = dict(zip(self.binding.names, self.binding.types, strict=True))
        if config.options.cast_inputs:
            cast = dtypes.from_triton(config.options.cast_inputs).torch
        to = getattr(torch, cast) if cast else None
        pads = padding.pads if padding is not None else {}
        self._shapes: dict[str, Shape] = {}
        self._arguments: dict[str, arguments.Argument] = {}
        # The input of requests that each one is made of.
        self._sources: dict[str, str] = {}
        # Of each input: how its values and arguments are compared, in as few frames as possible.
        self._compared = []
        for spec in config.inputs:
            name = spec.name
            shape = _choose_shape(config, spec, pads.get(name))
            argument = arguments.choose(signature, spec, takes[name], to)
            if by_row and self._batched:
                argument = arguments.for_rows(argument)
            self._compared.append((itemgetter(name), shape.fit, argument.refuse))
            self._shapes[name] = shape
            self._arguments[name] = argument
            self._sources[name] = name
        for made in config.batch_inputs:
            source = self._shapes[made.source]
            self._shapes[made.name] = source._replace(gather=ragged.batch_input(made))
            self._arguments[made.name] = arguments.TENSOR
            self._sources[made.name] = made.source
        # Triton leaves inputs on their device then, so items may be on different devices.
        self._any_device = not config.options.force_cpu_only_input_tensors
        self._compare = self._may_share if padding is not None or self._any_device else None
        masks = padding.masks if padding is not None else ()
        optional = frozenset(self._specs).difference(self._required, masks)
        # Other sets are bound by a request that leaves them out, or refuse it.
        self.patterns: tuple[frozenset[str], ...] = (frozenset(),)
        if optional:
            self._bound(optional)
            self.patterns = (frozenset(), optional)

    def alike(self, entries: Entries) -> TypeGuard[Items]:
        """Return whether all entries are valid items that can share a call, found in few calls.

        If not, `admit` finds which are refused, and `_key` which can share a call.
        """
        items: Sequence[Any] = entries
        try:
            for get, fit, refuse in self._compared:
                values = list(map(get, items))
                if not fit(values):
                    return False
                if refuse is not None and refuse(batches.concatenate(values)) is not None:
                    return False
        # An input is missing, an item was refused, or values are on different devices.
        except (LookupError, TypeError, ValueError, RuntimeError):
            return False
        return bool(self._compared) and (self._compare is None or self._compare(items))

    def _may_share(self, items: Items) -> bool:
        """Return whether items are on one device, with masks as long as their inputs."""
        if self._padding is not None and any(map(self._padding.mismatch, items)):
            return False
        if not self._any_device:
            return True
        devices = [{_device(item[name]) for item in items} for name in self._sent]
        return all(len(of_input) == 1 for of_input in devices)

    def admit(self, item: Item) -> Item | InputError:
        """Return the item, with masks added, or the reason to refuse it."""
        for name in self._required:
            if name not in item:
                return InputError(f"the request lacks the input '{name}'")
        if self._batched and (refusal := self._without_rows(item)) is not None:
            return refusal
        if self._padding is not None:
            mismatch = self._padding.mismatch(item)
            if mismatch is not None:
                return mismatch
            item = self._padding.fill(item)
        if len(item) < len(self._specs):
            try:
                self._bound(self._left_out(item))
            except BindingError as error:
                return InputError(f"the request lacks inputs: {error}")
        for name, value in item.items():
            refuse = self._arguments[name].refuse
            if refuse is not None and (reason := refuse(value)) is not None:
                return InputError(f"input '{name}' {reason}")
        return item

    def _without_rows(self, item: Item) -> InputError | None:
        """Return the error of a request whose inputs have no rows.

        Triton checks that all have as many, and drops the batch dimension of a shape with 0 rows.
        """
        if not item:
            return InputError("the request has no inputs, and so no number of rows")
        for name, value in item.items():
            axes = len(self._specs[name].dims) + 1 if name in self._specs else value.ndim
            if value.ndim != axes:
                return InputError(
                    f"input '{name}' has the shape {list(value.shape)} and no rows",
                    expected=f"{axes} dimensions, the first of at least 1",
                )
        return None

    def stage(self, caller: Caller) -> GroupStage:
        """Return the stage that refuses items and groups the others."""

        @functools.lru_cache(MAX_SETS)
        def call_of(left_out: frozenset[str]) -> tuple[Gather, Call]:
            binding = self._bound(left_out)
            return self._gather(binding), self._converting(binding, caller(binding))

        gather, call = call_of(frozenset())

        def group(entries: Entries) -> tuple[Entries, Sequence[Group]]:
            if self.alike(entries):
                return entries, (Group(gather, call, entries, range(len(entries))),)
            admitted = [
                entry if isinstance(entry, BackendError) else self.admit(entry) for entry in entries
            ]
            groups = []
            for members in self._members(admitted):
                places, items = zip(*members, strict=True)
                left_out = self._left_out(items[0])
                groups.append(Group(*call_of(left_out), items, places))
            return admitted, groups

        return group

    def _members(self, entries: Entries) -> list[Placed]:
        """Return the items that can share calls, each with its position."""
        groups: dict[Hashable, Placed] = {}
        for place, entry in enumerate(entries):
            if not isinstance(entry, BackendError):
                key = self._key(entry) if self._batched else place
                groups.setdefault(key, []).append((place, entry))
        if self._padding is None:
            return list(groups.values())
        return [part for members in groups.values() for part in self._padding.split(members)]

    def _key(self, item: Item) -> tuple[Hashable, ...]:
        """Return what items of one batch have in common."""
        names = [name for name in self._specs if name in item]
        key: list[Hashable] = [*names]
        for name in names:
            value = item[name]
            key += [self._shapes[name].key(value), _device(value)]
            same_value = self._arguments[name].key
            if same_value is not None:
                key.append(same_value(value))
        return tuple(key)

    def _left_out(self, item: Item) -> frozenset[str]:
        return frozenset(self._specs).difference(item)

    def _bind(self, left_out: frozenset[str]) -> InputBinding:
        """Return how items without these inputs are passed; raise BindingError if one is needed."""
        # States and controls of sequences are bound by name only.
        kept = frozenset(
            name for name, spec in self._specs.items() if spec.origin is not Origin.CLIENT
        )
        return bind_inputs(self._names, self._signature, left_out, sequence_inputs=kept)

    def _gather(self, binding: InputBinding) -> Gather:
        """Return the function that makes the columns of items, and counts the rows of each."""
        gathers = [self._shapes[name].gather for name in binding.names]
        sources = [itemgetter(self._sources[name]) for name in binding.names]
        gathered = list(zip(sources, gathers, strict=True))
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
        converts = [self._arguments[name].convert for name in binding.names]
        if not any(converts):
            return call

        def convert_and_call(*columns: Value) -> Tree:
            passed = [
                column if convert is None else convert(column)
                for convert, column in zip(converts, columns, strict=False)
            ]
            return call(*passed, *columns[len(converts) :])  # those of hooks are not inputs

        return convert_and_call


def _device(value: Value) -> torch.device:
    return value.device if isinstance(value, Tensor) else _HOST


class Shape(NamedTuple):
    """How the values of an input in several items become one column."""

    # Whether values can share a batch.
    fit: Callable[[Sequence[Value]], bool]
    # What the values of a batch have in common.
    key: Callable[[Value], Hashable]
    gather: Callable[[Sequence[Value]], Value]


def _choose_shape(config: ModelConfig, spec: TensorSpec, pad: Pad | None) -> Shape:
    """Return how the values of an input become a column: concatenated, padded or flat."""
    axes = len(spec.dims) + 1
    flat = spec.ragged and config.concatenates
    gather: Callable[[Sequence[Value]], Value] = batches.concatenate
    if spec.origin is Origin.STATE:
        gather = _copied
    elif flat:
        gather = ragged.flatten
    if not config.max_batch_size:  # a call has one item, which counts as one row
        return Shape(_is_one, _no_key, gather)
    if pad is not None:
        return Shape(pad.fit, _no_key, pad.gather)
    if flat:
        return Shape(partial(_fit_fixed, axes), _no_key, gather)
    fit = _fit_fixed if -1 not in spec.dims else _fit_equal
    return Shape(partial(fit, axes), lambda value: value.shape[1:], gather)


def _no_key(_: Value) -> None:
    return None


def _is_one(values: Sequence[Value]) -> bool:
    return len(values) == 1


def _fit_fixed(axes: int, values: Sequence[Value]) -> bool:
    """Return whether values have rows; Triton has checked their dims."""
    return set(map(_AXES, values)) == {axes}


def _fit_equal(axes: int, values: Sequence[Value]) -> bool:
    dims = values[0].shape[1:]
    if any(value.shape[1:] != dims for value in values):
        return False
    return _fit_fixed(axes, values)


def _copied(values: Sequence[Value]) -> Value:
    """Return a column that the model may write to: it keeps the states."""
    column = batches.concatenate(values)
    return clone(column) if len(values) == 1 else column
