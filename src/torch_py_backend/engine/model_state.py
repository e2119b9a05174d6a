"""What a model keeps between calls: the warm-up must not leave its own values there."""

from __future__ import annotations

import logging
import types
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.jit import ScriptModule

from torch_py_backend.engine.engine import Engine
from torch_py_backend.pipeline import failures

# Buffers of more bytes than this in total may be weights, as in quantized modules.
_COPIED_BYTES = 256 << 20
# An attribute's tensor of more bytes than this is not read.
_READ_BYTES = 64 << 20
# How far the references of an attribute are followed, and how many objects are read.
_DEPTH, _READ_OBJECTS = 16, 1 << 18
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_PLAIN = (str, bytes, int, float, complex, types.NoneType, torch.dtype, torch.device)
# Compared by identity: they hold no state, or refer to all objects of the process.
_OPAQUE = (type, types.ModuleType, types.FunctionType, logging.Logger)
# TorchScript attributes that are not observed: the weights of quantized modules are objects.
_OBJECTS = ("ClassType", "InterfaceType", "FunctionType")
# Attributes of an nn.Module that are not compared: buffers are by themselves.
_REGISTERED = ("_parameters", "_buffers", "_non_persistent_buffers_set")

# The hash of each object that was read, by its id, with the object, so that it keeps its id.
_Memo: TypeAlias = "dict[int, tuple[object, int]]"


class _Buffer(NamedTuple):
    """A buffer before the warm-up; `copy` is None if it may be a weight."""

    name: str
    module: nn.Module
    attribute: str
    tensor: Tensor
    version: object
    copy: Tensor | None


class ModelState:
    """The state of a model before the warm-up.

    Buffers are copied. Attributes of Python objects and of TorchScript are only compared, because
    what they refer to cannot always be copied. Global variables are not observed.
    """

    def __init__(self, engine: Engine) -> None:
        self._modules = dict(_modules(engine))
        self._buffers: list[_Buffer] = []
        left = _COPIED_BYTES
        for name, module, attribute, tensor in _buffers(self._modules):
            left -= tensor.nbytes
            copied = tensor.clone() if left >= 0 else None
            version = failures.version(tensor)
            self._buffers.append(_Buffer(name, module, attribute, tensor, version, copied))
        self._objects = dict(_objects(engine, self._modules))
        self._memo: _Memo = {}
        self._contents = _contents(self._objects, self._memo)

    def put_back(self) -> list[str]:
        """Put buffers back; return the names of everything else that the warm-up has changed."""
        names = {name for name, *_ in _buffers(self._modules)}
        changed = [*names.difference(buffer.name for buffer in self._buffers)]
        for buffer in self._buffers:
            present = getattr(buffer.module, buffer.attribute, None)
            if present is not None and failures.version(present) == buffer.version:
                continue
            if buffer.copy is None or buffer.copy.shape != buffer.tensor.shape:
                changed.append(buffer.name)
                continue
            with torch.no_grad():  # into the same memory: graphs read it there
                buffer.tensor.copy_(buffer.copy)
            setattr(buffer.module, buffer.attribute, buffer.tensor)
        then, now = self._contents, _contents(self._objects, {})
        return changed + [name for name in then | now if then.get(name) != now.get(name)]


def _modules(engine: Engine) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model's modules with their paths."""
    owner, module = engine.loaded.owner, engine.loaded.module
    if owner is not None:
        yield from owner.named_modules()
    if module is not owner:  # a frozen TorchScript model has attributes of its own
        script = getattr(module, "owner", module)  # of a method
        script = getattr(script, "_c", script)
        if isinstance(script, torch._C.ScriptModule):
            yield from torch.jit._recursive.wrap_cpp_module(script).named_modules()


def _buffers(modules: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield the path of each buffer, and its module, name and tensor."""
    for path, module in modules.items():
        for name, tensor in module.named_buffers(recurse=False):
            yield f"{path}.{name}".lstrip("."), module, name, tensor


# --- attributes ----------------------------------------------------------------------------------


def _objects(engine: Engine, modules: dict[str, nn.Module]) -> Iterator[tuple[str, object]]:
    """Yield the objects of the model's code with their paths."""
    for path, module in modules.items():
        if not isinstance(module, GraphModule):
            yield path, module
    if engine.loaded.owner is None:
        served = getattr(engine.loaded.module, "__self__", engine.loaded.module)
        yield from () if isinstance(served, types.FunctionType) else [("", served)]
    for hook in engine.hooks.defined if engine.hooks is not None else ():
        yield "hooks", getattr(hook.method, "__self__", None)


def _fields(part: object) -> dict[str, object]:
    """Return an object's attributes, without cached properties: they are computed from others."""
    kind = type(part)
    slots = [name for base in kind.__mro__ for name in vars(base).get("__slots__", ())]
    fields = {name: getattr(part, name) for name in slots if hasattr(part, name)}
    fields |= getattr(part, "__dict__", {})
    return {
        name: value
        for name, value in fields.items()
        if not isinstance(getattr(kind, name, None), cached_property)
    }


def _contents(objects: dict[str, object], memo: _Memo) -> dict[str, int]:
    """Return a hash of what each attribute contains; parameters and buffers are not read."""
    memo.update({id(part): (part, id(part)) for part in objects.values()})
    return {
        f"{path}.{name}".lstrip("."): _content(value, memo)
        for path, part in objects.items()
        for name, value in _attributes(part).items()
    }


def _attributes(part: object) -> dict[str, object]:
    """Return an object's attributes, without a module's parameters and buffers."""
    if isinstance(part, ScriptModule):
        kinds: Any = torch._C.ConcreteModuleType.from_jit_type(part._c._type())
        return {
            name: part._c.getattr(name)
            for name, (kind, is_parameter) in kinds.get_attributes().items()
            if not is_parameter and name not in part._buffers and not _has_objects(kind)
        }
    fields = _fields(part)
    if isinstance(part, nn.Module):
        for name in (*_REGISTERED, *_computed(part)):
            fields.pop(name, None)
    return fields


def _has_objects(kind: Any) -> bool:
    return kind.kind() in _OBJECTS or any(map(_has_objects, kind.containedTypes()))


def _computed(module: nn.Module) -> list[str]:
    """Return the attributes that torch's first weight_norm and spectral_norm set in each call."""
    return [getattr(hook, "name", "") for hook in module._forward_pre_hooks.values()]


def _content(value: object, memo: _Memo, depth: int = 0) -> int:
    """Return a hash of a value and of what it refers to."""
    if isinstance(value, _PLAIN):
        return hash(repr(value))  # NaN does not equal itself
    if isinstance(value, Tensor):
        return _tensor_content(value)
    if isinstance(value, np.ndarray):
        return hash((value.dtype.str, value.shape, value.tobytes()))
    if id(value) in memo:
        return memo[id(value)][1]
    memo[id(value)] = value, id(value)  # also for objects that refer to themselves
    parts: list[object] = []
    if not isinstance(value, _OPAQUE) and depth < _DEPTH and len(memo) < _READ_OBJECTS:
        parts = [part for pair in _fields(value).items() for part in pair]
        parts += list(value) if isinstance(value, _CONTAINERS) else []
        parts += dict.values(value) if isinstance(value, dict) else []
    if parts or isinstance(value, _CONTAINERS):
        hashes = [_content(part, memo, depth + 1) for part in parts]
        if isinstance(value, set | frozenset):
            hashes.sort()
        memo[id(value)] = value, hash((type(value).__name__, *hashes))
    return memo[id(value)][1]


def _tensor_content(tensor: Tensor) -> int:
    if isinstance(tensor, nn.Parameter):
        return id(tensor)
    try:
        if tensor.nbytes > _READ_BYTES:
            return hash(failures.version(tensor))
        return hash((tensor.dtype, tensor.shape, failures.digest(tensor)))
    except Exception:  # sparse, quantized, meta and fake tensors lack one or the other
        return id(tensor)
