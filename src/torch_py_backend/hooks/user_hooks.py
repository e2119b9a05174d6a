"""Hooks: the class `Hooks` of hooks.py, whose methods make batches and read results.

`preprocess` prepares a request's rows one by one and `collate` makes a batch of rows, or
`preprocess_batch` prepares a whole batch. `postprocess` reads the result of each row, or
`postprocess_batch` that of the batch. Each method is optional.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.config import conflicts, removed_names, request_parameters
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
from torch_py_backend.loading.python_source import HOOK_METHODS
from torch_py_backend.signature import introspection
from torch_py_backend.signature.arguments import Passing, Signature

log = logging.getLogger(__name__)

# What the methods of a user take and return: trees of anything.
Tree: TypeAlias = Any

# The argument of the hooks that do not take the inputs by name.
_ARGUMENTS = {"collate": "items", "postprocess": "result", "postprocess_batch": "result"}
_PER_BATCH = ("collate", "preprocess_batch", "postprocess_batch")
# Methods that exclude each other.
_EXCLUSIVE = (
    ("preprocess", "preprocess_batch"),
    ("preprocess_batch", "collate"),
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
    file: Path = Path("hooks.py")
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


def load(config: ModelConfig, artifact: Artifact) -> Hooks | None:
    """Load the hooks in a model's folder; None: there are none.

    Raises:
        SourceError: the class cannot be created, or its methods take other arguments.
        ConfigError: the config contradicts the hooks.
    """
    path = artifact.hooks
    if path is None:
        return None
    instance = python_source.construct_hooks(config, path)
    names = [name for name in HOOK_METHODS if getattr(instance, name, None) is not None]
    _check_names(config, path, instance, names)
    hooks = Hooks(**{name: _create_hook(config, path, instance, name) for name in names})
    _check_config(config, hooks)
    return hooks


def _check_names(config: ModelConfig, path: Path, instance: object, names: Collection[str]) -> None:
    """Raise SourceError for a removed method, two methods for one step, or no method."""
    for name, advice in removed_names.HOOKS.items():
        if hasattr(instance, name):
            raise SourceError(
                config.name, f"Hooks in {path.name} has {name}(), which was removed", cure=advice
            )
    for first, second in _EXCLUSIVE:
        if first in names and second in names:
            raise SourceError(
                config.name,
                f"Hooks in {path.name} has {first}() and {second}()",
                expected="one of them: they do the same",
            )
    if not names:
        raise SourceError(
            config.name,
            f"the class Hooks in {path.name} has no hooks",
            expected="some of the methods " + ", ".join(HOOK_METHODS),
        )


def _create_hook(config: ModelConfig, path: Path, instance: object, name: str) -> Hook:
    """Return the hook of this name after checking its arguments."""
    method, place = getattr(instance, name), f"Hooks.{name}"
    if not callable(method):
        raise SourceError(
            config.name, f"{place} in {path.name} is {a_type(method)}", expected="a method"
        )
    if inspect.iscoroutinefunction(method) or introspection.is_generator(method):
        raise SourceError(
            config.name,
            f"{place}() in {path.name} is asynchronous or a generator",
            expected="a method that returns its result",
        )
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError) as error:
        raise SourceError(
            config.name, f"the arguments of {place}() in {path.name} cannot be read: {error}"
        ) from error
    takes_parameters = request_parameters.ARGUMENT in signature.parameters
    argument = _ARGUMENTS.get(name)
    if argument is not None:
        parameters = {request_parameters.ARGUMENT: None} if takes_parameters else {}
        try:
            signature.bind(argument, **parameters)
        except TypeError as error:
            raise SourceError(
                config.name,
                f"{place}{signature} in {path.name} cannot be called: {error}",
                expected=f"{name}(self, {argument}), with {request_parameters.ARGUMENT} as the"
                " last argument if it takes them",
            ) from None
    text = f"{name}{signature}"
    return Hook(config.name, name, method, text, takes_parameters, path)


def _check_config(config: ModelConfig, hooks: Hooks) -> None:
    """Raise ConfigError if the config contradicts the hooks."""
    batches = [hook.name for hook in hooks.defined if hook.name in _PER_BATCH]
    argument = request_parameters.ARGUMENT
    in_forward = "Do in forward() what the hooks do, or remove hooks.py."
    rules = (
        (
            bool(batches) and not config.max_batch_size,
            f"Hooks has {', '.join(batches)}(), and max_batch_size is 0",
            "Set max_batch_size, or remove them: each request is then one item.",
        ),
        (
            config.options.pad is not None,
            "PAD is set, and the model has hooks",
            "Pad in collate() or preprocess_batch(), and remove PAD.",
        ),
        (
            config.sequencing is not None,
            "config.pbtxt has sequence_batching, and the model has hooks",
            in_forward,
        ),
        (
            config.concatenates,
            "config.pbtxt has batch_input or batch_output, and the model has hooks",
            in_forward,
        ),
        (config.decoupled, "the model is decoupled, and has hooks", in_forward),
        (
            hooks.takes_parameters and any(spec.name == argument for spec in config.inputs),
            f"an input is named {argument}, like the argument of hooks for a request's parameters",
            "Rename the input.",
        ),
        (
            hooks.takes_parameters and config.response_cache,
            "response_cache is enabled, and Hooks reads the parameters of requests",
            conflicts.CACHE_CURE,
        ),
    )
    for applies, problem, cure in rules:
        if applies:
            raise ConfigError(config.name, problem, cure=cure)
