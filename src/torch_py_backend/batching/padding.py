"""PAD: inputs of different lengths share a batch; outputs get their own lengths back."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_py_backend.batching.counters import Counts
from torch_py_backend.batching.gather_scatter import Item, Value, to_column
from torch_py_backend.config.model_config import ModelConfig, TensorSpec
from torch_py_backend.errors import ConfigError, shown

log = logging.getLogger(__name__)

# How many times as many values a padded batch may have as its items have one by one. Without a
# bound, one long request makes a batch of N requests N times as large as itself. Below 4, two calls
# cost small models more than the padding of one.
MOST_GROWTH = 4


@dataclass(frozen=True, slots=True)
class Pad:
    """How one input is padded.

    Attributes:
        axes: the axes that are, the batch being axis 0.
        value: what is put there.
        left: whether before the values, else behind them.
        multiple_of: what lengths are rounded up to.
    """

    axes: tuple[int, ...]
    value: float
    left: bool
    multiple_of: int

    def target(self, values: Sequence[Tensor]) -> list[int]:
        """The shape, less the batch, that holds each of the values."""
        longest = list(values[0].shape)
        for axis in self.axes:
            size = max(value.shape[axis] for value in values)
            longest[axis] = -(-size // self.multiple_of) * self.multiple_of
        return longest[1:]

    def fixed(self, shape: Sequence[int]) -> tuple[int, ...]:
        """What values that share a batch have in common of a shape."""
        return tuple(size for axis, size in enumerate(shape) if axis and axis not in self.axes)

    def alone(self, shape: Sequence[int]) -> list[int]:
        """The shape that one item's value is padded to."""
        multiple = self.multiple_of
        return [
            -(-size // multiple) * multiple if axis in self.axes else size
            for axis, size in enumerate(shape)
        ]

    def gather(self, items: Sequence[Value]) -> Tensor:
        """The items' values in one tensor; a single one that fits as it is, is not copied."""
        values: list[Any] = [to_column(value) for value in items]
        target = self.target(values)
        if all(list(value.shape[1:]) == target for value in values):
            return values[0] if len(values) == 1 else torch.cat(list(values))
        first = values[0]
        rows = sum(value.shape[0] for value in values)
        gathered = torch.full((rows, *target), self.value, dtype=first.dtype, device=first.device)
        start = 0
        for value in values:
            stop = start + value.shape[0]
            gathered[self._place(slice(start, stop), value, target)] = value
            start = stop
        return gathered

    def _place(self, rows: slice, value: Tensor, target: Sequence[int]) -> tuple[slice, ...]:
        sizes = zip(value.shape[1:], target, strict=True)
        left = self.left
        return (
            rows,
            *(slice(whole - size, whole) if left else slice(size) for size, whole in sizes),
        )


@dataclass(frozen=True, slots=True)
class _Cut:
    """An output's axis that is as long as an input's."""

    output: str
    axis: int
    input: str
    input_axis: int
    left: bool


class Padding:
    """What PAD says of a model.

    Attributes:
        pads: by input; masks are among them.
        masks: inputs that are made, where a request leaves them out, and what they are the mask of.

    Raises:
        ConfigError: PAD does not fit the inputs and outputs.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._specs = {spec.name: spec for spec in config.inputs}
        self.pads: dict[str, Pad] = {}
        self.masks: dict[str, str] = {}
        wished = config.options.pad or {}
        for name, how in wished.items():
            self.pads[name] = self._pad(config, name, how)
        for name, how in wished.items():
            if "mask" in how:
                self._add_mask(config, name, how["mask"])
        # All masks, those that requests must bring included.
        self._masked = {how["mask"]: name for name, how in wished.items() if "mask" in how}
        self._cuts = tuple(self._find_cuts(config, wished))

    def _pad(self, config: ModelConfig, name: str, how: Mapping[str, Any]) -> Pad:
        spec = self._specs.get(name)
        if spec is None:
            raise _refusal(config, f"'{name}', which is no input", shown(self._specs))
        if spec.dtype.torch is None:
            raise _refusal(config, f"'{name}', which holds strings", "inputs of numbers")
        axes = tuple(_free_axes(spec))
        if not axes:
            raise _refusal(config, f"'{name}', whose dims are fixed", "inputs with dims of -1")
        value = how.get("value", 0)
        dtype: torch.dtype = getattr(torch, spec.dtype.torch)
        if not _holds(dtype, value):
            raise _refusal(
                config, f"the value {value} for '{name}'", f"one that {spec.dtype.triton} can hold"
            )
        if not spec.ragged:
            log.warning(
                "model '%s': PAD names '%s', and Triton batches no requests that differ in its"
                " length. Write allow_ragged_batch: true into that input.",
                config.name,
                name,
            )
        left = how.get("side", "right") == "left"
        return Pad(axes, value, left, how.get("multiple_of", 1))

    def _add_mask(self, config: ModelConfig, name: str, mask: str) -> None:
        spec, pad = self._specs.get(mask), self.pads[name]
        if spec is None or mask == name or spec.dtype.torch is None:
            raise _refusal(config, f"the mask '{mask}'", f"another of {shown(self._specs)}")
        if len(spec.dims) != len(pad.axes) or set(spec.dims) != {-1}:
            raise _refusal(
                config,
                f"the mask '{mask}' of dims {list(spec.dims)}",
                f"dims of {[-1] * len(pad.axes)}, as many as '{name}' has of -1",
            )
        axes = tuple(range(1, len(pad.axes) + 1))
        self.pads[mask] = Pad(axes, 0, pad.left, pad.multiple_of)
        if spec.optional:
            self.masks[mask] = name

    def _find_cuts(self, config: ModelConfig, wished: Mapping[str, Any]) -> Iterator[_Cut]:
        outputs = {spec.name: spec for spec in config.outputs}
        named = {output: name for name, how in wished.items() for output in how.get("outputs", ())}
        for output in named:
            if output not in outputs or -1 not in outputs[output].dims:
                raise _refusal(config, f"the output '{output}'", "outputs with dims of -1")
        for output, spec in outputs.items():
            axes = list(_free_axes(spec))
            if output in named:
                name = named[output]
                for axis, input_axis in zip(axes, self.pads[name].axes, strict=False):
                    yield _Cut(output, axis, name, input_axis, self.pads[name].left)
                continue
            for axis in axes:
                followed = [one for one in wished if axis in self.pads[one].axes]
                if followed:
                    left = self.pads[followed[0]].left
                    yield _Cut(output, axis, followed[0], axis, left)

    def fill(self, item: Item) -> Item:
        """The item with the masks that its request left out."""
        for mask, name in self.masks.items():
            of = item.get(name)
            if mask not in item and of is not None:
                shape = [of.shape[0], *(of.shape[axis] for axis in self.pads[name].axes)]
                dtype: torch.dtype = getattr(torch, str(self._specs[mask].dtype.torch))
                device = of.device if isinstance(of, Tensor) else None
                item = item | {mask: torch.ones(shape, dtype=dtype, device=device)}
        return item

    def mismatch(self, item: Item) -> tuple[str, str] | None:
        """A mask and its input, where a request brought them in different sizes.

        In a batch both are padded to the longest: the model would not notice.
        """
        for mask, name in self._masked.items():
            if mask in item and name in item:
                whole = item[name].shape
                masked = (whole[0], *(whole[axis] for axis in self.pads[name].axes))
                if tuple(item[mask].shape) != masked:
                    return mask, name
        return None

    def split(self, items: Sequence[tuple[int, Item]]) -> list[list[tuple[int, Item]]]:
        """Return items of one group in parts that are padded to MOST_GROWTH at most.

        Args:
            items: items with the same inputs, each with its place; parts keep their order.
        """
        names = [name for name in self.pads if name in items[0][1]]
        if not names:
            return [list(items)]
        shapes = [[self.pads[name].alone(item[name].shape) for name in names] for _, item in items]
        rows = [one[0][0] for one in shapes]
        # As many rows as that cannot grow beyond it.
        if sum(rows) <= MOST_GROWTH:
            return [list(items)]
        values = [_count_values(one) for one in shapes]
        if _count_values(_padded(shapes)) <= MOST_GROWTH * sum(values):
            return [list(items)]
        parts: list[list[int]] = []
        part_shapes, part_values = shapes[0], 0
        # From the shortest row to the longest: what is too long for a part begins the next one.
        for index in sorted(range(len(items)), key=lambda at: values[at] / max(rows[at], 1)):
            together = _padded([part_shapes, shapes[index]])
            if parts and _count_values(together) <= MOST_GROWTH * (part_values + values[index]):
                parts[-1].append(index)
                part_shapes, part_values = together, part_values + values[index]
            else:
                parts.append([index])
                part_shapes, part_values = shapes[index], values[index]
        return [[items[index] for index in sorted(part)] for part in parts]

    def count(
        self,
        counts: Counts,
        items: Sequence[Item],
        names: Sequence[str],
        columns: Sequence[Value],
    ) -> None:
        """Count what a batch has of padding.

        Args:
            counts: where.
            items: the items.
            names: their inputs.
            columns: what was gathered of each.
        """
        for name, column in zip(names, columns, strict=True):
            if name in self.pads:
                values = math.prod(column.shape)
                counts.values += values
                sent = sum(math.prod(item[name].shape) for item in items)
                counts.padded_values += values - sent

    def cut(
        self, outcomes: Sequence[dict[str, Value]], items: Sequence[Item], shapes: Mapping[str, Any]
    ) -> None:
        """Give outputs the lengths of their own items.

        Args:
            outcomes: what each item gets; changed in place.
            items: the items.
            shapes: those of the padded inputs, as the model saw them.
        """
        for cut in self._cuts:
            if cut.input not in shapes:
                continue
            whole = shapes[cut.input][cut.input_axis]
            for outcome, item in zip(outcomes, items, strict=True):
                value, size = outcome[cut.output], item[cut.input].shape[cut.input_axis]
                # What is not as long as the padded input, has another length for other reasons;
                # with CHECK_OUTPUTS "false" it may have fewer dimensions.
                if size == whole or value.shape[cut.axis : cut.axis + 1] != (whole,):
                    continue
                kept = slice(whole - size, whole) if cut.left else slice(0, size)
                part = value[(slice(None),) * cut.axis + (kept,)]
                outcome[cut.output] = part.contiguous() if isinstance(part, Tensor) else part


def _count_values(shapes: Sequence[Sequence[int]]) -> int:
    return sum(map(math.prod, shapes))


def _padded(items: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """The shape of each padded input where these items share a batch."""
    return [
        [
            sum(sizes) if axis == 0 else max(sizes)
            for axis, sizes in enumerate(zip(*shapes, strict=True))
        ]
        for shapes in zip(*items, strict=True)
    ]


def _holds(dtype: torch.dtype, value: float) -> bool:
    """Whether a type has this value: found out at load, not by the first batch of two lengths."""
    try:
        held = torch.full((), value, dtype=dtype).item()
    except (RuntimeError, OverflowError):
        return False
    return dtype.is_floating_point or held == value


def _free_axes(spec: TensorSpec) -> Iterator[int]:
    return (axis for axis, dim in enumerate(spec.dims, 1) if dim == -1)


def _refusal(config: ModelConfig, found: str, expected: str) -> ConfigError:
    return ConfigError(config.name, f"PAD names {found}", expected=expected)
