"""Engines of functions, items, and outcomes of functions that double their input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import build
import numpy as np
import torch
from torch import Tensor, nn

from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError
from torch_py_backend.loading.hooks import Hook, Hooks
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature import introspection
from torch_py_backend.values import ANY_ROWS, Item, Rows

BAD = -7.0


def engine(
    function: Callable[..., Any],
    rows: Rows = ANY_ROWS,
    owner: nn.Module | None = None,
    step: Callable[[list[Any]], Any] | None = None,
    hooks: Mapping[str, Callable[..., Any]] | None = None,
    **overrides: Any,
) -> Engine:
    """An engine of a function; by default its input x and its output y are FP32 [-1]."""
    free = {"inputs": (build.spec("x", dims=(-1,)),), "outputs": (build.spec("y", dims=(-1,)),)}
    settings = build.config(**(free | overrides))
    signature = introspection.from_function(function)
    loaded = Loaded(build.artifact(), function, signature, owner, rows, step=step)
    named = {name: Hook(name, hook) for name, hook in (hooks or {}).items()}
    return Engine(settings, loaded, torch.device("cpu"), Hooks(**named) if named else None)


def texts(*rows: Any) -> Any:
    """Strings, as they arrive in a request."""
    return np.array(rows, dtype=np.object_)


def items(values: Sequence[float], rows: int = 1, length: int = 4) -> list[Item]:
    return [{"x": np.full((rows, length), value, dtype=np.float32)} for value in values]


def bad(x: Tensor) -> None:
    if bool((x == BAD).any()):
        raise ValueError("a bad value, see /srv/secret/place.txt")


def check(sent: Sequence[Item], outcomes: Sequence[Any], kind: type[BackendError]) -> list[int]:
    """Check each outcome: twice the values or an error of this class; return errors' positions."""
    failed = []
    for position, (item, outcome) in enumerate(zip(sent, outcomes, strict=True)):
        if isinstance(outcome, BackendError):
            assert type(outcome) is kind, outcome
            failed.append(position)
        else:
            np.testing.assert_array_equal(outcome["y"], 2 * np.asarray(item["x"]))
    return failed
