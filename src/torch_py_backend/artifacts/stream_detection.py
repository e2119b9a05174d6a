"""Detect from the syntax tree of a model.py whether the model streams; no code is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
# Nested scopes; a yield in them does not belong to the outer function.
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.GeneratorExp)


def is_streaming(path: Path, *, named: str | None = None, method: str | None = None) -> bool:
    """Return whether the model of a source file is a generator, or has begin() and step().

    Args:
        path: the file; False if it cannot be read or parsed, which loading it reports.
        named: the class or function to serve; None: the one that the file defines.
        method: the method to serve; None: forward(), or begin() and step().
    """
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    functions = {node.name: node for node in body if isinstance(node, _Function)}
    if named is not None:
        served: set[str] = {named}
    else:
        public = {name for name in (*classes, *functions) if not name.startswith("_")}
        # A class without a base is not a module. Beside a class, functions are its helpers.
        served = {name for name in public & classes.keys() if classes[name].bases}
        served = served or public - classes.keys() - {"example_inputs"}
    called = [functions[name] for name in served & functions.keys()]
    for name in served & classes.keys():
        methods = _methods(classes[name], classes)
        if method is None and {"begin", "step"} <= methods.keys():
            return True
        function = methods.get(method or "forward")
        if function is not None:
            called.append(function)
    return any(
        isinstance(node, ast.Yield | ast.YieldFrom)
        for function in called
        for node in _own_nodes(function)
    )


def _methods(
    owner: ast.ClassDef, classes: Mapping[str, ast.ClassDef], visited: frozenset[str] = frozenset()
) -> dict[str, _Function]:
    """Return the methods of a class, and of its bases in the same file."""
    methods: dict[str, _Function] = {}
    for base in reversed(owner.bases):
        if isinstance(base, ast.Name) and base.id in classes and base.id not in visited:
            methods |= _methods(classes[base.id], classes, visited | {owner.name})
    return methods | {node.name: node for node in owner.body if isinstance(node, _Function)}


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of nested scopes."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _SCOPES):
            yield child
            yield from _own_nodes(child)
