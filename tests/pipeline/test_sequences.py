"""State per correlation ID: ownership, lifetime and memory."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import models
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from stateful import IDLE_S, Served, config, make_state, step
from torch import Tensor

from torch_py_backend import values
from torch_py_backend.engine import warmup
from torch_py_backend.errors import ForwardError, InputError, OutputError, UnavailableError
from torch_py_backend.pipeline.sequences import GRACE_S
from torch_py_backend.values import RequestItem

# As long as Triton may know a sequence: a request may have been queued for a while.
_KEPT_S = IDLE_S + GRACE_S


def test_steps_share_a_call_and_slot_fillers_are_not_run() -> None:
    module = models.Accumulate()
    calls: list[int] = []
    module.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].shape[0]))
    served = Served(config(make_state()), module)
    assert served.send(step(1, 1, "s"), step(2, 10, "s"), step("1", 100, "s")) == [1, 10, 100]
    first, filler, second, other = served.send(
        step("1", 100), step(0, 9, "s"), step(1, 1), step("", 9)
    )
    assert (first, second) == (200, 2)
    assert isinstance(filler, UnavailableError)
    assert filler is other
    assert len(served.states) == 3
    assert served.send(step(2, 10, "e"), step(1, 1, "e")) == [20, 3]
    assert len(served.states) == 1
    assert served.send(step(0, 9)) == [filler]
    assert calls == [3, 2, 2]


def test_states_may_grow() -> None:
    def extend(x: Tensor, total: Tensor) -> dict[str, Tensor]:
        total = torch.cat([total, x[:, :1]], dim=1)
        return {"y": total.sum(1, keepdim=True).expand(-1, 4), "sum": total}

    served = Served(config(make_state(dims=(-1,))), extend)
    assert served.send(step(1, 1, "s")) == [1]
    assert served.send(step(1, 2), step(2, 10, "s")) == [3, 10]
    assert served.send(step(1, 3), step(2, 20)) == [6, 30]


@pytest.mark.parametrize("dtype", ["BOOL", "UINT16", "UINT32", "UINT64", "BF16", "FP64"])
def test_states_of_any_type(dtype: str) -> None:
    def forward(x: Tensor, total: Tensor) -> dict[str, Tensor]:
        return {"y": total.float() + x, "sum": (total.double() + x).to(total.dtype)}

    served = Served(config(make_state(dtype=dtype)), forward)
    assert served.send(step(1, 1, "s"), step(2, 0, "s")) == [1, 0]
    assert served.send(step(1, 0), step(2, 0)) == [1, 0]


def test_a_new_state_that_does_not_fit_in_memory_fails_its_step_only() -> None:
    served = Served(config(make_state()), models.Accumulate())
    served.send(step(1, 1, "s"), step(2, 10, "s"))
    copies = [MemoryError(), torch.full((1, 4), 20.0)]
    with mock.patch.object(values, "clone", side_effect=copies):
        refused, other = served.send(step(1, 1), step(2, 10))
    assert "not fit in memory" in str(refused)
    assert other == 20
    assert served.send(step(1, 1), step(2, 10)) == [2, 30]


def test_the_warm_up_runs_first_steps_and_those_that_follow_them() -> None:
    calls: list[tuple[int, bool]] = []

    def adds(x: Tensor, total: Tensor) -> dict[str, Tensor]:
        calls.append((x.shape[0], bool(total.any())))
        return {"y": x, "sum": total + 1}

    warmup.run(Served(config(make_state(), max_batch_size=2), adds).engine)
    assert calls == [(rows, follows) for rows in (2, 1) for follows in (False, True)]


def test_a_new_sequence_takes_the_place_of_the_oldest_idle_one() -> None:
    served = Served(config(make_state(), most=2), models.Accumulate())
    served.send(step(1, 1, "s"), step(2, 1, "s"))
    served.now += IDLE_S - 0.1
    served.send(step(2, 1))
    served.now += 0.2
    assert served.send(step(3, 1, "s"), step(2, 1)) == [1, 3]
    assert served.states._live.keys() == {2, 3}
    served.send(step(4, 1, "s"))  # no other is idle
    assert served.states._live.keys() == {2, 3, 4}


_NAMES: st.SearchStrategy[int | str] = st.sampled_from([1, 2, 3, "1", "2", 2**63 + 1])
_STEPS = st.builds(
    step,
    _NAMES,
    st.sampled_from([1.0, 2.0, 3.0, -1.0, np.nan]),  # -1 fails, and NaN is refused
    st.sampled_from(["", "", "", "s", "s", "e", "se"]),
)
_EVENTS = st.lists(
    st.lists(_STEPS, min_size=1, max_size=4, unique_by=lambda sent: sent.step.id)
    | st.sampled_from([_KEPT_S, _KEPT_S + 0.5]),
    max_size=12,
)


def _reusing() -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """Return a model that writes to its inputs, and returns memory that its next call reuses."""
    memory = torch.zeros(8, 4)

    def forward(x: Tensor, total: Tensor) -> dict[str, Tensor]:
        total += x
        kept = memory[: x.shape[0]].copy_(total)
        if bool((x == -1).any()):
            raise ValueError
        return {"y": kept, "sum": kept}

    return forward


@given(_EVENTS, st.sampled_from(["sum", "y"]), st.sampled_from([None, (4, 8)]))
# The step of the second sequence overwrites the memory that held the state of the first one.
@example([[step(1, 1, "s")], [step(2, 2, "s")], [step(1, 1)]], "sum", None)
def test_in_any_order_each_sequence_has_its_own_sum(
    events: list[list[RequestItem] | float], output: str, buckets: tuple[int, ...] | None
) -> None:
    state = make_state(("total", output))  # which clients get, or not
    served = Served(config(state, check_finite=True, batch_buckets=buckets), _reusing())
    totals: dict[int | str, float] = {}
    used: dict[int | str, float] = {}
    for event in events:
        if not isinstance(event, list):
            served.now += event
            continue
        for item, outcome in zip(event, served.send(*event), strict=True):
            value, (name, starts, ends, _) = float(np.asarray(item["x"])[0, 0]), item.step
            used[name] = served.now
            if starts:
                totals[name] = 0
            if name not in totals:
                assert isinstance(outcome, InputError)
                assert f"sequence {name} has no state here" in str(outcome)
            elif value == -1:
                assert isinstance(outcome, ForwardError)
            elif np.isnan(value):
                assert isinstance(outcome, OutputError)
            else:
                totals[name] += value
                assert outcome == totals[name]
            if ends:
                totals.pop(name, None)
        totals = {
            name: total for name, total in totals.items() if served.now - used[name] <= _KEPT_S
        }
        assert served.states._live.keys() == totals.keys()
