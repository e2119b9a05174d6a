"""Parts of a result that are no plain tensors: arrays, strings, numbers, tensors of a subclass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torch_py_backend.batching.gather_scatter import Strings, Value
from torch_py_backend.errors import OutputError, a_type


def unchecked(model: str, name: str, part: object) -> Value:
    """Convert a part of a result to a tensor or an array of strings, without checks.

    Raises:
        OutputError: the part is neither numbers nor strings.
    """
    if isinstance(part, Tensor):
        return part.detach()
    if isinstance(part, np.ndarray | np.generic) and part.dtype.kind not in "OUS":
        return from_numpy(part)
    if isinstance(part, bool | int | float):
        return torch.tensor(part)
    return strings(model, name, part)


def from_numpy(part: np.ndarray[Any, Any] | np.generic) -> Tensor:
    """Convert numpy's numbers; those of types that torch does not have raise TypeError."""
    # torch takes neither negative strides nor, without a warning, memory that cannot be written.
    return torch.from_numpy(np.require(part, requirements=["C", "W"]))


def without_operators(part: Tensor) -> Tensor:
    """Return a tensor of a subclass without the subclass, if its operators are all that it adds."""
    kind = type(part)
    operators = kind.__torch_function__ is not nn.Parameter.__torch_function__  # which has none
    wraps = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    return part.as_subclass(Tensor) if operators and not wraps else part


def strings(model: str, name: str, part: object) -> Strings:
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
        model,
        f"output '{name}' is {a_type(part)}",
        expected="a list of str or bytes",
    )
