"""Items become a batch and a batch becomes outcomes again: group, gather, scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from torch_py_backend.errors import BackendError

# One request's tensors by name, as the client sent them.
Item: TypeAlias = dict[str, Tensor]
# One request's result or its error.
Outcome: TypeAlias = dict[str, Tensor] | BackendError


class Batch(NamedTuple):
    """Gathered columns and the rows that each item brought.

    Attributes:
        columns: one tensor an input, [rows, ...], in the order asked for.
        sizes: rows of each item, in order; of no meaning where items have no batch dimension.
    """

    columns: Sequence[Tensor]
    sizes: Sequence[int]


def group(items: Sequence[Item], names: Sequence[str]) -> list[list[int]]:
    """Positions of items that can share a batch: same shapes but for the rows, same device."""
    if len(items) == 1:
        return [[0]]
    groups: dict[tuple[object, ...], list[int]] = {}
    for position, item in enumerate(items):
        key = tuple([(item[name].shape[1:], item[name].device) for name in names])
        groups.setdefault(key, []).append(position)
    return list(groups.values())


def gather(items: Sequence[Item], names: Sequence[str]) -> Batch:
    """The items' tensors, concatenated on dimension 0. One item is passed on without a copy."""
    if len(items) == 1:
        columns = [items[0][name] for name in names]
        return Batch(columns, columns[0].shape[:1])
    sizes = [item[names[0]].shape[0] for item in items]
    return Batch([torch.cat([item[name] for item in items]) for name in names], sizes)


def scatter(
    outputs: Sequence[Tensor], names: Sequence[str], sizes: Sequence[int]
) -> list[dict[str, Tensor]]:
    """Each item's rows of each output: views, contiguous because the outputs are."""
    if len(sizes) <= 1:
        return [dict(zip(names, outputs, strict=True))]
    split = [output.split_with_sizes(list(sizes)) for output in outputs]
    return [dict(zip(names, rows, strict=True)) for rows in zip(*split, strict=True)]
