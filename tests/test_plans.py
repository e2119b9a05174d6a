"""Plans for TENSOR_PARALLEL: where they are found, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import build
import parallel
import pytest
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from torch_py_backend import plans
from torch_py_backend.errors import ConfigError, LoadError, SourceError


def found(plan: Any, name: str = plans.NAME) -> Any:
    module = nn.Sequential(parallel.Wide(), parallel.Wide())
    object.__setattr__(module, name, plan)
    return plans.find(build.config(), module)


def test_styles_are_taken_as_they_are() -> None:
    """An attribute with torch's own styles is the plan."""
    plan = {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()}
    assert found(plan) == plan


def test_a_method_is_asked() -> None:
    """A plan may be computed; names may stand for many modules."""
    assert list(found(lambda: {"*.up": "colwise", "*.down": "rowwise"})) == ["*.up", "*.down"]


def test_plans_of_hugging_face() -> None:
    """The attribute that its models have will do; the model's own comes first."""
    assert list(found({"*.up": "colwise"}, "_tp_plan")) == ["*.up"]


@pytest.mark.parametrize(
    ("word", "kind", "layouts"),
    [
        ("colwise", ColwiseParallel, (Replicate(), Shard(-1))),
        ("colwise_rep", ColwiseParallel, (Replicate(), Replicate())),
        ("colwise_gather_output", ColwiseParallel, (Replicate(), Replicate())),
        ("rowwise", RowwiseParallel, (Shard(-1), Replicate())),
        ("rowwise_rep", RowwiseParallel, (Replicate(), Replicate())),
        ("embedding_rowwise", RowwiseParallel, (Replicate(), Replicate())),
    ],
)
def test_words(word: str, kind: Any, layouts: tuple[Any, Any]) -> None:
    """Each word is a style of torch, with the layouts that Hugging Face means by it."""
    style: Any = found({"0.up": word})["0.up"]
    assert type(style) is kind
    assert (style.input_layouts[0], style.output_layouts[0]) == layouts


def test_what_is_whole_everywhere() -> None:
    """A module that each process has as a whole needs no style."""
    assert found({"0.up": "replicate", "0.down": "rowwise"}).keys() == {"0.down"}


def _raises() -> Any:
    raise ValueError("of no use")


@pytest.mark.parametrize(
    ("plan", "kind", "says"),
    [
        (None, ConfigError, "Sequential has no tensor_parallel_plan"),
        ({}, ConfigError, "Sequential has no tensor_parallel_plan"),
        ([ColwiseParallel()], ConfigError, "tensor_parallel_plan is a list"),
        ({"0.middle": "colwise"}, ConfigError, "names 0.middle, and Sequential has no such module"),
        ({"up": "colwise"}, ConfigError, "names up"),
        ({"*": "colwise", 3: "colwise"}, ConfigError, "names 3"),
        ({"0.up": "colwize"}, ConfigError, "has 'colwize' for 0.up; expected"),
        ({"0.up": ColwiseParallel}, ConfigError, "for 0.up; expected"),
        (_raises, SourceError, "tensor_parallel_plan fails: ValueError: of no use"),
        ({"": "colwise"}, ConfigError, "names '', and Sequential has no such module"),
    ],
)
def test_wrong_plan(plan: Any, kind: type[LoadError], says: str) -> None:
    """What is wrong with a plan is said at load, with what would be right."""
    with pytest.raises(kind, match=says):
        found(plan)
