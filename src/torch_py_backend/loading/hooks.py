"""Hooks: the class `Hooks` of hooks.py, whose methods make batches and read results.

`preprocess` prepares a request's rows one by one and `collate` makes a batch of rows, or
`preprocess_batch` prepares a whole batch. `postprocess` reads the result of each row, or
`postprocess_batch` that of the batch. Each method is optional.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch_py_backend.config import removed_names
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import (
    ArtifactError,
    BackendError,
    BindingError,
    ConfigError,
    ForwardError,
    InputError,
    summarize,
)
from torch_py_backend.loading import python_source
from torch_py_backend.loading.discovery import Artifact
from torch_py_backend.signature import introspection
from torch_py_backend.signature.arguments import Argument, ArgumentType, Passing, Signature
from torch_py_backend.signature.binding import bind_inputs
from torch_py_backend.values import Parameters, Tree

log = logging.getLogger(__name__)

# The methods that the class may have, in the order in which they run.
HOOK_METHODS = ("preprocess", "preprocess_batch", "collate", "postprocess", "postprocess_batch")
# The name of the argument through which a hook receives the parameters of a request.
ARGUMENT = "parameters"
_PER_BATCH = ("collate", "preprocess_batch", "postprocess_batch")
# Methods that exclude each other.
_EXCLUSIVE = (
    {"preprocess", "preprocess_batch"},
    {"collate", "preprocess_batch"},
    {"postprocess", "postprocess_batch"},
)


class Hook:
    """One method of the hooks."""

    def __init__(self, name: str, method: Callable[..., Tree]) -> None:
        self.name, self.method = name, method
        self.takes_parameters = ARGUMENT in inspect.signature(method).parameters
        self._refused = False

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        """Call the method; InputError if it refuses the input, ForwardError if it fails."""
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
            if not self._refused:  # the first may be a mistake in the method
                self._refused = True
                log.warning(
                    "%s() refuses an input. Further ones are not logged.", self.name, exc_info=True
                )
            raise InputError(f"{self.name}() refuses the input: {summarize(error)}") from None

    def with_parameters(self, parameters: Parameters | Sequence[Parameters]) -> Callable[..., Tree]:
        """Bind the parameters of a request, or of each row, if the method takes them."""
        if not self.takes_parameters:
            return self
        return partial(self, **{ARGUMENT: parameters})

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
    instance = _construct(config, path)
    for name, advice in removed_names.HOOKS.items():
        if hasattr(instance, name):
            raise ArtifactError(f"{path.name} has {name}(), which was removed", cure=advice)
    names = [name for name in HOOK_METHODS if hasattr(instance, name)]
    if not names:
        raise ArtifactError(
            f"{path.name} has no class Hooks with hooks",
            expected=f"some of the methods {', '.join(HOOK_METHODS)}",
            cure="Rename the file if it serves another purpose.",
        )
    for pair in _EXCLUSIVE:
        if pair <= {*names}:
            both = "() and ".join(sorted(pair))
            raise ArtifactError(
                f"{path.name} has {both}()", expected="one of them: they do the same"
            )
    cure = f"It takes one argument, and {ARGUMENT} behind it if it needs them."
    created = {
        name: python_source.call(path, name, partial(_create_hook, instance, name), cure)
        for name in names
    }
    hooks = Hooks(**created)
    _check_config(config, hooks)
    return hooks


def _construct(config: ModelConfig, path: Path) -> object:
    """Return an instance of the class `Hooks` of a file; None: it has no such class."""
    hooks_class = getattr(python_source.import_source(path), "Hooks", None)
    if hooks_class is None:
        return None

    def build() -> object:
        takes_folder = "folder" in inspect.signature(hooks_class).parameters
        return hooks_class(folder=config.version_folder) if takes_folder else hooks_class()

    cure = "Its arguments are none, or `folder`, which is the version's folder."
    return python_source.call(path, "Hooks", build, cure)


def _create_hook(instance: object, name: str) -> Hook:
    """Return the hook of this name; TypeError if it takes other arguments."""
    hook = Hook(name, getattr(instance, name))
    if not name.startswith("preprocess"):  # that takes inputs by name, which are bound later
        parameters = {ARGUMENT: None} if hook.takes_parameters else {}
        inspect.signature(hook.method).bind("items or result", **parameters)
    return hook


def refuse_in_model(path: Path) -> None:
    """Raise ArtifactError if a model's source defines the class of hooks, which is for hooks.py."""
    source = python_source.import_source(path)
    hooks_class = getattr(source, "Hooks", None)
    is_own = getattr(hooks_class, "__module__", None) == source.__name__
    if is_own and any(hasattr(hooks_class, name) for name in HOOK_METHODS):
        raise ArtifactError(f"{path.name} defines the class Hooks", cure=removed_names.HOOKS_FILE)


def _check_config(config: ModelConfig, hooks: Hooks) -> None:
    """Raise ConfigError if the config contradicts the hooks."""
    batched = ", ".join(hooks.per_batch)
    if batched and not config.max_batch_size:
        raise ConfigError(
            f"Hooks has {batched}(), and max_batch_size is 0",
            cure="Set max_batch_size, or remove them: each request is then one item.",
        )
    excluded = {
        "PAD": config.options.pad is not None,
        "sequence_batching": config.sequencing is not None,
        "batch_input or batch_output": config.concatenates,
        "a decoupled policy": config.decoupled,
        "response_cache, which compares no parameters of requests": (
            hooks.takes_parameters and config.response_cache
        ),
    }
    for setting, is_set in excluded.items():
        if is_set:
            raise ConfigError(
                f"the model has hooks, and config.pbtxt has {setting}",
                cure="Remove one of the two.",
            )


def row_signature(config: ModelConfig) -> Signature:
    """Return the signature of a function that takes each input of one row by its name."""
    arguments = []
    for spec in config.inputs:
        takes = ArgumentType.TENSOR
        if spec.dtype.torch is None:
            takes = ArgumentType.RAW if spec.dims in ((), (1,)) else ArgumentType.BYTES
        required = not spec.optional
        arguments.append(Argument(spec.name, required, Passing.KEYWORD_ONLY, takes))
    return Signature(tuple(arguments), name="collate")


def hook_signature(config: ModelConfig, hook: Hook) -> Signature:
    """Return the signature of a hook for inputs; BindingError if it does not fit the config."""
    method = hook.method
    if hook.takes_parameters:  # the arguments after it are then passed by name
        method = partial(method, **{ARGUMENT: None})
    arguments = introspection.from_function(method).arguments
    inputs_only = tuple(each for each in arguments if each.name != ARGUMENT)
    signature = Signature(inputs_only, name=hook.name)
    names = [spec.name for spec in config.inputs]
    strings = {spec.name for spec in config.inputs if spec.dtype.torch is None}
    inputs = bind_inputs(names, signature)
    for name, takes in zip(inputs.names, inputs.types, strict=True):
        if name in strings and takes is ArgumentType.TENSOR:
            raise BindingError(
                f"input '{name}' is BYTES, and {signature} has no annotation for it",
                expected="an annotation: bytes or str for one a row, list[bytes] or list[str]",
            )
    return signature
