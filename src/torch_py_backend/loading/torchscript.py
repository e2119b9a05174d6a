"""TorchScript archives, and strings that are not UTF-8 as their arguments."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch

from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, ConfigError, summarize
from torch_py_backend.loading import mapped_files
from torch_py_backend.loading.loaded import Forward, Loaded, warn_unused
from torch_py_backend.signature import introspection
from torch_py_backend.signature.arguments import ArgumentType

_TEXTS = (ArgumentType.STR, ArgumentType.STRINGS, ArgumentType.NESTED_STRINGS)


def load(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    """Load an archive that torch.jit.save wrote.

    Raises:
        ArtifactError: this torch cannot load it, or it lacks the method to serve.
    """
    module = read(config, artifact.path, device)
    name = config.options.method or "forward"
    method: Any = getattr(module, name, None)
    if not hasattr(method, "schema"):
        raise ArtifactError(
            config.name,
            f"{artifact.path.name} is TorchScript without {name}()",
            expected="a module with the method that is served",
        )
    warn_unused(config, "model_class", "model_kwargs", "weights")
    # A call of the module, unlike one of forward(), runs its hooks.
    called = module if config.options.method is None else method
    signature = dataclasses.replace(introspection.from_schema(method.schema), name=name)
    return Loaded(artifact, called, signature, module)


def read(config: ModelConfig, path: Path, device: torch.device | None) -> torch.jit.ScriptModule:
    """Return the module of an archive in eval mode, with its weights in the mapped file.

    Raises:
        ArtifactError: this torch cannot load it.
    """
    try:
        module: torch.jit.ScriptModule = torch.jit.load(path, map_location=device)
    except Exception as error:  # a damaged archive raises nearly anything
        raise ArtifactError(
            config.name,
            f"{path.name} is TorchScript that torch {torch.__version__} cannot load:"
            f" {summarize(error)}",
            cure="Write it again with torch.jit.save under this version of torch.",
        ) from error
    module.eval()
    if config.options.enable_weight_sharing is not False:
        mapped_files.share((*module.parameters(), *module.buffers()), path)
    return module


def freeze(config: ModelConfig, loaded: Loaded) -> Forward:
    """Return a model with its weights as constants and its operators fused for the CPU.

    Raises:
        ConfigError: torch cannot freeze the graph.
    """
    method = config.options.method
    others = [method] if method else []
    try:
        frozen = torch.jit.freeze(loaded.owner, preserved_attrs=others)
        optimized = torch.jit.optimize_for_inference(frozen, other_methods=others)
    except Exception as error:  # unsupported graphs raise nearly anything
        raise ConfigError(
            config.name,
            f"OPTIMIZE asks for freeze, which fails: {summarize(error)}",
            cure="Remove freeze.",
        ) from error
    called: Forward = getattr(optimized, method) if method else optimized
    return called


# --- strings of any bytes --------------------------------------------------------------------


def accept_bytes(loaded: Loaded, called: Forward) -> Forward:
    """Return a callable that accepts strings that are not UTF-8, if the model takes strings."""
    takes_text = any(argument.type in _TEXTS for argument in loaded.signature.arguments)
    if not loaded.signature.torchscript or not takes_text:
        return called
    return _AcceptBytes(called, loaded.owner, loaded.signature.name)


class _AcceptBytes:
    """Calls a TorchScript model with strings of any bytes.

    torch passes bytes to the model unchanged, but decodes each string of the result and raises an
    error if it is not UTF-8. For calls with such bytes, the module gets a method that returns the
    codes of each string's bytes: slow (2 µs a byte), but without a second call of the model.
    """

    def __init__(self, called: Forward, owner: Any, method: str) -> None:
        self._called = called
        self._owner = owner
        self._method = method
        self._methods: dict[tuple[str, ...], Forward] = {}  # those with codes, by argument names
        schema: torch.FunctionSchema = getattr(owner, method).schema
        self._arguments = {
            argument.name: argument.type.annotation_str for argument in schema.arguments[1:]
        }
        (returned,) = schema.returns
        self._returned: torch.JitType = returned.type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _has_bytes((*args, *kwargs.values())):
            return self._called(*args, **kwargs)
        names = (*list(self._arguments)[: len(args)], *kwargs)
        if names not in self._methods:
            method = f"{self._method}_in_bytes_{len(self._methods)}"
            arguments = ", ".join(f"{name}: {self._arguments[name]}" for name in names)
            passed = ", ".join(f"{name}={name}" for name in names)
            self._owner.define(
                f"def {method}(self, {arguments}):\n"
                f"    result = self.{self._method}({passed})\n"
                f"    return {_encode('result', self._returned)}\n"
            )
            self._methods[names] = getattr(self._owner, method)
        return _decode(self._methods[names](*args, *kwargs.values()), self._returned)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, for hooks."""
        return getattr(self._called, name)


def _has_bytes(value: object) -> bool:
    if isinstance(value, list | tuple):  # for each request: pytree takes several times as long
        return any(map(_has_bytes, value))
    return isinstance(value, bytes)


def _encode(value: str, kind: Any, depth: int = 0) -> str:
    """Return a TorchScript expression that replaces the strings in a value with lists of codes."""
    if kind.kind() == "StringType":
        return f"[ord(c) for c in {value}]"
    if _is_text_list(kind):
        item = f"item{depth}"
        return f"[{_encode(item, kind.getElementType(), depth + 1)} for {item} in {value}]"
    if kind.kind() == "TupleType":
        parts = [_encode(f"{value}[{n}]", part, depth) for n, part in enumerate(kind.elements())]
        return f"({', '.join(parts)},)"
    return value


def _decode(value: Any, kind: Any) -> Any:
    """Replace the lists of codes that `_encode` made with bytes."""
    if kind.kind() == "StringType":
        return bytes(value)
    if _is_text_list(kind):
        return [_decode(item, kind.getElementType()) for item in value]
    if kind.kind() == "TupleType":
        return tuple(_decode(item, part) for item, part in zip(value, kind.elements(), strict=True))
    return value


def _is_text_list(kind: Any) -> bool:
    return re.fullmatch(r"(List\[)+str\]+", kind.annotation_str) is not None
