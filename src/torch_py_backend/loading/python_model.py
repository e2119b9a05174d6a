"""Modules and functions from a model.py or an installed package, with their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, ConfigError, SourceError
from torch_py_backend.loading import device_map, python_source, state_dict
from torch_py_backend.loading.loaded import Loaded, refuse_device_map
from torch_py_backend.signature import introspection

# The forward() of modules that define none.
_NO_FORWARD = nn.Module.forward


def load_module(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    """Load what a model.py defines, with the weights beside it.

    Raises:
        ArtifactError, SourceError, WeightsError: it cannot be loaded.
        ConfigError: an option does not apply to it.
    """
    source = python_source.import_source(config.name, artifact.path)
    filled = artifact.weights is not None
    built = python_source.construct(config, artifact.path, source, filled=filled)
    return _load(artifact, config, device, built, has_weights=artifact.weightless)


def load_factory(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    """Load what MODEL_FACTORY returns, with the weights in the version folder.

    Raises:
        as `load_module`.
    """
    filled = artifact.weights is not None
    built, complete = python_source.construct_from_package(config, filled=filled)
    has_weights = complete or artifact.weightless
    return _load(artifact, config, device, built, has_weights=has_weights)


def _load(
    artifact: Artifact,
    config: ModelConfig,
    device: torch.device | None,
    built: Any,
    *,
    has_weights: bool,
) -> Loaded:
    """Return a module, filled with its weights and on its device, or a function as `Loaded`."""
    owner = built if isinstance(built, nn.Module) else None
    dispatched = owner is not None and device is None and config.options.device_map is not None
    if owner is None:
        _check_function(artifact, config, built)
    else:
        if not has_weights:
            state_dict.load_into(config, artifact, owner)
        owner.eval()
        for parameter in owner.parameters():  # TorchScript does not support requires_grad_()
            parameter.requires_grad = False
        if device is not None:
            owner.to(device)
        elif dispatched:
            device_map.dispatch(config, owner)
    called, step, name = _entry_point(config, built)
    described = owner.forward if called is owner and owner is not None else called
    try:
        signature = dataclasses.replace(introspection.from_function(described), name=name)
    except (TypeError, ValueError) as error:
        raise SourceError(
            config.name, f"the arguments of what is served cannot be determined: {error}"
        ) from error
    if not config.decoupled:
        _refuse_streams(config, built, described)
    if dispatched and owner is not None:
        called = device_map.Dispatched(called, owner, config)
    return Loaded(artifact.kind, called, signature, owner, step=step)


def _check_function(artifact: Artifact, config: ModelConfig, built: Any) -> None:
    """Raise if an object that is not a module is not callable, or has weights or a device map."""
    if not callable(built):
        raise SourceError(
            config.name,
            f"what {artifact.path.name} builds is a {type(built).__name__}",
            expected="a torch.nn.Module or a function",
        )
    refuse_device_map(config, f"what {artifact.path.name} serves is a function")
    if artifact.weights is not None:
        raise ArtifactError(
            config.name,
            f"{artifact.weights.name} is beside a function, which has no weights",
            cure='Remove the file, or set the parameter WEIGHTS to "none".',
        )


def _entry_point(
    config: ModelConfig, built: Any
) -> tuple[Callable[..., Any], Callable[[list[Any]], Any] | None, str]:
    """Return the callable for inputs, the `step` of a streaming model, and the callable's name."""
    method = config.options.method
    if method is None:
        if config.decoupled and _has_steps(built):
            return built.begin, built.step, "begin"
        # A callable object that is not a function has no name.
        return built, None, getattr(built, "__name__", "forward")
    called: Callable[..., Any] | None = getattr(built, method, None)
    if called is None:
        raise SourceError(
            config.name,
            f"METHOD is '{method}', which {type(built).__name__} does not have",
            expected="the name of a method",
        )
    return called, None, method


def _has_steps(built: Any) -> bool:
    return all(callable(getattr(built, name, None)) for name in ("begin", "step"))


def _refuse_streams(config: ModelConfig, built: Any, described: Callable[..., Any]) -> None:
    """Raise ConfigError for a streaming model whose config is not decoupled."""
    problem = ""
    if introspection.is_generator(described):
        problem = f"{getattr(described, '__name__', 'forward')}() yields its results one by one"
    elif _has_steps(built) and getattr(described, "__func__", None) is _NO_FORWARD:
        problem = "begin() and step() make streams, and there is no forward()"
    if problem:
        raise ConfigError(
            config.name,
            f"{problem}, and the model is not decoupled",
            cure="Write model_transaction_policy { decoupled: true } into config.pbtxt; or let"
            " forward() return all results at once.",
        )
