"""Load an artifact with the loader of its type, and apply OPTIMIZE to the result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from torch_py_backend.config import removed_names
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, ConfigError
from torch_py_backend.loading import aotinductor, exported, hooks, python_source, torchscript
from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.loading.loaded import Forward, Loaded

log = logging.getLogger(__name__)

# Options that only artifacts with source use.
_OF_SOURCE = ("model_class", "model_kwargs", "weights")
Loader: TypeAlias = "Callable[[Artifact, ModelConfig, torch.device | None], Loaded]"


def load(
    artifact: Artifact,
    config: ModelConfig,
    device: torch.device | None,
) -> Loaded:
    """Load an artifact as a module in eval mode on a device; None: the model places itself.

    Raises:
        ArtifactError: the artifact cannot be loaded.
        ConfigError: METHOD is set, and the artifact has one method.
    """
    is_program = artifact.kind in (ArtifactType.EXPORTED, ArtifactType.AOTI)
    if is_program and config.options.method is not None:
        raise ConfigError(
            f"METHOD is set, and {artifact.path.name} is {artifact.kind.value}",
            cure="It holds one method, the one that was exported; remove METHOD.",
        )
    has_source = artifact.kind in (ArtifactType.MODULE, ArtifactType.FACTORY)
    for option in () if has_source else _OF_SOURCE:
        if getattr(config.options, option) is not None:
            log.warning(
                "the parameter %s has no effect on %s.", option.upper(), artifact.kind.value
            )
    import_beside(artifact)
    if artifact.kind is ArtifactType.MODULE:
        hooks.refuse_in_model(artifact.path)
    return LOADERS[artifact.kind](artifact, config, device)


def import_beside(artifact: Artifact) -> None:
    """Import hooks.py and the source file beside an artifact.

    They may register operators and classes that the artifact needs. If the source file cannot be
    imported, that is a warning: it may have nothing to do with the artifact.
    """
    if artifact.hooks is not None:
        python_source.import_source(artifact.hooks)
    if artifact.source is None:
        return
    try:
        python_source.import_source(artifact.source)
    except ArtifactError as error:
        log.warning("%s %s is loaded without it.", error, artifact.path.name)
    else:
        hooks.refuse_in_model(artifact.source)


LOADERS: Mapping[ArtifactType, Loader] = {
    ArtifactType.TORCHSCRIPT: torchscript.load,
    ArtifactType.MODULE: python_source.load,
    ArtifactType.FACTORY: python_source.load,
    ArtifactType.EXPORTED: exported.load,
    ArtifactType.AOTI: aotinductor.load,
}


def optimize(config: ModelConfig, loaded: Loaded) -> Forward:
    """Apply the values of OPTIMIZE that change the model itself; return the callable for inputs."""
    names, kind, owner = config.options.optimize, loaded.kind, loaded.owner
    supported: set[str] = set()
    if owner is not None:
        supported.add("channels_last")
        if kind is not ArtifactType.EXPORTED:
            supported |= {"bf16", "fp16"}
    if kind is ArtifactType.TORCHSCRIPT:
        supported.add("freeze")
    refused = [name for name in names if name not in supported]
    if refused:
        raise ConfigError(
            f"OPTIMIZE asks for {', '.join(refused)}, which {kind.value} does not support",
            cure=removed_names.FREEZING if "freeze" in refused else "Convert the module instead.",
        )
    if owner is not None and config.options.weights_dtype is not None:
        owner.to(getattr(torch, config.options.weights_dtype))
    if owner is not None and "channels_last" in names:
        owner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return torchscript.freeze(config, loaded) if "freeze" in names else loaded.module
