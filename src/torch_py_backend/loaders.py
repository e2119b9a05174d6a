"""One function a kind of artifact, all of one shape: the artifact becomes a Loaded."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_py_backend import (
    device_map,
    mapping,
    programs,
    signatures,
    sources,
    torchserve,
    weights,
)
from torch_py_backend.artifacts import Artifact, Kind
from torch_py_backend.batching import ANY_ROWS, Rows
from torch_py_backend.binding import Signature, Takes
from torch_py_backend.config import ModelConfig
from torch_py_backend.errors import ArtifactError, ConfigError, SourceError, brief

log = logging.getLogger(__name__)

# What a module has that defines no forward() of its own.
_NO_FORWARD = nn.Module.forward


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory.

    Attributes:
        kind: what it was loaded from.
        module: what is called with the inputs.
        signature: what it takes.
        owner: what holds its parameters and buffers; None: it has none, or they are not at hand.
        rows: how many rows one call takes.
        step: what advances several streams at once, where `module` is what begins one.
    """

    kind: Kind
    module: Callable[..., Any]
    signature: Signature
    owner: nn.Module | None = None
    rows: Rows = ANY_ROWS
    step: Callable[[list[Any]], Any] | None = None

    @property
    def returns(self) -> str:
        """The name of what returns the outputs."""
        return self.signature.name if self.step is None else "step"

    @property
    def streams(self) -> bool:
        """Whether a request has one result after the other."""
        return self.step is not None or signatures.yields(
            self.module.forward if isinstance(self.module, nn.Module) else self.module
        )

    @property
    def weights(self) -> Iterator[Tensor]:
        """Its parameters and buffers."""
        if self.owner is not None:
            yield from self.owner.parameters()
            yield from self.owner.buffers()


def load(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    """The artifact as a module in eval mode, on the device; None: where it puts itself.

    Raises:
        ArtifactError, SourceError, WeightsError: it cannot be loaded; the message says why.
        ConfigError: an option is not for such an artifact.
    """
    if artifact.kind not in (Kind.MODULE, Kind.FACTORY):
        _refuse_device_map(config, f"the model is {artifact.kind.value}")
    return _LOADERS[artifact.kind](artifact, config, device)


def _refuse_device_map(config: ModelConfig, found: str) -> None:
    """Refuse DEVICE_MAP for what is no module."""
    if config.options.device_map is not None:
        raise ConfigError(
            config.name,
            f"DEVICE_MAP is set, and {found}",
            expected="a model.py or a factory that makes a torch.nn.Module",
            cure="Take DEVICE_MAP out, or serve the module itself.",
        )


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
    if config.options.enable_weight_sharing is not False:
        mapping.share((*module.parameters(), *module.buffers()), artifact.path)
    name = config.options.method or "forward"
    method: Any = getattr(module, name, None)
    if not hasattr(method, "schema"):
        raise ArtifactError(
            config.name,
            f"{artifact.path.name} is TorchScript without {name}()",
            expected="a module with the method that is served",
        )
    _warn_unused(config, "model_class", "model_kwargs", "weights")
    # Called through the module, forward() runs its hooks.
    called = module if config.options.method is None else method
    signature = dataclasses.replace(signatures.of_schema(method.schema), name=name)
    return Loaded(artifact.kind, called, signature, module)


def passing_bytes(loaded: Loaded, called: Callable[..., Any]) -> Callable[..., Any]:
    """The same for strings that are not UTF-8, where the model is TorchScript that takes strings.

    Args:
        loaded: the model.
        called: what is called with the inputs.
    """
    takes = (one.takes for one in loaded.signature.arguments)
    if not loaded.signature.torchscript or not any(one in _TEXTS for one in takes):
        return called
    return _PassingBytes(called, loaded.owner, loaded.signature.name)


_TEXTS = (Takes.STR, Takes.STRINGS, Takes.NESTED_STRINGS)


class _PassingBytes:
    """Calls TorchScript with strings of any bytes, and returns what comes back.

    torch passes bytes on as they are, but decodes every string of the result, and raises where one
    is not UTF-8. So for a call with such bytes a method is added to the module that returns the
    numbers of each string's bytes: slow (2 µs a byte), but without a second call of the model.
    """

    def __init__(self, called: Callable[..., Any], owner: Any, method: str) -> None:
        self._called = called
        self._owner = owner
        self._method = method
        self._added: dict[tuple[str, ...], Callable[..., Any]] = {}
        self._schema: Any = getattr(owner, method).schema

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _holds_bytes((*args, *kwargs.values())):
            return self._called(*args, **kwargs)
        names = [one.name for one in self._schema.arguments[1 : 1 + len(args)]]
        names += kwargs
        added = self._added.get(tuple(names))
        if added is None:
            added = self._added[tuple(names)] = self._add(names)
        (returned,) = self._schema.returns
        return _joined(added(*args, *kwargs.values()), returned.type)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the model itself, for hooks."""
        return getattr(self._called, name)

    def _add(self, names: Sequence[str]) -> Callable[..., Any]:
        """A method that takes these arguments, and returns numbers for strings."""
        types = {one.name: one.type.annotation_str for one in self._schema.arguments}
        (returned,) = self._schema.returns
        name = f"{self._method}_in_bytes_{len(self._added)}"
        self._owner.define(
            f"def {name}(self, {', '.join(f'{one}: {types[one]}' for one in names)}):\n"
            f"    result = self.{self._method}({', '.join(f'{one}={one}' for one in names)})\n"
            f"    return {_numbers('result', returned.type)}\n"
        )
        method: Callable[..., Any] = getattr(self._owner, name)
        return method


def _holds_bytes(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_bytes, value))
    return isinstance(value, bytes)


def _numbers(value: str, kind: Any, depth: int = 0) -> str:
    """TorchScript that makes numbers of the strings in a value: of a list of them, or a tuple."""
    if kind.kind() == "StringType":
        return f"[ord(c) for c in {value}]"
    if kind.kind() == "ListType" and _of_text(kind):
        one = f"one{depth}"
        return f"[{_numbers(one, kind.getElementType(), depth + 1)} for {one} in {value}]"
    if kind.kind() == "TupleType":
        parts = [_numbers(f"{value}[{n}]", one, depth) for n, one in enumerate(kind.elements())]
        return f"({', '.join(parts)},)"
    return value


def _of_text(kind: Any) -> bool:
    while kind.kind() == "ListType":
        kind = kind.getElementType()
    return bool(kind.kind() == "StringType")


def _joined(value: Any, kind: Any) -> Any:
    """What `_numbers` has taken apart, as bytes."""
    if kind.kind() == "StringType":
        return bytes(value)
    if kind.kind() == "ListType" and _of_text(kind):
        return [_joined(one, kind.getElementType()) for one in value]
    if kind.kind() == "TupleType":
        return tuple(_joined(one, k) for one, k in zip(value, kind.elements(), strict=True))
    return value


def _warn_unused(config: ModelConfig, *fields: str) -> None:
    for field in fields:
        if getattr(config.options, field) is not None:
            log.warning(
                "model '%s': the parameter %s has no effect: the artifact is complete in itself.",
                config.name,
                field.upper(),
            )


def _load_module(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    source = sources.import_source(config.name, artifact.path)
    filled = artifact.weights is not None
    built = sources.construct(config, artifact.path, source, filled=filled)
    return _serve(artifact, config, device, built, has_weights=artifact.weightless)


def _load_factory(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    built, complete = sources.construct_from_package(config, filled=artifact.weights is not None)
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
            weights.fill(config, artifact, built)
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
            signatures.of_function(described), name=_name(config, built, begins=step is not None)
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
    if signatures.yields(described):
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
    _refuse_device_map(config, f"what {artifact.path.name} serves is a function")
    if artifact.weights is not None:
        raise ArtifactError(
            config.name,
            f"{artifact.weights.name} lies beside a function, which has no weights",
            cure='Remove the file, or set the parameter WEIGHTS to "none".',
        )


def _load_exported(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    _refuse_method(artifact, config)
    _warn_unused(config, "model_class", "model_kwargs", "weights")
    program = programs.load_exported(config, artifact.path, device)
    return Loaded(artifact.kind, program.module, program.signature, program.owner, program.rows)


def _load_aoti(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    _refuse_method(artifact, config)
    misfit = programs.misfit(artifact.path, device)
    if misfit and artifact.fallback is None:
        raise ArtifactError(
            config.name,
            f"{artifact.path.name} was built for {misfit}",
            cure="Serve it on such a machine, build it for this one, or name an exported program or"
            " a model.py to serve instead with the parameter FALLBACK.",
        )
    if misfit and artifact.fallback is not None:
        log.warning(
            "model '%s': %s was built for %s; %s is served instead.",
            config.name,
            artifact.path.name,
            misfit,
            artifact.fallback.path.name,
        )
        return load(artifact.fallback, config, device)
    _warn_unused(config, "model_class", "model_kwargs", "weights")
    try:
        program = programs.load_aoti(config, artifact.path, device)
    except ArtifactError as error:
        if artifact.fallback is None:
            raise
        log.warning("%s %s is served instead.", error, artifact.fallback.path.name)
        return load(artifact.fallback, config, device)
    return Loaded(artifact.kind, program.module, program.signature, program.owner, program.rows)


def _load_torchserve(
    artifact: Artifact, config: ModelConfig, device: torch.device | None
) -> Loaded:
    _refuse_steps(artifact, config)
    _warn_unused(config, "method", "model_class", "model_factory", "weights")
    served = torchserve.load(config, artifact.path, device)
    return Loaded(artifact.kind, served, torchserve.signature(config), served)


def _refuse_steps(artifact: Artifact, config: ModelConfig) -> None:
    asked = {
        "config.pbtxt has sequence_batching": config.sequencing is not None,
        "the model is decoupled": config.decoupled,
    }
    for problem, found in asked.items():
        if found:
            raise ConfigError(
                config.name,
                f"{problem}, and {artifact.path.name} is {artifact.kind.value}",
                cure="A handler answers each request by itself, and once; take it out.",
            )


def _refuse_method(artifact: Artifact, config: ModelConfig) -> None:
    if config.options.method is not None:
        raise ConfigError(
            config.name,
            f"METHOD is set, and {artifact.path.name} is {artifact.kind.value}",
            cure="It holds one method, the one that was exported; take METHOD out.",
        )


_LOADERS: Mapping[Kind, Callable[[Artifact, ModelConfig, torch.device | None], Loaded]] = {
    Kind.TORCHSCRIPT: _load_torchscript,
    Kind.MODULE: _load_module,
    Kind.FACTORY: _load_factory,
    Kind.EXPORTED: _load_exported,
    Kind.AOTI: _load_aoti,
    Kind.TORCHSERVE: _load_torchserve,
}
