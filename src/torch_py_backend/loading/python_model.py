"""Modules and functions of a model.py or an installed package, with their weights."""

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

# What a module has that defines no forward() of its own.
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
    return _serve(artifact, config, device, built, has_weights=artifact.weightless)


def load_factory(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    """Load what MODEL_FACTORY returns, with the weights in the version folder.

    Raises:
        as `load_module`.
    """
    built, complete = python_source.construct_from_package(
        config, filled=artifact.weights is not None
    )
    has_weights = complete or artifact.weightless
    return _serve(artifact, config, device, built, has_weights=has_weights)


def _serve(
    artifact: Artifact,
    config: ModelConfig,
    device: torch.device | None,
    built: Any,
    *,
    has_weights: bool,
) -> Loaded:
    """A module with its weights, or a function."""
    spread = device is None and config.options.device_map is not None
    if isinstance(built, nn.Module):
        if not has_weights:
            state_dict.fill(config, artifact, built)
        built.eval()
        for parameter in built.parameters():  # requires_grad_() of TorchScript refuses
            parameter.requires_grad = False
        if device is not None:
            built.to(device)
        elif spread:
            device_map.spread(config, built)
    else:
        _refuse_no_function(artifact, config, built)
    called, step = _served(config, built)
    described = built.forward if called is built and isinstance(built, nn.Module) else called
    try:
        signature = dataclasses.replace(
            introspection.of_function(described), name=_name(config, built, begins=step is not None)
        )
    except (TypeError, ValueError) as error:
        raise SourceError(
            config.name, f"the arguments of what is served cannot be told: {error}"
        ) from error
    if not config.decoupled:
        _refuse_streams(config, built, described)
    owner = built if isinstance(built, nn.Module) else None
    if spread and owner is not None:
        called = device_map.Home(called, owner, config)
    return Loaded(artifact.kind, called, signature, owner, step=step)


def _served(
    config: ModelConfig, built: Any
) -> tuple[Callable[..., Any], Callable[[list[Any]], Any] | None]:
    """What is called with a request's inputs; and what goes on from there, where there is such."""
    if config.decoupled and config.options.method is None and _has_steps(built):
        return built.begin, built.step
    return _method(config, built), None


def _name(config: ModelConfig, built: Any, *, begins: bool) -> str:
    """What the function that is called has for a name, where its author has written it."""
    if begins:
        return "begin"
    if config.options.method is not None:
        return config.options.method
    # What can be called without being a function has none.
    name: str = getattr(built, "__name__", "forward")
    return name


def _has_steps(built: Any) -> bool:
    return all(callable(getattr(built, name, None)) for name in ("begin", "step"))


def _refuse_streams(config: ModelConfig, built: Any, described: Callable[..., Any]) -> None:
    """A model of streams, in a config that promises one response to a request."""
    found = ""
    if introspection.yields(described):
        found = f"{getattr(described, '__name__', 'forward')}() yields its results one by one"
    elif _has_steps(built) and getattr(described, "__func__", None) is _NO_FORWARD:
        found = "begin() and step() make streams, and there is no forward()"
    if found:
        raise ConfigError(
            config.name,
            f"{found}, and the model is not decoupled",
            cure="Write model_transaction_policy { decoupled: true } into config.pbtxt; or let"
            " forward() return all results at once.",
        )


def _method(config: ModelConfig, built: Any) -> Callable[..., Any]:
    if config.options.method is None:
        called: Callable[..., Any] = built
        return called
    method: Callable[..., Any] | None = getattr(built, config.options.method, None)
    if method is None:
        raise SourceError(
            config.name,
            f"METHOD is '{config.options.method}', which {type(built).__name__} does not have",
            expected="the name of a method",
        )
    return method


def _refuse_no_function(artifact: Artifact, config: ModelConfig, built: Any) -> None:
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
            f"{artifact.weights.name} lies beside a function, which has no weights",
            cure='Remove the file, or set the parameter WEIGHTS to "none".',
        )
