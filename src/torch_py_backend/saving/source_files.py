"""A source file of a saved module: model.py imports the module's class, hooks.py the hooks.

The files of classes that are not installed are copied beside it. A class of hooks in a script or
notebook is written out.
"""

from __future__ import annotations

import importlib.util
import inspect
import shutil
import site
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from torch_py_backend.errors import SaveError
from torch_py_backend.loading import source_dependencies

_MAIN = "__main__"
_CURE = "Put the class and what it uses into a .py file and import it."
_INSTALLED = [
    *map(Path, {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}),
    *map(Path, [*site.getsitepackages(), site.getusersitepackages()]),
]


def write(folder: Path, stem: str, value: type, name: str, *, write_out: bool = False) -> None:
    """Write a source file that has a class, after a user's own file with its name.

    Args:
        folder: the version folder.
        stem: the name of the file without its suffix.
        value: the class.
        name: its name in the file.
        write_out: write the source of a class of a script or notebook into the file.

    Raises:
        SaveError: the class cannot be imported.
    """
    origin = None if "<locals>" in value.__qualname__ else _origin(value.__name__, value)
    if origin is not None:
        lines = _imported(folder, stem, name, *origin)
    elif write_out and value.__module__ == _MAIN:
        lines = _written_out(folder, stem, value, name)
    else:
        place = "a function" if "<locals>" in value.__qualname__ else "a script or a notebook"
        raise SaveError(
            f"{value.__qualname__} is defined in {place}, which cannot be imported",
            cure=_CURE,
        )
    path = folder / f"{stem}.py"
    own = path.read_text(encoding="utf-8").rstrip() + "\n" if path.exists() else ""
    path.write_text(own + lines, encoding="utf-8")


def _imported(folder: Path, stem: str, name: str, module: str, attribute: str) -> str:
    """Return the import of a value, after copying the files of a module that is not installed."""
    path = _local_file(module)
    if path is not None:
        parts = module.split(".")
        root = path.parents[len(parts) - (path.name != "__init__.py")]
        for place, file in source_dependencies.modules(root, tuple(parts)).items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / place)
        if module == stem:  # this file begins with the module
            return f"\n\n{name} = {attribute}\n" if name != attribute else ""
    source = f"from {module} import {attribute}" if attribute else f"import {module}"
    renamed = "" if name == (attribute or module) else f" as {name}"
    return f"{source}{renamed}\n"


def _written_out(folder: Path, stem: str, value: type, name: str) -> str:
    """Return the source of a class after the imports of what it uses."""
    try:
        text = textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError) as error:
        raise SaveError(
            f"the source of {value.__name__} cannot be read: {error}", cure=_CURE
        ) from None
    scope = vars(sys.modules[_MAIN])
    used = {*_global_names(symtable.symtable(text, value.__name__, "exec"))}
    imports = ""
    for used_name in sorted(used & scope.keys() - {value.__name__, "__name__", "__file__"}):
        origin = _origin(used_name, scope[used_name])
        if origin is None:
            raise SaveError(
                f"{value.__name__} uses '{used_name}', which is defined in the script",
                cure=_CURE,
            )
        imports += _imported(folder, stem, used_name, *origin)
    renamed = "" if name == value.__name__ else f"\n\n{name} = {value.__name__}\n"
    return f"{imports}\n\n{text.rstrip()}\n{renamed}"


def _global_names(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that a definition uses and does not define."""
    for symbol in table.get_symbols():
        is_module = table.get_type() == "module"
        if symbol.is_referenced() and (is_module or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _global_names(child)


def _origin(name: str, value: object) -> tuple[str, str] | None:
    """Return the module and the attribute from which to import a value; None: no module has it."""
    if isinstance(value, ModuleType):
        return (value.__name__, "") if importlib.util.find_spec(value.__name__) else None
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or module == _MAIN or module not in sys.modules:
        return None
    for key in ("__qualname__", "__name__", "_name"):
        attribute = getattr(value, key, None) or name
        if vars(sys.modules[module]).get(attribute) is value:
            return module, attribute
    return None


def _local_file(name: str) -> Path | None:
    """Return the file of a module that is not installed; None for all others."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return None
    path = Path(file).absolute()
    return None if any(path.is_relative_to(folder) for folder in _INSTALLED) else path
