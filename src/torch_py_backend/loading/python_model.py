"""Modules and functions from a model.py or an installed package, with their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, ConfigError, a_type
from torch_py_backend.loading import python_source, weights
from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.loading.loaded import NO_FORWARD, Forward, Loaded
from torch_py_backend.signature import introspection


def load(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    """Load what a model.py defines, or what MODEL_FACTORY of a package returns.

    A module is filled with the weights of its version folder and moved to its device.

    Raises:
        ArtifactError: it cannot be loaded.
        ConfigError: an option does not apply to it.
    """
    if artifact.kind is ArtifactType.FACTORY:
        served, pretrained = python_source.construct_from_package(config, artifact)
    else:
        served, pretrained = python_source.construct(config, artifact), False
    if not callable(served):
        raise ArtifactError(
            f"what {artifact.path.name} builds is {a_type(served)}",
            expected="a torch.nn.Module or a function",
        )
    owner = served if isinstance(served, nn.Module) else None
    if owner is None and artifact.weights is not None:
        raise ArtifactError(
            f"{artifact.weights.name} is beside a function, which has no weights",
            cure='Remove the file, or set the parameter WEIGHTS to "none".',
        )
    if owner is not None:
        if not pretrained and not artifact.weightless:
            weights.load_into(config, artifact, owner)
        owner.eval()
        for parameter in owner.parameters():  # TorchScript does not support requires_grad_()
            parameter.requires_grad = False
        if device is not None:
            owner.to(device)
    called, step, name = _entry_point(config, served)
    described = owner.forward if called is owner and owner is not None else called
    try:
        signature = dataclasses.replace(introspection.from_function(described), name=name)
    except (TypeError, ValueError) as error:
        raise ArtifactError(
            f"the arguments of what is served cannot be determined: {error}"
        ) from error
    _refuse_streams(config, served, described)
    return Loaded(artifact, called, signature, owner, step=step)


def _entry_point(
    config: ModelConfig, served: Any
) -> tuple[Forward, Callable[[list[Any]], Any] | None, str]:
    """Return the callable for inputs, the `step` of a streaming model, and the callable's name."""
    method = config.options.method
    if method is not None:
        called: Forward | None = getattr(served, method, None)
        if called is None:
            raise ArtifactError(
                f"METHOD is '{method}', which {type(served).__name__} does not have",
                expected="the name of a method",
            )
        return called, None, method
    if config.decoupled and _has_steps(served):
        return served.begin, served.step, "begin"
    # A callable object that is not a function has no name.
    return served, None, getattr(served, "__name__", "forward")


def _has_steps(served: object) -> bool:
    return all(callable(getattr(served, name, None)) for name in ("begin", "step"))


def _refuse_streams(config: ModelConfig, served: object, described: Forward) -> None:
    """Raise ConfigError for a streaming model whose config is not decoupled."""
    if config.decoupled:
        return
    if introspection.is_generator(described):
        problem = f"{getattr(described, '__name__', 'forward')}() yields its results one by one"
    elif _has_steps(served) and getattr(described, "__func__", None) is NO_FORWARD:
        problem = "begin() and step() make streams, and there is no forward()"
    else:
        return
    raise ConfigError(
        f"{problem}, and the model is not decoupled",
        cure="Write model_transaction_policy { decoupled: true } into config.pbtxt; or let"
        " forward() return all results at once.",
    )
