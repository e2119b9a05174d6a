"""Hooks: a class in model.py whose methods make batches and read results.

`preprocess` prepares a request's rows one by one and `collate` makes a batch of rows, or
`preprocess_batch` prepares a whole batch. `inference` calls the module. `postprocess` reads the
result of each row, or `postprocess_batch` that of the batch. Each method is optional.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from torch_py_backend.artifacts.discovery import HOOK_METHODS, Artifact, ArtifactType
from torch_py_backend.config import conflicts, request_parameters
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.config.request_parameters import Parameters
from torch_py_backend.errors import (
    BackendError,
    ConfigError,
    HookError,
    InputError,
    SourceError,
    a_type,
    summarize,
)
from torch_py_backend.loading import python_source
from torch_py_backend.signature import introspection
from torch_py_backend.signature.arguments import Passing, Signature

log = logging.getLogger(__name__)

# What the methods of a user take and return: trees of anything.
Tree: TypeAlias = Any

# The arguments of the hooks that do not take the inputs by name.
_ARGUMENTS = {
    "collate": ("items",),
    "inference": ("module", "batch"),
    "forward": ("module", "batch"),
    "postprocess": ("result",),
    "postprocess_batch": ("result",),
}
_PER_BATCH = ("collate", "preprocess_batch", "postprocess_batch")
# Methods that exclude each other.
_EXCLUSIVE = (
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
        method: the method.
        text: its declaration, for messages.
        takes_parameters: whether it takes the request's parameters.
        file: the file that defines it.
    """

    model: str
    name: str
    method: Callable[..., Tree]
    text: str
    takes_parameters: bool
    file: Path = Path("model.py")
    _logged: set[int | None] = field(default_factory=set)

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        """Call the method.

        Raises:
            InputError: the method refuses the input.
            HookError: the method fails.
        """
        try:
            return self.method(*args, **kwargs)
        except (BackendError, KeyboardInterrupt):
            raise
        except BaseException as error:
            # Decoders raise these for unreadable bytes; Pillow raises OSErrors without an errno.
            unreadable = isinstance(error, ValueError) or (
                isinstance(error, OSError) and error.errno is None
            )
            if unreadable and self.name.startswith("preprocess"):
                reason = summarize(error)
                self._log_refusal(error)
                raise InputError(self.model, f"{self.name}() refuses the input: {reason}") from None
            raise HookError(self.model, self.name, error) from error

    def _log_refusal(self, error: BaseException) -> None:
        """Log the first refusal of each line, which may be a mistake in the method."""
        line = python_source.error_line(error, self.file)
        if line not in self._logged:
            self._logged.add(line)
            log.warning(
                "model '%s': %s() in %s refuses an input at %s. The response has the code"
                " INVALID_ARG. Further refusals by this line are not logged.",
                self.model,
                self.name,
                self.file.name,
                python_source.error_location(error, self.file),
            )

    def with_parameters(self, parameters: Parameters | Sequence[Parameters]) -> Callable[..., Tree]:
        """Bind the parameters of a request, or of each row, if the method takes them."""
        return (
            partial(self, **{request_parameters.ARGUMENT: parameters})
            if self.takes_parameters
            else self
        )

    def signature(self) -> Signature:
        """Return the method's signature without the request's parameters."""
        arguments = []
        gap = False
        for argument in introspection.from_function(self.method).arguments:
            if argument.name == request_parameters.ARGUMENT:
                gap = True  # arguments after a gap cannot be passed by position
            elif gap and argument.passing is Passing.POSITIONAL:
                arguments.append(dataclasses.replace(argument, passing=Passing.KEYWORD))
            else:
                arguments.append(argument)
        return Signature(tuple(arguments), name=self.name)


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
    def defined(self) -> list[Hook]:
        """The defined hooks, in the order in which they run."""
        hooks = (getattr(self, field.name) for field in dataclasses.fields(self))
        return [hook for hook in hooks if hook is not None]

    @property
    def takes_parameters(self) -> bool:
        """Whether any hook takes the request's parameters."""
        return any(hook.takes_parameters for hook in self.defined)

    @property
    def per_batch(self) -> bool:
        """Whether any hook takes or returns a batch."""
        return any(hook.name in _PER_BATCH for hook in self.defined)

    @property
    def makes_batches(self) -> bool:
        """Whether hooks make the arguments of the module's call."""
        return any((self.preprocess, self.preprocess_batch, self.collate))

    def __str__(self) -> str:
        return ", ".join(hook.text for hook in self.defined)


# --- load ------------------------------------------------------------------------------------


def load(config: ModelConfig, artifact: Artifact) -> Hooks | None:
    """Load the hooks in a model's folder; None: there are none.

    Raises:
        SourceError: the class cannot be created, or its methods take other arguments.
        ConfigError: the config contradicts the hooks.
    """
    file = artifact.hooks
    instance: object = None if file is None else python_source.construct_hooks(config, file)
    hooks: dict[str, Hook] = {}
    if file is not None and instance is not None:
        named = config.default_model_filename not in (None, "model.pt")
        is_module = artifact.kind in (ArtifactType.MODULE, ArtifactType.FACTORY)
        modules = [] if named or is_module else python_source.module_names(config.name, file)
        if modules:
            raise ConfigError(
                config.name,
                f"{file.name} defines the module {modules[0]} and hooks, and"
                f" {artifact.path.name} beside it is {artifact.kind.value}",
                expected="one model",
                cure="Say which with default_model_filename.",
            )
        for name in HOOK_METHODS:
            if getattr(instance, name, None) is not None:
                hooks[name] = _create_hook(config, file, instance, name)
        _check_conflicts(config, type(instance).__name__, hooks)
    if config.options.preprocess_threads is not None and "preprocess" not in hooks:
        raise ConfigError(
            config.name,
            "PREPROCESS_THREADS is set, and there is no preprocess()",
            cure="Remove it, or write a class Hooks with that method.",
        )
    if "forward" in hooks:
        hooks["inference"] = hooks.pop("forward")
    return Hooks(**hooks) if hooks else None


def _create_hook(config: ModelConfig, path: Path, instance: object, name: str) -> Hook:
    """Return the hook of this name after checking its arguments."""
    method, file = getattr(instance, name), path.name
    place = f"{type(instance).__name__}.{name}"
    if not callable(method):
        raise SourceError(
            config.name, f"{place} in {file} is {a_type(method)}", expected="a method"
        )
    if inspect.iscoroutinefunction(method) or introspection.is_generator(method):
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
    takes_parameters = request_parameters.ARGUMENT in signature.parameters
    arguments = _ARGUMENTS.get(name)
    if arguments is not None:
        parameters = {request_parameters.ARGUMENT: None} if takes_parameters else {}
        try:
            signature.bind(*arguments, **parameters)
        except TypeError as error:
            raise SourceError(
                config.name,
                f"{place}{signature} in {file} cannot be called: {error}",
                expected=f"{name}(self, {', '.join(arguments)}), with"
                f" {request_parameters.ARGUMENT} as the last argument if it takes them",
            ) from None
    text = f"{name}{signature}"
    return Hook(config.name, name, method, text, takes_parameters, path)


def _check_conflicts(config: ModelConfig, name: str, hooks: Mapping[str, Hook]) -> None:
    if not hooks:
        raise SourceError(
            config.name,
            f"the class {name}, which is to run around forward(), has no hooks",
            expected="some of the methods " + ", ".join(HOOK_METHODS),
        )
    for first, second in _EXCLUSIVE:
        if first in hooks and second in hooks:
            raise SourceError(
                config.name,
                f"{name} has {first}() and {second}()",
                expected="one of them: they do the same",
            )
    batches = [hook for hook in _PER_BATCH if hook in hooks]
    argument = request_parameters.ARGUMENT
    named = any(spec.name == argument for spec in config.inputs)
    in_forward = {
        "config.pbtxt has sequence_batching": config.sequencing is not None,
        "config.pbtxt has batch_input or batch_output": config.concatenates,
        "the model is decoupled": config.decoupled,
    }
    rules = (
        (
            bool(batches) and not config.max_batch_size,
            f"{name} has {', '.join(batches)}(), and max_batch_size is 0",
            "Set max_batch_size, or remove them: each request is then one item.",
        ),
        (
            config.options.pad is not None,
            f"PAD is set, and {name} has hooks",
            "Pad in collate() or preprocess_batch(), and remove PAD.",
        ),
        *(
            (
                is_set,
                f"{setting}, and {name} has hooks",
                "Do in forward() what the hooks do, or remove them.",
            )
            for setting, is_set in in_forward.items()
        ),
        (
            named and any(hook.takes_parameters for hook in hooks.values()),
            f"an input is named {argument}, like the argument of hooks for a request's parameters",
            "Rename the input.",
        ),
        (
            config.response_cache and any(hook.takes_parameters for hook in hooks.values()),
            f"response_cache is enabled, and {name} reads the parameters of requests",
            conflicts.CACHE_CURE,
        ),
    )
    for applies, problem, cure in rules:
        if applies:
            raise ConfigError(config.name, problem, cure=cure)
