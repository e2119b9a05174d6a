"""Whether a model.py makes streams, told from its text: none of its code is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
# What is a function of its own: what yields in there is that one.
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.GeneratorExp)


def in_source(path: Path, *, named: str | None = None, method: str | None = None) -> bool:
    """Whether what a source file serves is a generator, or has begin() and step().

    Args:
        path: the file; one that cannot be read or parsed is told of when it is loaded.
        named: the class or function to be served; None: whichever the file defines.
        method: the method that is served; None: forward(), or begin() and step().
    """
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    classes = {one.name: one for one in body if isinstance(one, ast.ClassDef)}
    functions = {one.name: one for one in body if isinstance(one, _Function)}
    if named is not None:
        classes_served = [classes[named]] if named in classes else []
        functions_served = [functions[named]] if named in functions else []
    else:
        # A class without a base is no module.
        classes_served = [one for one in classes.values() if one.bases and _offered(one.name)]
        # A file is served for its class; its functions are that one's helpers.
        functions_served = [
            one for one in functions.values() if not classes_served and _offered(one.name)
        ]
    return any(map(_yields, functions_served)) or any(
        _streams(_methods(one, classes), method) for one in classes_served
    )


def _offered(name: str) -> bool:
    """Whether a file serves what it calls so, if nobody names another."""
    return not name.startswith("_") and name != "example_inputs"


def _methods(
    of: ast.ClassDef, classes: Mapping[str, ast.ClassDef], seen: frozenset[str] = frozenset()
) -> dict[str, _Function]:
    """A class's methods, those of its bases in the same file included."""
    found: dict[str, _Function] = {}
    for base in reversed(of.bases):
        if isinstance(base, ast.Name) and base.id in classes and base.id not in seen:
            found |= _methods(classes[base.id], classes, seen | {of.name})
    return found | {one.name: one for one in of.body if isinstance(one, _Function)}


def _streams(methods: Mapping[str, _Function], method: str | None) -> bool:
    if method is None and {"begin", "step"} <= methods.keys():
        return True
    served = methods.get(method or "forward")
    return served is not None and _yields(served)


def _yields(function: _Function) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own(function))


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """What belongs to a function, and not to one within it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _SCOPES):
            yield child
            yield from _own(child)
