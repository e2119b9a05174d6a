"""Trees of tensors, as hooks and models hand them on: moved, changed, taken apart by rows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.errors import OutputError


def sent(tree: Any, device: torch.device) -> Any:
    """A tree with its tensors on a device; as it is, where they are there."""
    return changed(tree, lambda one: one if one.device == device else one.to(device))


def changed(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A tree with its tensors as `change` makes them; as it is, where that changes none."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping | list | tuple) or _is_record(tree):
        parts = _parts(tree)
        made = [changed(part, change) for part in parts]
        if all(one is part for one, part in zip(made, parts, strict=True)):
            return tree
        return _like(tree, made)
    return tree


def owned(tree: Any) -> Any:
    """A tree whose tensors and arrays are copies, in containers of the same types.

    What cannot be copied, and what is no container, is the same object.
    """
    if isinstance(tree, Tensor | np.ndarray):
        return tree.clone() if isinstance(tree, Tensor) else tree.copy()
    if type(tree) is dict:
        return {key: owned(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(owned, tree))
    if isinstance(tree, Mapping | list | tuple) or _is_record(tree):
        try:  # of classes of their own, as transformers' BatchEncoding is
            return copy.deepcopy(tree)
        except Exception:  # noqa: S110  whatever such a class raises
            pass
    return tree


def split(model: str, result: Any, rows: int) -> list[Any]:
    """What each row has of a result: of a tensor its slice, of a list its entry.

    Tuples, dicts and dataclasses are taken apart; what is none of these goes to each row as it is.
    """
    if isinstance(result, Tensor | np.ndarray) and result.ndim:
        _check_rows(model, rows, f"{type(result).__name__} {list(result.shape)}", len(result))
        return list(result)
    if isinstance(result, list):
        _check_rows(model, rows, f"list of {len(result)}", len(result))
        return result
    if isinstance(result, Mapping | tuple) or _is_record(result):
        parts = [split(model, part, rows) for part in _parts(result)]
        return [_like(result, [part[row] for part in parts]) for row in range(rows)]
    return [result] * rows


def _check_rows(model: str, rows: int, found: str, count: int) -> None:
    if count != rows:
        raise OutputError(
            model,
            f"the result for {rows} rows holds a {found}, of which postprocess() cannot be given"
            " a row's part",
            expected="tensors whose dimension 0 is the batch, and lists with an entry a row",
            cure="Or write postprocess_batch(), which is given it as it is.",
        )


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _parts(tree: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        return list(tree.values())
    if isinstance(tree, list | tuple):
        return list(tree)
    return [getattr(tree, one.name) for one in dataclasses.fields(tree)]


def _like(tree: Any, parts: Sequence[Any]) -> Any:
    """A tree of the same kind, of other parts."""
    if isinstance(tree, Mapping):
        named = dict(zip(tree, parts, strict=True))
        # Hugging Face's outputs are dicts and dataclasses; what is absent there is None.
        return type(tree)(**named) if _is_record(tree) else named
    if isinstance(tree, list):
        return list(parts)
    if isinstance(tree, tuple):
        if type(tree) is tuple:
            return tuple(parts)
        makes: Any = getattr(type(tree), "_make", type(tree))  # torch's own take a sequence
        return makes(parts)
    names = [one.name for one in dataclasses.fields(tree)]
    return dataclasses.replace(tree, **dict(zip(names, parts, strict=True)))
