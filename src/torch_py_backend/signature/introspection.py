"""Read the signature of forward() from Python, a TorchScript schema or an exported call tree."""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch
from torch.utils import _pytree as pytree

from torch_py_backend.signature.arguments import (
    Argument,
    ArgumentType,
    Passing,
    Signature,
    path_text,
)

_TYPES: Mapping[object, ArgumentType] = {
    int: ArgumentType.INT,
    float: ArgumentType.FLOAT,
    bool: ArgumentType.BOOL,
    str: ArgumentType.STR,
    bytes: ArgumentType.RAW,
    collections.abc.Mapping: ArgumentType.DICT,
    collections.abc.MutableMapping: ArgumentType.DICT,
    tuple: ArgumentType.TUPLE,
    list: ArgumentType.LIST,
    collections.abc.Sequence: ArgumentType.LIST,
    collections.abc.Iterable: ArgumentType.LIST,
}


def from_function(function: Callable[..., object]) -> Signature:
    """Return the signature of a Python callable; TypeError or ValueError if Python knows none."""
    unwrapped = inspect.unwrap(function)
    while isinstance(unwrapped, functools.partial):
        unwrapped = inspect.unwrap(unwrapped.func)
    if not hasattr(unwrapped, "__globals__"):  # an object with a __call__
        unwrapped = type(unwrapped).__call__
    scope: dict[str, object] = getattr(unwrapped, "__globals__", {})
    arguments = []
    settings: frozenset[str] = frozenset()
    for name, parameter in inspect.signature(function).parameters.items():
        variadic = parameter.kind in (Passing.VAR_POSITIONAL, Passing.VAR_KEYWORD)
        only, nullable = _only_type(_resolved(parameter.annotation, scope))
        if isinstance(only, type) and only.__name__ == "GenerationConfig":
            settings = frozenset(vars(only()))  # of generate() of transformers, by `**`
        argument = Argument(
            name=name,
            required=parameter.default is inspect.Parameter.empty and not variadic,
            passing=parameter.kind,
            type=ArgumentType.TENSOR if variadic else _argument_type(only),
            text=str(parameter),
            nullable=nullable,
        )
        arguments.append(argument)
    return Signature(tuple(arguments), settings=settings)


def is_generator(function: Callable[..., object]) -> bool:
    """Return whether a call returns a generator, synchronous or asynchronous."""
    # The __call__ of an object is looked up in its class.
    callables = (function, type(function).__call__)
    checks = (inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(check(entry) for check in checks for entry in callables)


def _resolved(annotation: object, scope: dict[str, object]) -> object:
    """Evaluate an annotation that is text; return the text if that fails."""
    if isinstance(annotation, str):
        # For example names that only a type checker imports are not found.
        with contextlib.suppress(Exception):
            # It is text again if it is quoted under `from __future__ import annotations`.
            return _resolved(eval(annotation, scope), scope)  # noqa: S307  the model's own code
    return annotation


def _only_type(annotation: object) -> tuple[object, bool]:
    """Return the type that an annotation allows, Any if it allows several, and whether None."""
    kinds = [*_alternatives(annotation)]
    others = [kind for kind in kinds if kind is not types.NoneType]
    only = others[0] if others and all(kind == others[0] for kind in others) else Any
    return only, len(others) < len(kinds)


def _alternatives(annotation: object) -> Iterator[object]:
    """Yield the types that an annotation allows: of unions, literals and Annotated."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        for alternative in get_args(annotation):
            yield from _alternatives(alternative)
    elif origin is Literal:
        yield from map(type, get_args(annotation))
    elif origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    else:
        yield annotation


def _argument_type(annotation: object) -> ArgumentType:
    if isinstance(annotation, str):  # not resolvable
        outer = annotation.partition("[")[0].rpartition(".")[2].strip()
        is_dict = outer in ("dict", "Dict", "Mapping")
        return ArgumentType.DICT if is_dict else ArgumentType.TENSOR
    origin = get_origin(annotation) or annotation
    if not isinstance(origin, type):
        return ArgumentType.TENSOR
    outermost = ArgumentType.DICT if issubclass(origin, dict) else _TYPES.get(origin)
    if outermost is not ArgumentType.LIST or not get_args(annotation):
        return outermost or ArgumentType.TENSOR
    item: object = get_args(annotation)[0]
    nested = get_origin(item) is list
    while get_origin(item) is list:
        item = get_args(item)[0]
    if item is str:
        return ArgumentType.NESTED_STRINGS if nested else ArgumentType.STRINGS
    if item is bytes:
        return ArgumentType.NESTED_BYTES if nested else ArgumentType.BYTES
    return ArgumentType.LIST


# The names in TorchScript's annotations.
_SCRIPT_SCOPE: dict[str, object] = {
    **vars(typing),
    "__builtins__": {kind.__name__: kind for kind in (int, float, bool, str)},
    "Tensor": torch.Tensor,
}


def from_schema(schema: torch._C.FunctionSchema) -> Signature:
    """Return the signature of a TorchScript method from its schema, without self."""
    arguments = []
    for entry in schema.arguments[1:]:
        declared: Any = entry.type
        only, nullable = _only_type(_resolved(declared.annotation_str, _SCRIPT_SCOPE))
        argument = Argument(
            name=entry.name,
            required=not entry.has_default_value(),
            passing=Passing.KEYWORD_ONLY if entry.kwarg_only else Passing.POSITIONAL_OR_KEYWORD,
            type=_argument_type(only),
            text=f"{declared.str()} {entry.name}",
            nullable=nullable,
        )
        arguments.append(argument)
    return Signature(tuple(arguments), torchscript=True)


def from_tree(
    spec: pytree.TreeSpec, constants: Mapping[int, object], names: Sequence[str] = ()
) -> Signature:
    """Return the signature of an exported program.

    `spec` is the tree of (args, kwargs), in which the constants, by the number of their leaf, are
    no tensors and are passed; `names` are those of positional arguments, if known.
    """
    numbers = range(spec.num_leaves)
    args, kwargs = pytree.tree_unflatten(list(numbers), spec)
    paths, _ = pytree.tree_flatten_with_path((args, kwargs))
    tensors = [list(map(path_key, path)) for path, number in paths if number not in constants]
    leaves = [path_text("KWARGS" if root else "ARGS", tuple(keys)) for root, *keys in tensors]
    positional = [*names, *(f"arg{number}" for number in range(len(names), len(args)))]
    own = {f"ARGS[{number}]": name for number, name in enumerate(positional)}
    own = {leaf: name for leaf, name in own.items() if leaf in leaves}
    keys = [str(path[-1]) for path in tensors]
    arguments = []
    for leaf, key in zip(leaves, keys, strict=True):
        # A tensor in a container has the name of its key, if that is not ambiguous.
        is_name = keys.count(key) == 1 and not key.isdecimal() and key not in own.values()
        name = own.get(leaf, key if is_name else leaf)
        arguments.append(Argument(name, passing=Passing.POSITIONAL_ONLY))

    def unflatten(columns: Sequence[object]) -> tuple[Sequence[object], Mapping[str, object]]:
        remaining = iter(columns)
        values = [constants[n] if n in constants else next(remaining) for n in numbers]
        args, kwargs = pytree.tree_unflatten(values, spec)
        return args, kwargs

    is_flat = not constants and not kwargs and list(args) == list(numbers)
    return Signature(tuple(arguments), tuple(leaves), None if is_flat else unflatten)


def path_key(key: object) -> int | str:
    """Return a step of a pytree path as an index or a key."""
    step = getattr(key, "idx", getattr(key, "key", getattr(key, "name", key)))
    return step if isinstance(step, int) else str(step)
