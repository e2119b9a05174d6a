"""Compiled models before and after they are sealed; the rows that they are called with: warm-up."""

from typing import Any

import build
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.engine import compilation
from torch_py_backend.errors import ConfigError, LoadError
from torch_py_backend.pipeline.run import Counts

pytestmark = pytest.mark.usefixtures("dynamo")


def triple(x: Tensor) -> Tensor:
    return x * 3


def compiled(parameters: dict[str, Any], module: Any, kind: str = "CPU") -> compilation.Compiled:
    config = build.config(torch_compile_optional_parameters=parameters, kind=kind)
    return compilation.Compiled(config, module)


@pytest.mark.parametrize("parameters", [{"backend": "nope"}, {"Mode": "x"}])
def test_values_that_torch_compile_refuses_fail_the_load(parameters: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"OPTIONAL_PARAMETERS: .*(nope|Mode)"):
        compiled(parameters, triple)


def test_a_graph_break_fails_the_load_only_with_fullgraph() -> None:
    def branching(x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(LoadError, match=r"torch\.compile failed"):
        compiled({"backend": "eager", "fullgraph": True}, branching)(torch.ones(1))
    torch._dynamo.reset()
    assert compiled({"backend": "eager"}, branching)(torch.ones(1)) == 2


def test_an_error_of_the_compiler_fails_the_load_with_what_to_install() -> None:
    def broken(*_: object) -> Any:
        raise FileNotFoundError("no-such-compiler")

    with pytest.raises(LoadError, match=r"failed: FileNotFoundError: no-such.* such as g\+\+"):
        compiled({"backend": broken}, triple)(torch.ones(1))


def test_an_error_of_the_model_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        compiled({"backend": "eager"}, lambda x: x @ torch.ones(3, 3))(torch.ones(2, 4))


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
    model = compiled(arguments, triple, kind)
    for call in (model, model.seal(Counts())):
        call(torch.ones(2, 4))
    assert len(steps) == (2 if captures else 0)


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


def test_no_part_of_a_model_with_graph_breaks_runs_twice() -> None:
    module = Broken()
    model = compiled({"backend": "eager"}, module)
    model(torch.zeros(8, 4))
    sealed = model.seal(Counts())
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for shape in ((8, 4), (3, 4), (1, 4), (2, 5), (2, 4, 4)):
        calls, x = module.calls.item(), torch.zeros(shape)
        assert torch.equal(sealed(x).flatten(), torch.full((x.numel(),), 3.0))
        assert torch.equal(x, torch.ones(shape))
        assert module.calls.item() == calls + 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_a_sealed_model_that_fails_is_not_run_again() -> None:
    calls: list[Tensor] = []

    def refuse(x: Tensor) -> Tensor:
        calls.append(x)
        if x.sum() < 0:
            raise RuntimeError("negative")
        return x

    apart = torch.compiler.disable(refuse)
    model = compiled({"backend": "eager"}, lambda x: apart(x * 2))
    model(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="negative"):
        model.seal(Counts())(-torch.ones(2, 4))
    assert len(calls) == 2
