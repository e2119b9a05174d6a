"""Serves a TorchServe archive: its own handler answers, a batch of requests at a time.

The archive lies unpacked in the version folder. What TorchServe's worker does for a handler is done
here: the handler's module is imported from the archive's folder, which is also the working
directory; its function or its one class is found, initialized, and called with a list of requests.
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
    shown,
)
from torch_py_backend.loading import python_source
from torch_py_backend.loading.loaded import Loaded, warn_unused
from torch_py_backend.signature.binding import Argument, Passing, Signature, Takes
from torch_py_backend.torchserve import mar_archive, stand_in
from torch_py_backend.torchserve.context import Context, settings
from torch_py_backend.torchserve.mar_archive import Manifest
from torch_py_backend.torchserve.served import Handle, Served

log = logging.getLogger(__name__)


def load(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    """Load an archive that lies unpacked in the version folder.

    Raises:
        LoadError: it cannot be served; the message says why.
    """
    _refuse_steps(artifact, config)
    warn_unused(config, "method", "model_class", "model_factory", "weights")
    served = _handler(config, artifact.path, device)
    return Loaded(artifact.kind, served, _signature(config), served)


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


def _signature(config: ModelConfig) -> Signature:
    """The fields of a request, as the config names them.

    Raises:
        ConfigError: the config has other tensors than such a model's.
    """
    odd = [spec for spec in (*config.inputs, *config.outputs) if spec.dtype.triton != "BYTES"]
    odd += [spec for spec in config.inputs if spec.dims not in ((), (1,))]
    if odd or len(config.outputs) != 1:
        raise ConfigError(
            config.name,
            f"config.pbtxt has the tensors {shown(map(str, (*config.inputs, *config.outputs)))}",
            expected="inputs and one output of TYPE_STRING with dims: [ 1 ], as a request to"
            " TorchServe has fields and one answer",
        )
    arguments = tuple(_argument(spec.name, spec.optional) for spec in config.inputs)
    return Signature(arguments, name="handle")


def _argument(name: str, optional: bool) -> Argument:  # noqa: FBT001  the config's word for it
    text = f"{name}: list[bytes]"
    return Argument(name, not optional, Passing.KEYWORD, Takes.BYTES, text)


def _handler(config: ModelConfig, folder: Path, device: torch.device | None) -> Served:
    """The handler of an archive, initialized.

    Args:
        config: the model's config.
        folder: where the archive lies, unpacked.
        device: what the handler is told to use; None: its own choice.

    Raises:
        LoadError: it cannot be served; the message says why.
    """
    content_type = _content_type(config)
    try:
        manifest = mar_archive.read_manifest(folder, folder.name)
        yaml_config = mar_archive.settings(folder, manifest, folder.name)
    except ArchiveError as error:
        raise ArtifactError(config.name, str(error).rstrip(".")) from error
    gpu = device.index if device is not None and device.type == "cuda" else None
    headers = {"Content-Type": content_type} if content_type else {}
    context = Context(config, folder, manifest, yaml_config, gpu, headers)
    if not stand_in.install():
        log.info("model '%s': TorchServe is installed, and its own handlers are used.", config.name)
    # Handlers open files beside them by their bare names.
    os.chdir(folder)
    with _initializing(config, manifest), python_source.importing_from(folder):
        module = _import(folder, manifest.handler_module)
        handle, initialize, owners = _entry(config, module, manifest.handler_function)
        _refuse_coroutine(config, manifest, handle)
        initialize(context)
    for owner in owners:
        _compile(config, owner)
    return Served(config, handle, context, content_type, _modules(module, owners))


def _content_type(config: ModelConfig) -> str:
    """What MODEL_KWARGS says that bodies are."""
    given = config.options.model_kwargs or {}
    value = given.get("content_type", "")
    if given.keys() - {"content_type"} or not isinstance(value, str):
        raise OptionError(
            config.name,
            "MODEL_KWARGS",
            json.dumps(given),
            '{"content_type": "…"}, which is all that a TorchServe archive takes',
        )
    return value.partition(";")[0].strip().lower()


@contextmanager
def _initializing(config: ModelConfig, manifest: Manifest) -> Iterator[None]:
    settings.set(config)  # for good: a handler may put its initialization off
    try:
        yield
    except BackendError:
        raise
    except (Exception, SystemExit) as error:  # the handler's own code runs here
        path = Path(f"{manifest.handler_module}.py").absolute()
        raise SourceError(
            config.name,
            f"the handler {manifest.handler} fails at {python_source.place(error, path)}",
        ) from error


def _import(folder: Path, name: str) -> ModuleType:
    """The handler's module: the archive's, else TorchServe's own of this name."""
    if not mar_archive.holds_module(folder, name):
        return importlib.import_module(f"ts.torch_handler.{name}")
    return importlib.import_module(name)


def _entry(
    config: ModelConfig, module: ModuleType, function: str
) -> tuple[Handle, Callable[[Context], Any], list[Any]]:
    """How the handler is called and initialized, and the objects that hold its model."""
    handle: Handle | None = getattr(module, function, None)
    if handle is not None:
        # As in TorchServe: a function is called once without requests, to initialize itself.
        return handle, lambda context: handle(None, context), _services(module)
    classes = [one for one in vars(module).values() if _is_handler(one)]
    if not module.__name__.startswith("ts."):
        classes = [one for one in classes if one.__module__ == module.__name__]
    if len(classes) != 1:
        found = shown(one.__name__ for one in classes) or "no class with handle()"
        raise SourceError(
            config.name,
            f"the handler {module.__name__} defines {found}, and no function {function}()",
            expected="one class with initialize() and handle(), or that function",
        )
    handler = classes[0]()
    return handler.handle, handler.initialize, [handler]


def _refuse_coroutine(config: ModelConfig, manifest: Manifest, handle: Handle) -> None:
    if inspect.iscoroutinefunction(handle):
        raise SourceError(
            config.name,
            f"{handle.__name__}() is a coroutine in the handler {manifest.handler}",
            expected="a function that returns its answers",
        )


def _is_handler(value: Any) -> bool:
    return isinstance(value, type) and hasattr(value, "handle")


def _services(module: ModuleType) -> list[Any]:
    """The handlers that a module has made for its function to use."""
    return [one for one in vars(module).values() if _is_handler(type(one))]


def _modules(module: ModuleType, owners: Sequence[Any]) -> list[nn.Module]:
    """The modules that a handler calls, as far as they can be seen."""
    held = [one for holder in (module, *owners) for one in vars(holder).values()]
    return list({id(one): one for one in held if isinstance(one, nn.Module)}.values())


def _compile(config: ModelConfig, owner: Any) -> None:
    """Compile what the handler calls its model, where the config asks for it.

    Raises:
        OptionError: torch.compile does not take the parameters.
    """
    model = getattr(owner, "model", None)
    if not torch_compile.requested(config) or hasattr(model, "_orig_mod"):  # it has done so itself
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
    # What cannot be compiled runs eagerly, and torch says so in the log.
    torch._dynamo.config.suppress_errors = not required  # noqa: SLF001  a setting, under no other name
    try:
        model.compile(**parameters)
    except Exception as error:  # whatever torch.compile makes of a value that it does not know
        raise torch_compile.refusal(config, error) from error
