import logging
from collections.abc import Iterator
from typing import Any

import build
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend import compilation
from torch_py_backend.artifacts import Kind
from torch_py_backend.config import ModelConfig
from torch_py_backend.errors import LoadError, OptionError


class Branching(nn.Module):
    """Its control flow depends on data: a graph cannot hold it whole."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 3


@pytest.fixture(autouse=True)
def recompile_limit() -> Iterator[int]:
    """Torch's limit, put back after a test that raised it."""
    limit = torch._dynamo.config.recompile_limit
    yield limit
    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.reset()


def config(parameters: dict[str, Any] | None, **overrides: Any) -> ModelConfig:
    return build.config(torch_compile_optional_parameters=parameters, **overrides)


@pytest.mark.parametrize(
    ("parameters", "requested"),
    [
        pytest.param(None, False, id="unset"),
        pytest.param({}, True, id="defaults"),
        pytest.param({"mode": "default"}, True, id="mode"),
        pytest.param({"disable": True}, False, id="disabled"),
        pytest.param({"disable": False}, True, id="not disabled"),
    ],
)
def test_compilation_is_asked_for_by_the_parameter(
    parameters: dict[str, Any] | None, requested: bool
) -> None:
    """The parameter's presence asks for torch.compile, and its `disable` takes that back."""
    assert compilation.requested(config(parameters)) is requested


@pytest.mark.parametrize("parameters", [None, {"disable": True}], ids=["unset", "disabled"])
def test_eager_model_is_left_alone(parameters: dict[str, Any] | None) -> None:
    """Without a wish for it the module is served as it is."""
    module = Scaled()

    assert compilation.apply(config(parameters), Kind.MODULE, module) is module


@pytest.mark.parametrize("module", [Scaled(), lambda x: x * 3], ids=["module", "function"])
def test_model_is_compiled(module: Any) -> None:
    """Modules and functions are compiled, and give what they gave before."""
    x = torch.ones(2)
    torch._dynamo.utils.counters.clear()

    compiled = compilation.apply(config({"backend": "eager"}), Kind.MODULE, module)

    assert torch.equal(compiled(x), module(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_parameters_reach_torch_compile() -> None:
    """A graph break is an error when the config asks for a full graph, and only then."""
    whole = config({"backend": "eager", "fullgraph": True})
    parts = config({"backend": "eager"})

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compilation.apply(whole, Kind.MODULE, Branching())(torch.ones(1))
    torch._dynamo.reset()

    result = compilation.apply(parts, Kind.MODULE, Branching())(torch.ones(1))
    assert torch.equal(result, torch.full((1,), 2.0))


def test_torchscript_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    """TorchScript is served as it is, and one line says that the parameter has no effect."""
    module = torch.jit.script(Scaled())

    assert compilation.apply(config({}), Kind.TORCHSCRIPT, module) is module

    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "'digits'" in record.getMessage()
    assert "TORCH_COMPILE_OPTIONAL_PARAMETERS has no effect" in record.getMessage()


@pytest.mark.parametrize("parameters", [None, {"disable": True}], ids=["unset", "disabled"])
def test_eager_torchscript_is_not_warned_about(
    parameters: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """TorchScript without a wish for compilation leaves no line in the log."""
    compilation.apply(config(parameters), Kind.TORCHSCRIPT, torch.jit.script(Scaled()))

    assert caplog.messages == []


@pytest.mark.parametrize(
    ("dynamic", "rows", "limit"),
    [
        pytest.param(False, 32, 33, id="static"),
        pytest.param(False, 2, None, id="static, few rows"),
        pytest.param(None, 32, None, id="automatic"),
        pytest.param(True, 32, None, id="dynamic"),
    ],
)
def test_every_row_count_may_have_its_graph(
    dynamic: bool | None, rows: int, limit: int | None, recompile_limit: int
) -> None:
    """With static shapes torch's limit is raised to the number of batch sizes, never lowered."""
    parameters = {"backend": "eager", "dynamic": dynamic}

    compilation.apply(config(parameters, max_batch_size=rows), Kind.MODULE, Scaled())

    assert torch._dynamo.config.recompile_limit == (limit or recompile_limit)


def test_static_model_is_compiled_for_each_row_count() -> None:
    """With static shapes no batch size up to the largest falls back to eager."""
    parameters = {"backend": "eager", "dynamic": False, "fullgraph": True}
    compiled = compilation.apply(config(parameters, max_batch_size=12), Kind.MODULE, Scaled())
    torch._dynamo.utils.counters.clear()

    for rows in range(1, 13):
        compiled(torch.ones(rows, 4))

    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 12


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        pytest.param({"backend": "nope"}, "nope", id="backend"),
        pytest.param({"mode": "fastest"}, "fastest", id="mode"),
        pytest.param({"options": {"nope": 1}}, "nope", id="options"),
        pytest.param({"mode": "max-autotune", "options": {"debug": True}}, "options", id="both"),
        pytest.param({"dynamic": "yes"}, "bool", id="dynamic"),
    ],
)
def test_what_torch_compile_refuses_fails_the_load(parameters: dict[str, Any], said: str) -> None:
    """A value that torch.compile does not know is told with the model and the parameter."""
    with pytest.raises(OptionError) as raised:
        compilation.apply(config(parameters), Kind.MODULE, Scaled())

    assert isinstance(raised.value, LoadError)
    assert "'digits': the parameter TORCH_COMPILE_OPTIONAL_PARAMETERS is" in str(raised.value)
    assert said in str(raised.value)
