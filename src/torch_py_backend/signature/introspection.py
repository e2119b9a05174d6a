"""What forward() takes, as data: from a Python signature, a TorchScript schema or a call tree."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ForwardRef, Literal, Union, get_args, get_origin

from torch.utils import _pytree as pytree

from torch_py_backend.signature.binding import Argument, Passing, Signature, Takes, path_text

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
    scope = _scope(function)
    parameters = inspect.signature(function).parameters.values()
    annotations = {one.name: _resolved(one.annotation, scope) for one in parameters}
    return Signature(
        tuple(_argument(one, annotations[one.name]) for one in parameters),
        by_name=_by_name(parameters, annotations),
    )


def yields(function: Callable[..., Any]) -> bool:
    """Whether what a call returns is a generator, synchronous or not."""
    # An object is called through its class.
    called = (function, type(function).__call__)
    return any(
        inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in called
    )


def _scope(function: Callable[..., Any]) -> dict[str, Any]:
    """The names that a function's annotations may use."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    if not hasattr(function, "__globals__"):  # an object with a __call__
        function = type(function).__call__
    scope: dict[str, Any] = getattr(function, "__globals__", {})
    return scope


def _resolved(annotation: Any, scope: dict[str, Any]) -> Any:
    """What `from __future__ import annotations` has left as text."""
    for _ in range(2):  # it may have been written in quotes, too
        if not isinstance(annotation, str):
            break
        try:
            annotation = eval(annotation, scope)  # noqa: S307  the model's own code runs anyway
        except Exception:  # what only a type checker can resolve
            break
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
        keys=() if passing in _REST else _keys(kind),
    )


def _by_name(
    parameters: Iterable[inspect.Parameter], annotations: Mapping[str, Any]
) -> dict[str, Takes]:
    """What `**` takes under the names that are known.

    These are the keys of `Unpack[SomeTypedDict]`, and for `generate()` of transformers the settings
    that its GenerationConfig has. Their types are not annotated: the config's type decides.
    """
    rest = [one.name for one in parameters if one.kind is inspect.Parameter.VAR_KEYWORD]
    if not rest:
        return {}
    found: dict[str, Takes] = {}
    _, settings = _without_none(annotations.get("generation_config"))
    if isinstance(settings, type) and settings.__name__ == "GenerationConfig":
        found |= dict.fromkeys(vars(settings()), Takes.VALUE)
    annotation = annotations[rest[0]]
    if _name(get_origin(annotation)) == "Unpack":
        found |= {key.name: key.takes for key in _keys(get_args(annotation)[0])}
    return found


def _without_none(annotation: Any) -> tuple[bool, Any]:
    """Whether None is allowed, and the one other type that there is."""
    kinds = list(_alternatives(annotation))
    others = [kind for kind in kinds if kind is not types.NoneType]
    alike = others and all(kind == others[0] for kind in others)
    return len(others) < len(kinds), others[0] if alike else Any


# What says something about a key of a TypedDict, and not about its value.
_QUALIFIERS = ("Required", "NotRequired", "ReadOnly")


def _alternatives(annotation: Any) -> Iterator[Any]:
    """The types of what may be passed: unions and literals taken apart, remarks left away."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        for one in get_args(annotation):
            yield from _alternatives(one)
    elif origin is Literal:
        yield from map(type, get_args(annotation))
    elif origin is Annotated or _name(origin) in _QUALIFIERS:
        yield from _alternatives(get_args(annotation)[0])
    else:
        yield annotation


def _name(form: Any) -> str:
    """A special form's name, be it typing's or typing_extensions'."""
    return str(form).rpartition(".")[2]


def _keys(annotation: Any) -> tuple[Argument, ...]:
    """The keys of a TypedDict."""
    if not _is_typed_dict(annotation):
        return ()
    hints = annotation.__annotations__
    return tuple(_key_argument(annotation, name, _key_hint(hints[name])) for name in hints)


def _key_hint(hint: Any) -> Any:
    """What a TypedDict has kept as text, resolved where it was written."""
    if not isinstance(hint, ForwardRef):
        return hint
    module = sys.modules.get(str(hint.__forward_module__))
    return _resolved(hint.__forward_arg__, vars(module) if module is not None else {})


def _is_typed_dict(annotation: Any) -> bool:
    return isinstance(annotation, type) and hasattr(annotation, "__required_keys__")


def _key_argument(owner: Any, name: str, hint: Any) -> Argument:
    nullable, kind = _without_none(hint)
    # Where annotations are text, Python itself does not notice a qualifier.
    qualified = {"Required": True, "NotRequired": False}.get(_name(get_origin(hint)))
    required = name in owner.__required_keys__ if qualified is None else qualified
    return Argument(name, required, Passing.KEYWORD, _takes(kind), text=name, nullable=nullable)


_SCALARS = {
    int: Takes.INT,
    float: Takes.FLOAT,
    bool: Takes.BOOL,
    str: Takes.STR,
    bytes: Takes.RAW,
}
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_SEQUENCES = (list, collections.abc.Sequence, collections.abc.Iterable)


def _takes(annotation: Any) -> Takes:
    if isinstance(annotation, str):  # could not be resolved
        return _takes_text(annotation)
    if isinstance(annotation, type) and annotation in _SCALARS:
        return _SCALARS[annotation]
    origin = get_origin(annotation) or annotation
    if origin in _MAPPINGS or _is_typed_dict(origin):
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
    arguments = tuple(_schema_argument(one) for one in schema.arguments[1:])
    return Signature(arguments, torchscript=True)


_SCHEMA_TYPES = {
    "Tensor[]": Takes.LIST,
    "Tensor?[]": Takes.LIST,
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
