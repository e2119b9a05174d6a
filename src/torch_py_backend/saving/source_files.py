"""A source file of a saved module: model.py imports the module's class, hooks.py the hooks.

The files of classes that are not installed are copied beside it. A class of hooks in a script or
notebook is written out.
"""

from __future__ import annotations

import importlib.util
import inspect
import site
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from torch_py_backend.artifacts import source_dependencies
from torch_py_backend.errors import SaveError

_MAIN = "__main__"
_CURE = "Put the class and what it uses into a .py file and import it."
_INSTALLED = [
    *map(Path, {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}),
    *map(Path, [*site.getsitepackages(), site.getusersitepackages()]),
]


class SourceFiles:
    """Collects what a source file needs.

    Attributes:
        files: the files beside it, by their paths in the version folder.

    Args:
        model: the model's name.
        stem: the name of the file without its suffix.
    """

    def __init__(self, model: str, stem: str) -> None:
        self.files: dict[str, Path] = {}
        self._model, self._stem = model, stem
        self._lines: list[str] = []

    def add(self, value: type, name: str, *, write_out: bool = False) -> None:
        """Add a class.

        Args:
            value: the class.
            name: its name in the file.
            write_out: write the source of a class of a script or notebook into the file.

        Raises:
            SaveError: the class cannot be imported.
        """
        origin = None if "<locals>" in value.__qualname__ else _origin(value.__name__, value)
        if origin is not None:
            self._import(name, *origin)
        elif write_out and value.__module__ == _MAIN:
            self._write_out(value)
            self._rename(value.__name__, name)
        else:
            place = "a function" if "<locals>" in value.__qualname__ else "a script or a notebook"
            raise SaveError(
                self._model,
                f"{value.__qualname__} is defined in {place}, which cannot be imported",
                cure=_CURE,
            )

    def text(self) -> str:
        """Return the text of the file, which begins with that of a user's own file of its name."""
        own = self.files.pop(f"{self._stem}.py", None)
        if own is not None:
            return "".join([own.read_text(encoding="utf-8").rstrip() + "\n", *self._lines])
        return "".join(self._lines)

    def _import(self, name: str, module: str, attribute: str) -> None:
        """Import a value under a name, and take the files of a module that is not installed."""
        path = _local_file(module)
        if path is not None:
            parts = module.split(".")
            packaged = len(parts) - (path.name != "__init__.py")
            self.files |= source_dependencies.modules(path.parents[packaged], tuple(parts))
        if module == self._stem and f"{module}.py" in self.files:
            self._rename(attribute, name)  # the user's own file is the start of this one
            return
        source = f"from {module} import {attribute}" if attribute else f"import {module}"
        renamed = "" if name == (attribute or module) else f" as {name}"
        self._lines.append(f"{source}{renamed}\n")

    def _rename(self, old: str, name: str) -> None:
        if old != name:
            self._lines.append(f"\n\n{name} = {old}\n")

    def _write_out(self, value: type) -> None:
        """Write the source of a class after the imports of what it uses."""
        try:
            text = textwrap.dedent(inspect.getsource(value))
        except (OSError, TypeError) as error:
            raise SaveError(
                self._model, f"the source of {value.__name__} cannot be read: {error}", cure=_CURE
            ) from None
        scope = vars(sys.modules[_MAIN])
        used = {*_global_names(symtable.symtable(text, value.__name__, "exec"))}
        for name in sorted(used & scope.keys() - {value.__name__, "__name__", "__file__"}):
            origin = _origin(name, scope[name])
            if origin is None:
                raise SaveError(
                    self._model,
                    f"{value.__name__} uses '{name}', which is defined in the script",
                    cure=_CURE,
                )
            self._import(name, *origin)
        self._lines.append(f"\n\n{text.rstrip()}\n")


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
