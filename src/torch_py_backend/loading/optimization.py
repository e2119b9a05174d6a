"""The values of OPTIMIZE that change the model itself: frozen graphs, memory format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_py_backend.artifacts.discovery import ArtifactType
from torch_py_backend.compile import torch_compile
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError, summarize
from torch_py_backend.loading.loaded import Loaded


def apply(config: ModelConfig, loaded: Loaded) -> Callable[..., Any]:
    """Apply OPTIMIZE to a model, and return the callable for inputs.

    Raises:
        ConfigError: an optimization does not apply to such an artifact.
    """
    optimize, kind = config.options.optimize, loaded.kind
    if optimize and kind is ArtifactType.AOTI:
        raise _refusal(
            config, optimize, kind, "The package is compiled already; take OPTIMIZE out."
        )
    of_graphs = tuple(name for name in ("freeze", "cuda_graphs") if name in optimize)
    if of_graphs and kind is ArtifactType.TORCHSERVE:
        raise _refusal(config, of_graphs, kind, "Its handler is Python code; take that out.")
    set_memory_format(config, loaded)
    if "freeze" in optimize:
        if kind is ArtifactType.TORCHSCRIPT:
            return _frozen(config, loaded.owner)
        if not torch_compile.requested(config):
            raise _refusal(
                config,
                ("freeze",),
                kind,
                "Set TORCH_COMPILE_OPTIONAL_PARAMETERS, too: what is frozen is its graph.",
            )
    return loaded.module


def set_memory_format(config: ModelConfig, loaded: Loaded) -> None:
    """Convert the weights to the memory format that OPTIMIZE names, if any.

    Raises:
        ConfigError: there are no weights.
    """
    if "channels_last" not in config.options.optimize:
        return
    if loaded.owner is None:
        raise _refusal(config, ("channels_last",), loaded.kind, "A function has no weights.")
    loaded.owner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _frozen(config: ModelConfig, module: Any) -> Callable[..., Any]:
    """Return TorchScript with its weights as constants and its operators fused for the CPU."""
    method = config.options.method
    others = [method] if method else []
    try:
        frozen = torch.jit.freeze(module, preserved_attrs=others)
        ready = torch.jit.optimize_for_inference(frozen, other_methods=others)
    except Exception as error:  # unsupported graphs raise nearly anything
        raise ConfigError(
            config.name,
            f"OPTIMIZE asks for freeze, which fails: {summarize(error)}",
            cure="Take freeze out.",
        ) from error
    called: Callable[..., Any] = getattr(ready, method) if method else ready
    return called


def _refusal(
    config: ModelConfig, names: tuple[str, ...], kind: ArtifactType, cure: str
) -> ConfigError:
    return ConfigError(
        config.name,
        f"OPTIMIZE asks for {', '.join(names)}, and the model is {kind.value}",
        expected="what applies to it",
        cure=cure,
    )
