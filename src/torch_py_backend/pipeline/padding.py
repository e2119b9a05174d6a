"""PAD: pad inputs of different lengths to share a batch; cut outputs to their items' lengths."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.config.model_config import ModelConfig, TensorSpec
from torch_py_backend.errors import BackendError, ConfigError, InputError, join_names
from torch_py_backend.pipeline.batches import concatenate, grouped
from torch_py_backend.pipeline.run import Entry
from torch_py_backend.values import Items, Value, to_column

log = logging.getLogger(__name__)

# The largest ratio of a padded batch's values to its items' values. Without it, one long request
# would enlarge its whole batch. Below 4, two calls cost small models more than the padding of one.
MOST_GROWTH = 4


@dataclass(frozen=True, slots=True)
class Pad:
    """How one input is padded in `axes`, of which the batch is 0: before its values if `left`."""

    axes: tuple[int, ...]
    value: float
    left: bool
    multiple_of: int

    def padded_shape(self, shapes: Sequence[Sequence[int]]) -> list[int]:
        """Return the shape of a batch of values of these shapes."""
        sizes = list(zip(*shapes, strict=True))
        padded = [sum(sizes[0]), *shapes[0][1:]]
        for axis in self.axes:
            padded[axis] = self.rounded(max(sizes[axis]))
        return padded

    def rounded(self, length: int) -> int:
        """Return a length rounded up to a multiple."""
        return -(-length // self.multiple_of) * self.multiple_of

    def length_class(self, value: Value) -> tuple[int, ...]:
        """Return numbers that are equal for lengths of about the same size.

        With one axis to pad, such lengths differ by less than a factor of 4; with more, of 2.
        """
        lengths = [self.rounded(value.shape[axis]) for axis in self.axes]
        return tuple(length.bit_length() * len(lengths) // 2 for length in lengths)

    def gather(self, items: Sequence[Value]) -> Value:
        """Pad and concatenate the items' values; a single one of the target shape is not copied."""
        has_tensors = any(isinstance(value, Tensor) for value in items)
        columns: Sequence[Any] = list(map(to_column, items)) if has_tensors else items
        target = self.padded_shape([value.shape for value in columns])
        dims = tuple(target[1:])
        if all(value.shape[1:] == dims for value in columns):
            # forward() may change a shape in place: not that of the item.
            return torch.as_tensor(concatenate(columns)).detach()
        first = columns[0]
        if has_tensors:
            gathered = first.new_full(target, self.value)
        else:  # a copy of an array takes a third of the time
            gathered = np.full(target, self.value, first.dtype)
        start = 0
        for value in columns:
            rows, *sizes = value.shape
            place = [slice(start, start + rows)]
            for size, padded in zip(sizes, dims, strict=True):
                begin = padded - size if self.left else 0
                place.append(slice(begin, begin + size))
            gathered[tuple(place)] = value
            start += rows
        return to_column(gathered)


class Padding:
    """The padding of inputs by PAD; ConfigError if that does not match the inputs and outputs.

    Attributes:
        pads: the padding by input, masks included.
        masks: the input of each mask, and the type of the mask.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.pads: dict[str, Pad] = {}
        self.masks: dict[str, tuple[str, torch.dtype]] = {}
        # Axes of outputs that are as long as an axis of an input: the name and axis of both.
        self._cuts: list[tuple[str, int, str, int]] = []
        specs = {spec.name: spec for spec in config.inputs}
        free = {spec.name: axes for spec in config.outputs if (axes := _free_axes(spec))}
        settings = config.options.pad or {}
        for name, setting in settings.items():
            self._add(name, setting, specs, free)
        if free and settings and not any("outputs" in setting for setting in settings.values()):
            raise ConfigError(
                f"PAD does not say which of the outputs {join_names(free)} are as long as a padded"
                " input, to cut them to the length of each request",
                expected='"outputs": [] for none, or a list of them',
            )

    def _add(
        self,
        name: str,
        setting: Mapping[str, Any],
        specs: Mapping[str, TensorSpec],
        free: Mapping[str, Sequence[int]],
    ) -> None:
        """Add the padding of an input, with its mask and the outputs that are as long."""
        spec, mask = specs.get(name), specs.get(setting.get("mask", ""))
        axes = _free_axes(spec) if spec is not None else ()
        if spec is None or spec.dtype.torch is None or not axes:
            raise _refusal(f"'{name}'", "inputs of numbers with dims of -1")
        value, dtype = setting.get("value", 0), getattr(torch, spec.dtype.torch)
        if not dtype.is_floating_point and torch.tensor(value).to(dtype).item() != value:
            raise _refusal(
                f"the value {value} for '{name}'", f"one that {spec.dtype.triton} can hold"
            )
        if not spec.ragged:
            log.warning(
                "PAD names '%s', but Triton does not batch requests that differ in its"
                " length. Set allow_ragged_batch: true for that input.",
                name,
            )
        left, multiple_of = setting.get("side") == "left", setting.get("multiple_of", 1)
        self.pads.setdefault(name, Pad(axes, value, left, multiple_of))  # unless it is a mask
        if "mask" in setting:
            dims = (-1,) * len(axes)
            if mask is None or mask is spec or mask.dtype.torch is None or mask.dims != dims:
                expected = f"another input of numbers of dims {list(dims)}"
                raise _refusal(f"the mask '{setting['mask']}'", expected)
            self.pads[mask.name] = Pad(_free_axes(mask), 0, left, multiple_of)
            self.masks[mask.name] = name, getattr(torch, mask.dtype.torch)
        for output in setting.get("outputs", ()):
            if output not in free:
                raise _refusal(f"the output '{output}'", "outputs with dims of -1")
            pairs = zip(free[output], axes, strict=False)
            self._cuts += [(output, axis, name, of_input) for axis, of_input in pairs]

    def fill(self, entry: Entry) -> Entry:
        """Return an item with the masks that it left out; refuse one not as long as its input."""
        for mask, (name, dtype) in self.masks.items():
            if isinstance(entry, BackendError):
                break
            pad = self.pads[name]
            value = entry.get(name)
            sent = entry.get(mask)
            if value is None or value.ndim <= pad.axes[-1]:  # refused later
                continue
            shape = (value.shape[0], *(value.shape[axis] for axis in pad.axes))
            if sent is None:
                device = value.device if isinstance(value, Tensor) else None
                entry = entry | {mask: torch.ones(shape, dtype=dtype, device=device)}
            elif tuple(sent.shape) != shape:
                entry = InputError(
                    f"input '{mask}' is {list(sent.shape)}, and its input '{name}' is"
                    f" {list(value.shape)}",
                    expected="a mask as long as its input",
                )
        return entry

    def split(
        self,
        places: Sequence[int],
        items: Items,
    ) -> list[tuple[Sequence[int], Items]]:
        """Split the items of one group by their lengths if they would be padded too much."""
        pads = [(name, pad) for name, pad in self.pads.items() if name in items[0]]
        for name, pad in pads:
            shapes = [item[name].shape for item in items]
            if math.prod(pad.padded_shape(shapes)) > MOST_GROWTH * sum(map(math.prod, shapes)):
                break
        else:
            return [(places, items)]
        classes = [tuple(pad.length_class(item[name]) for name, pad in pads) for item in items]
        parts = grouped(items, lambda _: classes)
        return [([places[place] for place in part], members) for part, members in parts]

    def cut(
        self,
        outcomes: Sequence[dict[str, Value]],
        items: Items,
    ) -> None:
        """Cut outputs to the lengths of the items of a batch."""
        for output, axis, name, of_input in self._cuts:
            if name not in items[0]:
                continue
            pad, lengths = self.pads[name], [item[name].shape[of_input] for item in items]
            padded = pad.rounded(max(lengths))
            for outcome, size in zip(outcomes, lengths, strict=True):
                value = outcome[output]
                # Another length does not follow the input's; TorchScript's may lack the axis.
                if size == padded or value.shape[axis : axis + 1] != (padded,):
                    continue
                start = padded - size if pad.left else 0
                part = value[(slice(None),) * axis + (slice(start, start + size),)]
                outcome[output] = part.contiguous() if isinstance(part, Tensor) else part


def _free_axes(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(axis for axis, dim in enumerate(spec.dims, 1) if dim == -1)


def _refusal(found: str, expected: str) -> ConfigError:
    return ConfigError(f"PAD names {found}", expected=expected)
