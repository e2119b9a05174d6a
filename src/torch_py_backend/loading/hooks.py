"""Hooks: the class `Hooks` of hooks.py, whose methods make batches and read results.

`preprocess` prepares a request's rows one by one and `collate` makes a batch of rows, or
`preprocess_batch` prepares a whole batch. `postprocess` reads the result of each row, or
`postprocess_batch` that of the batch. Each method is optional.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from torch_py_backend.config import conflicts, removed_names
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import (
    ArtifactError,
    BackendError,
    BindingError,
    ConfigError,
    ForwardError,
    InputError,
    a_type,
    summarize,
)
from torch_py_backend.loading import python_source
from torch_py_backend.loading.discovery import Artifact
from torch_py_backend.loading.python_source import HOOK_METHODS
from torch_py_backend.signature import introspection
from torch_py_backend.signature.arguments import Argument, ArgumentType, Passing, Signature
from torch_py_backend.signature.binding import bind_inputs
from torch_py_backend.values import Parameters

log = logging.getLogger(__name__)

# What the methods of a user take and return: trees of anything.
Tree: TypeAlias = Any

# The name of the argument through which a hook receives the parameters of a request.
ARGUMENT = "parameters"
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
        name: the method's name.
        method: the method.
        takes_parameters: whether it takes the request's parameters.
        file: the file that defines it.
    """

    name: str
    method: Callable[..., Tree]
    takes_parameters: bool
    file: Path = Path("hooks.py")
    _logged: set[int | None] = field(default_factory=set)

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        """Call the method.

        Raises:
            InputError: the method refuses the input.
            ForwardError: the method fails.
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
            if not (unreadable and self.name.startswith("preprocess")):
                raise ForwardError(error, self.name) from error
            self._log_refusal(error)
            raise InputError(f"{self.name}() refuses the input: {summarize(error)}") from None

    def _log_refusal(self, error: BaseException) -> None:
        """Log the first refusal of each line, which may be a mistake in the method."""
        line = python_source.error_line(error, self.file)
        if line not in self._logged:
            self._logged.add(line)
            log.warning(
                "%s() in %s refuses an input at %s. The response has the code"
                " INVALID_ARG. Further refusals by this line are not logged.",
                self.name,
                self.file.name,
                python_source.error_location(error, self.file),
            )

    def with_parameters(self, parameters: Parameters | Sequence[Parameters]) -> Callable[..., Tree]:
        """Bind the parameters of a request, or of each row, if the method takes them."""
        if not self.takes_parameters:
            return self
        return partial(self, **{ARGUMENT: parameters})

    def signature(self) -> Signature:
        """Return the method's signature without the request's parameters."""
        method = self.method
        if self.takes_parameters:  # the arguments after it are then passed by name
            method = partial(method, **{ARGUMENT: None})
        arguments = introspection.from_function(method).arguments
        return Signature(
            tuple(each for each in arguments if each.name != ARGUMENT),
            name=self.name,
        )

    def __str__(self) -> str:
        return f"{self.name}{inspect.signature(self.method)}"


@dataclass(frozen=True, slots=True)
class Hooks:
    """A model's hooks, in the order in which they run; None for each that is not defined."""

    preprocess: Hook | None = None
    preprocess_batch: Hook | None = None
    collate: Hook | None = None
    postprocess: Hook | None = None
    postprocess_batch: Hook | None = None

    @property
    def defined(self) -> list[Hook]:
        """The defined hooks, in the order in which they run."""
        hooks = (getattr(self, name) for name in HOOK_METHODS)
        return [hook for hook in hooks if hook is not None]

    @property
    def takes_parameters(self) -> bool:
        """Whether any hook takes the request's parameters."""
        return any(hook.takes_parameters for hook in self.defined)

    @property
    def per_batch(self) -> list[str]:
        """The names of the hooks that take or return a batch."""
        return [hook.name for hook in self.defined if hook.name in _PER_BATCH]

    def __str__(self) -> str:
        return ", ".join(map(str, self.defined))


def load(config: ModelConfig, artifact: Artifact) -> Hooks | None:
    """Load the hooks in a model's folder; None: there are none.

    Raises:
        ArtifactError: the class cannot be created, or its methods take other arguments.
        ConfigError: the config contradicts the hooks.
    """
    path = artifact.hooks
    if path is None:
        return None
    instance = python_source.construct_hooks(config, path)
    methods = {name: getattr(instance, name, None) for name in HOOK_METHODS}
    hooks = Hooks(
        **{
            name: _create_hook(path, name, method)
            for name, method in methods.items()
            if method is not None
        }
    )
    _check_methods(f"the class Hooks in {path.name}", instance, hooks)
    _check_config(config, hooks)
    return hooks


def _create_hook(path: Path, name: str, method: Any) -> Hook:
    """Return the hook of this name after checking its arguments."""
    place = f"Hooks.{name} in {path.name}"
    if not callable(method):
        raise ArtifactError(f"{place} is {a_type(method)}", expected="a method")
    if inspect.iscoroutinefunction(method) or introspection.is_generator(method):
        raise ArtifactError(
            f"{place} is asynchronous or a generator",
            expected="a method that returns its result",
        )
    arguments = _ARGUMENTS.get(name)
    signature: object = ""
    try:
        signature = inspect.signature(method)
        takes_parameters = ARGUMENT in signature.parameters
        if arguments is not None:
            keywords = {ARGUMENT: None} if takes_parameters else {}
            signature.bind(arguments, **keywords)
    except (TypeError, ValueError) as error:
        raise ArtifactError(
            f"Hooks.{name}{signature} in {path.name} cannot be called: {error}",
            expected=f"{name}(self, {arguments or 'inputs by name'}), with"
            f" {ARGUMENT} as the last argument if it takes them",
        ) from None
    return Hook(name, method, takes_parameters, path)


def _check_methods(place: str, instance: object, hooks: Hooks) -> None:
    """Raise ArtifactError for a removed method, two methods for one step, or no method."""
    for name, advice in removed_names.HOOKS.items():
        if hasattr(instance, name):
            raise ArtifactError(f"{place} has {name}(), which was removed", cure=advice)
    for first, second in _EXCLUSIVE:
        if getattr(hooks, first) and getattr(hooks, second):
            raise ArtifactError(
                f"{place} has {first}() and {second}()",
                expected="one of them: they do the same",
            )
    if not hooks.defined:
        raise ArtifactError(
            f"{place} has no hooks",
            expected="some of the methods " + ", ".join(HOOK_METHODS),
        )


def _check_config(config: ModelConfig, hooks: Hooks) -> None:
    """Raise ConfigError if the config contradicts the hooks."""
    excluded = {
        "sequence_batching": config.sequencing is not None,
        "batch_input or batch_output": config.concatenates,
        "a decoupled policy": config.decoupled,
    }
    conflicting = [name for name, is_set in excluded.items() if is_set]
    problem = cure = ""
    if hooks.per_batch and not config.max_batch_size:
        problem = f"Hooks has {', '.join(hooks.per_batch)}(), and max_batch_size is 0"
        cure = "Set max_batch_size, or remove them: each request is then one item."
    elif config.options.pad is not None:
        problem = "PAD is set, and the model has hooks"
        cure = "Pad in collate() or preprocess_batch(), and remove PAD."
    elif conflicting:
        problem = f"config.pbtxt has {conflicting[0]}, and the model has hooks"
        cure = "Do in forward() what the hooks do, or remove hooks.py."
    elif hooks.takes_parameters and any(spec.name == ARGUMENT for spec in config.inputs):
        problem = f"an input is named {ARGUMENT}, like the argument for a request's parameters"
        cure = "Rename the input."
    elif hooks.takes_parameters and config.response_cache:
        problem = "response_cache is enabled, and Hooks reads the parameters of requests"
        cure = conflicts.CACHE_CURE
    if problem:
        raise ConfigError(problem, cure=cure)


def row_signature(config: ModelConfig) -> Signature:
    """Return the signature of a function that takes each input of one row by its name."""
    arguments = []
    for spec in config.inputs:
        takes = ArgumentType.TENSOR
        if spec.dtype.torch is None:
            takes = ArgumentType.RAW if spec.dims in ((), (1,)) else ArgumentType.BYTES
        arguments.append(
            Argument(spec.name, not spec.optional, Passing.KEYWORD_ONLY, takes, spec.name)
        )
    return Signature(tuple(arguments), name="collate")


def hook_signature(config: ModelConfig, hook: Hook) -> Signature:
    """Return the signature of a hook for inputs.

    Raises:
        BindingError: it has no annotations for strings, or takes scalars for a batch.
    """
    signature = hook.signature()
    names = [spec.name for spec in config.inputs]
    strings = {spec.name for spec in config.inputs if spec.dtype.torch is None}
    inputs = bind_inputs(names, signature)
    for name, takes in zip(inputs.names, inputs.types, strict=True):
        if name in strings and takes is ArgumentType.TENSOR:
            raise BindingError(
                f"input '{name}' is BYTES, and {signature} has no annotation for it",
                expected="an annotation: bytes or str for one a row, list[bytes] or list[str]",
            )
        if takes.scalar and signature.name == "preprocess_batch":
            raise BindingError(
                f"{signature} takes {takes.value} for the input '{name}', and gets those of all"
                " rows",
                expected="a Tensor, list[str] or list[bytes]",
                cure="Or name it preprocess, which is called for each row.",
            )
    return signature
