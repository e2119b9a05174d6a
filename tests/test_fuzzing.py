"""Nearly real artifacts, configs and parameters: understood or refused, and never a crash.

The short form; `make fuzz` takes longer and lets coverage lead it.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import fuzzing
import pytest
from hypothesis import example, given
from hypothesis import strategies as st


@st.composite
def _nearly_real(draw: st.DrawFn) -> bytes:
    """A seed with a few bytes changed, put in or taken out, cut off, or joined with another."""
    data = bytearray(draw(st.sampled_from(fuzzing.SEEDS)))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data)))
        edit = draw(st.sampled_from(["change", "insert", "remove", "cut", "join"]))
        if edit == "change":
            data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        elif edit == "insert":
            data[at:at] = draw(st.binary(max_size=8))
        elif edit == "remove":
            del data[at : at + draw(st.integers(1, 16))]
        elif edit == "cut":
            del data[at:]
        else:
            data += draw(st.sampled_from(fuzzing.SEEDS))
    return bytes(data)


def _seeds(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with each seed, too."""
    for seed in fuzzing.SEEDS:
        test = example(data=seed)(test)
    return test


@pytest.mark.parametrize("name", fuzzing.TARGETS)
@_seeds
@given(data=_nearly_real() | st.binary(max_size=200))
def test_nothing_but_a_refusal(name: str, data: bytes) -> None:
    """A parser accepts or refuses bytes that are right, nearly right or not at all."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python's own parsers, about what they are given
        fuzzing.TARGETS[name](Path(folder), data)
