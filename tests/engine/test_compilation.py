import dataclasses
import logging
from typing import Any

import build
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine import compilation
from torch_py_backend.errors import ConfigError, LoadError
from torch_py_backend.loading.discovery import ArtifactType
from torch_py_backend.pipeline.run import Counts

pytestmark = pytest.mark.usefixtures("dynamo")


class Branching(nn.Module):
    """Its control flow depends on data, so that a full graph is impossible."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 3


def config(parameters: dict[str, Any] | None, **overrides: Any) -> ModelConfig:
    return build.config(torch_compile_optional_parameters=parameters, **overrides)


def compiled(settings: ModelConfig, module: Any) -> compilation.Compiled:
    """Compile a module."""
    model = compilation.apply(settings, ArtifactType.MODULE, module, Counts())
    assert model is not None
    return model


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines of this package."""
    return [record.getMessage() for record in caplog.records if record.name == compilation.__name__]


def graphs() -> int:
    """Return the number of graphs since the counters were reset."""
    count: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return count


def test_model_without_compilation(caplog: pytest.LogCaptureFixture) -> None:
    """Without the parameter the module is not compiled; TorchScript is not, with a warning."""
    for parameters in (None, {"disable": True}):
        settings = config(parameters)
        assert compilation.apply(settings, ArtifactType.MODULE, Scaled(), Counts()) is None
    assert not caplog.records
    module = torch.jit.script(Scaled())
    assert compilation.apply(config({}), ArtifactType.TORCHSCRIPT, module, Counts()) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "TORCH_COMPILE_OPTIONAL_PARAMETERS has no effect" in record.getMessage()


def test_parameters_reach_torch_compile() -> None:
    """A graph break is an error only with fullgraph."""
    whole = config({"backend": "eager", "fullgraph": True})
    parts = config({"backend": "eager"})
    with pytest.raises(LoadError, match=r"torch\.compile failed"):
        compiled(whole, Branching())(torch.ones(1))
    torch._dynamo.reset()
    result = compiled(parts, Branching())(torch.ones(1))
    assert torch.equal(result, torch.full((1,), 2.0))


def test_recompile_limit() -> None:
    """With static shapes torch's limit is raised to the number of batch sizes, never lowered."""
    limit = torch._dynamo.config.recompile_limit
    for dynamic, rows, expected in ((None, 32, limit), (False, 32, 33), (False, 8, 33)):
        settings = config({"backend": "eager", "dynamic": dynamic}, max_batch_size=rows)
        compiled(settings, Scaled())
        assert torch._dynamo.config.recompile_limit == expected


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        pytest.param({"backend": "nope"}, "nope", id="backend"),
        pytest.param({"dynamic": "yes"}, "bool", id="dynamic"),
    ],
)
def test_wrong_parameters(parameters: dict[str, Any], message: str) -> None:
    """A value that torch.compile refuses fails the load."""
    with pytest.raises(ConfigError) as raised:
        compilation.apply(config(parameters), ArtifactType.MODULE, Scaled(), Counts())
    assert isinstance(raised.value, LoadError)
    assert "refuses TORCH_COMPILE_OPTIONAL_PARAMETERS" in str(raised.value)
    assert message in str(raised.value)


# --- sealed: what a request meets ------------------------------------------------------------


def test_sealed_model_compiles_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A shape outside the warm-up runs eagerly, and is logged once."""
    counts = Counts()
    model = compilation.apply(config({"backend": "eager"}), ArtifactType.MODULE, Scaled(), counts)
    assert model is not None
    model(torch.ones(8, 4))
    sealed = model.seal()
    torch._dynamo.utils.counters.clear()
    for shape in ((8, 4), (3, 4), (1, 4), (2, 5), (2, 4, 4), (1, 4)):
        assert torch.equal(sealed(torch.ones(shape)), torch.full(shape, 3.0))
    assert graphs() == 0
    assert counts.eager_calls == 4
    (message,) = ours(caplog)
    assert "[[1, 4]] were not met in the warm-up" in message


class Broken(nn.Module):
    """Writes to its input and a buffer before a graph break, and after it."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x += 1
        torch._dynamo.graph_break()
        self.calls += 1
        return x * 3 if x.shape[0] > 5 else x + 2  # one graph has a guard on the rows


@pytest.mark.parametrize("dynamic", [None, False], ids=["automatic", "static"])
def test_model_with_graph_breaks_is_run_once(dynamic: bool | None) -> None:
    """A call without a graph runs no part of the model twice."""
    module = Broken()
    model = compiled(config({"backend": "eager", "dynamic": dynamic}), module)
    model(torch.zeros(8, 4))
    sealed = model.seal()
    torch._dynamo.utils.counters.clear()
    for shape in ((8, 4), (3, 4), (1, 4), (2, 5), (2, 4, 4)):
        calls, x = module.calls.item(), torch.zeros(shape)
        assert torch.equal(sealed(x).flatten(), torch.full((x.numel(),), 3.0))
        assert torch.equal(x, torch.ones(shape))
        assert module.calls.item() == calls + 2
    assert graphs() == 0


def test_error_of_a_sealed_model() -> None:
    """An error of the model does not run it again."""
    calls: list[Tensor] = []

    def refuse(x: Tensor) -> Tensor:
        calls.append(x)
        if x.sum() < 0:
            raise RuntimeError("negative")
        return x

    apart = torch.compiler.disable(refuse)
    model = compiled(config({"backend": "eager"}), lambda x: apart(x * 2))
    model(torch.ones(2, 4))
    sealed = model.seal()
    calls.clear()
    with pytest.raises(RuntimeError, match="negative"):
        sealed(-torch.ones(2, 4))
    assert len(calls) == 1


def broken(graph: Any, samples: Any) -> Any:
    raise OSError("no working compiler")


def test_a_failed_compilation_fails_the_load() -> None:
    """A model that cannot be compiled fails the load with the compiler's error."""
    with pytest.raises(LoadError, match=r"torch\.compile failed: .*no working compiler"):
        compiled(config({"backend": broken}), Scaled())(torch.ones(2, 4))


def test_error_of_the_model_is_its_own() -> None:
    """An error of a model that fails eagerly, too, is raised as it is."""

    def forward(x: Tensor) -> Tensor:
        return x @ torch.ones(3, 3)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        compiled(config({"backend": "eager"}), forward)(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("arguments", "kind", "captures"),
    [
        ({"backend": "cudagraphs"}, "GPU", True),
        ({"mode": "reduce-overhead"}, "GPU", True),
        ({"mode": "max-autotune"}, "MODEL", True),
        ({"options": {"triton.cudagraphs": True}}, "GPU", True),
        ({"mode": "reduce-overhead"}, "CPU", False),
        ({"mode": "max-autotune-no-cudagraphs"}, "GPU", False),
        ({}, "GPU", False),
    ],
)
def test_each_call_begins_a_step_of_cuda_graphs(
    arguments: dict[str, Any], kind: str, captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch may write over the outputs of a CUDA graph when the next step begins."""
    steps: list[bool] = []
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: steps.append(True))
    settings = dataclasses.replace(config(arguments), kind=kind)
    model = compiled(settings, Scaled())
    model(torch.ones(2, 4))
    sealed = model.seal()
    for _ in range(2):
        sealed(torch.ones(2, 4))
    assert len(steps) == (3 if captures else 0)
