"""Properties of any binding and any batch.

Examples are the same in every run (see the profile in conftest.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import build
import engines
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_py_backend.errors import ForwardError, LoadError, OutOfMemoryError
from torch_py_backend.signature import binding, introspection
from torch_py_backend.signature.arguments import Argument, Passing, Signature
from torch_py_backend.signature.binding import InputBinding
from torch_py_backend.values import ANY_ROWS, Item, Rows

# A tree's leaves stand for tensors; a key of digits would be a number in a path.
_KEY = st.text("abcdefghijklmnop_", min_size=1, max_size=4)
_TREES = st.recursive(
    st.just(0),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(_KEY, inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)


def _called(inputs: InputBinding) -> Any:
    """Return the arguments of a module if each column is its own name."""
    return inputs.call(lambda *args, **kwargs: (args, kwargs), inputs.names)


@given(
    st.lists(_TREES, max_size=4),
    st.dictionaries(_KEY, _TREES, max_size=3),
    st.randoms(use_true_random=False),
)
def test_in_any_call_tree_each_leaf_gets_the_input_of_its_name(
    trees: list[Any], keywords: dict[str, Any], random: Any
) -> None:
    spec = pytree.tree_structure((tuple(trees), keywords))
    program = introspection.from_tree(spec, {})
    arguments = [Argument(f"argument{number}") for number in range(len(trees))]
    arguments += [Argument(name, passing=Passing.KEYWORD_ONLY) for name in keywords]
    leaves = program.leaves or {}
    numbers = [f"INPUT__{number}" for number in range(len(leaves))]
    for signature, names in (
        (Signature(tuple(arguments)), leaves),
        (program, leaves),
        (program, leaves.values()),
        (program, numbers),
    ):
        inputs = binding.bind_inputs(random.sample([*names], len(names)), signature)
        assert _called(inputs) == pytree.tree_unflatten(names, spec)


_NAMES = st.sampled_from(["x", "y", "INPUT__0", "ARGS[0]"]) | st.text("xIN_0²٣é[]", max_size=8)


@given(st.lists(_NAMES, min_size=1, max_size=5), st.integers(1, 4), st.booleans())
def test_names_of_any_spelling_feed_forward_once_each_or_are_refused(
    names: list[str], count: int, rest: bool
) -> None:
    arguments = [Argument(f"a{index}", required=index == 0) for index in range(count)]
    if rest:
        arguments.append(Argument("more", required=False, passing=Passing.VAR_POSITIONAL))
    try:
        inputs = binding.bind_inputs(names, Signature(tuple(arguments)))
    except LoadError:
        return
    assert sorted(pytree.tree_leaves(_called(inputs))) == sorted(names)


_BUCKETS = st.sets(st.integers(1, 16), min_size=1, max_size=4).map(lambda one: tuple(sorted(one)))
_PADS = st.fixed_dictionaries(
    {"mask": st.just("mask"), "outputs": st.just(["y", "kept"])},
    optional={
        "value": st.integers(-3, 3),
        "side": st.sampled_from(["left", "right"]),
        "multiple_of": st.integers(1, 8),
    },
)
_WRONG = -1  # no value of padding and of the inputs, unless a request is to fail


@st.composite
def _items(draw: st.DrawFn, *, masks: bool) -> list[Item]:
    """Requests of some rows and lengths, as arrays or tensors; half of the masks are left out."""
    sent: list[Item] = []
    for number in range(draw(st.integers(1, 6))):
        shape = draw(st.integers(1, 5)), draw(st.integers(0, 9))
        values = np.arange(np.prod(shape), dtype=np.int64).reshape(shape) + 100 * number + 5
        item: Item = {"ids": values}
        if masks and draw(st.booleans()):
            item["mask"] = values % 2
        if draw(st.integers(0, 3)) == 0:
            values[-1:, -1:] = _WRONG
        if draw(st.booleans()):
            item["ids"] = torch.from_numpy(values)
        sent.append(item)
    return sent


@given(
    st.none() | _PADS,
    st.sampled_from([ANY_ROWS, Rows(4, 4), Rows(2, None)]).map(lambda rows: (rows, None))
    | _BUCKETS.map(lambda buckets: (ANY_ROWS, buckets)),
    st.sampled_from([2, 3, 9, 32, 32]),
    st.data(),
)
def test_each_request_of_any_batch_gets_its_own_result_or_its_own_error(
    pad: dict[str, Any] | None,
    limits: tuple[Rows, tuple[int, ...] | None],
    fits: int,
    data: st.DataObject,
) -> None:
    items = data.draw(_items(masks=pad is not None))
    rows, buckets = limits

    def forward(ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        assert engine.rows.accept(len(ids))
        if len(ids) > fits:
            raise MemoryError
        if bool((ids == _WRONG).any()):
            raise ValueError
        return {"y": 2 * ids, "kept": ids if mask is None else mask}

    ids, mask, y, kept = (build.spec(name, "INT64", (-1,)) for name in ("ids", "mask", "y", "kept"))
    inputs = [dataclasses.replace(spec, ragged=True, optional=spec is mask) for spec in (ids, mask)]
    engine = engines.engine(
        forward,
        rows,
        inputs=tuple(inputs),
        outputs=(y, kept),
        max_batch_size=16,
        batch_buckets=buckets,
        pad=pad and {"ids": pad},
    )
    for item, outcome in zip(items, engine.run(items), strict=True):
        sent = np.asarray(item["ids"])
        if engine.rows.filled(min(len(sent), engine.rows.most or len(sent))) > fits:
            assert isinstance(outcome, OutOfMemoryError)
        elif (sent == _WRONG).any():
            assert isinstance(outcome, ForwardError)
        else:
            assert isinstance(outcome, dict)
            np.testing.assert_array_equal(outcome["y"], 2 * sent)
            own = sent if pad is None else np.ones_like(sent)
            np.testing.assert_array_equal(outcome["kept"], item.get("mask", own))
