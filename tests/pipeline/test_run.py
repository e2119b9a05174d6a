from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import engine
from models import double
from torch import Tensor

from torch_py_backend.errors import OutputError
from torch_py_backend.pipeline import run
from torch_py_backend.pipeline.run import Counts


def items(*shapes: tuple[int, ...]) -> list[Any]:
    return [{"x": torch.rand(shape)} for shape in shapes]


def test_one_item_and_the_outputs_of_a_single_call_are_not_copied() -> None:
    calls: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        calls.append(x)
        return x

    model, sent = engine(forward), items((2, 4))
    model.run(sent)  # the very first call may copy
    for batch in (sent, items((1, 4), (2, 4))):
        ys: list[Any] = [outcome["y"] for outcome in model.run(batch)]
        assert ys[0].data_ptr() == calls[-1].data_ptr()
        assert ys[-1].untyped_storage().data_ptr() == calls[-1].untyped_storage().data_ptr()
    assert calls[1].data_ptr() == sent[0]["x"].data_ptr()


def test_what_padding_adds_to_outputs_is_cut_off_even_if_forward_reshapes_its_inputs() -> None:
    pad = {"x": {"value": float("inf"), "outputs": ["y"]}}
    served = engine(lambda x: 2 * x.unsqueeze_(1).squeeze(1), pad=pad, check_finite=True)
    for lengths in ([2, 4], [3]):
        sent: list[Any] = [{"x": torch.ones(1, length)} for length in lengths]
        outcomes: list[Any] = list(served.run(sent))
        assert [outcome["y"].tolist() for outcome in outcomes] == [[[2.0] * n] for n in lengths]


def test_a_result_of_another_structure_fails_its_batch_only() -> None:
    results: list[Any] = [{"y": torch.ones(1, 4)}, torch.ones(1, 4), {"z": torch.ones(1, 4)}]
    model = engine(lambda x: results.pop(0))
    outcomes = [model.run(items((1, 4)))[0] for _ in range(3)]
    assert isinstance(outcomes[0], dict)
    for outcome in outcomes[1:]:
        assert isinstance(outcome, OutputError)
        assert "the outputs y where its first result has them" in str(outcome)


def serves(_: Tensor) -> None: ...


def fits(x: Tensor) -> None:
    if x.shape[0] > 2:
        raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("lengths", [[1] * 5, [1, 2]], ids=["one shape", "two shapes"])
@pytest.mark.parametrize(
    ("judge", "how"),
    [
        (serves, {"batch_buckets": (2,)}),
        (fits, {}),
        (serves, {"hooks": {"preprocess": double}}),
        (serves, {"hooks": {"preprocess": lambda x: x.mul_(2)}}),
        (serves, {"hooks": {"postprocess": double}}),
    ],
    ids=["buckets", "halves", "preprocess", "in place", "postprocess"],
)
def test_requests_keep_their_outputs_when_further_calls_reuse_the_memory(
    judge: Callable[[Tensor], None], how: dict[str, Any], lengths: list[int]
) -> None:
    memory = torch.zeros(8)

    def model(x: Tensor) -> Tensor:
        made = memory[: x.numel()].view(x.shape).copy_(x * 2)
        judge(x)
        return made

    sent = [torch.full((1, length), float(value)) for value, length in enumerate(lengths, 1)]
    expected = [(4 if "hooks" in how else 2) * x for x in sent]
    outcomes: Any = engine(model, **how).run([{"x": x} for x in sent])
    assert [outcome["y"].tolist() for outcome in outcomes] == [y.tolist() for y in expected]


def test_seconds_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def taking(seconds: float, value: Callable[..., Any]) -> Callable[..., Any]:
        def stage(*args: Any) -> Any:
            now[0] += seconds
            return value(*args)

        return stage

    plain = engine(double).stages
    stages = plain._replace(
        send=taking(2, lambda columns: columns),
        extract=taking(8, plain.extract),
        fetch=taking(16, lambda values: values),
    )
    _, (group,) = stages.group(items((2, 1), (1, 1)))
    timed = group._replace(gather=taking(1, group.gather), call=taking(4, group.call))
    run.attempt(stages, counts := Counts())(timed, False)
    assert counts == Counts(
        rows=3,
        gather_seconds=1,
        host_to_device_seconds=2,
        forward_seconds=12,
        device_to_host_seconds=16,
    )
