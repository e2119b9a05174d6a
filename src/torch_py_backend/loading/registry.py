"""The table of loaders: one function per artifact type."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from torch_py_backend.artifacts.discovery import Artifact, Kind
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError
from torch_py_backend.loading import exported_programs, python_model, torchscript
from torch_py_backend.loading.loaded import Loaded, refuse_device_map, refuse_method, warn_unused

log = logging.getLogger(__name__)

Loader: TypeAlias = "Callable[[Artifact, ModelConfig, torch.device | None], Loaded]"

# Imported for such artifacts only. By name: it lies above this package.
_TORCHSERVE = "torch_py_backend.torchserve.loader"


def load(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    """Load an artifact as a module in eval mode.

    Where the artifact was built for another machine, or cannot be loaded, its fallback is.

    Args:
        artifact: the artifact.
        config: the model's config.
        device: where it is loaded to; None: the model chooses.

    Raises:
        ArtifactError, SourceError, WeightsError: it cannot be loaded; the message says why.
        ConfigError: an option does not apply to such an artifact.
    """
    if artifact.kind not in (Kind.MODULE, Kind.FACTORY):
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
    program = exported_programs.load_exported(config, artifact.path, device)
    return Loaded(artifact.kind, program.module, program.signature, program.owner, program.rows)


def _load_aoti(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    refuse_method(artifact, config)
    misfit = exported_programs.misfit(artifact.path, device)
    if misfit:
        raise ArtifactError(
            config.name,
            f"{artifact.path.name} was built for {misfit}",
            cure=""
            if artifact.fallback is not None
            else "Serve it on such a machine, build it for this one, or name an exported program or"
            " a model.py to serve instead with the parameter FALLBACK.",
        )
    warn_unused(config, "model_class", "model_kwargs", "weights")
    program = exported_programs.load_aoti(config, artifact.path, device)
    return Loaded(artifact.kind, program.module, program.signature, program.owner, program.rows)


def _load_torchserve(
    artifact: Artifact, config: ModelConfig, device: torch.device | None
) -> Loaded:
    loaded: Loaded = importlib.import_module(_TORCHSERVE).load(artifact, config, device)
    return loaded


LOADERS: Mapping[Kind, Loader] = {
    Kind.TORCHSCRIPT: torchscript.load,
    Kind.MODULE: python_model.load_module,
    Kind.FACTORY: python_model.load_factory,
    Kind.EXPORTED: _load_exported,
    Kind.AOTI: _load_aoti,
    Kind.TORCHSERVE: _load_torchserve,
}
