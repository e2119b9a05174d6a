"""OPTIMIZE, as far as it changes the model itself: frozen graphs, memory format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_py_backend.artifacts.discovery import Kind
from torch_py_backend.compile import torch_compile
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError, brief
from torch_py_backend.loading.loaded import Loaded


def apply(config: ModelConfig, loaded: Loaded) -> Callable[..., Any]:
    """What is called with the inputs, as OPTIMIZE wants it.

    Raises:
        ConfigError: an optimization does not apply to such an artifact.
    """
    wished, kind = config.options.optimize, loaded.kind
    if wished and kind is Kind.AOTI:
        raise _refusal(config, wished, kind, "The package is compiled already; take OPTIMIZE out.")
    whole = tuple(name for name in ("freeze", "cuda_graphs") if name in wished)
    if whole and kind is Kind.TORCHSERVE:
        raise _refusal(config, whole, kind, "Its handler is Python code; take that out.")
    lay_out(config, loaded)
    if "freeze" in wished:
        if kind is Kind.TORCHSCRIPT:
            return _frozen(config, loaded.owner)
        if not torch_compile.requested(config):
            raise _refusal(
                config,
                ("freeze",),
                kind,
                "Set TORCH_COMPILE_OPTIONAL_PARAMETERS, too: what is frozen is its graph.",
            )
    return loaded.module


def lay_out(config: ModelConfig, loaded: Loaded) -> None:
    """Put the weights into the memory format that OPTIMIZE names, if it names one.

    Raises:
        ConfigError: there are no weights.
    """
    if "channels_last" not in config.options.optimize:
        return
    if loaded.owner is None:
        raise _refusal(config, ("channels_last",), loaded.kind, "A function has no weights.")
    loaded.owner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _frozen(config: ModelConfig, module: Any) -> Callable[..., Any]:
    """TorchScript with its weights as constants, its operators fused and laid out for the CPU."""
    method = config.options.method
    others = [method] if method else []
    try:
        frozen = torch.jit.freeze(module, preserved_attrs=others)
        ready = torch.jit.optimize_for_inference(frozen, other_methods=others)
    except Exception as error:  # graphs that it cannot take raise nearly anything
        raise ConfigError(
            config.name,
            f"OPTIMIZE asks for freeze, which fails: {brief(error)}",
            cure="Take freeze out.",
        ) from error
    called: Callable[..., Any] = getattr(ready, method) if method else ready
    return called


def _refusal(config: ModelConfig, names: tuple[str, ...], kind: Kind, cure: str) -> ConfigError:
    return ConfigError(
        config.name,
        f"OPTIMIZE asks for {', '.join(names)}, and the model is {kind.value}",
        expected="what applies to it",
        cure=cure,
    )
