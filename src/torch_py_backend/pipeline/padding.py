"""PAD: pad inputs of different lengths to share a batch; cut outputs to their items' lengths."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.config.model_config import ModelConfig, TensorSpec
from torch_py_backend.errors import ConfigError, InputError, join_names
from torch_py_backend.pipeline.batches import concatenate
from torch_py_backend.values import Item, Items, Value, to_column

log = logging.getLogger(__name__)

# Items of a group, each with its place among the entries of a run.
Placed: TypeAlias = "list[tuple[int, Item]]"

# The largest ratio of a padded batch's values to its items' values. Without a limit, one long
# request makes a batch of N requests N times as large as itself. With less than 4, two calls cost
# small models more than the padding of one.
MOST_GROWTH = 4


@dataclass(frozen=True, slots=True)
class Pad:
    """How one input is padded.

    Attributes:
        axes: the axes to pad; the batch is axis 0.
        ndim: the number of axes; Triton checks the sizes of the others.
        value: the padding value.
        left: whether to pad before the values, not after them.
        multiple_of: round lengths up to a multiple of this.
    """

    axes: tuple[int, ...]
    ndim: int
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

    def mask_shape(self, value: Value) -> tuple[int, ...]:
        """Return the shape of a mask of a value."""
        return (value.shape[0], *(value.shape[axis] for axis in self.axes))

    def rounded(self, length: int) -> int:
        """Return a length rounded up to a multiple."""
        return -(-length // self.multiple_of) * self.multiple_of

    def length_class(self, value: Value) -> list[int]:
        """Return numbers that are equal for lengths of about the same size.

        With one axis to pad, such lengths differ by less than a factor of 4; with more, of 2.
        """
        lengths = [self.rounded(value.shape[axis]) for axis in self.axes]
        return [length.bit_length() * len(lengths) // 2 for length in lengths]

    def fit(self, values: Sequence[Value]) -> bool:
        """Return whether values can share a batch without much padding."""
        shapes = [value.shape for value in values]
        if set(map(len, shapes)) != {self.ndim}:
            return False
        sent = sum(map(math.prod, shapes))
        return math.prod(self.padded_shape(shapes)) <= MOST_GROWTH * sent

    def gather(self, items: Sequence[Value]) -> Value:
        """Pad and concatenate the items' values.

        Those of a single one of the target shape are not copied.
        """
        target = self.padded_shape([value.shape for value in items])
        dims = tuple(target[1:])
        columns: Sequence[Any] = items
        has_tensors = any(isinstance(value, Tensor) for value in items)
        needs_no_padding = all(value.shape[1:] == dims for value in items)
        if has_tensors or needs_no_padding:
            columns = [to_column(value) for value in items]
        if needs_no_padding:
            # forward() may change a shape in place: not that of the item.
            return columns[0].detach() if len(items) == 1 else concatenate(columns)
        dtype = columns[0].dtype
        gathered: Any
        if has_tensors:
            device = columns[0].device
            gathered = torch.full(target, self.value, dtype=dtype, device=device)
        else:  # a copy of an array takes a third of the time
            gathered = np.full(target, self.value, dtype=dtype)
        start = 0
        for value in columns:
            rows, *sizes = value.shape
            place = [slice(start, start + rows)]
            for size, padded in zip(sizes, dims, strict=True):
                first = padded - size if self.left else 0
                place.append(slice(first, first + size))
            gathered[tuple(place)] = value
            start += rows
        return to_column(gathered)


@dataclass(frozen=True, slots=True)
class _Cut:
    """An output's axis that has the length of an input's axis."""

    output: str
    axis: int
    input: str
    input_axis: int
    left: bool


class Padding:
    """The padding of a model's inputs, as configured by PAD.

    Attributes:
        pads: the padding by input, masks included.
        masks: optional masks, created for requests without them, and the input of each.

    Raises:
        ConfigError: PAD does not match the inputs and outputs.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._specs = {spec.name: spec for spec in config.inputs}
        self.pads: dict[str, Pad] = {}
        self.masks: dict[str, str] = {}
        # All masks, including those that requests must send.
        self._masked: dict[str, str] = {}
        settings = config.options.pad or {}
        for name, setting in settings.items():
            self.pads[name] = self._parse_pad(name, setting)
        for name, setting in settings.items():
            if "mask" in setting:
                self._add_mask(name, setting["mask"])
        self._cuts = list(self._parse_cuts(config, settings))

    def _parse_pad(self, name: str, setting: Mapping[str, Any]) -> Pad:
        spec = self._specs.get(name)
        if spec is None or spec.dtype.torch is None or -1 not in spec.dims:
            raise _refusal(f"'{name}'", "inputs of numbers with dims of -1")
        axes = tuple(_free_axes(spec))
        value = setting.get("value", 0)
        dtype: torch.dtype = getattr(torch, spec.dtype.torch)
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
        left = setting.get("side", "right") == "left"
        return Pad(axes, 1 + len(spec.dims), value, left, setting.get("multiple_of", 1))

    def _add_mask(self, name: str, mask: str) -> None:
        spec, pad = self._specs.get(mask), self.pads[name]
        dims = (-1,) * len(pad.axes)
        if spec is None or mask == name or spec.dtype.torch is None or spec.dims != dims:
            raise _refusal(f"the mask '{mask}'", f"another input of numbers of dims {list(dims)}")
        axes = tuple(range(1, len(pad.axes) + 1))
        self.pads[mask] = Pad(axes, 1 + len(axes), 0, pad.left, pad.multiple_of)
        self._masked[mask] = name
        if spec.optional:
            self.masks[mask] = name

    def _parse_cuts(
        self,
        config: ModelConfig,
        settings: Mapping[str, Any],
    ) -> Iterator[_Cut]:
        outputs = {spec.name: spec for spec in config.outputs}
        free = [spec.name for spec in config.outputs if -1 in spec.dims]
        if free and settings and not any("outputs" in setting for setting in settings.values()):
            name = next(iter(settings))
            raise ConfigError(
                f"PAD does not say which of the outputs {join_names(free)} are as long as a padded"
                " input, to cut them to the length of each request",
                expected=f'a list of them in PAD, or [] for none: {{"{name}": {{"outputs":'
                f" {json.dumps(free)}}}}}",
            )
        for name, setting in settings.items():
            pad = self.pads[name]
            for output in setting.get("outputs", ()):
                axes = list(_free_axes(outputs[output])) if output in outputs else []
                if not axes:
                    raise _refusal(f"the output '{output}'", "outputs with dims of -1")
                for axis, input_axis in zip(axes, pad.axes, strict=False):
                    yield _Cut(output, axis, name, input_axis, pad.left)

    def fill(self, item: Item) -> Item:
        """Return the item with masks for those that its request left out."""
        for mask, name in self.masks.items():
            value = item.get(name)
            if mask not in item and value is not None:
                shape = self.pads[name].mask_shape(value)
                dtype: torch.dtype = getattr(torch, str(self._specs[mask].dtype.torch))
                device = value.device if isinstance(value, Tensor) else None
                item = item | {mask: torch.ones(shape, dtype=dtype, device=device)}
        return item

    def mismatch(self, item: Item) -> InputError | None:
        """Return the error of a request that sent a mask and its input in different sizes.

        In a batch both are padded to the longest, so the model would not notice.
        """
        for mask, name in self._masked.items():
            if mask not in item or name not in item:
                continue
            sent = item[mask].shape
            if tuple(sent) != self.pads[name].mask_shape(item[name]):
                return InputError(
                    f"input '{mask}' is {list(sent)}, and its input '{name}' is"
                    f" {list(item[name].shape)}",
                    expected="a mask as long as its input",
                )
        return None

    def split(self, items: Placed) -> list[Placed]:
        """Split the items of one group by their lengths if they would be padded too much."""
        _, first = items[0]
        pads = {name: pad for name, pad in self.pads.items() if name in first}
        columns = {name: [item[name] for _, item in items] for name in pads}
        if all(pad.fit(columns[name]) for name, pad in pads.items()):
            return [items]
        parts: dict[tuple[int, ...], Placed] = {}
        for place, item in items:
            lengths: list[int] = []
            for name, pad in pads.items():
                lengths += pad.length_class(item[name])
            parts.setdefault(tuple(lengths), []).append((place, item))
        return list(parts.values())

    def cut(self, outcomes: Sequence[dict[str, Value]], items: Items) -> None:
        """Cut outputs to the lengths of the items of a batch."""
        for cut in self._cuts:
            if cut.input not in items[0]:
                continue
            lengths = [item[cut.input].shape[cut.input_axis] for item in items]
            padded = self.pads[cut.input].rounded(max(lengths))
            for outcome, size in zip(outcomes, lengths, strict=True):
                value = outcome[cut.output]
                # An output that is not as long as the padded input does not follow its length. Of
                # TorchScript, it may have fewer dimensions.
                follows = value.shape[cut.axis : cut.axis + 1] == (padded,)
                if size == padded or not follows:
                    continue
                start = padded - size if cut.left else 0
                kept = [slice(None)] * cut.axis
                kept.append(slice(start, start + size))
                part = value[tuple(kept)]
                outcome[cut.output] = part.contiguous() if isinstance(part, Tensor) else part


def _free_axes(spec: TensorSpec) -> Iterator[int]:
    return (axis for axis, dim in enumerate(spec.dims, 1) if dim == -1)


def _refusal(found: str, expected: str) -> ConfigError:
    return ConfigError(f"PAD names {found}", expected=expected)
