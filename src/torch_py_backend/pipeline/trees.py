"""Trees of tensors, as hooks and models pass them: map them, copy them, split them by rows."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.errors import OutputError, a_type, counted
from torch_py_backend.values import Call, Tree


def to_device(
    tree: Tree,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tree:
    """Move the tensors of a tree to a device, and convert floating-point ones to a type, if any.

    Return the same tree if nothing changes.
    """

    def move(part: Tensor) -> Tensor:
        return part.to(device, dtype if part.is_floating_point() else None)

    return _map(move, tree)


def clone(tree: Tree) -> Tree:
    """Copy the tensors of a tree; other leaves stay the same objects."""
    return _map(torch.clone, tree)


def _map(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping | list | tuple) or _is_record(tree):
        parts = _parts(tree)
        mapped = [_map(function, part) for part in parts]
        if not all(map(operator.is_, mapped, parts)):
            return _like(tree, mapped)
    return tree


def split(result: Tree, rows: int) -> list[Tree]:
    """Split a result by rows: a tensor into slices, a list into entries.

    Split the parts of tuples, dicts and dataclasses likewise. Repeat anything else for each row.
    """
    if isinstance(result, Tensor | np.ndarray) and result.ndim:
        _check_rows(rows, f"{a_type(result)} {list(result.shape)}", len(result))
        return list(result)
    if isinstance(result, list):
        _check_rows(rows, f"a list of {len(result)}", len(result))
        return result
    if isinstance(result, Mapping | tuple) or _is_record(result):
        parts = [split(part, rows) for part in _parts(result)]
        return [_like(result, [part[row] for part in parts]) for row in range(rows)]
    return [result] * rows


def _check_rows(rows: int, found: str, count: int) -> None:
    if count != rows:
        raise OutputError(
            f"the result for {counted(rows, 'row')} holds {found}, which cannot be split by rows"
            " for postprocess()",
            expected="tensors whose dimension 0 is the batch, and lists with an entry a row",
            cure="Or write postprocess_batch(), which receives the unchanged result.",
        )


def _is_record(value: Tree) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _parts(tree: Tree) -> list[Tree]:
    if isinstance(tree, Mapping):
        return list(tree.values())
    if isinstance(tree, list | tuple):
        return list(tree)
    return [getattr(tree, field.name) for field in dataclasses.fields(tree)]


def _like(tree: Tree, parts: Sequence[Tree]) -> Tree:
    """Return a tree of the same type with other parts."""
    if isinstance(tree, Mapping):
        named = dict(zip(tree, parts, strict=True))
        # Hugging Face's outputs are dicts and dataclasses; absent fields are None.
        return type(tree)(**named) if _is_record(tree) else named
    if isinstance(tree, list):
        return list(parts)
    if isinstance(tree, tuple):
        if type(tree) is tuple:
            return tuple(parts)
        make: Call = getattr(type(tree), "_make", type(tree))  # torch's types take a sequence
        return make(parts)
    names = [field.name for field in dataclasses.fields(tree)]
    return dataclasses.replace(tree, **dict(zip(names, parts, strict=True)))
