"""Modules and functions of a model.py or an installed package, with their weights."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, LoadError, join_names, summarize
from torch_py_backend.loading import weights
from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature import introspection

_Result = TypeVar("_Result")
_KEYWORDS = "Give its arguments as JSON in the parameter MODEL_KWARGS."


def import_source(path: Path) -> ModuleType:
    """Import a model's source file; it can import the files beside it.

    A file that has not changed since is not executed again: its code may fail the second time.
    """
    key = f"{path} {path.stat().st_mtime_ns} {path.stat().st_size}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    name = f"torch_py_backend_model_{digest[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    _make_importable(path.parent)
    try:
        call(path, "", partial(SourceFileLoader(name, str(path)).exec_module, module))
    except LoadError:
        del sys.modules[name]
        raise
    return module


def _make_importable(folder: Path) -> None:
    """Make the modules in a folder importable, also a `model`, as Triton's stub names ours."""
    model = sys.modules.get("model")
    stub = getattr(model, "__file__", None)
    if stub is not None and not Path(stub).is_relative_to(folder):
        del sys.modules["model"]
    sys.path.insert(0, str(folder))
    # A model repository may be read-only, or belong to another user.
    sys.dont_write_bytecode = True


def call(
    path: Path,
    name: str,
    function: Callable[[], _Result],
    cure: str = "",
) -> _Result:
    """Call a function of a model's file; raise ArtifactError with the line of its error.

    Without a name, the function runs the file. `cure` says what to do about wrong arguments.
    """
    try:
        return function()
    except LoadError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if frame.f_code.co_filename == str(path)]
        line = f"line {lines[-1]}: " if lines else ""
        failed = f"{name}() in {path.name}" if name else path.name
        raise ArtifactError(
            f"{failed} fails at {line}{summarize(error)}",
            cure=cure if isinstance(error, TypeError) else "",
        ) from error


def load(
    artifact: Artifact,
    config: ModelConfig,
    device: torch.device | None,
) -> Loaded:
    """Load what a model.py defines, or MODEL_FACTORY returns, with its weights on its device."""
    served, is_filled = construct(config, artifact)
    owner = served if isinstance(served, nn.Module) else None
    if owner is not None:
        if not is_filled:
            weights.load_into(config, artifact, owner)
        owner.eval()
        for parameter in owner.parameters():  # TorchScript does not support requires_grad_()
            parameter.requires_grad = False
        if device is not None:
            owner.to(device)
    attribute = config.options.method
    step = None
    if config.decoupled and attribute is None and {"begin", "step"}.issubset(dir(served)):
        attribute = "begin"
        step = served.step
    # A callable object that is not a function has no name.
    name = attribute or str(getattr(served, "__name__", "forward"))
    called = described = served
    if attribute is not None:
        called = described = call(artifact.path, name, partial(getattr, served, attribute))
    elif owner is not None:
        described = owner.forward
    signature = call(artifact.path, name, partial(introspection.from_function, described))
    signature = dataclasses.replace(signature, name=name)
    return Loaded(artifact, called, signature, owner, step=step)


def construct(config: ModelConfig, artifact: Artifact) -> tuple[Any, bool]:
    """Return the module or the function that is served, and whether it has its weights already.

    A class with `from_pretrained`, as in transformers, reads the folder itself, without a network.
    """
    path, options = artifact.path, config.options
    keywords, name = options.model_kwargs or {}, options.model_factory or ""
    if artifact.kind is ArtifactType.FACTORY:
        path = config.folder / "config.pbtxt"  # it names the factory
        # Read by Hugging Face's libraries when they are imported.
        os.environ["HF_HUB_OFFLINE"] = "1"
        _make_importable(config.version_folder)
        factory = call(path, name, partial(pkgutil.resolve_name, name))
        reads_folder = hasattr(factory, "from_pretrained")
        for folder in (config.version_folder, config.folder):
            if reads_folder and (folder / "config.json").is_file():
                keywords = {"local_files_only": True, **keywords}
                build = partial(factory.from_pretrained, str(folder), **keywords)
                return call(path, name, build, _KEYWORDS), True
    else:
        factory = _select(config, path)
        if not isinstance(factory, type) and not name and not keywords:
            return factory, False
        name = name or factory.__name__
    build = partial(factory, **keywords)
    if artifact.weights is not None:
        saved = partial(weights.read, config, artifact.weights)
        build = partial(weights.build_uninitialized, build, saved)
    return call(path, name, build, _KEYWORDS), False


def _select(config: ModelConfig, path: Path) -> Any:
    """Return the class or function of a source file that is to be served."""
    source, name = import_source(path), config.options.model_factory or config.options.model_class
    hooks = getattr(source, "Hooks", None)
    if getattr(hooks, "__module__", None) == source.__name__:
        cure = "Move it to hooks.py beside the model."
        raise ArtifactError(f"{path.name} defines the class Hooks", cure=cure)
    classes = module_classes(source)
    functions = {
        name: function
        for name, function in inspect.getmembers(source, inspect.isfunction)
        if function.__module__ == source.__name__ and name[0] != "_" and name != "example_inputs"
    }
    candidates: Mapping[str, Any] = classes or functions
    if name is not None:
        value = getattr(source, name, None)
        # A later load must not change the module that is served: it is constructed each time.
        is_usable = callable(value) and not isinstance(value, nn.Module)
        candidates = {name: value} if is_usable else {}
    elif config.python_runtime:  # as Triton's own runtime does, which serves imported classes, too
        classes = classes or module_classes(source, imported=True)
        candidates = dict([*classes.items()][:1]) or functions
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    found = join_names(classes | functions) or "no nn.Module and no function"
    raise ArtifactError(
        f"{path.name} defines {found}",
        expected=name or "one class derived from torch.nn.Module, or one function",
        cure="Name the one to serve with the parameter MODEL_CLASS.",
    )


def module_classes(
    source: ModuleType,
    *,
    imported: bool = False,
) -> dict[str, type]:
    """Return the public classes of modules that a file defines, or also imports, once by name."""
    return {
        value.__name__: value
        for name, value in inspect.getmembers(source, inspect.isclass)
        if issubclass(value, nn.Module)
        and name[0] != "_"
        and value.__module__.partition(".")[0] != "torch"
        and (imported or value.__module__ == source.__name__)
    }
