"""State per correlation ID: ownership, lifetime and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import build
import models
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stateful import IDLE_S, Served, config, engine, make_state, step
from torch import Tensor

from torch_py_backend.config.model_config import Origin
from torch_py_backend.engine import warmup
from torch_py_backend.errors import ForwardError, InputError, OutputError, UnavailableError
from torch_py_backend.pipeline.sequences import GRACE_S
from torch_py_backend.signature import binding, introspection
from torch_py_backend.values import Item, RequestItem, Step

# Longer than the idle time, plus the time a request may still be queued.
_FORGOTTEN_S = IDLE_S + GRACE_S + 0.5


def accumulating(**overrides: Any) -> Served:
    return Served(config(make_state(), **overrides), models.Accumulate())


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


def test_a_sequence_ends_with_its_last_step_whatever_is_raised() -> None:
    served = Served(config(make_state()), _interrupted)
    served.send(step(1, 1, "s"), step(2, 1, "s"))
    with pytest.raises(KeyboardInterrupt):
        served.send(step(1, -1, "e"), step(2, 1))
    assert len(served.states) == 1


def _interrupted(x: Tensor, total: Tensor) -> dict[str, Tensor]:
    if bool((x == -1).any()):
        raise KeyboardInterrupt
    return {"y": x, "sum": total + x}


def reusing() -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """Return a model that writes to its inputs, and returns memory that its next call reuses."""
    memory = torch.zeros(8, 4)

    def forward(x: Tensor, total: Tensor) -> dict[str, Tensor]:
        total += x
        kept = memory[: x.shape[0]].copy_(total)
        if bool((x == -1).any()):
            raise ValueError
        return {"y": kept, "sum": kept}

    return forward


def test_states_are_independent_of_the_models_memory() -> None:
    served = Served(config(make_state(), retry_failed_batch=True), reusing())
    assert served.send(step(1, 1, "s")) == [1]
    assert served.send(step(2, 10, "s")) == [10]
    assert isinstance(served.send(step(1, -1))[0], ForwardError)
    assert served.send(step(1, 1)) == [2]
    assert served.send(step(3, 7, "s"), step(2, 10)) == [7, 20]
    assert served.send(step(3, 7)) == [14]
    assert served.send(step(2, 10), step(1, 4)) == [30, 6]


def test_a_state_does_not_keep_its_batch() -> None:
    width = 1 << 15
    wide: Item = {"x": np.ones((1, width), dtype=np.float32)}
    settings = config(
        make_state(dims=(width,)),
        inputs=(build.spec(dims=(width,)),),
        outputs=(build.spec("y", dims=(width,)),),
    )
    served = Served(settings, models.Accumulate())

    def memory() -> int:
        """The bytes of the states, and of the memory that they keep alive."""
        values = [states["total"] for states, _ in served.states._live.values()]
        stores = [state.untyped_storage() for state in values if isinstance(state, Tensor)]
        return sum({store.data_ptr(): store.nbytes() for store in stores}.values())

    served.run([RequestItem(wide, step=Step(name, starts=True)) for name in range(1, 9)])
    assert memory() == 8 * width * 4
    served.run([RequestItem(wide, step=Step(name, ends=True)) for name in range(2, 9)])
    assert memory() == width * 4


def test_a_state_that_is_not_finite_is_not_kept() -> None:
    served = Served(config(make_state(("total", "y")), check_finite=True), models.Accumulate())
    assert served.send(step(1, 2, "s"), step(2, 5, "s")) == [2, 5]
    outcomes = served.send(step(1, float("nan")), step(2, 5))
    assert isinstance(outcomes[0], OutputError)
    assert outcomes[1] == 10
    assert served.send(step(1, 1), step(2, 5)) == [3, 15]


@pytest.mark.parametrize("dtype", ["BOOL", "UINT16", "UINT32", "UINT64", "BF16", "FP64"])
def test_states_of_any_type(dtype: str) -> None:
    def forward(x: Tensor, total: Tensor) -> dict[str, Tensor]:
        return {"y": total.float() + x, "sum": (total.double() + x).to(total.dtype)}

    served = Served(config(make_state(dtype=dtype)), forward)
    assert served.send(step(1, 1, "s"), step(2, 0, "s")) == [1, 0]
    assert served.send(step(1, 0), step(2, 0)) == [1, 0]


def test_the_warm_up_runs_first_steps_and_those_that_follow_them() -> None:
    calls: list[tuple[int, bool]] = []

    def adds(x: Tensor, total: Tensor) -> dict[str, Tensor]:
        calls.append((x.shape[0], bool(total.any())))
        return {"y": x, "sum": total + 1}

    model = engine(config(make_state(), max_batch_size=2), adds)
    warmup.run(model)
    assert calls == [(rows, follows) for rows in (2, 1) for follows in (False, True)]


def test_rows_that_fill_a_bucket_do_not_become_states() -> None:
    served = accumulating(batch_buckets=(4, 8))
    assert served.send(*(step(name, name, "s") for name in (1, 2, 3))) == [1, 2, 3]
    assert served.send(step(2, 5), step(3, 5)) == [7, 8]
    assert served.send(step(1, 1)) == [2]


def _takes_one(x: Tensor, total: Tensor, READY: Tensor) -> Tensor:
    return x


def _takes_dict(inputs: dict[str, Tensor]) -> Tensor:
    return inputs["x"]


def _takes_list(tensors: list[Tensor]) -> Tensor:
    return tensors[0]


_ALL = ("START", "READY", "CORRID")


@pytest.mark.parametrize(
    ("function", "controls", "taken"),
    [
        (_takes_one, _ALL, ("READY",)),
        (_takes_dict, _ALL, _ALL),
        (_takes_list, _ALL, ()),
        (_takes_one, ("READY__2", "CORRID__3"), ("READY__2",)),
    ],
)
def test_controls_are_taken_by_name_or_number(
    function: Callable[..., Any], controls: tuple[str, ...], taken: tuple[str, ...]
) -> None:
    origin = Origin.CONTROL
    specs = [
        dataclasses.replace(build.spec(name, "INT32", (1,)), origin=origin) for name in controls
    ]
    settings = config(controls=specs)
    bound = binding.with_controls(settings, introspection.from_function(function))
    assert tuple(spec.name for spec in bound.inputs if spec.origin is origin) == taken


def test_idle_sequences_are_freed_after_a_request_may_have_been_queued() -> None:
    served = accumulating()
    served.send(step(1, 1, "s"), step(2, 1, "s"))
    served.now += IDLE_S + GRACE_S
    assert served.send(step(1, 1)) == [2]
    served.now += GRACE_S + 0.5
    assert served.send(step(1, 1)) == [3]
    assert served.states._live.keys() == {1}
    assert isinstance(served.send(step(2, 1))[0], InputError)


def test_a_new_sequence_takes_the_place_of_the_oldest_idle_one() -> None:
    settings = config(make_state())
    assert settings.sequencing is not None
    sequencing = settings.sequencing._replace(most=2)
    served = Served(dataclasses.replace(settings, sequencing=sequencing), models.Accumulate())
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
    st.sampled_from([1.0, 2.0, 3.0, -1.0]),  # -1 fails
    st.sampled_from(["", "", "", "s", "s", "e", "se"]),
)
_EVENTS = st.lists(
    st.lists(_STEPS, min_size=1, max_size=6, unique_by=lambda sent: sent.step.id) | st.just("wait"),
    max_size=20,
)


@given(_EVENTS)
def test_in_any_order_each_sequence_has_its_own_sum(events: list[list[RequestItem] | str]) -> None:
    served = accumulating()
    totals: dict[int | str, float] = {}
    used: dict[int | str, float] = {}
    for event in events:
        if not isinstance(event, list):
            served.now += _FORGOTTEN_S
            continue
        for item, outcome in zip(event, served.send(*event), strict=True):
            _compare(totals, item, outcome)
            used[item.step.id] = served.now
        totals = {
            name: total for name, total in totals.items() if served.now - used[name] < _FORGOTTEN_S
        }
        assert served.states._live.keys() == totals.keys()


def _compare(totals: dict[int | str, float], item: RequestItem, outcome: Any) -> None:
    """Compare the outcome of a step with one that is computed with a dict."""
    value, step = float(np.asarray(item["x"])[0, 0]), item.step
    if step.starts:
        totals[step.id] = 0
    if step.id not in totals:
        assert isinstance(outcome, InputError)
        assert f"sequence {step.id} has no state here" in str(outcome)
    elif value == -1:
        assert isinstance(outcome, ForwardError)
    else:
        totals[step.id] += value
        assert outcome == totals[step.id]
    if step.ends:
        totals.pop(step.id, None)
