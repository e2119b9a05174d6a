"""Properties of any binding and any batch.

Examples are the same in every run (see the profile in conftest.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import build
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from torch_py_backend import values
from torch_py_backend.config import dtypes
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import LoadError
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.pipeline import batches
from torch_py_backend.pipeline.run import Counts
from torch_py_backend.signature import binding, introspection
from torch_py_backend.signature.arguments import Argument, Passing, Signature
from torch_py_backend.signature.binding import InputBinding
from torch_py_backend.values import ANY_ROWS, Item, Rows

# A tree's leaves stand for tensors; a key of digits would be a number in a path.
_KEY = st.text("abcdefghijklmnop_", min_size=1, max_size=4)
_TREES = st.recursive(
    st.just(None),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(_KEY, inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)


def _numbered(trees: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Return the trees with the paths of their leaves as leaves, and these paths."""
    paths: list[str] = []

    def visit(tree: Any, path: str) -> Any:
        if isinstance(tree, list):
            return [visit(child, f"{path}[{index}]") for index, child in enumerate(tree)]
        if isinstance(tree, dict):
            return {key: visit(child, f"{path}[{key}]") for key, child in tree.items()}
        paths.append(path)
        return path

    return [visit(tree, f"ARGS[{index}]") for index, tree in enumerate(trees)], paths


def _argument(
    name: str, *, required: bool = True, passing: Passing = Passing.POSITIONAL_OR_KEYWORD
) -> Argument:
    return Argument(name, required, passing)


def _called(inputs: InputBinding) -> Any:
    """Return the arguments of a module if each column is its own name."""
    return inputs.call(lambda *args, **kwargs: (args, kwargs), inputs.names)


@given(st.lists(_TREES, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_in_any_call_tree_each_leaf_gets_the_input_of_its_path(
    trees: list[Any], random: Any
) -> None:
    expected, paths = _numbered(trees)
    arguments = tuple(_argument(f"argument{index}") for index in range(len(trees)))
    random.shuffle(paths)
    args, kwargs = _called(binding.bind_inputs(paths, Signature(arguments)))
    assert list(args) == expected
    assert kwargs == {}


@given(
    st.lists(_TREES, max_size=3),
    st.dictionaries(_KEY, _TREES, max_size=3),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_a_program_gets_each_leaf_where_it_was_exported(
    trees: list[Any], keywords: dict[str, Any], random: Any, numbers: bool
) -> None:
    leaf = object()
    tree: Any = pytree.tree_map(
        lambda _: leaf, (tuple(trees), keywords), is_leaf=lambda node: node is None
    )
    flat, spec = pytree.tree_flatten(tree)
    if not flat:
        return
    signature = introspection.from_tree(spec, {})
    leaves = list(signature.leaves or ())
    names = [f"INPUT__{index}" for index in range(len(leaves))] if numbers else leaves
    order = random.sample(names, len(names))
    args, kwargs = _called(binding.bind_inputs(order, signature))
    expected = pytree.tree_unflatten(names, spec)
    assert (tuple(args), dict(kwargs)) == expected


_NAMES = st.sampled_from(["x", "y", "INPUT__0", "ARGS[0]"]) | st.text(max_size=8)


@given(st.lists(_NAMES, min_size=1, max_size=5), st.integers(1, 4), st.booleans())
def test_names_of_any_spelling_feed_forward_once_each_or_are_refused(
    names: list[str], count: int, rest: bool
) -> None:
    arguments = [_argument(f"a{index}", required=index == 0) for index in range(count)]
    if rest:
        arguments.append(_argument("more", required=False, passing=Passing.VAR_POSITIONAL))
    try:
        inputs = binding.bind_inputs(names, Signature(tuple(arguments)))
    except LoadError:
        return
    assert sorted(pytree.tree_leaves(_called(inputs))) == sorted(names)


_NUMBERS = [dtype for dtype in dtypes.TABLE if dtype.numpy not in (None, "object")]


@st.composite
def _rows(draw: st.DrawFn) -> Rows:
    buckets = sorted(draw(st.sets(st.integers(1, 16), max_size=4)))
    if buckets:
        return Rows(buckets[0], buckets[-1], tuple(buckets))
    least = draw(st.integers(1, 5))
    return Rows(least, draw(st.none() | st.integers(least, 12)))


def _value(shape: Sequence[int], kind: dtypes.DType, start: int) -> Any:
    """Return values that differ from each other, as far as their type allows."""
    count = math.prod(shape)
    if kind.triton == "BYTES":
        texts = np.empty(count, dtype=np.object_)
        texts[:] = [f"{start + index}".encode() for index in range(count)]
        return texts.reshape(shape)
    return (np.arange(start, start + count) % 251).astype(kind.numpy).reshape(shape)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([*_NUMBERS, dtypes.from_triton("BYTES")]),
    _rows(),
    st.booleans(),
)
def test_rows_return_to_their_items(
    sizes: list[int], shape: list[int], kind: dtypes.DType, rows: Rows, tensors: bool
) -> None:
    sent = [_value((size, *shape), kind, 7 * index) for index, size in enumerate(sizes)]
    if tensors and kind.triton != "BYTES":
        sent = [torch.from_numpy(value) for value in sent]

    def identity(column: Any) -> list[Any]:
        assert rows.accept(column.shape[0])
        return [column]

    fill = batches.filled(rows, lambda result, _: result, values.clone, Counts())
    outputs = fill(identity, [batches.concatenate(sent)], sum(sizes))
    outcomes = batches.scatter(outputs, ["y"], sizes)
    for value, outcome in zip(sent, outcomes, strict=True):
        assert np.array_equal(np.asarray(outcome["y"]), np.asarray(value))


def _identity(ids: Any, mask: Any) -> dict[str, Any]:
    return {"y": ids, "kept": mask}


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 9), st.booleans()), min_size=1, max_size=6
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "value": st.integers(-3, 3),
            "side": st.sampled_from(["left", "right"]),
            "multiple_of": st.integers(1, 8),
        },
    ),
    st.sampled_from([ANY_ROWS, Rows(4, 4), Rows(2, None)]),
)
def test_padded_items_get_their_own_back(
    shapes: list[tuple[int, int, bool]], pad: dict[str, Any], rows: Rows
) -> None:
    ids, mask, y, kept = (build.spec(name, "INT64", (-1,)) for name in ("ids", "mask", "y", "kept"))
    settings = build.config(
        inputs=(
            dataclasses.replace(ids, ragged=True),
            dataclasses.replace(mask, ragged=True, optional=True),
        ),
        outputs=(y, kept),
        max_batch_size=16,
        pad={"ids": {**pad, "mask": "mask", "outputs": ["y", "kept"]}},
    )
    signature = Signature((_argument("ids"), _argument("mask")))
    loaded = Loaded(build.artifact(), _identity, signature, None, rows)
    engine = Engine(settings, loaded, torch.device("cpu"))
    items: list[Item] = []
    for number, (count, length, masked) in enumerate(shapes):
        sent = np.arange(count * length, dtype=np.int64).reshape(count, length) + 100 * number
        items.append({"ids": sent, **({"mask": sent % 2} if masked else {})})
    outcomes = engine.run(items)
    for item, outcome in zip(items, outcomes, strict=True):
        assert isinstance(outcome, dict), outcome
        assert np.array_equal(np.asarray(outcome["y"]), item["ids"])
        assert np.array_equal(
            np.asarray(outcome["kept"]), item.get("mask", np.ones_like(item["ids"]))
        )
