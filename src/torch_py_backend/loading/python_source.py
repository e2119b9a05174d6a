"""The object that a model.py or a package defines: imported, selected, constructed."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.machinery
import importlib.util
import inspect
import logging
import operator
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from torch_py_backend.config import removed_names
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, a_type, join_names, summarize
from torch_py_backend.loading import weights
from torch_py_backend.loading.discovery import Artifact

log = logging.getLogger(__name__)

# The methods that the class of hooks may have, in the order in which they run.
HOOK_METHODS = ("preprocess", "preprocess_batch", "collate", "postprocess", "postprocess_batch")

_Result = TypeVar("_Result")

_KEYWORDS = "Give its arguments as JSON in the parameter MODEL_KWARGS."


# --- the import ------------------------------------------------------------------------------


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
    line = error_line(error, path)
    return f"line {line}: {summarize(error)}" if line else summarize(error)


def error_line(error: BaseException, path: Path) -> int | None:
    """Return the number of the line of a file that raised an exception; None: no line of it did."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == str(path)]
    return lines[-1] if lines else None


def _call(path: Path, name: str, function: Callable[[], _Result], cure: str = "") -> _Result:
    """Call a function of a model's file; raise ArtifactError with the line of its error.

    `cure` says what to do about wrong arguments.
    """
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise ArtifactError(
            f"{name}() in {path.name} fails at {error_location(error, path)}",
            cure=cure if isinstance(error, TypeError) else "",
        ) from error


# --- the model -------------------------------------------------------------------------------


def construct(config: ModelConfig, artifact: Artifact) -> object:
    """Return the object of a model.py that is served: a constructed module, or a function.

    The random values of weights that a file has are not drawn.

    Raises:
        ArtifactError: the file defines no model, or several, or it fails.
    """
    path, options = artifact.path, config.options
    refuse_hooks(path)
    target = _select(config, path, import_source(path))
    keywords = options.model_kwargs or {}
    if not isinstance(target, type) and options.model_factory is None:
        if keywords:
            name = getattr(target, "__name__", type(target).__name__)
            raise ArtifactError(
                f"MODEL_KWARGS is set, and {name}, which {path.name} serves, is not constructed",
                cure="Remove MODEL_KWARGS, or name a function that builds the module with"
                " MODEL_FACTORY.",
            )
        # A later load must not change the one that is served. Some cannot be copied, such as those
        # with locks, or with torch's first weight_norm().
        if isinstance(target, nn.Module):
            with contextlib.suppress(Exception):
                return copy.deepcopy(target)
        return target
    name = options.model_factory or target.__name__
    return _call(path, name, lambda: _build(config, artifact, target, keywords), cure=_KEYWORDS)


def construct_from_package(config: ModelConfig, artifact: Artifact) -> tuple[object, bool]:
    """Return what `MODEL_FACTORY: "package.module:callable"` builds, and whether it has weights.

    A class with `from_pretrained`, as in transformers, gets the folder with the config.json, and
    no network; it reads the weights itself.

    Raises:
        ArtifactError: the factory cannot be imported, or fails.
    """
    factory_name = config.options.model_factory or ""
    package, _, name = factory_name.partition(":")
    # Read by Hugging Face's libraries when they are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        with importing_from(config.version_folder):
            factory = operator.attrgetter(name)(importlib.import_module(package))
    except (Exception, SystemExit) as error:  # the package's own code runs here
        raise ArtifactError(
            f"MODEL_FACTORY is '{factory_name}', which cannot be imported: {summarize(error)}",
            expected="package.module:callable of a package that this Python has",
        ) from error
    keywords = config.options.model_kwargs or {}
    from_pretrained = getattr(factory, "from_pretrained", None)
    folders = (config.version_folder, config.folder)
    folder = next((path for path in folders if (path / "config.json").is_file()), None)
    try:
        if from_pretrained is not None and folder is not None:
            return from_pretrained(str(folder), local_files_only=True, **keywords), True
        return _build(config, artifact, factory, keywords), False
    except (Exception, SystemExit) as error:
        raise ArtifactError(
            f"MODEL_FACTORY '{factory_name}' with {keywords or 'no arguments'} fails:"
            f" {summarize(error)}",
            cure=_KEYWORDS,
        ) from error


def _build(
    config: ModelConfig,
    artifact: Artifact,
    factory: Callable[..., object],
    keywords: Mapping[str, object],
) -> object:
    path = artifact.weights
    if path is None:
        return factory(**keywords)
    return weights.build_uninitialized(
        lambda: factory(**keywords), lambda: weights.read(config, path)
    )


def _select(config: ModelConfig, path: Path, source: ModuleType) -> Any:
    """Return the class, function or module object in the source that is to be served."""
    options = config.options
    classes = _defined(source, _is_module_class)
    if config.python_runtime and not classes:
        # Triton's Python runtime serves imported classes, too.
        classes = {
            name: value
            for name, value in vars(source).items()
            if _is_module_class(value) and value.__module__.partition(".")[0] != "torch"
        }
    functions = _defined(source, inspect.isfunction)
    name = options.model_factory or options.model_class
    if name is not None:
        target = getattr(source, name, None)
        if callable(target):
            return target
        key = "MODEL_FACTORY" if options.model_factory else "MODEL_CLASS"
        raise ArtifactError(
            f"{key} is '{name}', which {path.name} does not define",
            expected=f"one of {join_names(classes | functions) or 'its classes or functions'}",
        )
    candidates = classes or functions
    if len({id(value) for value in candidates.values()}) == 1:  # a class may have two names
        return next(iter(candidates.values()))
    if classes and config.python_runtime:
        log.warning(
            "%s defines %s; %s is served, the first in the alphabet, as Triton's own"
            " runtime does. The parameter MODEL_CLASS names another.",
            path.name,
            join_names(classes),
            min(classes),
        )
        return classes[min(classes)]
    problem = (
        f"defines {join_names(candidates)}"
        if candidates
        else "defines no nn.Module and no function"
    )
    raise ArtifactError(
        f"{path.name} {problem}",
        expected="one class derived from torch.nn.Module, or one function",
        cure="Name the one to serve with the parameter MODEL_CLASS." if candidates else "",
    )


def _defined(source: ModuleType, matches: Callable[[object], bool]) -> dict[str, Any]:
    """Return the matching public objects that a file defines; imported ones are left out."""
    return {
        name: value
        for name, value in vars(source).items()
        if not name.startswith("_")
        and name != "example_inputs"
        and matches(value)
        and value.__module__ == source.__name__
    }


def _is_module_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


# --- beside the model ------------------------------------------------------------------------


def example_inputs(path: Path) -> Mapping[str, object] | None:
    """Return what `example_inputs()` of a model's source returns; None: it has none.

    Raises:
        ArtifactError: the function fails, or does not return a dict.
    """
    function = getattr(import_source(path), "example_inputs", None)
    if function is None:
        return None
    inputs: object = _call(path, "example_inputs", function)
    if not isinstance(inputs, Mapping):
        raise ArtifactError(
            f"example_inputs() in {path.name} returns {a_type(inputs)}",
            expected="a dict of tensors by input name",
        )
    return inputs


def refuse_hooks(path: Path) -> None:
    """Raise ArtifactError if a model's source defines the class of hooks, which is for hooks.py."""
    source = import_source(path)
    hooks_class = _defined(source, lambda value: isinstance(value, type)).get("Hooks")
    if hooks_class is None or _is_module_class(hooks_class):
        return
    names = [name for name in HOOK_METHODS if hasattr(hooks_class, name)]
    if names:
        raise ArtifactError(
            f"{path.name} defines the class Hooks with {names[0]}()",
            cure=removed_names.HOOKS_FILE,
        )


def construct_hooks(config: ModelConfig, path: Path) -> Any:
    """Return an instance of the class `Hooks` of hooks.py.

    Raises:
        ArtifactError: there is no such class, or it cannot be constructed.
    """
    hooks_class = getattr(import_source(path), "Hooks", None)
    if not isinstance(hooks_class, type) or _is_module_class(hooks_class):
        raise ArtifactError(
            f"{path.name} does not define the class Hooks",
            expected="a plain class of that name with some of the methods "
            + ", ".join(HOOK_METHODS),
            cure="Rename the file if it serves another purpose.",
        )
    keywords: dict[str, Path] = {}
    with contextlib.suppress(TypeError, ValueError):  # some built-in classes have no signature
        if "folder" in inspect.signature(hooks_class).parameters:
            keywords["folder"] = config.version_folder
    return _call(
        path,
        "Hooks",
        lambda: hooks_class(**keywords),
        cure="Its arguments are none, or `folder`, which is the version's folder.",
    )
