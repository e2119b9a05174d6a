"""The first answers after READY are those of a model that has not been called before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import fake_triton
import models
import numpy as np
import pytest
import scenarios
import torch
from safetensors.torch import save_file
from scenarios import Writer
from torch import Tensor, nn

from torch_py_backend.adapter import TritonPythonModel

pytestmark = pytest.mark.usefixtures("process", "dynamo")

_ROWS = (1, 3, 2)


class Scripted(nn.Module):
    """Keeps state in each kind of attribute that TorchScript can change."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        # The annotations of this file are text, which TorchScript does not read.
        self.seen: Any = torch.jit.Attribute([], list[Tensor])
        self.by_name: Any = torch.jit.Attribute({}, dict[str, Tensor])
        self.last: Any = torch.jit.Attribute(None, Optional[Tensor])  # noqa: UP045
        self.kept: Any
        self.total = torch.zeros(4)  # an attribute, no buffer
        self.register_buffer("kept", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x)
        last = self.last
        result = x + self.calls + len(self.seen) + len(self.by_name) + self.total + self.kept
        if last is not None:
            result = result + last
        self.by_name[str(self.calls)] = x
        self.last = x.sum()
        self.total += 1
        self.kept = self.kept + 1
        return result  # type: ignore[no-any-return]


class Nested(nn.Module):
    """Its state is in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Scripted()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)  # type: ignore[no-any-return]


class Buffers(nn.Module):
    """Writes to a buffer, replaces one, and leaves one as it is."""

    count: Tensor
    replaced: Tensor
    constant: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("replaced", torch.zeros(4), persistent=False)
        self.register_buffer("constant", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        result = x * self.constant + self.count + self.replaced
        self.count += 1
        self.replaced = self.replaced + x.sum()
        return result


class Creates(nn.Module):
    """Creates a buffer in its first call."""

    def forward(self, x: Tensor) -> Tensor:
        if created := not hasattr(self, "created"):
            self.register_buffer("created", torch.ones(4), persistent=False)
        return x + created


class Memory:
    """What an attribute of Attentive refers to."""

    def __init__(self) -> None:
        self.parts: dict[str, Tensor] = {"sum": torch.zeros(4)}


class Attentive(nn.Module):
    """Writes to a tensor in an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    def forward(self, x: Tensor) -> Tensor:
        self.memory.parts["sum"] += x.sum(0)
        return x + self.memory.parts["sum"]


class Large(nn.Module):
    """Writes into a buffer that may as well be a weight."""

    large: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("large", torch.zeros((1 << 26) + 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.large[:4] += 1
        return x + self.large[:4]


class Called:
    """A callable object that is no module."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


def build() -> Called:
    return Called()


class Negated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x


class Hooks:
    """Hooks around Negated with a state of their own."""

    def __init__(self) -> None:
        self.calls = 0

    def preprocess(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        return {"x": x + self.calls}

    def __call__(self, x: Tensor) -> Tensor:
        return -torch.stack([self.preprocess(row)["x"] for row in x])


class Recomputes(nn.Module):
    """Its attributes change in a call, but nothing that later calls depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 4, batch_first=True)
        # It computes `weight`, an attribute, before each call.
        self.head = torch.nn.utils.weight_norm(nn.Linear(4, 4))

    @functools.cached_property
    def scale(self) -> float:
        return 2.0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.cell(x[:, None])[0][:, 0]) * self.scale
        return result


_CONFIG = scenarios.config({"x": [4]}, {"y": [4]}, more="dynamic_batching { }\n")
_BUILT_AGAIN = "is built again without a warm-up"


def _weights(module: nn.Module) -> Writer:
    def write(folder: Path) -> None:
        if module.state_dict():
            save_file(module.state_dict(), folder / "model.safetensors")

    return write


def _exported(module: nn.Module) -> Writer:
    def write(folder: Path) -> None:
        rows = {"x": {0: torch.export.Dim("rows", max=64)}}
        program = torch.export.export(module.eval(), (torch.zeros(3, 4),), dynamic_shapes=rows)
        torch.export.save(program, folder / "model.pt2")

    return write


class Exported(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.count


def _python(module: nn.Module, *definitions: Any) -> Writer:
    return scenarios.both(
        scenarios.text("import functools\n" + models.source(type(module), *definitions)),
        _weights(module),
    )


def _example(folder: Path) -> None:
    save_file({"x": torch.arange(12.0).reshape(3, 4)}, folder / "example_inputs.safetensors")


def _served(folder: Path, write: Writer, config: str) -> tuple[TritonPythonModel, str]:
    """Load a model with an example beside it; return it and the log of the load."""
    scenario = scenarios.Scenario("digits", scenarios.both(write, _example), config)
    model = TritonPythonModel()
    model.initialize(fake_triton.arguments(scenario.lay_out(folder)))
    return model, "\n".join(f"{level}: {text}" for level, text in fake_triton.Logger.lines)


def _compare(model: TritonPythonModel, fresh: Callable[[Tensor], Tensor]) -> None:
    """Compare answers one after another with those of a module that was not called before."""
    for rows in _ROWS:
        x = np.full((rows, 4), rows, np.float32)
        request = fake_triton.InferenceRequest([fake_triton.Tensor("x", x)])
        (response,) = model.execute([request])
        assert response.error() is None
        (tensor,) = response.output_tensors()
        with torch.no_grad():
            expected = fresh(torch.from_numpy(x.copy()))
        np.testing.assert_allclose(tensor.as_numpy(), expected.numpy(), rtol=1e-5)


_FROZEN = '\nparameters { key: "OPTIMIZE" value { string_value: "freeze" } }\n'


@pytest.mark.parametrize(
    ("module", "write"),
    [(Buffers(), _python(Buffers())), (Exported(), _exported(Exported()))],
    ids=["module", "program"],
)
def test_buffers_are_put_back(module: nn.Module, write: Writer, tmp_path: Path) -> None:
    """The model is not built again if only buffers have changed."""
    model, log = _served(tmp_path, write, _CONFIG)
    assert _BUILT_AGAIN not in log, log
    _compare(model, module)


@pytest.mark.parametrize(
    ("fresh", "write", "config", "name"),
    [
        pytest.param(Attentive, _python(Attentive(), Memory), "", "memory", id="object"),
        pytest.param(Large, _python(Large()), "", "large", id="large buffer"),
        pytest.param(Creates, _python(Creates()), "", "created", id="new buffer"),
        pytest.param(Nested, scenarios.script(Nested()), "", "part.calls", id="TorchScript"),
        pytest.param(Nested, scenarios.script(Nested()), _FROZEN, "part.calls", id="frozen"),
        pytest.param(
            Hooks, scenarios.hooked(models.source(Negated, Hooks)), "", "hooks.calls", id="hooks"
        ),
        pytest.param(build, scenarios.python(Called, build), "", "calls", id="no module"),
    ],
)
def test_models_that_are_built_again(
    fresh: Callable[[], Any], write: Writer, config: str, name: str, tmp_path: Path
) -> None:
    """A model whose attributes have changed is built again, and a warning names them."""
    parameters = {"MODEL_CLASS": fresh.__name__}
    if fresh is build:
        parameters = {"MODEL_FACTORY": "build"}
    elif fresh in (Hooks, Nested):
        parameters = {}
    config = scenarios.config({"x": [4]}, {"y": [4]}, parameters=parameters) + config
    model, log = _served(tmp_path, write, config)
    (line,) = [line for line in log.splitlines() if _BUILT_AGAIN in line]
    assert line.startswith("warn: ")
    assert name in line
    assert log.count("the warm-up begins") == 1
    _compare(model, torch.jit.script(Nested()) if fresh is Nested else fresh())


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_models_that_recompute_attributes(tmp_path: Path) -> None:
    """Attributes with equal values, and cached properties, are no state."""
    module = Recomputes().eval()
    write = _python(module)
    config = scenarios.config({"x": [4]}, {"y": [4]}, parameters={"MODEL_CLASS": "Recomputes"})
    model, log = _served(tmp_path, write, config)
    assert _BUILT_AGAIN not in log, log
    _compare(model, module)


class Caches(nn.Module):
    """Fills a table in its first call, as some models of timm do."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "bias" not in self.tables:
            self.tables["bias"] = torch.arange(4.0)
        return x + self.tables["bias"]


@pytest.mark.parametrize(
    ("module", "write", "eager_calls"),
    [
        # Its first call with an empty table had eight rows.
        pytest.param(Caches(), _python(Caches()), 1, id="table"),
        pytest.param(Attentive(), _python(Attentive(), Memory), 0, id="object"),
    ],
)
def test_compiled_models(
    module: nn.Module, write: Writer, eager_calls: int, tmp_path: Path
) -> None:
    """A compiled model that is built again compiles nothing, and uses the graphs that it has."""
    compiles = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "aot_eager"}'}
    parameters = compiles | {"MODEL_CLASS": type(module).__name__}
    config = scenarios.config({"x": [4]}, {"y": [4]}, parameters=parameters)
    model, log = _served(tmp_path, write, config)
    assert _BUILT_AGAIN in log
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    _compare(model, module)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert model._engine.counts.eager_calls == eager_calls
