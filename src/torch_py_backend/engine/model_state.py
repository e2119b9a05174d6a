"""What a model keeps between calls: the warm-up must not leave its own values there."""

from __future__ import annotations

import copy
import logging
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.jit import ScriptModule

from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import join_names
from torch_py_backend.pipeline import failures

log = logging.getLogger(__name__)

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

_Modules: TypeAlias = "Sequence[tuple[str, nn.Module]]"
# The hash of each object that was read, by its id, with the object, so that it keeps its id.
_Memo: TypeAlias = "dict[int, tuple[object, int]]"


class ModelState:
    """The state of a model before the warm-up.

    Buffers and TorchScript attributes are copied. Attributes of Python objects are only compared,
    because what they refer to cannot always be copied. Global variables are not observed.
    """

    def __init__(self, engine: Engine) -> None:
        modules = list(_modules(engine))
        python = [module for _, module in modules if not isinstance(module, ScriptModule)]
        self._buffers = [(module._buffers, set(module._buffers)) for module in python]
        self._slots: list[_Slot] = []
        left = _COPIED_BYTES
        for name, get, put in _values(modules):
            value = get()
            left -= value.nbytes if isinstance(value, Tensor) else 0
            # A deep copy of a view would contain all of its memory.
            duplicate = Tensor.clone if isinstance(value, Tensor) else copy.deepcopy
            copied = None if left < 0 else duplicate(value)
            self._slots.append(_Slot(name, get, put, value, _version(value), copied))
        self._objects = dict(_objects(engine, modules))
        self._memo: _Memo = {}
        self._contents = _contents(self._objects, self._memo)

    def put_back(self) -> list[str]:
        """Put back what the warm-up has changed; return the names of what cannot be put back."""
        names, remaining = [], []
        for slot in self._slots:
            if _version(slot.get()) == slot.version:
                continue
            if slot.copy is None and slot.value is not None:
                remaining.append(slot.name)
                continue
            value = slot.copy
            if isinstance(value, Tensor) and value.shape == slot.value.shape:
                with torch.no_grad():  # into the same memory: graphs read it there
                    value = slot.value.copy_(value)
            slot.put(value)
            names.append(slot.name)
        for buffers, before in self._buffers:
            created = buffers.keys() - before
            names += created
            for name in created:
                del buffers[name]
        if names:
            log.info(
                "the warm-up has changed %s of the model, which is put back.",
                join_names(names),
            )
        then, now = self._contents, _contents(self._objects, {})
        return remaining + [name for name in then | now if then.get(name) != now.get(name)]


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


# --- buffers and TorchScript attributes --------------------------------------------------------


class _Slot(NamedTuple):
    """A buffer or a TorchScript attribute before the warm-up; `copy` is None if there is none."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object]
    value: Any
    version: object
    copy: Any


def _values(
    modules: _Modules,
) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], object]]]:
    """Yield the name of each value, and the functions that return and replace it."""
    for path, module in modules:
        if isinstance(module, ScriptModule):
            kinds: Any = torch._C.ConcreteModuleType.from_jit_type(module._c._type())
            attributes = kinds.get_attributes().items()
            names = [
                name
                for name, (kind, is_parameter) in attributes
                if not is_parameter and not _has_objects(kind)
            ]
            get, put = module._c.getattr, module._c.setattr
        else:
            names = list(module._buffers)
            get, put = module._buffers.get, module._buffers.__setitem__
        for name in names:
            yield f"{path}.{name}".lstrip("."), partial(get, name), partial(put, name)


def _version(value: object) -> object:
    if isinstance(value, Tensor):
        return id(value), failures.version(value)
    return _content(value, {})


def _has_objects(kind: Any) -> bool:
    return kind.kind() in _OBJECTS or any(map(_has_objects, kind.containedTypes()))


# --- attributes of Python objects --------------------------------------------------------------


def _objects(engine: Engine, modules: _Modules) -> Iterator[tuple[str, object]]:
    """Yield the objects of the model's code with their paths."""
    for path, module in modules:
        if not isinstance(module, ScriptModule | GraphModule):
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
        for name, value in _fields(part).items()
        if not (isinstance(part, nn.Module) and name in (*_REGISTERED, *_computed(part)))
    }


def _computed(module: nn.Module) -> list[object]:
    """Return the attributes that torch's first weight_norm and spectral_norm set in each call."""
    return [getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()]


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
