"""What forward() takes, as data: from a Python signature, a TorchScript schema or a call tree."""

from __future__ import annotations

import collections.abc
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, Union, get_args, get_origin

from torch.utils import _pytree as pytree

from torch_py_backend.binding import Argument, Passing, Signature, Takes, path_text

_PASSING = {
    inspect.Parameter.POSITIONAL_ONLY: Passing.POSITIONAL,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: Passing.POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY: Passing.KEYWORD,
    inspect.Parameter.VAR_POSITIONAL: Passing.REST,
    inspect.Parameter.VAR_KEYWORD: Passing.REST_BY_NAME,
}
_REST = (Passing.REST, Passing.REST_BY_NAME)


# --- Python ----------------------------------------------------------------------------------


def of_function(function: Callable[..., Any]) -> Signature:
    """The signature of a Python callable.

    Raises:
        TypeError, ValueError: Python cannot tell it.
    """
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    parameters = inspect.signature(function).parameters.values()
    return Signature(tuple(_argument(one, _resolved(one.annotation, scope)) for one in parameters))


def _resolved(annotation: Any, scope: dict[str, Any]) -> Any:
    """What `from __future__ import annotations` has left as text."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, scope)  # noqa: S307  the model's own code, which runs anyway
    except Exception:  # what only a type checker can resolve
        return annotation


def _argument(parameter: inspect.Parameter, annotation: Any) -> Argument:
    passing = _PASSING[parameter.kind]
    nullable, kind = _without_none(annotation)
    return Argument(
        name=parameter.name,
        required=parameter.default is inspect.Parameter.empty and passing not in _REST,
        passing=passing,
        takes=Takes.TENSOR if passing in _REST else _takes(kind),
        text=str(parameter),
        nullable=nullable,
        unnamed=parameter.kind is inspect.Parameter.POSITIONAL_ONLY,
    )


def _without_none(annotation: Any) -> tuple[bool, Any]:
    """Whether None is allowed, and the one other type of an Optional."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return False, annotation
    others = [one for one in get_args(annotation) if one is not types.NoneType]
    nullable = len(others) < len(get_args(annotation))
    return nullable, others[0] if len(others) == 1 else Any


_SCALARS = {int: Takes.INT, float: Takes.FLOAT, bool: Takes.BOOL, str: Takes.STR}
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_SEQUENCES = (list, collections.abc.Sequence, collections.abc.Iterable)


def _takes(annotation: Any) -> Takes:
    if isinstance(annotation, str):  # could not be resolved
        return _takes_text(annotation)
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    origin = get_origin(annotation) or annotation
    if origin in _MAPPINGS:
        return Takes.DICT
    if origin is tuple:
        return Takes.TUPLE
    if origin in _SEQUENCES:
        return _takes_sequence(get_args(annotation))
    return Takes.TENSOR


def _takes_sequence(items: Sequence[Any]) -> Takes:
    item = items[0] if items else None
    nested = get_origin(item) is list
    while get_origin(item) is list:
        item = get_args(item)[0]
    if item is str:
        return Takes.NESTED_STRINGS if nested else Takes.STRINGS
    if item is bytes:
        return Takes.NESTED_BYTES if nested else Takes.BYTES
    return Takes.LIST


def _takes_text(annotation: str) -> Takes:
    outer = annotation.partition("[")[0].rpartition(".")[2].strip()
    return Takes.DICT if outer in ("dict", "Dict", "Mapping") else Takes.TENSOR


# --- TorchScript -----------------------------------------------------------------------------


def of_schema(schema: Any) -> Signature:
    """The signature of a TorchScript method: its schema, less self."""
    return Signature(tuple(_schema_argument(one) for one in schema.arguments[1:]))


_SCHEMA_TYPES = {
    "Tensor[]": Takes.LIST,
    "int": Takes.INT,
    "float": Takes.FLOAT,
    "bool": Takes.BOOL,
    "str": Takes.STR,
    "str[]": Takes.STRINGS,
    "str[][]": Takes.NESTED_STRINGS,
}


def _schema_argument(argument: Any) -> Argument:
    declared = argument.type.str()
    kind = declared.removesuffix("?")
    takes = _SCHEMA_TYPES.get(kind, Takes.TENSOR)
    if kind.startswith("Dict("):
        takes = Takes.DICT
    elif kind.startswith("("):  # a tuple, in the schema's own writing
        takes = Takes.TUPLE
    return Argument(
        name=argument.name,
        required=not argument.has_default_value(),
        passing=Passing.KEYWORD if argument.kwarg_only else Passing.POSITIONAL,
        takes=takes,
        text=f"{declared} {argument.name}",
        nullable=declared.endswith("?"),
    )


# --- artifacts that carry their call tree ------------------------------------------------------


def of_tree(
    spec: pytree.TreeSpec, constants: dict[int, Any], names: Sequence[str] = ()
) -> Signature:
    """The signature of an exported program.

    Args:
        spec: the tree of (args, kwargs).
        constants: leaves that are no tensors, by their number; they are passed as exported.
        names: the names of positional arguments, where they are known.
    """
    numbers = range(spec.num_leaves)
    args, kwargs = pytree.tree_unflatten(list(numbers), spec)
    arguments = [
        _tree_argument(names[index] if index < len(names) else f"arg{index}", Passing.POSITIONAL)
        for index in range(len(args))
    ]
    arguments += [_tree_argument(name, Passing.KEYWORD) for name in kwargs]
    paths, _ = pytree.tree_flatten_with_path((args, kwargs))
    leaves = tuple(_path(path) for path, number in paths if number not in constants)

    def unflatten(columns: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        rest = iter(columns)
        values = [constants[n] if n in constants else next(rest) for n in numbers]
        args, kwargs = pytree.tree_unflatten(values, spec)
        return args, kwargs

    return Signature(tuple(arguments), leaves, unflatten)


def _tree_argument(name: str, passing: Passing) -> Argument:
    return Argument(name, required=True, passing=passing, takes=Takes.TENSOR, text=name)


def _path(keys: Sequence[Any]) -> str:
    root, *rest = [_key(key) for key in keys]
    return path_text("ARGS" if root == 0 else "KWARGS", tuple(rest))


def _key(key: Any) -> int | str:
    """One step of a pytree path."""
    if isinstance(key, pytree.SequenceKey):
        return key.idx
    if isinstance(key, pytree.MappingKey):
        return key.key if isinstance(key.key, int) else str(key.key)
    return str(getattr(key, "name", key))
