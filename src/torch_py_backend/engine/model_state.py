"""What a model keeps between calls: the warm-up must not leave its own values there."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Collection, MutableMapping, MutableSequence, MutableSet
from functools import cached_property

import torch
from torch import Tensor, nn

from torch_py_backend.pipeline import failures

# Buffers of more bytes than this in total may be weights, as in quantized modules.
_COPIED_BYTES = 256 << 20
# Attributes whose values are compared. `x.device` is another object each time.
_VALUES = (types.NoneType, bool, int, float, str, bytes, torch.device)
_CONTAINERS = (MutableSequence, MutableMapping, MutableSet)


class ModelState:
    """The state of a module before the warm-up.

    Buffers are copied. Of the Python attributes of each module only a mark is kept: what changes
    within another object than a tensor, or a container that keeps its length, is not noticed.
    """

    def __init__(self, owner: nn.Module | None) -> None:
        self._owner = nn.Module() if owner is None else owner
        self._modules = dict(self._owner.named_modules())
        # While they are kept, no other object gets an identity or an address of theirs.
        self._kept: list[object] = []
        self._marks = self._read()
        self._copies: dict[str, tuple[Tensor, Tensor]] = {}
        copied = 0
        for path, tensor in self._owner.named_buffers(remove_duplicate=False):
            copied += tensor.numel() * tensor.element_size()  # sparse ones have no nbytes
            if copied <= _COPIED_BYTES:
                self._copies[path] = tensor, tensor.clone()

    def changed(self) -> list[str]:
        """Return the names of the buffers and attributes that the warm-up has changed."""
        before, after = self._marks, self._read()
        return [path for path in before | after if before.get(path) != after.get(path)]

    def put_back(self, changed: Collection[str]) -> list[str]:
        """Put buffers back; return the names of everything else that has changed."""
        for path in self._copies.keys() & changed:
            tensor, copied = self._copies[path]
            with torch.no_grad():  # into the same memory: graphs read it there
                tensor.copy_(copied)
            module, _, name = path.rpartition(".")
            setattr(self._modules[module], name, tensor)
        return [path for path in changed if path not in self._copies]

    def _read(self) -> dict[str, object]:
        """Return the marks of all buffers and attributes by their paths."""
        values: dict[str, object] = dict(self._owner.named_buffers(remove_duplicate=False))
        for path, module in self._modules.items():
            hooks = module._forward_pre_hooks.values()
            # torch's first weight_norm and spectral_norm set these attributes in each call.
            computed = [getattr(hook, "name", "") for hook in hooks]
            for name, value in vars(module).items():
                is_cached = isinstance(getattr(type(module), name, None), cached_property)
                if name not in computed and not is_cached:
                    values[f"{path}.{name}".lstrip(".")] = value
        self._kept += values.values()
        return {path: _mark(value) for path, value in values.items()}


def _mark(value: object) -> object:
    """Return what tells an attribute from its later value."""
    if isinstance(value, _VALUES):
        return repr(value)
    if isinstance(value, tuple):
        return tuple(map(_mark, value))
    if isinstance(value, Tensor):
        # A tensor of a library may have no address.
        with contextlib.suppress(Exception):
            return value.shape, failures.version(value)
    return id(value), len(value) if isinstance(value, _CONTAINERS) else 0
