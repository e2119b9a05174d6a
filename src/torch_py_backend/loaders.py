"""One function a kind of artifact, all of one shape: the artifact becomes a Loaded."""

from __future__ import annotations

import collections.abc
import hashlib
import importlib.util
import inspect
import logging
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_origin

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from torch_py_backend import artifacts
from torch_py_backend.artifacts import Artifact, Content, Kind
from torch_py_backend.binding import Argument, Passing
from torch_py_backend.config import ModelConfig
from torch_py_backend.errors import ArtifactError, SourceError, WeightsError, brief, shown

log = logging.getLogger(__name__)


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
        module: Any = torch.jit.load(artifact.path, map_location=device)  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError, OSError) as error:
        raise ArtifactError(
            config.name,
            f"{artifact.path.name} is TorchScript that torch {torch.__version__} cannot load:"
            f" {brief(error)}",
            cure="Write it again with torch.jit.save under this version of torch.",
        ) from error
    module.eval()
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
    source = _import_source(config.name, artifact.path)
    module = _construct(config, artifact.path, source)
    if not isinstance(module, nn.Module):
        return _load_function(artifact, config, module)
    if not artifact.weightless:
        _fill(config, artifact, module)
    module.eval().requires_grad_(requires_grad=False)
    if device is not None:
        module.to(device)
    arguments = _signature_arguments(config, module.forward)
    return Loaded(module, arguments, (*module.parameters(), *module.buffers()))


def _load_function(artifact: Artifact, config: ModelConfig, function: Any) -> Loaded:
    if not callable(function):
        raise SourceError(
            config.name,
            f"the factory in {artifact.path.name} returned a {type(function).__name__}",
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


# --- Python source ---------------------------------------------------------------------------


def _import_source(model: str, path: Path) -> ModuleType:
    """Run a model's source file as a module of its own; files beside it can be imported."""
    name = f"torch_py_backend_model_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SourceError(model, f"{path.name} is no Python source", expected="a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise SourceError(model, f"{path.name} fails at {_place(error, path)}") from error
    return module


def _place(error: BaseException, path: Path) -> str:
    """The line of the model's own file that an exception comes from, and what it says."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: SyntaxError: {error.msg}: {(error.text or '').strip()}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{brief(error)}"


def _construct(config: ModelConfig, path: Path, source: ModuleType) -> Any:
    """What is called with the inputs: a module, built, or a function."""
    chosen = _choose(config, path, source)
    is_factory = config.options.model_factory is not None
    if not isinstance(chosen, type) and not is_factory:
        return chosen
    keywords = config.options.model_kwargs or {}
    try:
        inspect.signature(chosen).bind(**keywords)
    except TypeError as error:
        raise SourceError(
            config.name,
            f"{chosen.__name__}{inspect.signature(chosen)} in {path.name} cannot be called with"
            f" {keywords or 'no arguments'}: {error}",
            cure="Give its arguments as JSON in the parameter MODEL_KWARGS.",
        ) from None
    try:
        return chosen(**keywords)
    except (Exception, SystemExit) as error:
        raise SourceError(
            config.name, f"{chosen.__name__}() in {path.name} fails at {_place(error, path)}"
        ) from error


def _choose(config: ModelConfig, path: Path, source: ModuleType) -> Any:
    """The class, function or module object in the source that is to be served."""
    options = config.options
    named = options.model_factory or options.model_class
    classes = _defined(source, _is_module_class)
    functions = _defined(source, inspect.isfunction)
    if named is not None:
        found = getattr(source, named, None)
        if callable(found):
            return found
        key = "MODEL_FACTORY" if options.model_factory else "MODEL_CLASS"
        raise SourceError(
            config.name,
            f"{key} is '{named}', which {path.name} does not define",
            expected=f"one of {shown(classes | functions) or 'its classes or functions'}",
        )
    candidates = classes or functions
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    found = f"defines {shown(candidates)}" if candidates else "defines no nn.Module and no function"
    raise SourceError(
        config.name,
        f"{path.name} {found}",
        expected="one class derived from torch.nn.Module, or one function",
        cure="Name the one to serve with the parameter MODEL_CLASS." if candidates else "",
    )


def _defined(source: ModuleType, wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """Public names of the file's own definitions; what it imports does not count."""
    return {
        name: value
        for name, value in vars(source).items()
        if not name.startswith("_") and wanted(value) and value.__module__ == source.__name__
    }


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


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
        return annotation.removeprefix("typing.").lower().startswith(("dict", "mapping"))
    return (get_origin(annotation) or annotation) in (dict, collections.abc.Mapping)


# --- weights ---------------------------------------------------------------------------------


def _fill(config: ModelConfig, artifact: Artifact, module: nn.Module) -> None:
    """Put the weights into the module: every key, no other key, every shape."""
    own = module.state_dict(keep_vars=True)
    if artifact.weights is None:
        if not own:
            return  # nothing to fill
        raise ArtifactError(
            config.name,
            f"{type(module).__name__} has {len(own)} weights, and no file with them lies beside"
            f" {artifact.path.name}",
            expected=f"{artifact.path.stem}.safetensors, .pt or .pth",
            cure='Save module.state_dict() there, or set the parameter WEIGHTS to "none".',
        )
    state = _read_weights(config, artifact.weights)
    _compare(config, artifact.weights.name, own, state)
    alike = all(own[key].dtype == tensor.dtype for key, tensor in state.items())
    # Assigned tensors stay mapped from the file: no copy, and instances share its pages. Tied
    # parameters would come apart, and another dtype would change the module's.
    assign = alike and len({id(tensor) for tensor in own.values()}) == len(own) == len(state)
    module.load_state_dict(state, strict=False, assign=assign)


def _compare(
    config: ModelConfig, file: str, own: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    # safetensors files keep one name of tied weights: its twins are not missing.
    present = {id(own[key]) for key in own if key in state}
    missing = [key for key in own if key not in state and id(own[key]) not in present]
    unexpected = [key for key in state if key not in own]
    shapes = [
        f"{key} {list(state[key].shape)} instead of {list(tensor.shape)}"
        for key, tensor in own.items()
        if key in state and state[key].shape != tensor.shape
    ]
    if missing or unexpected or shapes:
        raise WeightsError(config.name, file, missing=missing, unexpected=unexpected, shapes=shapes)


def _read_weights(config: ModelConfig, path: Path) -> Mapping[str, Tensor]:
    if path.suffix == ".safetensors":
        return _read_safetensors(config, path)
    found = artifacts.describe(path)
    if found is not Content.STATE_DICT:
        raise ArtifactError(
            config.name,
            f"the weights {path.name} are {found.value}",
            expected="a state_dict that torch.save wrote, or safetensors",
            cure="Save module.state_dict() there.",
        )
    try:
        state = _torch_load(path)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError) as error:
        raise ArtifactError(
            config.name,
            f"the weights {path.name} cannot be read with weights_only: {brief(error)}",
            expected="a state_dict of plain tensors",
            cure="Save module.state_dict() there, or convert it to safetensors.",
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(one, Tensor) for one in state.values()):
        inner = [key for key in ("state_dict", "model") if key in state] if state else []
        raise ArtifactError(
            config.name,
            f"the weights {path.name} hold a {type(state).__name__} that is no state_dict",
            expected="tensors by name",
            cure=f"Save its entry '{inner[0]}' alone." if inner else "",
        )
    return state


def _torch_load(path: Path) -> Any:
    # Files older than torch 1.6 are no zip archives and cannot be mapped.
    with path.open("rb") as file:
        mapped = file.read(2) == b"PK"
    return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)


def _read_safetensors(config: ModelConfig, path: Path) -> Mapping[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise ArtifactError(
            config.name,
            f"the weights {path.name} are no valid safetensors: {brief(error)}",
            cure="Write them again with safetensors.torch.save_file, or copy them again.",
        ) from error
