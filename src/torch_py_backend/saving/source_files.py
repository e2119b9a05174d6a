"""A source file of a saved module: model.py imports the module's class, hooks.py the hooks.

The files of classes that are not installed are copied beside it. A class of hooks in a script or
notebook is written out.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import shutil
import site
import sys
import sysconfig
import textwrap
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


def write(
    folder: Path,
    stem: str,
    value: type,
    name: str,
    *,
    write_out: bool = False,
) -> None:
    """Write a source file, `stem`.py, that has a class by a name, after a user's own such file.

    With `write_out`, the source of a class of a script or notebook is written into the file.
    """
    local = "<locals>" in value.__qualname__
    origin = None if local else _origin(value.__name__, value)
    if origin is not None:
        lines = _imported(folder, stem, name, *origin)
    elif write_out and value.__module__ == _MAIN:
        lines = _written_out(folder, stem, value, name)
    else:
        raise SaveError(
            f"{value.__qualname__} cannot be imported: it is defined in a script, a notebook or a"
            " function",
            cure=_CURE,
        )
    path = folder / f"{stem}.py"
    own = path.read_text(encoding="utf-8").rstrip() + "\n" if path.exists() else ""
    path.write_text(own + lines, encoding="utf-8")


def _imported(
    folder: Path,
    stem: str,
    name: str,
    module: str,
    attribute: str,
) -> str:
    """Return the import of a value, after copying the files of a module that is not installed."""
    file = getattr(sys.modules.get(module), "__file__", None)
    path = Path(file or sys.executable).absolute()
    if file is not None and not any(path.is_relative_to(place) for place in _INSTALLED):
        parts = module.split(".")
        root = path.parents[len(parts) - (path.name != "__init__.py")]
        for place, source in source_dependencies.modules(root, parts[0]).items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / place)
        if module == stem:  # this file begins with the module
            return f"\n\n{name} = {attribute}\n" if name != attribute else ""
    statement = f"from {module} import {attribute}" if attribute else f"import {module}"
    renamed = "" if name == (attribute or module) else f" as {name}"
    return f"{statement}{renamed}\n"


def _written_out(folder: Path, stem: str, value: type, name: str) -> str:
    """Return the source of a class after the imports of what it uses."""
    text = textwrap.dedent(inspect.getsource(value))
    nodes = [*ast.walk(ast.parse(text))]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    defined = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    scope = vars(sys.modules[_MAIN])
    imports = ""
    for used in sorted((read - defined - {value.__name__, "__name__", "__file__"}) & scope.keys()):
        origin = _origin(used, scope[used])
        if origin is None:
            raise SaveError(
                f"{value.__name__} uses '{used}', which is defined in the script",
                cure=_CURE,
            )
        imports += _imported(folder, stem, used, *origin)
    renamed = "" if name == value.__name__ else f"\n\n{name} = {value.__name__}\n"
    return f"{imports}\n\n{text.rstrip()}\n{renamed}"


def _origin(name: str, value: object) -> tuple[str, str] | None:
    """Return the module and the attribute from which to import a value; None: no module has it."""
    if isinstance(value, ModuleType):
        return (value.__name__, "") if importlib.util.find_spec(value.__name__) else None
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or module == _MAIN or module not in sys.modules:
        return None
    attribute = getattr(value, "__name__", name)
    return (module, attribute) if getattr(sys.modules[module], attribute, None) is value else None
