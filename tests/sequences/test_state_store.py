"""State per correlation ID: ownership, lifetime and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import build
import fake_gpu
import models
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stateful import IDLE_S, SLOTS, Served, config, engine, make_state, step
from torch import Tensor, nn

from torch_py_backend.batching.gather_scatter import Item
from torch_py_backend.config import dtypes
from torch_py_backend.config.model_config import Origin
from torch_py_backend.config.sequence_config import ControlInput, InitialState, State
from torch_py_backend.errors import ForwardError, InputError, OutputError
from torch_py_backend.loading import example_inputs
from torch_py_backend.sequences import row_pool, state_store
from torch_py_backend.sequences.row_pool import Pool
from torch_py_backend.sequences.state_store import Step
from torch_py_backend.signature import introspection
from torch_py_backend.startup import warmup

# Longer than the idle time, plus the time a request may still be queued.
_FORGOTTEN_S = IDLE_S + 1.5


def accumulating(**overrides: Any) -> Served:
    return Served(config(make_state(), **overrides), models.Accumulate())


def test_steps() -> None:
    """Each step adds to its own sequence's state, in one call; slot fillers are not run."""
    module = models.Accumulate()
    calls: list[int] = []
    module.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].shape[0]))
    served = Served(config(make_state()), module)
    assert served.send(step(1, 1, "s"), step(2, 10, "s"), step("1", 100, "s")) == [1, 10, 100]
    assert served.send(step("1", 100), step(0, 9, "s"), step(1, 1), step("", 9)) == [200, {}, 2, {}]
    assert len(served.states) == 3
    assert served.send(step(2, 10, "e"), step(1, 1, "e")) == [20, 3]
    assert len(served.states) == 1
    assert served.send(step(0, 9)) == [{}]
    assert calls == [3, 2, 2]


def test_unknown_sequences() -> None:
    """A step of a sequence that has not begun, or has ended, is refused with what to do."""
    served = accumulating()
    served.send(step(1, 1, "s"), step(2, 1, "se"))
    outcomes = served.send(step(1, 1), step(2, 1), step(3, 1, "e"))
    assert outcomes[0] == 2
    assert all(isinstance(outcome, InputError) for outcome in outcomes[1:])
    assert "sequence 2 has no state here" in str(outcomes[1])
    assert "expected the START flag in the first request" in str(outcomes[1])
    assert len(served.states) == 1


def test_a_report_has_the_position_of_the_failed_step() -> None:
    """Slot fillers, refused steps and earlier rounds do not shift the positions of reports."""
    served = accumulating()
    served.send(step(1, 1, "s"), step(2, 1, "s"))
    outcomes = served.send(step(0, 9), step(7, 1), step(1, 1), step(2, -1), step(1, -1), step(1, 1))
    reported = [at for at, value in enumerate(outcomes) if getattr(value, "reported", False)]
    assert reported == [3, 4]


@pytest.mark.parametrize(("flags", "value"), [("s", 7), ("e", None), ("", 12)])
def test_a_step_that_cannot_be_read(flags: str, value: float | None) -> None:
    """It begins and ends its sequence, so no later step gets an older sequence's state."""
    served = accumulating()
    served.send(step(1, 5, "s"))
    served.states.skip(1, starts="s" in flags, ends="e" in flags)
    (after,) = served.send(step(1, 7))
    assert after == value if value else isinstance(after, InputError)


def test_internal_error_ends_sequences() -> None:
    """A sequence ends with its last step, whatever exception is raised."""
    served = accumulating()
    served.send(step(1, 1, "s"), step(2, 1, "s"))
    served.states._run_items = _fails
    with pytest.raises(KeyboardInterrupt):
        served.send(step(1, 1, "e"), step(2, 1))
    assert len(served.states) == 1


def _fails(items: Any) -> Any:
    raise KeyboardInterrupt


# --- memory of states ----------------------------------------------------------------------------


def keeping() -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """Return a model that returns its own buffer, and writes to its inputs."""
    own = torch.zeros(1, 4)

    def forward(x: Tensor, total: Tensor) -> dict[str, Tensor]:
        total += x
        if x.shape[0] > 1:
            return {"y": total, "sum": total}
        own.copy_(total)
        if bool((x == -1).any()):
            raise ValueError
        return {"y": own, "sum": own}

    return forward


def test_a_model_that_writes_to_its_inputs_and_outputs() -> None:
    """States are independent of the model's memory, of initial states and of failed steps."""
    served = Served(config(make_state(), retry_failed_batch=True), keeping())
    assert served.send(step(1, 1, "s")) == [1]
    assert served.send(step(2, 10, "s")) == [10]
    assert isinstance(served.send(step(1, -1))[0], ForwardError)
    assert served.send(step(1, 1)) == [2]
    assert served.send(step(3, 7, "s"), step(2, 10)) == [7, 20]
    assert served.send(step(3, 7)) == [14]


def reusing() -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """Return a model that returns views of a buffer that the next call reuses."""
    memory = torch.zeros(8, 4)

    def forward(x: Tensor, total: Tensor) -> dict[str, Tensor]:
        total = memory[: x.shape[0]].copy_(total + x)
        return {"y": total, "sum": total}

    return forward


def test_a_model_that_reuses_memory() -> None:
    """Steps of one sequence in one batch keep their own results and states."""
    served = Served(config(make_state()), reusing())
    assert served.send(step(1, 1, "s"), step(2, 10, "s"), step(1, 2), step(1, 3)) == [1, 10, 3, 6]
    assert served.send(step(2, 10), step(1, 4)) == [20, 10]


def _memory(served: Served) -> int:
    """Return the bytes that states take, including memory they keep alive."""
    values = [state.values["total"] for state in served.states._sequences.values()]
    stores = [state.untyped_storage() for state in values if isinstance(state, Tensor)]
    return sum({state.data_ptr(): state.nbytes() for state in stores}.values())


@pytest.mark.parametrize("width", [4, 1 << 15], ids=["small", "large"])
def test_a_state_does_not_keep_its_batch(width: int) -> None:
    """After most sequences have ended, memory shrinks and `size` is the bytes of the rest."""
    wide: Item = {"x": np.ones((1, width), dtype=np.float32)}
    settings = config(
        make_state(dims=(width,)),
        inputs=(build.spec(dims=(width,)),),
        outputs=(build.spec("y", dims=(width,)),),
    )
    served = Served(settings, models.Accumulate())
    for first in range(1, 105, 8):
        names = range(first, first + 8)
        served.states.run([Step(name, True, False, wide) for name in names])
    assert served.states.size == 104 * width * 4
    served.states.run([Step(name, False, True, wide) for name in range(2, 105)])
    served.states.sweep()
    assert served.states.size == width * 4
    assert _memory(served) <= 64 * width * 4
    assert _memory(served) == width * 4 or width == 4
    (outcome,) = served.states.run([Step(1, False, True, wide)])
    assert isinstance(outcome, dict)
    assert torch.as_tensor(outcome["y"]).unique().tolist() == [2]


def test_a_state_that_is_an_output() -> None:
    """It is returned to clients, alone and in a batch, and refused if it is not finite."""
    served = Served(config(make_state(("total", "y")), check_finite=True), models.Accumulate())
    assert served.send(step(1, 1, "s")) == [1]
    assert served.send(step(1, 1), step(2, 5, "s"), step(3, 7, "se")) == [2, 5, 7]
    outcomes = served.send(step(1, float("nan")), step(2, 5))
    assert isinstance(outcomes[0], OutputError)
    assert outcomes[1] == 10
    assert served.send(step(1, 1), step(2, 5)) == [3, 15]


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("names", [(1,), (1, 2, 3)], ids=["alone", "in a batch"])
def test_a_state_that_is_an_output_on_a_gpu(
    names: tuple[int, ...], on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client on the host gets a copy, one copy for a batch; the state stays on the GPU."""
    served = Served(config(make_state(("total", "y"))), models.Accumulate())
    waits = fake_gpu.install(monkeypatch)
    run, columns = served.engine.run, dict[int, Any]()

    def put(value: Any) -> Any:
        column = value[0] if isinstance(value, tuple) else value
        columns[id(column)] = column, columns.get(id(column), (0, fake_gpu.put(column)))[1]
        on_device = columns[id(column)][1]
        return (on_device, value[1]) if isinstance(value, tuple) else on_device

    def run_on_gpu(items: Sequence[Item]) -> list[Any]:
        return [
            {name: put(value) for name, value in outcome.items()}
            for outcome in run(items)
            if isinstance(outcome, dict)
        ]

    served.states._run_items = run_on_gpu
    for flags, expected in (("s", 1), ("", 2)):
        steps = [step(name, name, flags) for name in names]
        if on_gpu:
            steps = [
                s._replace(item={"x": fake_gpu.put(torch.as_tensor(s.item["x"]))}) for s in steps
            ]
        outcomes = served.states.run(steps)
        for name, outcome in zip(names, outcomes, strict=True):
            assert isinstance(outcome, dict)
            assert isinstance(outcome["y"], Tensor)
            assert outcome["y"].flatten()[0] == name * expected
            # A row of a batch is a view, which the substitute does not mark.
            assert outcome["y"].is_cuda == (on_gpu and len(names) == 1)
        assert len(waits) == (0 if on_gpu else expected)


def shapes(x: Tensor, total: Tensor | None = None) -> dict[str, Tensor]:
    """Return a state with as many columns as x says; of another type for negative values."""
    before = 0 if total is None else total[:, :1].double()
    after = (before + x[:, :1].double().abs()).expand(-1, int(x[0, 1]))
    return {"y": after[:, :1].float(), "sum": after if x[0, 0] < 0 else after.float()}


def _shaped(name: int, value: float, width: int, flags: str = "") -> Step:
    row = np.array([[value, width]], dtype=np.float32)
    return Step(name, "s" in flags, "e" in flags, {"x": row})


def test_states_that_change_their_form() -> None:
    """A state may change its shape or type in any step, and change back."""
    settings = config(
        State("total", "sum"),
        inputs=(build.spec("x", dims=(2,)),),
        outputs=(build.spec("y", dims=(1,)),),
    )
    served = Served(settings, shapes)
    for name in (1, 2, 3):
        assert served.send(_shaped(name, name, 4, "s")) == [name]
    assert served.send(*(_shaped(name, name, 4) for name in (1, 2, 3))) == [2, 4, 6]
    assert served.states.size == 3 * 16
    assert served.send(_shaped(1, 1, 8)) == [3]
    assert served.send(_shaped(2, -2, 4)) == [6]
    assert served.states.size == 32 + 32 + 16
    assert served.send(*(_shaped(name, name, 4) for name in (1, 3))) == [4, 9]
    assert served.send(*(_shaped(name, name, 4) for name in (1, 2, 3))) == [5, 8, 12]
    assert served.states.size == 3 * 16
    assert served.send(*(_shaped(name, name, 4, "e") for name in (1, 2, 3))) == [6, 10, 15]
    assert served.states.size == 0


def test_failed_write_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the states of a batch cannot be written, its sequences end."""
    served = accumulating()
    served.send(step(1, 1, "s"), step(2, 1, "s"), step(3, 1, "s"))

    def fails(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Pool, "write", fails)
        with pytest.raises(MemoryError):
            served.send(step(1, 1), step(2, 1))
    outcomes = served.send(step(1, 1), step(2, 1), step(3, 1))
    assert [type(outcome) for outcome in outcomes[:2]] == [InputError, InputError]
    assert outcomes[2] == 2
    assert served.states.size == 16


def test_states_that_cannot_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """If memory runs out for one of the states of a batch, no state of it is read later."""
    served = accumulating()
    for name in (1, 2):  # alone: their states are not in the table
        served.send(step(name, 1, "s"))
    add = Pool.add

    def fails(pool: Pool, holder: row_pool.Holder) -> None:
        if len(pool):
            raise torch.OutOfMemoryError
        add(pool, holder)

    with monkeypatch.context() as patch:
        patch.setattr(Pool, "add", fails)
        with pytest.raises(torch.OutOfMemoryError):
            served.send(step(1, 1), step(2, 1))
    outcomes = served.send(step(1, 1), step(2, 1))
    assert [type(outcome) for outcome in outcomes] == [InputError, InputError]
    assert served.states.size == 0


# --- types of states ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["BOOL", "UINT16", "UINT32", "UINT64", "BF16", "FP64"])
def test_types_of_states(dtype: str) -> None:
    """States of any type are stored, also those of steps that share a batch."""

    def forward(x: Tensor, total: Tensor) -> dict[str, Tensor]:
        return {"y": total.float() + x, "sum": (total.double() + x).to(total.dtype)}

    served = Served(config(make_state(dtype=dtype)), forward)
    assert served.send(step(1, 1, "s"), step(2, 0, "s")) == [1, 0]
    assert served.send(step(1, 0), step(2, 0)) == [1, 0]


def test_states_of_strings() -> None:
    """Strings are stored as in requests."""
    settings = config(
        make_state(("pages", "new_pages"), "BYTES", (1,)),
        inputs=(build.spec("words", "BYTES", (1,)),),
        outputs=(build.spec("y", "BYTES", (1,)),),
    )
    served = Served(settings, models.Journal())

    def send(flags: str, **words: str) -> list[Any]:
        steps = [
            Step(name, bool(flags), False, {"words": np.array([[word.encode()]], dtype=np.object_)})
            for name, word in words.items()
        ]
        return [outcome["y"].tolist() for outcome in served.states.run(steps)]  # type: ignore[index]

    assert send("s", a="é", b="1") == [[["é"]], [["1"]]]
    assert send("", b="2", a="t") == [[["12"]], [["ét"]]]
    assert served.states.size == 2 + 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: None, "the state 'RESULT[1]' is a NoneType; expected a dense tensor"),
        (lambda x: x.sum(), "the state 'RESULT[1]' is float32 []; expected a dense tensor"),
        (lambda x: torch.cat([x, x]), "output 'RESULT[1]' has 2 rows for a batch of 1"),
    ],
)
def test_invalid_state(wrong: Callable[[Tensor], Any], message: str) -> None:
    """A state of STATE must be a tensor with a row for each request, in every step."""

    def forward(x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Any]:
        return x, wrong(x) if x[0, 0] == 1 else x

    served = Served(config(State("state", "RESULT[1]")), forward)
    served.send(step(2, 2, "s"))
    (error,) = served.send(step(1, 1, "s"))
    assert message in str(error)


# --- before READY ------------------------------------------------------------------------------


def test_the_warm_up_runs_further_steps() -> None:
    """The warm-up runs batches of first steps, and of steps that follow them."""
    module = _Sums()
    calls: list[tuple[int, bool]] = []
    module.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args[0].shape[0], len(args) + len(kwargs) > 1)),
        with_kwargs=True,
    )
    model = engine(config(State("total", "sum"), max_batch_size=2), module)
    warmup.run(model)
    assert calls == [
        (rows, follows) for rows in (2, 1) for follows in (False, True) for _ in range(3)
    ]


@pytest.mark.parametrize("carried", [False, True], ids=["state", "option"])
def test_compiled_steps(carried: bool, dynamo: None, caplog: pytest.LogCaptureFixture) -> None:
    """Graphs compiled before READY serve first steps and later ones."""
    state = State("total", "sum") if carried else make_state()
    how: dict[str, Any] = {"torch_compile_optional_parameters": {"backend": "eager"}}
    served = Served(config(state, **how), _Sums(fails=False))
    with torch.inference_mode():  # as the adapter does
        warmup.run(served.engine)
        for rows in (1, 2, 5, 8):
            names = range(1, rows + 1)
            assert served.send(*(step(name, name, "s") for name in names)) == list(names)
            assert served.send(*(step(name, name, "e") for name in names)) == [2 * n for n in names]
    assert not [record for record in caplog.records if record.name.startswith("torch_py_backend")]


def test_buckets_fill_up_with_states() -> None:
    """Rows that fill a bucket do not become states."""
    served = accumulating(batch_buckets=(4, 8))
    assert served.send(*(step(name, name, "s") for name in (1, 2, 3))) == [1, 2, 3]
    assert served.send(step(2, 5), step(3, 5)) == [7, 8]
    assert served.send(step(1, 1)) == [2]


def test_samples_are_first_steps() -> None:
    """Sample inputs have initial states, and controls of a single step."""
    settings = config(make_state(dims=(-1, 2), initial=InitialState((0, 2))), controls=_CONTROLS)
    sample = example_inputs.item(
        state_store.with_controls(settings, introspection.from_function(_takes_total)), 3
    )
    assert {name: (tuple(value.shape), str(value.dtype)) for name, value in sample.items()} == {
        "x": ((3, 4), "torch.float32"),
        "total": ((3, 0, 2), "torch.float32"),
        "READY": ((3, 1), "torch.float32"),
    }
    assert torch.equal(torch.as_tensor(sample["READY"]), torch.ones(3, 1))


def _takes_total(x: Tensor, total: Tensor, READY: Tensor) -> Tensor:
    return x


# --- controls ----------------------------------------------------------------------------------

_CONTROLS = [
    ControlInput(name, dtypes.from_triton(dtype))
    for name, dtype in (("START", "INT32"), ("READY", "FP32"), ("CORRID", "UINT64"))
]


def _takes_all(x: Tensor, CORRID: Tensor, START: Tensor, READY: Tensor) -> Tensor:
    return x


def _takes_one(x: Tensor, READY: Tensor) -> Tensor:
    return x


def _takes_dict(inputs: dict[str, Tensor]) -> Tensor:
    return inputs["x"]


def _takes_list(tensors: list[Tensor]) -> Tensor:
    return tensors[0]


_NUMBERED = [
    ControlInput(f"{control.name}__{place}", control.dtype)
    for place, control in enumerate(_CONTROLS)
]


@pytest.mark.parametrize(
    ("function", "controls", "taken"),
    [
        (_takes_all, _CONTROLS, ["START", "READY", "CORRID"]),
        (_takes_one, _CONTROLS, ["READY"]),
        (_takes_dict, _CONTROLS, ["START", "READY", "CORRID"]),
        (_takes_list, _CONTROLS, []),
        (_takes_one, _NUMBERED[1:], ["READY__1"]),
    ],
)
def test_controls_are_taken_by_name(
    function: Callable[..., Any], controls: list[ControlInput], taken: list[str]
) -> None:
    """Controls whose name or number is an argument of forward() are passed, others ignored."""
    bound = state_store.with_controls(
        config(controls=controls), introspection.from_function(function)
    )
    specs = [spec for spec in bound.inputs if spec.origin is Origin.CONTROL]
    assert [spec.name for spec in specs] == taken
    assert all(spec.dims == (1,) for spec in specs)


# --- memory ------------------------------------------------------------------------------------


def doubles(x: Tensor, total: Tensor) -> dict[str, Tensor]:
    """Return a state that is twice as large as its input."""
    return {"y": x, "sum": torch.cat([total, total], dim=1)}


def doubling(limit: int) -> Served:
    state = make_state(dims=(-1,), initial=InitialState((1 << 17,)))  # half a megabyte
    return Served(config(state, sequence_memory_mb=limit), doubles)


def test_memory_is_limited() -> None:
    """A step whose state exceeds the limit is refused with the figures; the old state stays."""
    served = doubling(3)
    assert served.send(step(1, 1, "s"), step(2, 2, "s")) == [1, 2]
    assert served.states.size == 2 << 20
    assert served.send(step(1, 1)) == [1]
    (error,) = served.send(step(2, 2))
    assert "with the new state of sequence 2, 2 sequences would take 4.0 MB" in str(error)
    assert "at most 3 MB, SEQUENCE_MEMORY_MB. The state before this request is kept" in str(error)
    assert error.code == "UNAVAILABLE"
    assert served.states.size == 3 << 20
    served.send(step(1, 1, "e"))
    assert served.send(step(2, 2)) == [2]
    assert served.states.size == 2 << 20


def test_refusals_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """The log has one line per minute, with the number of refused steps."""
    served = doubling(1)
    served.send(step(1, 1, "s"))
    served.send(step(1, 1), *(step(name, 1, "s") for name in (2, 3)))
    served.now += 59
    served.send(step(1, 1))
    assert [line.levelname for line in caplog.records] == ["WARNING"]
    assert caplog.messages[0].startswith("model 'digits': with the new state of sequence 1, ")
    assert caplog.messages[0].endswith(" since the model was loaded: 1.")
    served.now += 1
    served.send(step(1, 1))
    assert len(caplog.messages) == 2
    assert caplog.messages[1].endswith(": 5.")


def test_idle_sequences_are_freed_first() -> None:
    """States of idle sequences are freed before a step is refused."""
    served = doubling(2)
    served.send(step(1, 1, "s"), step(2, 2, "s"))
    served.now += _FORGOTTEN_S
    assert served.send(step(3, 3, "s")) == [3]
    assert len(served.states) == 1


def test_no_sequence_of_a_running_batch_is_freed() -> None:
    """A batch may take longer than the idle time: its sequences keep the memory of their states."""
    served = doubling(2)
    run = served.states._run_items

    def slow(items: Any) -> Any:
        served.now += 10 * _FORGOTTEN_S
        return run(items)

    served.send(step(1, 1, "s"), step(2, 2, "s"))
    served.states._run_items = slow
    outcomes = served.send(step(1, 1), step(2, 2))
    assert [outcome.code for outcome in outcomes] == ["UNAVAILABLE", "UNAVAILABLE"]
    assert (len(served.states), served.states.size) == (2, 2 << 20)


# --- idle sequences ------------------------------------------------------------------------------


def test_idle_sequences_are_freed() -> None:
    """After the idle time without other requests the state is freed."""
    served = accumulating()
    served.send(step(1, 1, "s"))
    served.now += IDLE_S
    served.states.sweep()
    assert len(served.states) == 1
    served.now += _FORGOTTEN_S - IDLE_S
    served.states.sweep()
    assert len(served.states) == served.states.size == 0
    assert isinstance(served.send(step(1, 1))[0], InputError)


def test_sequences_with_queued_requests_are_kept() -> None:
    """While others run, a sequence is freed once none of its requests can be in Triton's queue."""
    served = accumulating()
    served.send(step(1, 1, "s"), step(2, 1, "s"), step(3, 1, "s"))
    for _ in range(20):  # without a pause
        served.now += 0.5
        served.send(step(2, 1))
    served.states.sweep()
    assert served.send(step(1, 1)) == [2]  # it arrived in time
    for _ in range(SLOTS + 8 + 1):
        served.send(step(2, 1))
    served.states.sweep()
    assert served.states._sequences.keys() == {1, 2}


def test_a_sweep_for_which_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that cannot be shrunk stays; later sweeps free idle sequences all the same."""
    served = accumulating()
    served.send(*(step(name, 1, "s") for name in range(1, 200)))
    served.send(*(step(name, 1, "e") for name in range(2, 200)))
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "new_empty", Mock(side_effect=torch.OutOfMemoryError))
        served.states.sweep()
    assert served.send(step(1, 1)) == [2]
    served.now += _FORGOTTEN_S
    served.states.sweep()
    assert len(served.states) == 0


def test_sweep_does_not_wait_for_a_batch() -> None:
    """A sweep during a batch returns at once and changes nothing."""
    served = accumulating()
    run = served.states._run_items

    def swept(items: Any) -> Any:
        served.now += 10 * _FORGOTTEN_S
        served.states.sweep()
        return run(items)

    served.send(step(1, 1, "s"))
    served.states._run_items = swept
    assert served.send(step(1, 1)) == [2]


# --- random order ------------------------------------------------------------------------------

_NAMES: st.SearchStrategy[int | str] = st.sampled_from([1, 2, 3, "1", "2", 2**63 + 1])
_STEPS = st.builds(
    step,
    _NAMES,
    st.sampled_from([1.0, 2.0, 3.0, -1.0]),  # -1 fails
    st.sampled_from(["", "", "", "s", "s", "e", "se"]),
)
_EVENTS = st.lists(
    st.lists(_STEPS, min_size=1, max_size=6) | st.just("wait") | st.just("sweep"), max_size=20
)


@given(_EVENTS, st.booleans())
def test_no_state_leaks(events: list[list[Step] | str], carried: bool) -> None:
    """In any order of begins, steps, failures, ends and idling, each sequence has its own sum."""
    state = State("total", "sum") if carried else make_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_pool, "_MIN_ROWS", 1)  # so that tables grow and shrink all the time
        _play(events, Served(config(state), _Sums() if carried else models.Accumulate()))


def _play(events: list[list[Step] | str], served: Served) -> None:
    totals: dict[int | str, float] = {}
    used: dict[int | str, float] = {}
    sent = served.now
    for event in events:
        if isinstance(event, list):
            sent = served.now
            for step, outcome in zip(event, served.send(*event), strict=True):
                _compare(totals, step, outcome)
                used[step.id] = sent
        elif event == "wait":
            served.now += _FORGOTTEN_S
        else:
            served.states.sweep()
            forgotten = {name for name in totals if served.now - used[name] > IDLE_S + 1}
            freed = totals.keys() - served.states._sequences.keys()
            assert freed <= forgotten
            assert freed == forgotten or sent == served.now
            totals = {name: total for name, total in totals.items() if name not in freed}
        assert served.states._sequences.keys() == totals.keys()
        assert served.states.size == sum(state.size for state in served.states._sequences.values())


class _Sums(nn.Module):
    def __init__(self, *, fails: bool = True) -> None:
        super().__init__()
        self._fails = fails

    def forward(self, x: Tensor, total: Tensor | None = None) -> dict[str, Tensor]:
        if self._fails and bool((x == -1).any()):
            raise ValueError("no -1")
        total = x if total is None else total + x
        return {"y": total, "sum": total}


def _compare(totals: dict[int | str, float], step: Step, outcome: Any) -> None:
    """Return the expected outcome of a step, computed with a dict."""
    value = float(np.asarray(step.item["x"])[0, 0])
    if step.starts:
        totals[step.id] = 0
    if step.id not in totals:
        assert isinstance(outcome, InputError)
    elif value == -1:
        assert isinstance(outcome, ForwardError)
    else:
        totals[step.id] += value
        assert outcome == totals[step.id]
    if step.ends:
        totals.pop(step.id, None)
