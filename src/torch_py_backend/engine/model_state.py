"""What a model keeps between calls: the warm-up must not leave its own values there."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from torch_py_backend.engine.engine import Engine
from torch_py_backend.pipeline import failures

# Buffers of more bytes than this in total may be weights, as in quantized modules.
_COPIED_BYTES = 256 << 20
# Attributes whose values are compared. `x.device` is another object each time.
_VALUES = (types.NoneType, bool, int, float, str, bytes, torch.device)
_CONTAINERS = (MutableSequence, MutableMapping, MutableSet)
_Mark: TypeAlias = "tuple[object, ...]"


class ModelState:
    """The state of a model before the warm-up.

    Buffers are copied. Of other attributes only a mark is kept: an attribute that is assigned, a
    counter, a container that grows, and a tensor that is written are noticed. What changes within
    another object, or within a container that keeps its length, is not; neither are global
    variables.
    """

    def __init__(self, engine: Engine) -> None:
        self._modules = dict(_modules(engine))
        self._objects = dict(_objects(engine, self._modules))
        # While they are kept, no other object gets an identity or an address of theirs.
        self._kept: list[object] = []
        self._marks = self._read()
        # Buffers and their copies.
        self._copies: dict[str, tuple[Tensor, Tensor]] = {}
        copied = 0
        for path, tensor in self._buffers():
            copied += tensor.numel() * tensor.element_size()  # sparse ones have no nbytes
            if copied <= _COPIED_BYTES:
                self._copies[path] = tensor, tensor.clone()

    def put_back(self) -> list[str]:
        """Put buffers back; return the names of everything else that the warm-up has changed."""
        before, marks = self._marks, self._read()
        changed = [path for path in before | marks if before.get(path) != marks.get(path)]
        return [path for path in changed if not self._restore(path)]

    def _restore(self, path: str) -> bool:
        """Put a buffer back; return whether there is a copy that fits."""
        if path not in self._copies:
            return False
        tensor, copied = self._copies[path]
        if copied.shape != tensor.shape:
            return False
        with torch.no_grad():  # into the same memory: graphs read it there
            tensor.copy_(copied)
        module, dot, name = path.rpartition(".")
        setattr(self._modules[module + dot], name, tensor)
        return True

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for path, module in self._modules.items():
            for name, tensor in module.named_buffers(recurse=False):
                yield path + name, tensor

    def _read(self) -> dict[str, _Mark]:
        """Return the marks of all buffers and attributes by their paths."""
        marks = {}
        for path, tensor in self._buffers():
            marks[path] = _mark(tensor, stays=True)
            self._kept.append(tensor)
        for path, part in self._objects.items():
            # Attributes of TorchScript are other Python objects each time.
            stays = not isinstance(part, ScriptModule)
            for name, value in _attributes(part).items():
                marks[path + name] = _mark(value, stays=stays)
                self._kept.append(value)
        return marks


def _modules(engine: Engine) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model's modules with their paths, each with a dot at its end."""
    roots = [engine.loaded.owner]
    if engine.loaded.module is not engine.loaded.owner:
        # A frozen TorchScript model has attributes of its own.
        script = getattr(engine.loaded.module, "owner", engine.loaded.module)  # of a method
        script = getattr(script, "_c", script)
        if isinstance(script, torch._C.ScriptModule):
            roots.append(torch.jit._recursive.wrap_cpp_module(script))
    for root in roots:
        if root is not None:
            for path, module in root.named_modules():
                yield f"{path}.".lstrip("."), module


def _objects(engine: Engine, modules: dict[str, nn.Module]) -> Iterator[tuple[str, object]]:
    """Yield the objects of the model's code with their paths."""
    yield from modules.items()
    served = getattr(engine.loaded.module, "__self__", engine.loaded.module)
    if engine.loaded.owner is None and not isinstance(served, types.FunctionType):
        yield "", served
    for hook in engine.hooks.defined if engine.hooks is not None else ():
        yield "hooks.", getattr(hook.method, "__self__", None)


def _attributes(part: object) -> dict[str, object]:
    """Return an object's attributes, without those that are computed in each call."""
    if isinstance(part, ScriptModule):
        kinds: Any = torch._C.ConcreteModuleType.from_jit_type(part._c._type())
        return {
            name: part._c.getattr(name)
            for name, (_, is_parameter) in kinds.get_attributes().items()
            if not is_parameter and name not in part._buffers
        }
    hooks = getattr(part, "_forward_pre_hooks", {}).values()
    # torch's first weight_norm and spectral_norm set these attributes in each call.
    computed = [getattr(hook, "name", "") for hook in hooks]
    return {
        name: value
        for name, value in getattr(part, "__dict__", {}).items()
        if name not in computed and not isinstance(getattr(type(part), name, None), cached_property)
    }


def _mark(value: object, *, stays: bool) -> _Mark:
    """Return what tells an attribute from its later value; `stays`: objects keep their identity."""
    kind, identity = type(value), id(value) if stays else None
    if isinstance(value, _VALUES):
        return kind, repr(value)
    if isinstance(value, tuple):
        return kind, *(_mark(part, stays=stays) for part in value)
    if isinstance(value, _CONTAINERS):
        return kind, identity, len(value)
    if isinstance(value, Tensor):
        # A tensor of a library may have no address.
        with contextlib.suppress(Exception):
            return kind, value.shape, failures.version(value)
    return kind, identity
