"""The table of loaders: one function per artifact type."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError
from torch_py_backend.loading import aotinductor, exported_program, python_model, torchscript
from torch_py_backend.loading.loaded import Loaded, refuse_device_map, refuse_method, warn_unused

log = logging.getLogger(__name__)

Loader: TypeAlias = "Callable[[Artifact, ModelConfig, torch.device | None], Loaded]"

# Imported by name when such an artifact is loaded: it is in a layer above this package.
_TORCHSERVE = "torch_py_backend.torchserve.loader"


def load(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    """Load an artifact as a module in eval mode.

    If the artifact was built for another machine or cannot be loaded, load its fallback.

    Args:
        artifact: the artifact.
        config: the model's config.
        device: the device that it is loaded to; None: the model places itself.

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


def _load_exported(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    refuse_method(artifact, config)
    warn_unused(config, "model_class", "model_kwargs", "weights")
    return exported_program.load(config, artifact.path, device)


def _load_aoti(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    refuse_method(artifact, config)
    mismatch = aotinductor.mismatch(artifact.path, device)
    if mismatch:
        raise ArtifactError(
            config.name,
            f"{artifact.path.name} was built for {mismatch}",
            cure=""
            if artifact.fallback is not None
            else "Serve it on such a machine, build it for this one, or name an exported program or"
            " a model.py to serve instead with the parameter FALLBACK.",
        )
    warn_unused(config, "model_class", "model_kwargs", "weights")
    return aotinductor.load(config, artifact.path, device)


def _load_torchserve(
    artifact: Artifact, config: ModelConfig, device: torch.device | None
) -> Loaded:
    loaded: Loaded = importlib.import_module(_TORCHSERVE).load(artifact, config, device)
    return loaded


LOADERS: Mapping[ArtifactType, Loader] = {
    ArtifactType.TORCHSCRIPT: torchscript.load,
    ArtifactType.MODULE: python_model.load_module,
    ArtifactType.FACTORY: python_model.load_factory,
    ArtifactType.EXPORTED: _load_exported,
    ArtifactType.AOTI: _load_aoti,
    ArtifactType.TORCHSERVE: _load_torchserve,
}
