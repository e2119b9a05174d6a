"""A model computed by two processes, with gloo on the CPU: its values are those of one.

What goes wrong between ranks is in test_ranks_lost.py: a process has one group of ranks at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import build
import parallel
import pytest
import torch
from torch.distributed.tensor import DTensor

from torch_py_backend import artifacts, loaders, plans, ranks, sharing
from torch_py_backend.loaders import Loaded

_SOURCE = (
    parallel.SOURCE
    + """

class Kept:
    pass


class Served(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.gather = nn.Linear(4, 9)
        self.register_buffer("noise", torch.rand(4), persistent=False)

    def tensor_parallel_plan(self):
        whole = ColwiseParallel(use_local_output=False)
        return super().tensor_parallel_plan() | {"embed": "embedding_rowwise", "gather": whole}

    def forward(self, x, ids=None, words=(), *, more=None):
        if "drawn" in words:
            return self.differences()
        y = super().forward(x)
        if ids is not None:
            y = y + self.embed(ids)
        if more is not None:
            y = y + more["flags"].to(y.dtype) * more["factor"]
        return {"y": y + sum(map(len, words)), "hidden": [self.gather(y)]}

    def differences(self):
        \"\"\"Between what ranks draw.\"\"\"
        highest, lowest = (torch.rand(4) + self.noise).repeat(2, 1)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        return highest - lowest
"""
)


def _state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        **parallel.wide().state_dict(),
        "embed.weight": torch.rand(10, 4, generator=generator),
        "gather.weight": torch.rand(9, 4, generator=generator),
        "gather.bias": torch.rand(9, generator=generator),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    build.write(folder, "model.py", _SOURCE)
    torch.save(_state(), folder / "1" / "model.pt")
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[Loaded]:
    """The model on two ranks."""
    config = build.config(folder, tensor_parallel=2, model_class="Served")
    environment = dict(os.environ)
    found = ranks.load(config, artifacts.find(config))
    yield found
    found.leave()
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[..., Any]:
    """The same model in this process alone."""
    config = build.config(folder, model_class="Served")
    return loaders.load(artifacts.find(config), config, torch.device("cpu")).module


def _x(rows: int) -> torch.Tensor:
    return torch.rand(rows, 4, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("rows", range(1, 9))
def test_values(
    rows: int, mode: Callable[[], Any], loaded: Loaded, alone: Callable[..., Any]
) -> None:
    """Batches of any size give what one process gives."""
    with mode():
        made, wanted = loaded.module(_x(rows)), alone(_x(rows))
    torch.testing.assert_close(made, wanted)
    assert type(made["y"]) is torch.Tensor
    # A tensor that the plan leaves in shares is put together.
    assert type(made["hidden"][0]) is torch.Tensor


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        pytest.param((torch.tensor([1, 2]),), {}, id="INT64"),
        pytest.param((torch.tensor([1, 9], dtype=torch.int32),), {}, id="INT32"),
        pytest.param((None, ["ab", "ä"]), {}, id="strings"),
        pytest.param(
            (),
            {"more": {"flags": torch.tensor([[True], [False]]), "factor": 2.5}},
            id="nested, BOOL, number",
        ),
        pytest.param(
            (),
            {"more": {"flags": torch.ones(2, 1, dtype=torch.int16), "factor": torch.tensor(0.5)}},
            id="INT16, no dims",
        ),
        pytest.param(
            (),
            {"more": {"flags": torch.ones(4, 2, dtype=torch.bfloat16).T, "factor": 1}},
            id="strided",
        ),
    ],
)
def test_what_is_passed(
    args: tuple[Any, ...], kwargs: Any, loaded: Loaded, alone: Callable[..., Any]
) -> None:
    """All ranks get what the first one is called with: structure, strings, types, layouts."""
    with torch.inference_mode():
        torch.testing.assert_close(
            loaded.module(_x(2), *args, **kwargs), alone(_x(2), *args, **kwargs)
        )


def test_no_rows(loaded: Loaded) -> None:
    """Tensors without values are not sent, and arrive."""
    with torch.inference_mode():
        made = loaded.module(_x(1), None, (), more={"flags": torch.ones(0, 4), "factor": 1.0})
    assert made["y"].shape == (0, 4)


def test_ranks_draw_alike(loaded: Loaded) -> None:
    """What is drawn at load and in forward() is the same in all of them."""
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(loaded.module(_x(1), None, ["drawn"]), torch.zeros(4))


def test_each_rank_has_its_share(loaded: Loaded) -> None:
    """Weights are shared out as the plan says; what lies in a file stays there."""
    assert loaded.owner is not None
    shapes = {
        name: list(one.to_local().shape)
        for name, one in loaded.owner.named_parameters()
        if isinstance(one, DTensor)
    }
    assert shapes == {
        "up.weight": [3, 4],
        "up.bias": [3],
        "down.weight": [4, 3],
        "down.bias": [4],
        "embed.weight": [5, 4],
        "gather.weight": [5, 4],
        "gather.bias": [5],
    }
    mapped = sharing.mapped(loaded)
    assert mapped.ranges
    assert mapped.shared > 0


def test_uneven_shares(loaded: Loaded) -> None:
    """They compute the same where the output is put together; the log tells of them."""
    assert loaded.owner is not None
    assert plans.uneven(loaded.owner) == ["gather.weight", "gather.bias"]


def test_ranks_that_fail_alike_go_on(loaded: Loaded, alone: Callable[..., Any]) -> None:
    """A request that all refuse harms nobody else: the error is the model's own."""
    bad = torch.full((1, 4), 101.0)
    with torch.inference_mode():
        for _ in range(3):
            with pytest.raises(ValueError, match="all refuse this"):
                loaded.module(bad)
            torch.testing.assert_close(loaded.module(_x(3)), alone(_x(3)))


def test_what_cannot_be_sent(loaded: Loaded, alone: Callable[..., Any]) -> None:
    """It is refused before any rank hears of it."""
    with torch.inference_mode():
        with pytest.raises((TypeError, AttributeError, Exception), match="pickle"):
            loaded.module(_x(1), None, (one for one in "ab"))
        torch.testing.assert_close(loaded.module(_x(3)), alone(_x(3)))


def test_what_hooks_want_of_it(loaded: Loaded) -> None:
    """Only a call is done by all ranks: whatever else hooks do with the module is refused."""
    with pytest.raises(AttributeError, match="'embed': with TENSOR_PARALLEL hooks can call"):
        loaded.module.embed  # type: ignore[attr-defined]  # noqa: B018


def test_one_worker_for_two_ranks(loaded: Loaded) -> None:
    """This process is the first of them."""
    assert len(parallel.workers(os.getpid())) == 1
