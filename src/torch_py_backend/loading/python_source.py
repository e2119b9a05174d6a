"""Modules and functions of a model.py or an installed package, with their weights."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.machinery
import importlib.util
import inspect
import logging
import operator
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, ConfigError, join_names, summarize
from torch_py_backend.loading import weights
from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature import introspection

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_KEYWORDS = "Give its arguments as JSON in the parameter MODEL_KWARGS."


def import_source(path: Path) -> ModuleType:
    """Import a model's source file; it can import the files beside it.

    A file that has not changed since is not executed again: its code may fail the second time.
    """
    key = f"{path} {path.stat().st_mtime_ns} {path.stat().st_size}"
    name = f"torch_py_backend_model_{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.machinery.ModuleSpec(name, loader, origin=str(path))
    spec.has_location = True  # the module has __file__
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with importing_from(path.parent):
            loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ArtifactError(f"{path.name} fails at {error_location(error, path)}") from error
    return module


@contextlib.contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Make the modules in a folder importable, during and after the context.

    Triton's stub imports the backend's file as `model`. It is removed from sys.modules where the
    folder has a `model` of its own.
    """
    stub = getattr(sys.modules.get("model"), "__file__", None)
    has_model = any((folder / name).is_file() for name in ("model.py", "model/__init__.py"))
    if has_model and stub is not None and not Path(stub).is_relative_to(folder):
        del sys.modules["model"]
        importlib.invalidate_caches()
    sys.path.insert(0, str(folder))
    # Write no bytecode: a model repository may be read-only, or belong to another user.
    previous, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = previous


def error_location(error: BaseException, path: Path) -> str:
    """Return the line of the model's file that raised an exception, and its message."""
    if isinstance(error, SyntaxError) and error.filename == str(path) and error.lineno:
        return f"line {error.lineno}: SyntaxError: {error.msg}: {(error.text or '').strip()}"
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == str(path)]
    return f"line {lines[-1]}: {summarize(error)}" if lines else summarize(error)


def call(
    path: Path,
    name: str,
    function: Callable[[], _Result],
    cure: str = "",
) -> _Result:
    """Call a function of a model's file; raise ArtifactError with the line of its error.

    `cure` says what to do about wrong arguments.
    """
    try:
        return function()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ArtifactError(
            f"{name}() in {path.name} fails at {error_location(error, path)}",
            cure=cure if isinstance(error, TypeError) else "",
        ) from error


def load(
    artifact: Artifact,
    config: ModelConfig,
    device: torch.device | None,
) -> Loaded:
    """Load what a model.py defines, or what MODEL_FACTORY of a package returns.

    A module is filled with the weights of its version folder and moved to its device.
    """
    served, is_filled = construct(config, artifact)
    owner = served if isinstance(served, nn.Module) else None
    if owner is not None:
        # With WEIGHTS "none" there is no file of weights, and none is missing.
        if not is_filled and (artifact.weights is not None or not config.options.weights):
            weights.load_into(config, artifact, owner)
        owner.eval()
        for parameter in owner.parameters():  # TorchScript does not support requires_grad_()
            parameter.requires_grad = False
        if device is not None:
            owner.to(device)
    name = config.options.method or "forward"
    return call(artifact.path, name, partial(_describe, artifact, config, served, owner))


def _describe(
    artifact: Artifact, config: ModelConfig, served: Any, owner: nn.Module | None
) -> Loaded:
    """Return the loaded model: the callable for inputs, its signature, and how it streams."""
    method = config.options.method
    has_steps = all(callable(getattr(served, name, None)) for name in ("begin", "step"))
    called = served if method is None else getattr(served, method)
    # A callable object that is not a function has no name.
    name = method or str(getattr(served, "__name__", "forward"))
    step = None
    if method is None and config.decoupled and has_steps:
        called, step, name = served.begin, served.step, "begin"
    described = owner.forward if called is owner and owner is not None else called
    signature = dataclasses.replace(introspection.from_function(described), name=name)
    # Modules without a forward() have that of nn.Module.
    only_steps = has_steps and getattr(described, "__func__", None) is nn.Module.forward
    if not config.decoupled and (only_steps or introspection.is_generator(described)):
        raise ConfigError(
            f"{name}() makes a stream of results, and the model is not decoupled",
            cure="Write model_transaction_policy { decoupled: true } into config.pbtxt; or let"
            " forward() return all results at once.",
        )
    return Loaded(artifact, called, signature, owner, step=step)


def construct(config: ModelConfig, artifact: Artifact) -> tuple[object, bool]:
    """Return the module or the function that is served, and whether it has its weights already."""
    path, options = artifact.path, config.options
    if artifact.kind is ArtifactType.FACTORY:
        place = config.folder / "config.pbtxt"  # it names the factory
        build = partial(_from_package, config, artifact)
        return call(place, options.model_factory or "", build, _KEYWORDS)
    target = _select(config, path, import_source(path))
    if isinstance(target, type) or options.model_factory is not None:
        name = options.model_factory or target.__name__
        return call(path, name, partial(_build, config, artifact, target), _KEYWORDS), False
    if options.model_kwargs:
        raise ArtifactError(
            f"MODEL_KWARGS is set, and what {path.name} serves is not constructed",
            cure="Remove MODEL_KWARGS, or name what builds the module with MODEL_FACTORY.",
        )
    return target, False


def _from_package(config: ModelConfig, artifact: Artifact) -> tuple[object, bool]:
    """Return what `MODEL_FACTORY: "package.module:callable"` builds, and whether it has weights.

    A class with `from_pretrained`, as in transformers, gets the folder with the config.json, and
    no network; it reads the weights itself.
    """
    package, _, name = (config.options.model_factory or "").partition(":")
    # Read by Hugging Face's libraries when they are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    with importing_from(config.version_folder):
        factory = operator.attrgetter(name)(importlib.import_module(package))
    folders = (config.version_folder, config.folder)
    folder = next((path for path in folders if (path / "config.json").is_file()), None)
    if folder is None or not hasattr(factory, "from_pretrained"):
        return _build(config, artifact, factory), False
    keywords = config.options.model_kwargs or {}
    return factory.from_pretrained(str(folder), local_files_only=True, **keywords), True


def _build(
    config: ModelConfig,
    artifact: Artifact,
    factory: Callable[..., object],
) -> object:
    build = partial(factory, **(config.options.model_kwargs or {}))
    if artifact.weights is None:
        return build()
    return weights.build_uninitialized(build, partial(weights.read, config, artifact.weights))


def _select(config: ModelConfig, path: Path, source: ModuleType) -> Any:
    """Return the class or function in the source that is to be served."""
    options = config.options
    classes = module_classes(source)
    functions = {
        name: value
        for name, value in vars(source).items()
        if inspect.isfunction(value)
        and value.__module__ == source.__name__
        and not name.startswith("_")
        and name != "example_inputs"
    }
    name = options.model_factory or options.model_class
    if name is not None:
        target = getattr(source, name, None)
        # A later load must not change the module that is served: it is constructed each time.
        if callable(target) and not isinstance(target, nn.Module):
            return target
        key = "MODEL_FACTORY" if options.model_factory else "MODEL_CLASS"
        raise ArtifactError(
            f"{key} is '{name}', which {path.name} does not define",
            expected=f"one of {join_names(classes | functions) or 'its classes or functions'}",
        )
    if config.python_runtime:  # as Triton's own runtime does, which serves imported classes, too
        classes = classes or module_classes(source, imported=True)
        classes = {name: classes[name] for name in sorted(classes)[:1]}
    candidates = classes or functions
    distinct = {id(value): value for value in candidates.values()}  # a class may have two names
    if len(distinct) == 1:
        return distinct.popitem()[1]
    raise ArtifactError(
        f"{path.name} defines {join_names(candidates) or 'no nn.Module and no function'}",
        expected="one class derived from torch.nn.Module, or one function",
        cure="Name the one to serve with the parameter MODEL_CLASS.",
    )


def module_classes(source: ModuleType, *, imported: bool = False) -> dict[str, type]:
    """Return the public classes of modules that a source file defines, or also imports."""
    return {
        name: value
        for name, value in vars(source).items()
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and not name.startswith("_")
        and value.__module__.partition(".")[0] != "torch"
        and (imported or value.__module__ == source.__name__)
    }
