"""Read the signature of forward() from Python, a TorchScript schema or an exported call tree."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ForwardRef, Literal, Union, get_args, get_origin

from torch.utils import _pytree as pytree

from torch_py_backend.signature.binding import Argument, ArgumentType, Passing, Signature, path_text

_PASSING = {
    inspect.Parameter.POSITIONAL_ONLY: Passing.POSITIONAL,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: Passing.POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY: Passing.KEYWORD,
    inspect.Parameter.VAR_POSITIONAL: Passing.REST,
    inspect.Parameter.VAR_KEYWORD: Passing.REST_BY_NAME,
}
_REST = (Passing.REST, Passing.REST_BY_NAME)


# --- Python ----------------------------------------------------------------------------------


def from_function(function: Callable[..., Any]) -> Signature:
    """Return the signature of a Python callable.

    Raises:
        TypeError, ValueError: Python cannot inspect it.
    """
    scope = _scope(function)
    parameters = inspect.signature(function).parameters.values()
    annotations = {
        parameter.name: _resolved(parameter.annotation, scope) for parameter in parameters
    }
    return Signature(
        tuple(_argument(parameter, annotations[parameter.name]) for parameter in parameters),
        by_name=_by_name(parameters, annotations),
    )


def is_generator(function: Callable[..., Any]) -> bool:
    """Return whether a call returns a generator, synchronous or asynchronous."""
    # The __call__ of an object is looked up in its class.
    callables = (function, type(function).__call__)
    return any(map(inspect.isgeneratorfunction, callables)) or any(
        map(inspect.isasyncgenfunction, callables)
    )


def _scope(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the global names that the annotations of a function may use."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    if not hasattr(function, "__globals__"):  # an object with a __call__
        function = type(function).__call__
    scope: dict[str, Any] = getattr(function, "__globals__", {})
    return scope


def _resolved(annotation: Any, scope: dict[str, Any]) -> Any:
    """Evaluate an annotation that is text; return the text if that fails."""
    for _ in range(2):  # quoted, and `from __future__ import annotations`
        if not isinstance(annotation, str):
            break
        try:
            annotation = eval(annotation, scope)  # noqa: S307  the model's own code runs anyway
        except Exception:  # for example names that only a type checker imports
            break
    return annotation


def _argument(parameter: inspect.Parameter, annotation: Any) -> Argument:
    passing = _PASSING[parameter.kind]
    nullable, kind = _without_none(annotation)
    return Argument(
        name=parameter.name,
        required=parameter.default is inspect.Parameter.empty and passing not in _REST,
        passing=passing,
        takes=ArgumentType.TENSOR if passing in _REST else _takes(kind),
        text=str(parameter),
        nullable=nullable,
        unnamed=parameter.kind is inspect.Parameter.POSITIONAL_ONLY,
        keys=() if passing in _REST else _keys(kind),
    )


def _by_name(
    parameters: Iterable[inspect.Parameter], annotations: Mapping[str, Any]
) -> dict[str, ArgumentType]:
    """Return the types of the known names that `**` accepts.

    These are the keys of `Unpack[SomeTypedDict]`, and the attributes of GenerationConfig for
    `generate()` of transformers. The latter have no annotations; the config's type decides.
    """
    rest = [
        parameter.name
        for parameter in parameters
        if parameter.kind is inspect.Parameter.VAR_KEYWORD
    ]
    if not rest:
        return {}
    known: dict[str, ArgumentType] = {}
    _, settings = _without_none(annotations.get("generation_config"))
    if isinstance(settings, type) and settings.__name__ == "GenerationConfig":
        known |= dict.fromkeys(vars(settings()), ArgumentType.VALUE)
    annotation = annotations[rest[0]]
    if _name(get_origin(annotation)) == "Unpack":
        known |= {key.name: key.takes for key in _keys(get_args(annotation)[0])}
    return known


def _without_none(annotation: Any) -> tuple[bool, Any]:
    """Return whether an annotation allows None, and its only other type (Any if it has several)."""
    kinds = list(_alternatives(annotation))
    others = [kind for kind in kinds if kind is not types.NoneType]
    alike = others and all(kind == others[0] for kind in others)
    return len(others) < len(kinds), others[0] if alike else Any


# Qualifiers of the keys of a TypedDict.
_QUALIFIERS = ("Required", "NotRequired", "ReadOnly")


def _alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation allows: of unions, literals, Annotated and qualifiers."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        for alternative in get_args(annotation):
            yield from _alternatives(alternative)
    elif origin is Literal:
        yield from map(type, get_args(annotation))
    elif origin is Annotated or _name(origin) in _QUALIFIERS:
        yield from _alternatives(get_args(annotation)[0])
    else:
        yield annotation


def _name(form: Any) -> str:
    """Return the name of a special form of typing or typing_extensions."""
    return str(form).rpartition(".")[2]


def _keys(annotation: Any) -> tuple[Argument, ...]:
    """Return the keys of a TypedDict; empty for other types."""
    if not _is_typed_dict(annotation):
        return ()
    hints = annotation.__annotations__
    return tuple(_key_argument(annotation, name, _key_hint(hints[name])) for name in hints)


def _key_hint(hint: Any) -> Any:
    """Evaluate a hint that a TypedDict keeps as text, in the module that defines it."""
    if not isinstance(hint, ForwardRef):
        return hint
    module = sys.modules.get(str(hint.__forward_module__))
    return _resolved(hint.__forward_arg__, vars(module) if module is not None else {})


def _is_typed_dict(annotation: Any) -> bool:
    return isinstance(annotation, type) and hasattr(annotation, "__required_keys__")


def _key_argument(owner: Any, name: str, hint: Any) -> Argument:
    nullable, kind = _without_none(hint)
    # Python ignores qualifiers in annotations that are text.
    qualified = {"Required": True, "NotRequired": False}.get(_name(get_origin(hint)))
    required = name in owner.__required_keys__ if qualified is None else qualified
    return Argument(name, required, Passing.KEYWORD, _takes(kind), text=name, nullable=nullable)


_SCALARS = {
    int: ArgumentType.INT,
    float: ArgumentType.FLOAT,
    bool: ArgumentType.BOOL,
    str: ArgumentType.STR,
    bytes: ArgumentType.RAW,
}
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_SEQUENCES = (list, collections.abc.Sequence, collections.abc.Iterable)


def _takes(annotation: Any) -> ArgumentType:
    if isinstance(annotation, str):  # not resolvable
        return _takes_text(annotation)
    if isinstance(annotation, type) and annotation in _SCALARS:
        return _SCALARS[annotation]
    origin = get_origin(annotation) or annotation
    if origin in _MAPPINGS or _is_typed_dict(origin):
        return ArgumentType.DICT
    if origin is tuple:
        return ArgumentType.TUPLE
    if origin in _SEQUENCES:
        return _takes_sequence(get_args(annotation))
    return ArgumentType.TENSOR


def _takes_sequence(items: Sequence[Any]) -> ArgumentType:
    item = items[0] if items else None
    nested = get_origin(item) is list
    while get_origin(item) is list:
        item = get_args(item)[0]
    if item is str:
        return ArgumentType.NESTED_STRINGS if nested else ArgumentType.STRINGS
    if item is bytes:
        return ArgumentType.NESTED_BYTES if nested else ArgumentType.BYTES
    return ArgumentType.LIST


def _takes_text(annotation: str) -> ArgumentType:
    outer = annotation.partition("[")[0].rpartition(".")[2].strip()
    return ArgumentType.DICT if outer in ("dict", "Dict", "Mapping") else ArgumentType.TENSOR


# --- TorchScript -----------------------------------------------------------------------------


def from_schema(schema: Any) -> Signature:
    """Return the signature of a TorchScript method from its schema, without self."""
    arguments = tuple(map(_schema_argument, schema.arguments[1:]))
    return Signature(arguments, torchscript=True)


_SCHEMA_TYPES = {
    "Tensor[]": ArgumentType.LIST,
    "Tensor?[]": ArgumentType.LIST,
    "int": ArgumentType.INT,
    "float": ArgumentType.FLOAT,
    "bool": ArgumentType.BOOL,
    "str": ArgumentType.STR,
    "str[]": ArgumentType.STRINGS,
    "str[][]": ArgumentType.NESTED_STRINGS,
}


def _schema_argument(argument: Any) -> Argument:
    declared = argument.type.str()
    kind = declared.removesuffix("?")
    takes = _SCHEMA_TYPES.get(kind, ArgumentType.TENSOR)
    if kind.startswith("Dict("):
        takes = ArgumentType.DICT
    elif kind.startswith("("):  # the schema's syntax for a tuple
        takes = ArgumentType.TUPLE
    return Argument(
        name=argument.name,
        required=not argument.has_default_value(),
        passing=Passing.KEYWORD if argument.kwarg_only else Passing.POSITIONAL,
        takes=takes,
        text=f"{declared} {argument.name}",
        nullable=declared.endswith("?"),
    )


# --- artifacts with their own call tree --------------------------------------------------------


def from_tree(
    spec: pytree.TreeSpec, constants: dict[int, Any], names: Sequence[str] = ()
) -> Signature:
    """Return the signature of an exported program.

    Args:
        spec: the tree of (args, kwargs).
        constants: leaves that are not tensors, by number; their exported values are passed.
        names: the names of positional arguments, if known.
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
    return Argument(name, required=True, passing=passing, takes=ArgumentType.TENSOR, text=name)


def _path(keys: Sequence[Any]) -> str:
    root, *rest = [_key(key) for key in keys]
    return path_text("ARGS" if root == 0 else "KWARGS", tuple(rest))


def _key(key: Any) -> int | str:
    """Return a step of a pytree path as an index or a key."""
    if isinstance(key, pytree.SequenceKey):
        return key.idx
    if isinstance(key, pytree.MappingKey):
        return key.key if isinstance(key.key, int) else str(key.key)
    return str(getattr(key, "name", key))
