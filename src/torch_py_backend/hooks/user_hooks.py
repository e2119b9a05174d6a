"""Hooks: a class in model.py whose methods make batches and read results.

`preprocess` prepares a request's rows one by one and `collate` makes a batch of rows, or
`preprocess_batch` prepares a whole batch. `inference` calls the module. `postprocess` reads the
result of each row, or `postprocess_batch` that of the batch. Each method is optional.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_py_backend.artifacts.discovery import HOOK_METHODS, Artifact, ArtifactType
from torch_py_backend.config import request_parameters
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import (
    BackendError,
    ConfigError,
    HookError,
    InputError,
    SourceError,
    summarize,
)
from torch_py_backend.loading import python_source
from torch_py_backend.signature import introspection
from torch_py_backend.signature.binding import Passing, Signature

# The arguments of the hooks that do not take the inputs by name.
_TAKES = {
    "collate": ("items",),
    "inference": ("module", "batch"),
    "forward": ("module", "batch"),
    "postprocess": ("result",),
    "postprocess_batch": ("result",),
}
_PER_BATCH = ("collate", "preprocess_batch", "postprocess_batch")
# Methods that exclude each other.
_RIVALS = (
    ("preprocess", "preprocess_batch"),
    ("preprocess_batch", "collate"),
    ("inference", "forward"),
    ("postprocess", "postprocess_batch"),
)


@dataclass
class Hook:
    """One method of the hooks.

    Attributes:
        model: the model's name.
        name: the method's name.
        function: the method, instrumented where requested.
        text: its declaration, for messages.
        asks: whether it takes the request's parameters.
        blames: whether a ValueError or TypeError that it raises is the client's fault.
    """

    model: str
    name: str
    function: Callable[..., Any]
    text: str
    asks: bool
    blames: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method.

        Raises:
            InputError: the method refuses the input.
            HookError: the method fails.
        """
        try:
            return self.function(*args, **kwargs)
        except (BackendError, KeyboardInterrupt):
            raise
        except BaseException as error:
            if self.blames and _is_refusal(error):
                reason = summarize(error)
                raise InputError(self.model, f"{self.name}() refuses the input: {reason}") from None
            raise HookError(self.model, self.name, error) from error

    def with_parameters(self, parameters: Any) -> Callable[..., Any]:
        """Bind the parameters of a request, or of each row, if the method takes them."""
        return partial(self, **{request_parameters.ARGUMENT: parameters}) if self.asks else self

    def signature(self) -> Signature:
        """Return the method's signature without the request's parameters."""
        arguments = []
        gap = False
        for argument in introspection.from_function(self.function).arguments:
            if argument.name == request_parameters.ARGUMENT:
                gap = True  # arguments after a gap cannot be passed by position
            elif gap and argument.passing is Passing.POSITIONAL:
                arguments.append(dataclasses.replace(argument, passing=Passing.KEYWORD))
            else:
                arguments.append(argument)
        return Signature(tuple(arguments), name=self.name)


def _is_refusal(error: BaseException) -> bool:
    """Return whether a decoder may raise this for unreadable bytes.

    Pillow raises OSErrors without an errno.
    """
    unreadable = isinstance(error, OSError) and error.errno is None
    return isinstance(error, ValueError | TypeError) or unreadable


@dataclass(frozen=True, slots=True)
class Hooks:
    """A model's hooks; None for each that is not defined."""

    preprocess: Hook | None = None
    preprocess_batch: Hook | None = None
    collate: Hook | None = None
    inference: Hook | None = None
    postprocess: Hook | None = None
    postprocess_batch: Hook | None = None

    @property
    def stages(self) -> list[Hook]:
        """The defined hooks, in the order in which they run."""
        stages = (getattr(self, field.name) for field in dataclasses.fields(self))
        return [stage for stage in stages if stage is not None]

    @property
    def asks(self) -> bool:
        """Whether any hook takes the request's parameters."""
        return any(stage.asks for stage in self.stages)

    @property
    def per_batch(self) -> bool:
        """Whether any hook takes or returns a batch."""
        return any(stage.name in _PER_BATCH for stage in self.stages)

    @property
    def makes_batches(self) -> bool:
        """Whether hooks make the arguments of the module's call."""
        makers = (self.preprocess, self.preprocess_batch, self.collate)
        return any(stage is not None for stage in makers)

    def __str__(self) -> str:
        return ", ".join(stage.text for stage in self.stages)


# --- load ------------------------------------------------------------------------------------


def load(config: ModelConfig, artifact: Artifact) -> Hooks | None:
    """Load the hooks in a model's folder; None: there are none.

    Raises:
        SourceError: the class cannot be created, or its methods take other arguments.
        ConfigError: the config contradicts the hooks.
    """
    built = (
        python_source.construct_hooks(config, artifact.hooks)
        if artifact.hooks is not None
        else None
    )
    if artifact.hooks is None or built is None:
        _refuse_idle_threads(config, used=False)
        return None
    _refuse_two_models(config, artifact)
    stages = {
        name: stage
        for name in HOOK_METHODS
        if (stage := _stage(config, artifact.hooks.name, built, name)) is not None
    }
    _refuse_contradictions(config, type(built).__name__, stages)
    _refuse_idle_threads(config, used="preprocess" in stages)
    if "forward" in stages:
        stages["inference"] = stages.pop("forward")
    return Hooks(**stages)


def _refuse_idle_threads(config: ModelConfig, *, used: bool) -> None:
    if config.options.preprocess_threads is not None and not used:
        raise ConfigError(
            config.name,
            "PREPROCESS_THREADS is set, and there is no preprocess()",
            cure="Take it out, or write a class Hooks with that method.",
        )


def _refuse_two_models(config: ModelConfig, artifact: Artifact) -> None:
    """Refuse a module in the hooks' source beside another model that the config does not name."""
    named = config.default_model_filename not in (None, "model.pt")
    if (
        named
        or artifact.hooks is None
        or artifact.kind in (ArtifactType.MODULE, ArtifactType.FACTORY)
    ):
        return
    modules = python_source.module_names(config.name, artifact.hooks)
    if modules:
        raise ConfigError(
            config.name,
            f"{artifact.hooks.name} defines the module {modules[0]} and hooks, and"
            f" {artifact.path.name} beside it is {artifact.kind.value}",
            expected="one model",
            cure="Say which with default_model_filename.",
        )


def _stage(config: ModelConfig, file: str, built: Any, name: str) -> Hook | None:
    method = getattr(built, name, None)
    if method is None:
        return None
    place = f"{type(built).__name__}.{name}"
    if not callable(method):
        raise SourceError(
            config.name, f"{place} in {file} is a {type(method).__name__}", expected="a method"
        )
    if (
        inspect.iscoroutinefunction(method)
        or inspect.isgeneratorfunction(method)
        or inspect.isasyncgenfunction(method)
    ):
        raise SourceError(
            config.name,
            f"{place}() in {file} is asynchronous or a generator",
            expected="a method that returns its result",
        )
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError) as error:
        raise SourceError(
            config.name, f"the arguments of {place}() in {file} cannot be read: {error}"
        ) from error
    asks = request_parameters.ARGUMENT in signature.parameters
    if name in _TAKES:
        _check_arguments(config, f"{place}{signature} in {file}", signature, name, asks=asks)
    blames = name.startswith("preprocess")
    return Hook(config.name, name, method, f"{name}{signature}", asks, blames)


def _check_arguments(
    config: ModelConfig, place: str, signature: inspect.Signature, name: str, *, asks: bool
) -> None:
    takes = _TAKES[name]
    try:
        signature.bind(*takes, **({request_parameters.ARGUMENT: None} if asks else {}))
    except TypeError as error:
        raise SourceError(
            config.name,
            f"{place} cannot be called: {error}",
            expected=f"{name}(self, {', '.join(takes)}), and after that"
            f" {request_parameters.ARGUMENT} where it wants them",
        ) from None


def _refuse_contradictions(config: ModelConfig, kind: str, stages: Mapping[str, Hook]) -> None:
    if not stages:
        raise SourceError(
            config.name,
            f"the class {kind}, which is to run around forward(), has no hooks",
            expected="some of the methods " + ", ".join(HOOK_METHODS),
        )
    for one, other in _RIVALS:
        if one in stages and other in stages:
            raise SourceError(
                config.name,
                f"{kind} has {one}() and {other}()",
                expected="one of them: they do the same",
            )
    batches = [name for name in _PER_BATCH if name in stages]
    named = any(spec.name == request_parameters.ARGUMENT for spec in config.inputs)
    contradictions = (
        (
            bool(batches) and not config.max_batch_size,
            f"{kind} has {', '.join(batches)}(), and max_batch_size is 0",
            "Set max_batch_size, or take them out: each request is then one item.",
        ),
        (
            config.options.pad is not None,
            f"PAD is set, and {kind} has hooks",
            "Pad in collate() or preprocess_batch(), and take PAD out.",
        ),
        (
            "cuda_graphs" in config.options.optimize,
            f"OPTIMIZE asks for cuda_graphs, and {kind} has hooks",
            "Take cuda_graphs out.",
        ),
        (
            config.sequencing is not None,
            f"config.pbtxt has sequence_batching, and {kind} has hooks",
            "Do in forward() what the hooks do, or take them out.",
        ),
        (
            config.concatenates,
            f"config.pbtxt has batch_input or batch_output, and {kind} has hooks",
            "Do in forward() what the hooks do, or take them out.",
        ),
        (
            config.decoupled,
            f"the model is decoupled, and {kind} has hooks",
            "Do in forward() what the hooks do, or take them out.",
        ),
        (
            named and any(stage.asks for stage in stages.values()),
            f"an input is named {request_parameters.ARGUMENT}, as the request's own are for hooks",
            "Rename the input.",
        ),
    )
    for contradicts, problem, cure in contradictions:
        if contradicts:
            raise ConfigError(config.name, problem, cure=cure)
