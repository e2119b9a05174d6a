"""Load an artifact with the loader of its type, and apply OPTIMIZE to the result."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, ConfigError, LoadError, summarize
from torch_py_backend.loading import aotinductor, exported, python_source, torchscript
from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.loading.loaded import Forward, Loaded

log = logging.getLogger(__name__)

_SCRIPT, _PACKAGE = ArtifactType.TORCHSCRIPT, ArtifactType.AOTI
_PROGRAMS = (ArtifactType.EXPORTED, _PACKAGE)
_CONVERT = "Convert the module instead."
_FREEZING = 'Set TORCH_COMPILE_OPTIONAL_PARAMETERS to {"options": {"freezing": true}}.'
# What types of artifacts do not use: an option, or a value; what to do, or "" if it has no effect.
_UNUSED = (
    ("MODEL_CLASS", (_SCRIPT, *_PROGRAMS), ""),
    ("MODEL_KWARGS", (_SCRIPT, *_PROGRAMS), ""),
    ("WEIGHTS", (_SCRIPT, *_PROGRAMS), ""),
    ("TORCH_COMPILE_OPTIONAL_PARAMETERS", (_SCRIPT, _PACKAGE), ""),
    ("METHOD", _PROGRAMS, "It holds one method, the one that was exported; remove METHOD."),
    ("OPTIMIZE freeze", (ArtifactType.MODULE, ArtifactType.FACTORY, *_PROGRAMS), _FREEZING),
    ("OPTIMIZE bf16", _PROGRAMS, _CONVERT),
    ("OPTIMIZE fp16", _PROGRAMS, _CONVERT),
    ("OPTIMIZE channels_last", (_PACKAGE,), _CONVERT),
    ("OPTIMIZE aoti", (_SCRIPT, _PACKAGE), "Serve the module that it was made from."),
)


def without_unused(config: ModelConfig, kind: ArtifactType) -> ModelConfig:
    """Return the config without options that have no effect on an artifact type; log each."""
    unused: dict[str, Any] = {}
    for name, kinds, cure in _UNUSED:
        key, _, value = name.partition(" ")
        setting = getattr(config.options, key.lower())
        is_set = value in setting if value else setting is not None
        if not is_set or kind not in kinds:
            continue
        if cure:
            raise ConfigError(f"{name} is not supported for {kind.value}", cure=cure)
        log.warning("the parameter %s has no effect on %s.", name, kind.value)
        unused[key.lower()] = None
    return dataclasses.replace(config, options=dataclasses.replace(config.options, **unused))


_LOADERS = {
    ArtifactType.TORCHSCRIPT: torchscript.load,
    ArtifactType.EXPORTED: exported.load,
    ArtifactType.AOTI: aotinductor.load,
}


def load(
    artifact: Artifact,
    config: ModelConfig,
    device: torch.device | None,
) -> Loaded:
    """Load an artifact as a module in eval mode on a device; None: the model places itself.

    hooks.py and the source file beside it are imported before: they may register operators and
    classes that it needs. A source file that cannot be imported is a warning.
    """
    path = artifact.path
    if artifact.hooks is not None:
        python_source.import_source(artifact.hooks)
    if artifact.kind.has_weights_apart:
        return python_source.load(artifact, config, device)
    source = path.with_name("model.py")
    if source.is_file():
        try:
            python_source.import_source(source)
        except ArtifactError as error:
            log.warning("%s %s is loaded without it.", error, path.name)
    try:
        return _LOADERS[artifact.kind](artifact, config, device)
    except LoadError:
        raise
    except Exception as error:  # a damaged file, or one of another torch, raises nearly anything
        raise ArtifactError(
            f"{path.name} is {artifact.kind.value} that torch {torch.__version__} cannot load:"
            f" {summarize(error)}",
            cure="If an operator or a class is missing, import its package in model.py beside the"
            " artifact; else write it again under this version of torch.",
        ) from error


def optimize(config: ModelConfig, loaded: Loaded) -> Forward:
    """Apply the values of OPTIMIZE that change the model itself; return the callable for inputs."""
    options, owner = config.options, loaded.owner
    if owner is not None:
        if options.weights_dtype is not None:
            owner.to(getattr(torch, options.weights_dtype))
        if "channels_last" in options.optimize:
            owner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if "freeze" in options.optimize:
        return torchscript.freeze(config, loaded)
    return loaded.module
