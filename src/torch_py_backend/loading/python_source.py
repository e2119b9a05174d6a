"""A model.py becomes the object that is served: imported, chosen, constructed."""

from __future__ import annotations

import contextlib
import hashlib
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
from typing import Any, NamedTuple

from torch import nn

from torch_py_backend.artifacts import discovery
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import SourceError, brief, shown
from torch_py_backend.loading import initialization

log = logging.getLogger(__name__)


def import_source(model: str, path: Path) -> ModuleType:
    """Run a model's source file as a module of its own; files beside it can be imported.

    A file that has been run, and is the same since, is not run again: it may not bear that.
    """
    name = _module_name(path)
    state = _state(path)
    known = sys.modules.get(name)
    if known is not None and known.__spec__ is not None and known.__spec__.loader_state == state:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SourceError(model, f"{path.name} is no Python source", expected="a .py file")
    spec.loader_state = state
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with importing_from(path.parent):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise SourceError(model, f"{path.name} fails at {place(error, path)}") from error
    return module


def _state(path: Path) -> tuple[int, int]:
    try:
        about = path.stat()
    except OSError:  # the loader will say so
        return (0, 0)
    return (about.st_mtime_ns, about.st_size)


def _module_name(path: Path) -> str:
    return f"torch_py_backend_model_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"


@contextlib.contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Modules in the folder can be imported, also later, by what the model does at run time."""
    _forget_stub_module(folder)
    sys.path.insert(0, str(folder))
    # A model repository is read, not written: it may be another user's, or read-only.
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _forget_stub_module(folder: Path) -> None:
    """Remove `model` from sys.modules where it is another file than the folder's own.

    Triton's stub imports the backend's file as `model`; `import model` would return that one.
    """
    file = getattr(sys.modules.get("model"), "__file__", None)
    if file is None or Path(file).is_relative_to(folder):
        return
    if any((folder / name).is_file() for name in ("model.py", "model/__init__.py")):
        del sys.modules["model"]
        importlib.invalidate_caches()


def place(error: BaseException, path: Path) -> str:
    """The line of the model's own file that an exception comes from, and what it says."""
    if isinstance(error, SyntaxError) and error.filename == str(path) and error.lineno:
        return f"line {error.lineno}: SyntaxError: {error.msg}: {(error.text or '').strip()}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{brief(error)}"


class Built(NamedTuple):
    """What a factory built, and whether it has read its weights, too."""

    served: Any
    has_weights: bool


def construct_from_package(config: ModelConfig, *, filled: bool) -> Built:
    """What `MODEL_FACTORY: "package.module:callable"` builds.

    A class with `from_pretrained` (transformers' and its likes) is given the folder that holds a
    config.json, and no network.
    """
    named = config.options.model_factory or ""
    package, _, name = named.partition(":")
    # Read by Hugging Face's libraries when they are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        with importing_from(config.version_folder):
            chosen = operator.attrgetter(name)(importlib.import_module(package))
    except (Exception, SystemExit) as error:  # the package's own code runs here
        raise SourceError(
            config.name,
            f"MODEL_FACTORY is '{named}', which cannot be imported: {brief(error)}",
            expected="package.module:callable of a package that this Python has",
        ) from error
    keywords = config.options.model_kwargs or {}
    pretrained = getattr(chosen, "from_pretrained", None)
    folder = _pretrained_folder(config)
    try:
        if pretrained is not None and folder is not None:
            return Built(
                pretrained(str(folder), local_files_only=True, **keywords), has_weights=True
            )
        return Built(_call(chosen, keywords, filled=filled), has_weights=False)
    except (Exception, SystemExit) as error:
        raise SourceError(
            config.name,
            f"MODEL_FACTORY '{named}' with {keywords or 'no arguments'} fails: {brief(error)}",
            cure="Give its arguments as JSON in the parameter MODEL_KWARGS.",
        ) from error


def _pretrained_folder(config: ModelConfig) -> Path | None:
    """Where a config.json lies: in the version folder, or beside config.pbtxt."""
    folders = (config.version_folder, config.folder)
    return next((one for one in folders if (one / "config.json").is_file()), None)


def example_inputs(model: str, path: Path, name: str) -> Mapping[str, Any] | None:
    """What the function of this name in a model's source returns; None: there is none.

    Raises:
        SourceError: it fails, or returns something else than a dict.
    """
    function = getattr(import_source(model, path), name, None)
    if function is None:
        return None
    try:
        made = function()
    except (Exception, SystemExit) as error:
        raise SourceError(
            model, f"{name}() in {path.name} fails at {place(error, path)}"
        ) from error
    if not isinstance(made, Mapping):
        raise SourceError(
            model,
            f"{name}() in {path.name} returns a {type(made).__name__}",
            expected="a dict of tensors by input name",
        )
    return made


def construct_hooks(config: ModelConfig, path: Path) -> Any:
    """An object of the class whose methods run around forward().

    None: the class that has the name is the module itself.

    Raises:
        SourceError: there is no such class, or it cannot be built.
    """
    source = import_source(config.name, path)
    name = config.options.hooks or discovery.HOOKS
    chosen = getattr(source, name, None)
    if _is_module_class(chosen) and config.options.hooks is None:
        return None
    if not isinstance(chosen, type) or issubclass(chosen, nn.Module):
        kind = "an nn.Module" if _is_module_class(chosen) else "no class"
        raise SourceError(
            config.name,
            f"{name}, which is to run around forward(), is {kind} in {path.name}",
            expected="a plain class with some of the methods " + ", ".join(discovery.STAGES),
        )
    signature = _signature(chosen)
    takes_folder = signature is not None and "folder" in signature.parameters
    keywords = {"folder": config.version_folder} if takes_folder else {}
    if signature is not None:
        try:
            signature.bind(**keywords)
        except TypeError as error:
            raise SourceError(
                config.name,
                f"{name}{signature} in {path.name} cannot be called: {error}",
                expected="no arguments, or `folder`, which is the version's folder",
            ) from None
    try:
        return chosen(**keywords)
    except (Exception, SystemExit) as error:
        raise SourceError(
            config.name, f"{name}() in {path.name} fails at {place(error, path)}"
        ) from error


def modules_in(model: str, path: Path) -> list[str]:
    """The names of the modules that a source defines itself."""
    return list(_defined(import_source(model, path), _is_module_class))


def construct(config: ModelConfig, path: Path, source: ModuleType, *, filled: bool) -> Any:
    """What is called with the inputs: a module, built, or a function.

    Args:
        config: the model's config.
        path: its source.
        source: that source, imported.
        filled: whether a file of weights will fill the module, whose random ones none will see.
    """
    chosen = _choose(config, path, source)
    is_factory = config.options.model_factory is not None
    if not isinstance(chosen, type) and not is_factory:
        _refuse_arguments(config, path, chosen)
        return chosen
    keywords = config.options.model_kwargs or {}
    name = config.options.model_factory or chosen.__name__
    signature = _signature(chosen)
    if signature is not None:
        try:
            signature.bind(**keywords)
        except TypeError as error:
            raise SourceError(
                config.name,
                f"{name}{signature} in {path.name} cannot be called with"
                f" {keywords or 'no arguments'}: {error}",
                cure="Give its arguments as JSON in the parameter MODEL_KWARGS.",
            ) from None
    try:
        return _call(chosen, keywords, filled=filled)
    except (Exception, SystemExit) as error:
        raise SourceError(
            config.name, f"{name}() in {path.name} fails at {place(error, path)}"
        ) from error


def _call(chosen: Callable[..., Any], keywords: Mapping[str, Any], *, filled: bool) -> Any:
    def build() -> Any:
        return chosen(**keywords)

    return initialization.unfilled(build) if filled else build()


def _refuse_arguments(config: ModelConfig, path: Path, chosen: Any) -> None:
    if config.options.model_kwargs:
        name = getattr(chosen, "__name__", type(chosen).__name__)
        raise SourceError(
            config.name,
            f"MODEL_KWARGS is set, and {name}, which {path.name} serves, is not constructed",
            cure="Take MODEL_KWARGS out, or name a function that builds the module with"
            " MODEL_FACTORY.",
        )


def _signature(chosen: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(chosen)
    except (TypeError, ValueError):  # some built-in functions do not tell theirs
        return None


def _choose(config: ModelConfig, path: Path, source: ModuleType) -> Any:
    """The class, function or module object in the source that is to be served."""
    options = config.options
    named = options.model_factory or options.model_class
    classes = _defined(source, _is_module_class)
    if config.python_runtime and not classes:
        classes = _imported_classes(source)
    functions = _defined(source, inspect.isfunction)
    if named is not None:
        found = getattr(source, named, None)
        if callable(found):
            return found
        key = "MODEL_FACTORY" if options.model_factory else "MODEL_CLASS"
        raise SourceError(
            config.name,
            f"{key} is '{named}', which {path.name} does not define",
            expected=f"one of {shown(classes | functions) or 'its classes or functions'}",
        )
    candidates = classes or functions
    distinct = {id(one): one for one in candidates.values()}  # one class may have two names
    if len(distinct) == 1:
        return next(iter(distinct.values()))
    if classes and config.python_runtime:
        return _first(config, path, classes)
    found = f"defines {shown(candidates)}" if candidates else "defines no nn.Module and no function"
    raise SourceError(
        config.name,
        f"{path.name} {found}",
        expected="one class derived from torch.nn.Module, or one function",
        cure="Name the one to serve with the parameter MODEL_CLASS." if candidates else "",
    )


def _first(config: ModelConfig, path: Path, classes: Mapping[str, Any]) -> Any:
    """The class that the Python runtime of Triton's PyTorch backend takes among several."""
    name = min(classes)
    log.warning(
        "model '%s': %s defines %s; %s is served, the first in the alphabet, as Triton's own"
        " runtime does. The parameter MODEL_CLASS names another.",
        config.name,
        path.name,
        shown(classes),
        name,
    )
    return classes[name]


def _defined(source: ModuleType, wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """Public names of the file's own definitions; what it imports does not count."""
    return {
        name: value
        for name, value in vars(source).items()
        if not name.startswith("_")
        and name != "example_inputs"
        and wanted(value)
        and value.__module__ == source.__name__
    }


def _imported_classes(source: ModuleType) -> dict[str, Any]:
    """Modules that a file has from others than torch: Triton's own runtime serves these, too."""
    return {
        name: value
        for name, value in vars(source).items()
        if _is_module_class(value) and value.__module__.partition(".")[0] != "torch"
    }


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)
