"""What a model keeps between calls: the warm-up must not leave its own values there."""

from __future__ import annotations

import io
import logging
import pickle
import types
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

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
# Compared by identity: they hold no state.
_OPAQUE = (type, types.ModuleType, types.FunctionType, logging.Logger)
# TorchScript attributes that are not observed: the weights of quantized modules are objects.
_OBJECTS = ("ClassType", "InterfaceType", "FunctionType")
# Attributes of an nn.Module that are not compared: buffers are by themselves.
_REGISTERED = ("_parameters", "_buffers", "_non_persistent_buffers_set")


class _Buffer(NamedTuple):
    """A buffer before the warm-up; `copy` is None if it may be a weight."""

    module: nn.Module
    name: str
    tensor: Tensor
    version: object
    copy: Tensor | None


class ModelState:
    """The state of a model before the warm-up.

    Buffers are copied. Attributes of Python objects and of TorchScript are only compared, because
    what they refer to cannot always be copied. An attribute that pickle does not accept is compared
    by identity. Global variables are not observed.
    """

    def __init__(self, engine: Engine) -> None:
        self._modules = dict(_modules(engine))
        self._buffers: dict[str, _Buffer] = {}
        left = _COPIED_BYTES
        for path, module in self._modules.items():
            for name, tensor in module.named_buffers(recurse=False):
                left -= tensor.nbytes
                copied = tensor.clone() if left >= 0 else None
                buffer = _Buffer(module, name, tensor, failures.version(tensor), copied)
                self._buffers[path + name] = buffer
        self._objects = dict(_objects(engine, self._modules))
        self._attributes = self._read()  # which keep their identities
        self._contents = self._hashes(self._attributes)

    def put_back(self) -> list[str]:
        """Put buffers back; return the names of everything else that the warm-up has changed."""
        changed = []
        for path, module in self._modules.items():
            for name, _ in module.named_buffers(recurse=False):
                if path + name not in self._buffers:
                    changed.append(path + name)
        for path, buffer in self._buffers.items():
            present = getattr(buffer.module, buffer.name, None)
            if present is not None and failures.version(present) == buffer.version:
                continue
            if buffer.copy is None or buffer.copy.shape != buffer.tensor.shape:
                changed.append(path)
                continue
            with torch.no_grad():  # into the same memory: graphs read it there
                buffer.tensor.copy_(buffer.copy)
            setattr(buffer.module, buffer.name, buffer.tensor)
        contents = self._hashes(self._read())
        before = self._contents
        changed += [path for path in before | contents if before.get(path) != contents.get(path)]
        return changed

    def _read(self) -> dict[str, object]:
        """Return the attributes of all objects by their paths."""
        attributes = {}
        for path, part in self._objects.items():
            for name, value in _attributes(part).items():
                attributes[path + name] = value
        return attributes

    def _hashes(self, attributes: dict[str, object]) -> dict[str, int]:
        known = set(map(id, self._objects.values()))
        return {path: _content(value, known) for path, value in attributes.items()}


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


# --- attributes ----------------------------------------------------------------------------------


def _objects(engine: Engine, modules: dict[str, nn.Module]) -> Iterator[tuple[str, object]]:
    """Yield the objects of the model's code with their paths."""
    for path, module in modules.items():
        if not isinstance(module, GraphModule):
            yield path, module
    served = getattr(engine.loaded.module, "__self__", engine.loaded.module)
    if engine.loaded.owner is None and not isinstance(served, types.FunctionType):
        yield "", served
    for hook in engine.hooks.defined if engine.hooks is not None else ():
        yield "hooks.", getattr(hook.method, "__self__", None)


def _attributes(part: object) -> dict[str, object]:
    """Return an object's attributes, without a module's parameters and buffers."""
    if isinstance(part, ScriptModule):
        kinds: Any = torch._C.ConcreteModuleType.from_jit_type(part._c._type())
        return {
            name: part._c.getattr(name)
            for name, (kind, is_parameter) in kinds.get_attributes().items()
            if not is_parameter and name not in part._buffers and not _has_objects(kind)
        }
    fields = dict(getattr(part, "__dict__", {}))
    computed = [
        name for name in fields if isinstance(getattr(type(part), name, None), cached_property)
    ]
    if isinstance(part, nn.Module):
        computed += _REGISTERED
        # torch's first weight_norm and spectral_norm set these attributes in each call.
        computed += [getattr(hook, "name", "") for hook in part._forward_pre_hooks.values()]
    for name in computed:
        fields.pop(name, None)
    return fields


def _has_objects(kind: Any) -> bool:
    return kind.kind() in _OBJECTS or any(map(_has_objects, kind.containedTypes()))


class _Pickler(pickle.Pickler):
    """Writes what a value contains: hashes of tensors, IDs of code and of the model's objects."""

    def __init__(self, stream: io.BytesIO, known: set[int]) -> None:
        super().__init__(stream)
        self._known = known

    def persistent_id(self, value: object) -> object:
        if isinstance(value, Tensor):
            return _tensor_content(value)
        if isinstance(value, _OPAQUE) or id(value) in self._known:
            return id(value)
        return None


def _content(value: object, known: set[int]) -> int:
    """Return a hash of a value and of what it refers to."""
    stream = io.BytesIO()
    try:
        _Pickler(stream, known).dump(value)
    except Exception:  # it has a lock or a file, or is too deep
        return id(value)
    return hash(stream.getvalue())


def _tensor_content(tensor: Tensor) -> int:
    if isinstance(tensor, nn.Parameter):
        return id(tensor)
    try:
        if tensor.nbytes > _READ_BYTES:
            return hash(failures.version(tensor))
        return hash((tensor.dtype, tensor.shape, failures.digest(tensor)))
    except Exception:  # sparse, quantized, meta and fake tensors lack one or the other
        return id(tensor)
