"""The first answers after READY are those of a model that has not been called before."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_triton
import models
import numpy as np
import pytest
import scenarios
import torch
from instances import logged, request
from scenarios import Scenario, Writer
from torch import Tensor, nn

from torch_py_backend.adapter import TritonPythonModel
from torch_py_backend.engine import model_state

pytestmark = pytest.mark.usefixtures("process", "dynamo")


class Buffers(nn.Module):
    count: Tensor
    replaced: Tensor
    sparse: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("replaced", torch.zeros(4), persistent=False)
        self.register_buffer("sparse", torch.eye(4).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        result = x + self.count + self.replaced + self.sparse.to_dense().sum(0)
        self.count += 1
        self.sparse.mul_(2)
        self.replaced = self.replaced + x.sum()
        return result


class Part(nn.Module):
    seen: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x)
        return x + self.calls + len(self.seen)


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.total = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.total += 1
        result: Tensor = self.part(x) + self.total
        return result


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum(0)
        return x + self.total


class Recomputes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # It computes `weight`, an attribute, before each call.
        self.head = torch.nn.utils.weight_norm(nn.Linear(4, 4))
        self.shape, self.device = torch.Size([4]), torch.device("cpu")

    @functools.cached_property
    def scale(self) -> float:
        return 2.0

    def forward(self, x: Tensor) -> Tensor:
        self.shape, self.device = x.shape[1:], x.device
        result: Tensor = self.head(x) * self.scale
        return result


def _python(module: nn.Module, *definitions: Any) -> Writer:
    source = "import functools\n" + models.source(type(module), *definitions)
    return scenarios.both(scenarios.text(source), scenarios.safe(module.state_dict()))


def _served(folder: Path, write: Writer, **parameters: str) -> TritonPythonModel:
    model = TritonPythonModel()
    scenario = Scenario("digits", write, scenarios.x_to_y(4, **parameters))
    model.initialize(fake_triton.arguments(scenario.lay_out(folder)))
    return model


def _compare(model: TritonPythonModel, fresh: Callable[[Tensor], Tensor]) -> None:
    for rows in (1, 3, 2):
        (response,) = model.execute([request(rows, rows=rows)])
        assert response.error() is None
        (tensor,) = response.output_tensors()
        with torch.no_grad():
            expected = fresh(torch.full((rows, 4), float(rows)))
        np.testing.assert_allclose(tensor.as_numpy(), expected.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "scripted"), [(Buffers, False), (Recomputes, False), (Sums, True)]
)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_buffers_are_put_back_and_caches_stay(
    make: Callable[[], nn.Module], scripted: bool, tmp_path: Path
) -> None:
    module = make().eval()
    if scripted:
        module.register_buffer("total", module.__dict__.pop("total"))
    model = _served(tmp_path, scenarios.script(module) if scripted else _python(module))
    assert not logged("warn")
    _compare(model, module)


@pytest.mark.parametrize(
    ("make", "names"),
    [(Attributes, ["part.calls", "part.seen", "total"]), (Buffers, ["count", "replaced"])],
)
def test_models_with_other_state_are_built_again(
    make: Callable[[], Any], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_state, "_COPIED_BYTES", 8)  # larger buffers may as well be weights
    definitions = [Part] if make is Attributes else []
    model = _served(tmp_path, _python(make(), *definitions), MODEL_CLASS=make.__name__)
    (warning,) = logged("warn")
    assert "is built again without a warm-up" in warning
    assert all(name in warning for name in names)
    assert sum("the warm-up begins" in line for line in logged("info")) == 1
    _compare(model, make())


def test_a_compiled_model_that_is_built_again_uses_its_graphs(tmp_path: Path) -> None:
    compiles = '{"backend": "aot_eager"}'
    write = scenarios.python(Sums)
    model = _served(tmp_path, write, WEIGHTS="none", TORCH_COMPILE_OPTIONAL_PARAMETERS=compiles)
    assert "built again" in logged("warn")[0]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    _compare(model, Sums())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert model._engine.counts.eager_calls == 0
