"""OPTIMIZE: frozen graphs, memory formats and types of weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import build
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.artifacts.discovery import ArtifactType
from torch_py_backend.errors import ConfigError, PlatformError
from torch_py_backend.loading import registry
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature.arguments import Signature


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.convolution(x))
        return normed.relu()

    @torch.jit.export
    def raw(self, x: Tensor) -> Tensor:
        convolved: Tensor = self.convolution(x)
        return convolved


def loaded(kind: ArtifactType, owner: nn.Module | None, served: Any = None) -> Loaded:
    called: Any = served or owner
    return Loaded(build.artifact(kind), called, Signature(()), owner)


@pytest.fixture
def module() -> Iterator[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield Convolved().eval()


@pytest.mark.parametrize(
    "options", [{}, {"optimize": ("freeze",), "torch_compile_optional_parameters": {}}]
)
def test_module_is_not_changed(module: nn.Module, options: dict[str, Any]) -> None:
    """Without OPTIMIZE a model is not changed; with torch.compile its graph is frozen later."""
    assert registry.optimize(build.config(**options), loaded(ArtifactType.MODULE, module)) is module


@pytest.mark.parametrize("kind", [ArtifactType.MODULE, ArtifactType.TORCHSCRIPT])
def test_channels_last(module: nn.Module, kind: ArtifactType) -> None:
    """The weights of convolutions change their layout, not their values, also for a method."""
    x = torch.rand(2, 3, 8, 8)
    expected = module(x)
    owner: Any = torch.jit.script(module) if kind is ArtifactType.TORCHSCRIPT else module
    config = build.config(optimize=("channels_last",))
    assert registry.optimize(config, loaded(kind, owner, owner.raw)) == owner.raw
    optimized = registry.optimize(config, loaded(kind, owner))
    assert owner.convolution.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(optimized(x), expected)


@pytest.mark.parametrize("optimize", [("int8_weights",), ("bf16_weights", "fp8_weights")])
def test_quantized_weights(optimize: tuple[str, ...]) -> None:
    """Linear layers have weights of 8 bits, and nearly the same results."""
    layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = layers(x)
    config = build.config(optimize=optimize)
    registry.optimize(config, loaded(ArtifactType.MODULE, layers))
    with torch.inference_mode():
        result = layers(x.to(next(layers.parameters()).dtype)).float()
    torch.testing.assert_close(result, expected, rtol=0.1, atol=0.05)
    assert not torch.equal(result, expected)
    stored = sum(
        part.nbytes for part in layers[0].weight.__dict__.values() if torch.is_tensor(part)
    )
    assert stored < 2 * 64 * 64


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is missing, or that does not fit torch, is named."""
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    config = build.config(optimize=("int8_weights",))
    with pytest.raises(PlatformError, match=r"torchao cannot be imported.*Install it"):
        registry.optimize(config, loaded(ArtifactType.MODULE, nn.Linear(4, 4)))


@pytest.mark.parametrize("method", [None, "raw"])
def test_torchscript_is_frozen(module: nn.Module, method: str | None) -> None:
    """A frozen graph has no parameters, and returns the same."""
    x = torch.rand(2, 3, 8, 8)
    script: Any = torch.jit.script(module)
    served = getattr(script, method) if method else script
    config = build.config(optimize=("freeze",), method=method)
    with torch.inference_mode():
        expected = served(x)
        frozen: Any = registry.optimize(config, loaded(ArtifactType.TORCHSCRIPT, script, served))
        torch.testing.assert_close(frozen(x), expected, rtol=1e-4, atol=1e-5)
    assert "GetAttr" not in str(frozen.graph)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("freeze", ArtifactType.EXPORTED, "TORCH_COMPILE_OPTIONAL_PARAMETERS, too"),
        ("bf16", ArtifactType.AOTI, "remove OPTIMIZE"),
        ("channels_last", ArtifactType.MODULE, "A function has no weights"),
        ("fp16_weights", ArtifactType.MODULE, "A function has no weights"),
        ("int8_weights", ArtifactType.EXPORTED, "Its code fixes the types"),
        ("fp8_weights", ArtifactType.TORCHSCRIPT, "torchao quantizes Python modules"),
        ("bf16_weights", ArtifactType.EXPORTED, "Its code fixes the types"),
    ],
)
def test_unsupported_optimizations(name: str, kind: ArtifactType, message: str) -> None:
    """An optimization that does not apply to the artifact is refused."""
    with pytest.raises(ConfigError, match=message):
        registry.optimize(build.config(optimize=(name,)), loaded(kind, None, lambda x: x))
