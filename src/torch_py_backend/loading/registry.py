"""Load an artifact with the loader of its type, and apply OPTIMIZE to the result."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.compile import torch_compile
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, ConfigError
from torch_py_backend.loading import aotinductor, exported_program, python_model, torchscript
from torch_py_backend.loading.loaded import Forward, Loaded, refuse_device_map

log = logging.getLogger(__name__)

Loader: TypeAlias = "Callable[[Artifact, ModelConfig, torch.device | None], Loaded]"


def load(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    """Load an artifact as a module in eval mode on a device; None: the model places itself.

    If the artifact was built for another machine or cannot be loaded, load its fallback.

    Raises:
        ArtifactError, SourceError, WeightsError: the artifact cannot be loaded.
        ConfigError: an option does not apply to artifacts of this type.
    """
    if artifact.kind not in (ArtifactType.MODULE, ArtifactType.FACTORY):
        refuse_device_map(config, f"the model is {artifact.kind.value}")
    try:
        return LOADERS[artifact.kind](artifact, config, device)
    except ArtifactError as error:
        if artifact.fallback is None:
            raise
        log.warning("%s %s is served instead.", error, artifact.fallback.path.name)
    return load(artifact.fallback, config, device)


def _load_torchserve(
    artifact: Artifact, config: ModelConfig, device: torch.device | None
) -> Loaded:
    # Imported by name: it is in a layer above this package.
    torchserve = importlib.import_module("torch_py_backend.torchserve.loader")
    loaded: Loaded = torchserve.load(artifact, config, device)
    return loaded


LOADERS: Mapping[ArtifactType, Loader] = {
    ArtifactType.TORCHSCRIPT: torchscript.load,
    ArtifactType.MODULE: python_model.load,
    ArtifactType.FACTORY: python_model.load,
    ArtifactType.EXPORTED: exported_program.load,
    ArtifactType.AOTI: aotinductor.load,
    ArtifactType.TORCHSERVE: _load_torchserve,
}


# --- OPTIMIZE --------------------------------------------------------------------------------


def optimize(config: ModelConfig, loaded: Loaded) -> Forward:
    """Apply the values of OPTIMIZE that change the model itself; return the callable for inputs.

    Raises:
        ConfigError: an optimization does not apply to such an artifact.
    """
    optimizations, kind = config.options.optimize, loaded.kind
    if optimizations and kind is ArtifactType.AOTI:
        raise _refusal(
            config, optimizations, kind, "The package is compiled already; remove OPTIMIZE."
        )
    of_graphs = tuple(name for name in ("freeze", "cuda_graphs") if name in optimizations)
    if of_graphs and kind is ArtifactType.TORCHSERVE:
        raise _refusal(config, of_graphs, kind, "Its handler is Python code; remove that.")
    set_memory_format(config, loaded)
    if "freeze" in optimizations and kind is ArtifactType.TORCHSCRIPT:
        return torchscript.freeze(config, loaded)
    if "freeze" in optimizations and not torch_compile.requested(config):
        cure = "Set TORCH_COMPILE_OPTIONAL_PARAMETERS, too: what is frozen is its graph."
        raise _refusal(config, ("freeze",), kind, cure)
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


def _refusal(
    config: ModelConfig, names: tuple[str, ...], kind: ArtifactType, cure: str
) -> ConfigError:
    return ConfigError(
        config.name,
        f"OPTIMIZE asks for {', '.join(names)}, and the model is {kind.value}",
        expected="what applies to it",
        cure=cure,
    )
