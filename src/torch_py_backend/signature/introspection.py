"""Read the signature of forward() from Python, a TorchScript schema or an exported call tree."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import torch
from torch.utils import _pytree as pytree

from torch_py_backend.signature.arguments import (
    VARIADIC,
    Argument,
    ArgumentType,
    Passing,
    Signature,
    path_text,
)

_TYPES = {
    int: ArgumentType.INT,
    float: ArgumentType.FLOAT,
    bool: ArgumentType.BOOL,
    str: ArgumentType.STR,
    bytes: ArgumentType.RAW,
    tuple: ArgumentType.TUPLE,
    list: ArgumentType.LIST,
    Sequence: ArgumentType.LIST,
    Iterable: ArgumentType.LIST,
}
# The names in TorchScript's annotations.
_SCRIPT_SCOPE = {**vars(typing), "Tensor": torch.Tensor}


def from_function(function: Callable[..., object]) -> Signature:
    """Return the signature of a Python callable; TypeError or ValueError if Python knows none."""
    unwrapped = inspect.unwrap(function)
    while isinstance(unwrapped, functools.partial):
        unwrapped = inspect.unwrap(unwrapped.func)
    if not hasattr(unwrapped, "__globals__"):  # an object with a __call__
        unwrapped = type(unwrapped).__call__
    own = inspect.signature(function).replace(return_annotation=Parameter.empty)
    return _signature(own, getattr(unwrapped, "__globals__", {}))


def from_schema(schema: torch._C.FunctionSchema) -> Signature:
    """Return the signature of a TorchScript method from its schema, without self."""
    parameters = [
        Parameter(
            entry.name,
            Passing.KEYWORD_ONLY if entry.kwarg_only else Passing.POSITIONAL_OR_KEYWORD,
            default=entry.default_value if entry.has_default_value() else Parameter.empty,
            annotation=cast("Any", entry.type).annotation_str,
        )
        for entry in schema.arguments[1:]
    ]
    own = inspect.Signature(parameters)
    return dataclasses.replace(_signature(own, _SCRIPT_SCOPE), torchscript=True)


def _signature(own: inspect.Signature, scope: Mapping[str, object]) -> Signature:
    """Return a signature of Python's as ours; its annotations may be text with names of a scope."""
    arguments = []
    settings: frozenset[str] = frozenset()
    for name, parameter in own.parameters.items():
        kinds = _alternatives(_resolved(parameter.annotation, scope))
        for kind in kinds:
            if isinstance(kind, type) and kind.__name__ == "GenerationConfig":
                settings = frozenset(vars(kind()))  # of generate() of transformers, by `**`
        takes = _argument_type(kinds)
        required = parameter.default is Parameter.empty
        if parameter.kind in VARIADIC:
            takes = ArgumentType.TENSOR
            required = False
        nullable = types.NoneType in kinds
        arguments.append(Argument(name, required, parameter.kind, takes, nullable))
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(own))  # of annotations that are text
    return Signature(tuple(arguments), text, settings=settings)


def _resolved(annotation: object, scope: Mapping[str, object]) -> object:
    """Evaluate an annotation that is text, with Any for names that only a type checker imports."""
    names = collections.ChainMap({**vars(builtins), **scope}, collections.defaultdict(lambda: Any))
    try:
        # It is text again if it is quoted under `from __future__ import annotations`.
        while isinstance(annotation, str):
            annotation = eval(annotation, {}, names)  # noqa: S307  the model's own code
    except Exception:
        return Any
    return annotation


def _alternatives(annotation: object) -> list[object]:
    """Return the types that an annotation allows: of unions, literals and Annotated."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return [type(value) for value in args]
    if origin in (Annotated, Union, types.UnionType):
        among = args[:1] if origin is Annotated else args
        return [kind for alternative in among for kind in _alternatives(alternative)]
    return [annotation]


def _argument_type(kinds: Sequence[object]) -> ArgumentType:
    """Return the type of an argument that allows these types."""
    annotation, *others = [kind for kind in kinds if kind is not types.NoneType] or [Any]
    origin = get_origin(annotation) or annotation
    if not isinstance(origin, type) or any(other != annotation for other in others):
        return ArgumentType.TENSOR
    if issubclass(origin, Mapping):
        return ArgumentType.DICT
    outermost = _TYPES.get(origin, ArgumentType.TENSOR)
    if outermost is not ArgumentType.LIST or not get_args(annotation):
        return outermost
    item: object = get_args(annotation)[0]
    nested = get_origin(item) is list
    while get_origin(item) is list:
        item = get_args(item)[0]
    if item is str:
        return ArgumentType.NESTED_STRINGS if nested else ArgumentType.STRINGS
    if item is bytes:
        return ArgumentType.NESTED_BYTES if nested else ArgumentType.BYTES
    return ArgumentType.LIST


def from_tree(
    spec: pytree.TreeSpec,
    constants: Mapping[int, object],
    names: Sequence[str] = (),
) -> Signature:
    """Return the signature of an exported program with the tree `spec` of (args, kwargs).

    `constants`, by the number of their leaf, are passed as they are; `names`: positional arguments.
    """
    numbers = range(spec.num_leaves)
    args, kwargs = pytree.tree_unflatten(list(numbers), spec)
    paths, _ = pytree.tree_flatten_with_path((args, kwargs))
    tensors = [tuple(map(path_key, path)) for path, number in paths if number not in constants]
    positional = [*names[: len(args)], *(f"arg{n}" for n in range(len(names), len(args)))]
    keys = [str(path[-1]) for path in tensors]
    leaves = {}
    for (root, *path), key in zip(tensors, keys, strict=True):
        leaf = path_text("KWARGS" if root else "ARGS", path)
        # A tensor in a container has the name of its key, if that is not ambiguous.
        is_name = keys.count(key) == 1 and not key.isdecimal() and key not in positional
        leaves[leaf] = key if is_name else leaf
        if not root and len(path) == 1:
            leaves[leaf] = positional[int(key)]
    arguments = [Argument(name, passing=Passing.POSITIONAL_ONLY) for name in leaves.values()]

    def unflatten(columns: Sequence[object]) -> Any:
        remaining = iter(columns)
        values = [constants[n] if n in constants else next(remaining) for n in numbers]
        return pytree.tree_unflatten(values, spec)

    text = f"({', '.join(leaves.values())})"
    return Signature(tuple(arguments), text, leaves, unflatten)


def path_key(key: object) -> int | str:
    """Return a step of a pytree path as an index or a key."""
    step = getattr(key, "idx", getattr(key, "key", getattr(key, "name", key)))
    return step if isinstance(step, int) else str(step)
