"""Hooks: the class `Hooks` of hooks.py, whose methods make batches and read results.

`preprocess` prepares rows one by one and `collate` makes a batch of them, or `preprocess_batch` a
whole batch. `postprocess` reads the result of a row, or `postprocess_batch` that of a batch.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch_py_backend.config import removed_names
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import (
    ArtifactError,
    BackendError,
    ConfigError,
    ForwardError,
    InputError,
    summarize,
)
from torch_py_backend.loading import python_source
from torch_py_backend.loading.discovery import Artifact
from torch_py_backend.signature import introspection
from torch_py_backend.signature.arguments import Signature
from torch_py_backend.values import Parameters, Tree

log = logging.getLogger(__name__)

ARGUMENT = "parameters"  # through which a hook receives those of a request


class Hook:
    """One method of the hooks; TypeError if it does not take what it is called with."""

    def __init__(self, name: str, method: Callable[..., Tree]) -> None:
        self.name, self.method = name, method
        signature = inspect.signature(method)
        self.takes_parameters = ARGUMENT in signature.parameters
        if not name.startswith("preprocess"):  # that takes inputs by name, which are bound later
            named = {ARGUMENT: None} if self.takes_parameters else {}
            signature.bind("rows or result", **named)
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
        return partial(self, **{ARGUMENT: parameters}) if self.takes_parameters else self

    @property
    def signature(self) -> Signature:
        """The arguments that inputs are bound to."""
        method = self.method
        if self.takes_parameters:
            method = partial(method, **{ARGUMENT: None})  # what is behind them is passed by name
        signature = introspection.from_function(method)
        inputs = tuple(each for each in signature.arguments if each.name != ARGUMENT)
        return dataclasses.replace(signature, arguments=inputs, name=self.name)


class Hooks(NamedTuple):
    """A model's hooks, in the order in which they run; None for each that is not defined."""

    preprocess: Hook | None = None
    preprocess_batch: Hook | None = None
    collate: Hook | None = None
    postprocess: Hook | None = None
    postprocess_batch: Hook | None = None

    @property
    def takes_parameters(self) -> bool:
        return any(hook.takes_parameters for hook in self if hook is not None)

    @property
    def per_batch(self) -> list[Hook]:
        """The hooks that take or return a batch."""
        hooks = (self.preprocess_batch, self.collate, self.postprocess_batch)
        return [hook for hook in hooks if hook is not None]


def load(config: ModelConfig, artifact: Artifact) -> Hooks | None:
    """Load the hooks in a model's folder; None: there are none."""
    path = artifact.hooks
    if path is None:
        return None
    hooks_class = getattr(python_source.import_source(path), "Hooks", None)
    if advice := removed_names.advice("hook", dir(hooks_class)):
        raise ArtifactError(f"{path.name}: {advice}")
    names = [name for name in Hooks._fields if hasattr(hooks_class, name)]
    if hooks_class is None or not names:
        raise ArtifactError(
            f"{path.name} has no class Hooks with hooks",
            expected=f"some of the methods {', '.join(Hooks._fields)}",
        )
    for name in ("preprocess", "postprocess"):
        if name in names and f"{name}_batch" in names:
            raise ArtifactError(f"{path.name} has {name}() and {name}_batch()", expected="one")
    if "collate" in names and "preprocess" not in names:
        raise ArtifactError(f"{path.name} has collate() and no preprocess()", expected="both")
    build = hooks_class
    if "folder" in inspect.signature(hooks_class).parameters:
        build = partial(hooks_class, folder=config.version_folder)
    cure = "Its arguments are none, or `folder`, which is the version's folder."
    instance = python_source.call(path, "Hooks", build, cure)
    created = {}
    for name in names:
        create = partial(Hook, name, getattr(instance, name))
        created[name] = python_source.call(path, name, create)
    hooks = Hooks(**created)
    _check_config(config, hooks)
    return hooks


def _check_config(config: ModelConfig, hooks: Hooks) -> None:
    if hooks.per_batch and not config.max_batch_size:
        found = f"{hooks.per_batch[0].name}() takes batches, and max_batch_size is 0"
        raise ConfigError(found, cure="Set it, or write a hook of rows.")
    if hooks.takes_parameters and config.response_cache:
        found = "hooks take parameters, which response_cache does not compare"
        raise ConfigError(found, cure="Remove one of the two.")
