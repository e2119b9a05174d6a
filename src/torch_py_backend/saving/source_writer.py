"""A model.py for classes of this process: imported where a file defines them, else written out.

A class of a script or notebook is written with the imports, constants, functions and classes that
it uses. The rest of the script, which may train the model, is not.
"""

from __future__ import annotations
import __future__

import ast
import importlib.util
import inspect
import linecache
import site
import symtable
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

from torch_py_backend.artifacts import source_dependencies
from torch_py_backend.errors import SaveError

_MAIN = "__main__"
# model.py has its own values, such as the path that other files are looked for beside.
_OF_EVERY_MODULE = {"__file__", "__name__", "__doc__", "__package__", "__spec__"}
_INSTALLED = [
    *map(Path, {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}),
    *map(Path, [*site.getsitepackages(), site.getusersitepackages()]),
]


class SourceWriter:
    """Collects the definitions and files that a model.py needs.

    Attributes:
        files: files beside model.py, by their paths in the version folder.
    """

    def __init__(self, model: str) -> None:
        self.files: dict[str, Path] = {}
        self._model = model
        self._values: dict[str, object] = {}
        self._imports: list[str] = []
        self._definitions: list[str] = []
        self._postponed = False

    def add(self, value: type | FunctionType) -> None:
        """Add a class or function under its own name.

        Raises:
            SaveError: no source defines it, or its source uses an object that cannot be written.
        """
        if "<locals>" in value.__qualname__:
            raise SaveError(
                self._model,
                f"{value.__qualname__} is defined inside a function, whose variables a file does"
                " not have",
                expected="a class at the top level of a script or a module",
            )
        self._add(value.__name__, value, value.__name__)

    def text(self) -> str:
        """Return the text of model.py, without a class of a user's own model.py."""
        own = self.files.pop("model.py", None)
        text = "" if own is None else own.read_text(encoding="utf-8").rstrip() + "\n"
        future = "from __future__ import annotations\n\n"
        start = future if self._postponed and not own else text
        return start + "".join([*self._imports, *self._definitions])

    def _add(self, name: str, value: object, user: str) -> None:
        if name in self._values:
            if self._values[name] is not value:
                raise SaveError(
                    self._model,
                    f"two different objects with the name {name} belong to its source",
                    cure="Rename one of them.",
                )
            return
        self._values[name] = value
        origin = _origin(name, value)
        if origin is not None:
            module, attribute = origin
            self._take_module(module)
            if module != "model" or "model.py" not in self.files:
                source = f"from {module} import {attribute}" if attribute else f"import {module}"
                renamed = "" if name == (attribute or module) else f" as {name}"
                self._imports.append(f"{source}{renamed}\n")
            return
        if isinstance(value, type | FunctionType) and value.__module__ == _MAIN:
            self._define(value)
            return
        if not _is_literal(value):
            raise SaveError(
                self._model,
                f"{user} uses '{name}', a {type(value).__name__} of the script, which cannot be"
                " written to a file",
                expected="imports, functions, classes, numbers and strings",
                cure="Make it an argument or an attribute of the module.",
            )
        self._definitions.append(f"\n{name} = {value!r}\n")

    def _take_module(self, name: str) -> None:
        """Add the files of a module that is not installed."""
        path = _local_file(name)
        if path is not None:
            parts = name.split(".")
            packaged = len(parts) - (path.name != "__init__.py")
            root = path.parents[packaged]
            self.files |= source_dependencies.modules(root, tuple(parts))

    def _define(self, value: type | FunctionType) -> None:
        """Write a definition of the script after those that it uses."""
        text = self._definition(value)
        scope = vars(sys.modules[_MAIN])
        names = set(_global_names(symtable.symtable(text, value.__name__, "exec")))
        for name in sorted((names & scope.keys()) - _OF_EVERY_MODULE):
            self._add(name, scope[name], value.__name__)
        self._definitions.append(f"\n\n{text.rstrip()}\n")

    def _definition(self, value: type | FunctionType) -> str:
        """Return the last definition of this name in the files of its code."""
        codes = [function.__code__ for function in _functions(value)]
        flag = __future__.annotations.compiler_flag
        self._postponed |= any(code.co_flags & flag for code in codes)
        files = [code.co_filename for code in codes]
        files.append(str(getattr(sys.modules[_MAIN], "__file__", "")))
        for file in files:
            lines = linecache.getlines(file)
            try:
                body = ast.parse("".join(lines)).body
            except SyntaxError:  # a cell of a notebook with commands of its own
                continue
            for node in reversed(body):
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == value.__name__:
                    first = min([node.lineno, *(entry.lineno for entry in node.decorator_list)])
                    return "".join(lines[first - 1 : node.end_lineno])
        raise SaveError(
            self._model,
            f"the source of {value.__name__} is not in a file or a notebook"
            + (f" but in {files[0]}" if files[0] else ""),
            cure="Put the class into a .py file and import it.",
        )


def _global_names(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that a definition uses and does not define."""
    for symbol in table.get_symbols():
        is_module = table.get_type() == "module"
        if symbol.is_referenced() and (is_module or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _global_names(child)


def _functions(value: type | FunctionType) -> Iterator[FunctionType]:
    members = [value] if isinstance(value, FunctionType) else vars(value).values()
    for member in members:
        function = inspect.unwrap(member) if callable(member) else member
        if isinstance(function, FunctionType) and function.__module__ == _MAIN:
            yield function


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


def _is_literal(value: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, RecursionError):
        return False
