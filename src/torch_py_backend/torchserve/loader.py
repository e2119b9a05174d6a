"""Loads a TorchServe archive, which is served by its own handler.

The archive is unpacked in the version folder. As in TorchServe's worker, the handler's module is
imported from the archive's folder, which is also the working directory; its function or its only
class is initialized, and called with a list of requests.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.compile import torch_compile
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import (
    ArchiveError,
    ArtifactError,
    BackendError,
    ConfigError,
    OptionError,
    SourceError,
    join_names,
)
from torch_py_backend.loading import python_source
from torch_py_backend.loading.loaded import Loaded, warn_unused
from torch_py_backend.signature.binding import Argument, ArgumentType, Passing, Signature
from torch_py_backend.torchserve import mar_archive, stand_in
from torch_py_backend.torchserve.context import Context, settings
from torch_py_backend.torchserve.mar_archive import Manifest
from torch_py_backend.torchserve.served import Handle, Served

log = logging.getLogger(__name__)


def load(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    """Load an archive that is unpacked in the version folder.

    Raises:
        LoadError: it cannot be served.
    """
    for problem, applies in (
        ("config.pbtxt has sequence_batching", config.sequencing is not None),
        ("the model is decoupled", config.decoupled),
    ):
        if applies:
            raise ConfigError(
                config.name,
                f"{problem}, and {artifact.path.name} is {artifact.kind.value}",
                cure="A handler sends one response per request and keeps no state; remove it.",
            )
    warn_unused(config, "method", "model_class", "model_factory", "weights")
    served = _handler(config, artifact.path, device)
    return Loaded(artifact.kind, served, _signature(config), served)


def _signature(config: ModelConfig) -> Signature:
    """Return the signature of the handler: the inputs of the config.

    Raises:
        ConfigError: the config has other tensors than strings.
    """
    wrong = [spec for spec in (*config.inputs, *config.outputs) if spec.dtype.triton != "BYTES"]
    wrong += [spec for spec in config.inputs if spec.dims not in ((), (1,))]
    if wrong or len(config.outputs) != 1:
        raise ConfigError(
            config.name,
            "config.pbtxt has the tensors"
            f" {join_names(map(str, (*config.inputs, *config.outputs)))}",
            expected="inputs and one output of TYPE_STRING with dims: [ 1 ], as a request to"
            " TorchServe has fields and one answer",
        )
    arguments = tuple(
        Argument(
            spec.name,
            not spec.optional,
            Passing.KEYWORD,
            ArgumentType.BYTES,
            f"{spec.name}: list[bytes]",
        )
        for spec in config.inputs
    )
    return Signature(arguments, name="handle")


def _handler(config: ModelConfig, folder: Path, device: torch.device | None) -> Served:
    """Import and initialize the handler of an archive.

    Args:
        config: the model's config.
        folder: the folder of the unpacked archive.
        device: the device that the context names; None: the handler's own choice.

    Raises:
        LoadError: it cannot be served.
    """
    content_type = _content_type(config)
    try:
        manifest = mar_archive.read_manifest(folder, folder.name)
        yaml_config = mar_archive.read_settings(folder, manifest, folder.name)
    except ArchiveError as error:
        raise ArtifactError(config.name, str(error).rstrip(".")) from error
    gpu = device.index if device is not None and device.type == "cuda" else None
    headers = {"Content-Type": content_type} if content_type else {}
    context = Context(config, folder, manifest, yaml_config, gpu, headers)
    if not stand_in.install():
        log.info("model '%s': TorchServe is installed, and its own handlers are used.", config.name)
    # Handlers open files of the archive by relative paths.
    os.chdir(folder)
    with _initializing(config, manifest), python_source.importing_from(folder):
        module = _import(folder, manifest.handler_module)
        handle, initialize, owners = _entry(config, module, manifest.handler_function)
        if inspect.iscoroutinefunction(handle):
            raise SourceError(
                config.name,
                f"{handle.__name__}() is a coroutine in the handler {manifest.handler}",
                expected="a function that returns its answers",
            )
        initialize(context)
    for owner in owners:
        _compile(config, owner)
    return Served(config, handle, context, content_type, _modules(module, owners))


def _content_type(config: ModelConfig) -> str:
    """Return the content type of request bodies, from MODEL_KWARGS."""
    kwargs = config.options.model_kwargs or {}
    value = kwargs.get("content_type", "")
    if kwargs.keys() - {"content_type"} or not isinstance(value, str):
        raise OptionError(
            config.name,
            "MODEL_KWARGS",
            json.dumps(kwargs),
            '{"content_type": "…"}, which is all that a TorchServe archive takes',
        )
    return value.partition(";")[0].strip().lower()


@contextmanager
def _initializing(config: ModelConfig, manifest: Manifest) -> Iterator[None]:
    settings.set(config)  # not reset: a handler may initialize itself later
    try:
        yield
    except BackendError:
        raise
    except (Exception, SystemExit) as error:  # the handler's own code runs here
        path = Path(f"{manifest.handler_module}.py").absolute()
        raise SourceError(
            config.name,
            f"the handler {manifest.handler} fails at {python_source.error_location(error, path)}",
        ) from error


def _import(folder: Path, name: str) -> ModuleType:
    """Import the handler's module from the archive, or else from TorchServe."""
    if not mar_archive.holds_module(folder, name):
        return importlib.import_module(f"ts.torch_handler.{name}")
    return importlib.import_module(name)


def _entry(
    config: ModelConfig, module: ModuleType, function: str
) -> tuple[Handle, Callable[[Context], Any], list[Any]]:
    """Return the handler's function, its initialization, and the objects that hold its model."""
    handle: Handle | None = getattr(module, function, None)
    if handle is not None:
        # As in TorchServe: a function is called once without requests, to initialize itself. Its
        # module may hold instances of handlers.
        instances = [value for value in vars(module).values() if _is_handler(type(value))]
        return handle, lambda context: handle(None, context), instances
    classes = [value for value in vars(module).values() if _is_handler(value)]
    if not module.__name__.startswith("ts."):
        classes = [cls for cls in classes if cls.__module__ == module.__name__]
    if len(classes) != 1:
        names = join_names(cls.__name__ for cls in classes) or "no class with handle()"
        raise SourceError(
            config.name,
            f"the handler {module.__name__} defines {names}, and no function {function}()",
            expected="one class with initialize() and handle(), or that function",
        )
    handler = classes[0]()
    return handler.handle, handler.initialize, [handler]


def _is_handler(value: Any) -> bool:
    return isinstance(value, type) and hasattr(value, "handle")


def _modules(module: ModuleType, owners: Sequence[Any]) -> list[nn.Module]:
    """Return the nn.Modules in the attributes of the handler and of its module."""
    values = [value for holder in (module, *owners) for value in vars(holder).values()]
    return list({id(value): value for value in values if isinstance(value, nn.Module)}.values())


def _compile(config: ModelConfig, owner: Any) -> None:
    """Compile the handler's attribute `model`, if the config says so.

    Raises:
        OptionError: torch.compile does not accept the parameters.
    """
    model = getattr(owner, "model", None)
    if not torch_compile.requested(config) or hasattr(
        model, "_orig_mod"
    ):  # the handler has compiled it
        return
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        log.warning(
            "model '%s': TORCH_COMPILE_OPTIONAL_PARAMETERS has no effect: the handler's model is a"
            " %s.",
            config.name,
            type(model).__name__,
        )
        return
    parameters = config.options.torch_compile_optional_parameters or {}
    required = config.options.compile_required or parameters.get("fullgraph", False)
    # Code that cannot be compiled runs eagerly; torch logs it.
    torch._dynamo.config.suppress_errors = not required  # noqa: SLF001  a setting, under no other name
    try:
        model.compile(**parameters)
    except Exception as error:  # any error of torch.compile for an unknown value
        raise torch_compile.parameter_error(config, error) from error
