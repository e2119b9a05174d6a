"""What a model keeps between calls: the warm-up must not leave its own values there."""

from __future__ import annotations

import io
import logging
import pickle
import types
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.jit import ScriptFunction, ScriptModule

from torch_py_backend.engine.engine import Engine
from torch_py_backend.pipeline import failures

# Buffers of more bytes than this in total may be weights, as in quantized modules.
_COPIED_BYTES = 256 << 20
# Compared by identity: they hold no state.
_OPAQUE = (type, types.ModuleType, types.FunctionType, logging.Logger, nn.Parameter)
# Objects of TorchScript are not observed: the weights of quantized modules are such.
_SCRIPT_OBJECTS = (torch.ScriptObject, ScriptFunction)
# Attributes of an nn.Module that are not compared: buffers are by themselves.
_REGISTERED = ("_parameters", "_buffers", "_non_persistent_buffers_set")


class ModelState:
    """The state of a model before the warm-up.

    Buffers are copied. Attributes of Python objects and of TorchScript are only compared, because
    what they refer to cannot always be copied. An attribute that pickle does not accept is compared
    by identity. Global variables are not observed.
    """

    def __init__(self, engine: Engine) -> None:
        self._modules = dict(_modules(engine))
        self._buffers = self._named_buffers()
        self._versions = {path: failures.version(tensor) for path, tensor in self._buffers.items()}
        self._copies: dict[str, Tensor] = {}
        left = _COPIED_BYTES
        for path, tensor in self._buffers.items():
            left -= tensor.nbytes
            if left >= 0:
                self._copies[path] = tensor.clone()
        self._objects = dict(_objects(engine, self._modules))
        self._attributes = self._read()  # which keep their identities
        self._contents = self._hashes(self._attributes)

    def put_back(self) -> list[str]:
        """Put buffers back; return the names of everything else that the warm-up has changed."""
        changed = []
        present = self._named_buffers()
        for path in self._buffers | present:
            if path in present and failures.version(present[path]) == self._versions.get(path):
                continue
            copied = self._copies.get(path)
            if copied is None or copied.shape != self._buffers[path].shape:
                changed.append(path)
                continue
            tensor = self._buffers[path]
            with torch.no_grad():  # into the same memory: graphs read it there
                tensor.copy_(copied)
            module, dot, name = path.rpartition(".")
            setattr(self._modules[module + dot], name, tensor)
        contents = self._hashes(self._read())
        before = self._contents
        changed += [path for path in before | contents if before.get(path) != contents.get(path)]
        return changed

    def _named_buffers(self) -> dict[str, Tensor]:
        return {
            path + name: tensor
            for path, module in self._modules.items()
            for name, tensor in module.named_buffers(recurse=False)
        }

    def _read(self) -> dict[str, object]:
        """Return the attributes of all objects by their paths."""
        return {
            path + name: value
            for path, part in self._objects.items()
            for name, value in _attributes(part).items()
        }

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
            for name, (_, is_parameter) in kinds.get_attributes().items()
            if not is_parameter and name not in part._buffers
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


class _Pickler(pickle.Pickler):
    """Writes what a value contains: hashes of tensors, IDs of code and of the model's objects."""

    def __init__(self, stream: io.BytesIO, known: set[int]) -> None:
        super().__init__(stream)
        self._known = known

    def persistent_id(self, value: object) -> object:
        if isinstance(value, _SCRIPT_OBJECTS):
            return type(value).__name__
        if isinstance(value, _OPAQUE) or id(value) in self._known:
            return id(value)
        if isinstance(value, Tensor):
            return value.dtype, value.shape, failures.digest(value)
        return None


def _content(value: object, known: set[int]) -> int:
    """Return a hash of a value and of what it refers to."""
    stream = io.BytesIO()
    try:
        _Pickler(stream, known).dump(value)
    except Exception:  # it has a lock, a file or a sparse tensor, or is too deep
        return id(value)
    return hash(stream.getvalue())
