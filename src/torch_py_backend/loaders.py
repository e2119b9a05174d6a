"""One function a kind of artifact, all of one shape: the artifact becomes a Loaded."""

from __future__ import annotations

import collections.abc
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_origin

import torch
from torch import Tensor, nn

from torch_py_backend import sources, weights
from torch_py_backend.artifacts import Artifact, Kind
from torch_py_backend.binding import Argument, Passing
from torch_py_backend.config import ModelConfig
from torch_py_backend.errors import ArtifactError, SourceError, brief


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory.

    Attributes:
        module: what is called with the inputs.
        arguments: what it takes.
        weights: its parameters and buffers.
    """

    module: Callable[..., Any]
    arguments: tuple[Argument, ...]
    weights: tuple[Tensor, ...]


def load(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    """The artifact as a module in eval mode, on the device; None: where it puts itself.

    Raises:
        ArtifactError, SourceError, WeightsError: it cannot be loaded; the message says why.
    """
    return _LOADERS[artifact.kind](artifact, config, device)


def _load_torchscript(
    artifact: Artifact, config: ModelConfig, device: torch.device | None
) -> Loaded:
    try:
        module: Any = torch.jit.load(artifact.path, map_location=device)
    except Exception as error:  # a damaged archive raises nearly anything
        raise ArtifactError(
            config.name,
            f"{artifact.path.name} is TorchScript that torch {torch.__version__} cannot load:"
            f" {brief(error)}",
            cure="Write it again with torch.jit.save under this version of torch.",
        ) from error
    module.eval()
    if not hasattr(module, "forward"):
        raise ArtifactError(
            config.name,
            f"{artifact.path.name} is TorchScript without forward()",
            expected="a module with forward(), which is what is served",
        )
    schema = module.forward.schema
    arguments = tuple(_schema_argument(one) for one in schema.arguments[1:])  # [0] is self
    return Loaded(module, arguments, (*module.parameters(), *module.buffers()))


def _schema_argument(argument: Any) -> Argument:
    kind = argument.type.str()
    return Argument(
        name=argument.name,
        required=not argument.has_default_value(),
        passing=Passing.KEYWORD if argument.kwarg_only else Passing.POSITIONAL,
        takes_dict=kind.startswith("Dict("),
        text=f"{kind} {argument.name}",
    )


def _load_module(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    source = sources.import_source(config.name, artifact.path)
    module = sources.construct(config, artifact.path, source)
    if not isinstance(module, nn.Module):
        return _load_function(artifact, config, module)
    if not artifact.weightless:
        weights.fill(config, artifact, module)
    module.eval()
    for parameter in module.parameters():  # requires_grad_() of TorchScript refuses
        parameter.requires_grad = False
    if device is not None:
        module.to(device)
    arguments = _signature_arguments(config, module.forward)
    return Loaded(module, arguments, (*module.parameters(), *module.buffers()))


def _load_function(artifact: Artifact, config: ModelConfig, function: Any) -> Loaded:
    if not callable(function):
        raise SourceError(
            config.name,
            f"what {artifact.path.name} builds is a {type(function).__name__}",
            expected="a torch.nn.Module or a function",
        )
    if artifact.weights is not None:
        raise ArtifactError(
            config.name,
            f"{artifact.weights.name} lies beside a function, which has no weights",
            cure='Remove the file, or set the parameter WEIGHTS to "none".',
        )
    return Loaded(function, _signature_arguments(config, function), ())


_LOADERS: Mapping[Kind, Callable[[Artifact, ModelConfig, torch.device | None], Loaded]] = {
    Kind.TORCHSCRIPT: _load_torchscript,
    Kind.MODULE: _load_module,
}


def _signature_arguments(config: ModelConfig, forward: Callable[..., Any]) -> tuple[Argument, ...]:
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError) as error:
        raise SourceError(
            config.name, f"the arguments of what is served cannot be told: {error}"
        ) from error
    return tuple(_signature_argument(one) for one in signature.parameters.values())


_PASSING = {
    inspect.Parameter.POSITIONAL_ONLY: Passing.POSITIONAL,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: Passing.POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY: Passing.KEYWORD,
    inspect.Parameter.VAR_POSITIONAL: Passing.REST,
    inspect.Parameter.VAR_KEYWORD: Passing.REST_BY_NAME,
}


def _signature_argument(parameter: inspect.Parameter) -> Argument:
    passing = _PASSING[parameter.kind]
    rest = passing in (Passing.REST, Passing.REST_BY_NAME)
    return Argument(
        name=parameter.name,
        required=parameter.default is inspect.Parameter.empty and not rest,
        passing=passing,
        takes_dict=_is_dict(parameter.annotation) and not rest,
        text=str(parameter),
    )


def _is_dict(annotation: Any) -> bool:
    if isinstance(annotation, str):  # from __future__ import annotations
        return annotation.split("[")[0].split(".")[-1] in ("dict", "Dict", "Mapping")
    return (get_origin(annotation) or annotation) in (dict, collections.abc.Mapping)
