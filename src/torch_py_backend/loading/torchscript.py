"""TorchScript archives, and strings that are not UTF-8 as their arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, brief
from torch_py_backend.loading import mapped_files
from torch_py_backend.loading.loaded import Loaded, warn_unused
from torch_py_backend.signature import introspection
from torch_py_backend.signature.binding import Takes

_TEXTS = (Takes.STR, Takes.STRINGS, Takes.NESTED_STRINGS)


def load(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    """Load an archive of torch.jit.save.

    Raises:
        ArtifactError: it is damaged, or lacks the method that is served.
    """
    try:
        module: Any = torch.jit.load(artifact.path, map_location=device)
    except Exception as error:  # a damaged archive raises nearly anything
        raise ArtifactError(
            config.name,
            f"{artifact.path.name} is TorchScript that torch {torch.__version__} cannot load:"
            f" {brief(error)}",
            cure="Write it again with torch.jit.save under this version of torch.",
        ) from error
    module.eval()
    if config.options.enable_weight_sharing is not False:
        mapped_files.share((*module.parameters(), *module.buffers()), artifact.path)
    name = config.options.method or "forward"
    method: Any = getattr(module, name, None)
    if not hasattr(method, "schema"):
        raise ArtifactError(
            config.name,
            f"{artifact.path.name} is TorchScript without {name}()",
            expected="a module with the method that is served",
        )
    warn_unused(config, "model_class", "model_kwargs", "weights")
    # Called through the module, forward() runs its hooks.
    called = module if config.options.method is None else method
    signature = dataclasses.replace(introspection.of_schema(method.schema), name=name)
    return Loaded(artifact.kind, called, signature, module)


def passing_bytes(loaded: Loaded, called: Callable[..., Any]) -> Callable[..., Any]:
    """The same for strings that are not UTF-8, where the model is TorchScript that takes strings.

    Args:
        loaded: the model.
        called: what is called with the inputs.
    """
    takes = (one.takes for one in loaded.signature.arguments)
    if not loaded.signature.torchscript or not any(one in _TEXTS for one in takes):
        return called
    return _PassingBytes(called, loaded.owner, loaded.signature.name)


class _PassingBytes:
    """Calls TorchScript with strings of any bytes, and returns what comes back.

    torch passes bytes on as they are, but decodes every string of the result, and raises where one
    is not UTF-8. So for a call with such bytes a method is added to the module that returns the
    numbers of each string's bytes: slow (2 µs a byte), but without a second call of the model.
    """

    def __init__(self, called: Callable[..., Any], owner: Any, method: str) -> None:
        self._called = called
        self._owner = owner
        self._method = method
        self._added: dict[tuple[str, ...], Callable[..., Any]] = {}
        self._schema: Any = getattr(owner, method).schema

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _holds_bytes((*args, *kwargs.values())):
            return self._called(*args, **kwargs)
        names = [one.name for one in self._schema.arguments[1 : 1 + len(args)]]
        names += kwargs
        added = self._added.get(tuple(names))
        if added is None:
            added = self._added[tuple(names)] = self._add(names)
        (returned,) = self._schema.returns
        return _joined(added(*args, *kwargs.values()), returned.type)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the model itself, for hooks."""
        return getattr(self._called, name)

    def _add(self, names: Sequence[str]) -> Callable[..., Any]:
        """A method that takes these arguments, and returns numbers for strings."""
        types = {one.name: one.type.annotation_str for one in self._schema.arguments}
        (returned,) = self._schema.returns
        name = f"{self._method}_in_bytes_{len(self._added)}"
        self._owner.define(
            f"def {name}(self, {', '.join(f'{one}: {types[one]}' for one in names)}):\n"
            f"    result = self.{self._method}({', '.join(f'{one}={one}' for one in names)})\n"
            f"    return {_numbers('result', returned.type)}\n"
        )
        method: Callable[..., Any] = getattr(self._owner, name)
        return method


def _holds_bytes(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_bytes, value))
    return isinstance(value, bytes)


def _numbers(value: str, kind: Any, depth: int = 0) -> str:
    """TorchScript that makes numbers of the strings in a value: of a list of them, or a tuple."""
    if kind.kind() == "StringType":
        return f"[ord(c) for c in {value}]"
    if kind.kind() == "ListType" and _of_text(kind):
        one = f"one{depth}"
        return f"[{_numbers(one, kind.getElementType(), depth + 1)} for {one} in {value}]"
    if kind.kind() == "TupleType":
        parts = [_numbers(f"{value}[{n}]", one, depth) for n, one in enumerate(kind.elements())]
        return f"({', '.join(parts)},)"
    return value


def _of_text(kind: Any) -> bool:
    while kind.kind() == "ListType":
        kind = kind.getElementType()
    return bool(kind.kind() == "StringType")


def _joined(value: Any, kind: Any) -> Any:
    """What `_numbers` has taken apart, as bytes."""
    if kind.kind() == "StringType":
        return bytes(value)
    if kind.kind() == "ListType" and _of_text(kind):
        return [_joined(one, kind.getElementType()) for one in value]
    if kind.kind() == "TupleType":
        return tuple(_joined(one, k) for one, k in zip(value, kind.elements(), strict=True))
    return value
