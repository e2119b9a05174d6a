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

_CURE = "Put the class and what it uses into a .py file and import it."
_INSTALLED = [
    *map(Path, [*map(sysconfig.get_path, ("stdlib", "platstdlib")), *site.getsitepackages()]),
    Path(site.getusersitepackages()),
]


def write(folder: Path, stem: str, value: type) -> None:
    """Write a class into model.py or hooks.py, after a user's own file of that name.

    The class of hooks is named Hooks there.
    """
    name = "Hooks" if stem == "hooks" else value.__name__
    origin = _origin(value.__name__, value)
    if origin is not None:
        lines = _imported(folder, name, *origin)
        if origin[0] == stem:  # the file is a copy of this module, which does not import itself
            lines = f"\n\n{name} = {origin[1]}\n" if name != origin[1] else ""
    elif stem == "hooks" and value.__module__ == "__main__":
        lines = _written_out(folder, value)
    else:
        raise SaveError(
            f"{value.__qualname__} cannot be imported: it is defined in a script, a notebook or a"
            " function",
            cure=_CURE,
        )
    path = folder / f"{stem}.py"
    own = path.read_text(encoding="utf-8").rstrip() + "\n" if path.exists() else ""
    path.write_text(own + lines, encoding="utf-8")


def _imported(folder: Path, name: str, module: str, attribute: str) -> str:
    """Return the import of a value, after copying the files of a module that is not installed."""
    path = Path(getattr(sys.modules[module], "__file__", None) or sysconfig.__file__).absolute()
    if not any(path.is_relative_to(place) for place in _INSTALLED):
        parts = module.split(".")
        root = path.parents[len(parts) - (path.name != "__init__.py")]
        for place, source in source_dependencies.modules(root, parts[0]).items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / place)
    statement = f"from {module} import {attribute}" if attribute else f"import {module}"
    return f"{statement}\n" if name == (attribute or module) else f"{statement} as {name}\n"


def _written_out(folder: Path, value: type) -> str:
    """Return the source of a class of hooks after the imports of what it uses."""
    text = textwrap.dedent(inspect.getsource(value))
    nodes = [*ast.walk(ast.parse(text))]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    defined = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    scope = vars(sys.modules["__main__"])
    imports = ""
    for used in sorted((read - defined - {value.__name__, "__name__", "__file__"}) & scope.keys()):
        origin = _origin(used, scope[used])
        if origin is None:
            raise SaveError(
                f"{value.__name__} uses '{used}', which is defined in the script", cure=_CURE
            )
        imports += _imported(folder, used, *origin)
    renamed = "" if value.__name__ == "Hooks" else f"\n\nHooks = {value.__name__}\n"
    return f"{imports}\n\n{text.rstrip()}\n{renamed}"


def _origin(name: str, value: object) -> tuple[str, str] | None:
    """Return the module and the attribute from which to import a value; None: no module has it."""
    if isinstance(value, ModuleType):
        return (value.__name__, "") if importlib.util.find_spec(value.__name__) else None
    module = getattr(value, "__module__", None) or "__main__"
    attribute = getattr(value, "__name__", name)
    is_there = getattr(sys.modules.get(module), attribute, None) is value
    return (module, attribute) if is_there and module != "__main__" else None
