"""OPTIMIZE."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import build
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.artifacts.discovery import ArtifactType
from torch_py_backend.errors import ConfigError
from torch_py_backend.loading import registry
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature.binding import Signature


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
    return Loaded(kind, called, Signature(()), owner)


@pytest.fixture
def module() -> Iterator[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield Convolved().eval()


def test_without_optimize(module: nn.Module) -> None:
    """Without OPTIMIZE a model is not changed."""
    assert registry.optimize(build.config(), loaded(ArtifactType.MODULE, module)) is module


@pytest.mark.parametrize("kind", [ArtifactType.MODULE, ArtifactType.TORCHSCRIPT])
def test_channels_last(module: nn.Module, kind: ArtifactType) -> None:
    """The weights of convolutions change their layout, not their values."""
    x = torch.rand(2, 3, 8, 8)
    expected = module(x)
    served: Any = torch.jit.script(module) if kind is ArtifactType.TORCHSCRIPT else module

    found = registry.optimize(build.config(optimize=("channels_last",)), loaded(kind, served))

    weight = served.convolution.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found(x), expected)


def test_channels_last_of_a_method(module: nn.Module) -> None:
    """The weights of the module are changed if one of its methods is served."""
    served = module.raw
    config = build.config(optimize=("channels_last",))

    found = registry.optimize(config, loaded(ArtifactType.MODULE, module, served))

    assert found == served
    weight: Any = module.get_parameter("convolution.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("method", [None, "raw"])
def test_torchscript_is_frozen(module: nn.Module, method: str | None) -> None:
    """A frozen graph has no parameters, and returns the same."""
    x = torch.rand(2, 3, 8, 8)
    script: Any = torch.jit.script(module)
    served = getattr(script, method) if method else script
    config = build.config(optimize=("freeze",), method=method)

    with torch.inference_mode():
        expected = served(x)
        found: Any = registry.optimize(config, loaded(ArtifactType.TORCHSCRIPT, script, served))
        torch.testing.assert_close(found(x), expected, rtol=1e-4, atol=1e-5)

    assert "GetAttr" not in str(found.graph)


@pytest.mark.parametrize(
    ("wished", "kind", "says"),
    [
        (("freeze",), ArtifactType.MODULE, "TORCH_COMPILE_OPTIONAL_PARAMETERS, too"),
        (("freeze",), ArtifactType.EXPORTED, "TORCH_COMPILE_OPTIONAL_PARAMETERS, too"),
        (("bf16",), ArtifactType.AOTI, "take OPTIMIZE out"),
    ],
)
def test_unsupported_optimizations(
    module: nn.Module, wished: tuple[str, ...], kind: ArtifactType, says: str
) -> None:
    """An optimization that does not apply to the artifact is refused."""
    with pytest.raises(ConfigError, match=says):
        registry.optimize(build.config(optimize=wished), loaded(kind, module))


def test_function_has_no_memory_format() -> None:
    """channels_last is refused for a function, which has no weights."""
    config = build.config(optimize=("channels_last",))

    with pytest.raises(ConfigError, match="A function has no weights"):
        registry.optimize(config, loaded(ArtifactType.MODULE, None, lambda x: x))


def test_compiled_module_may_be_frozen(module: nn.Module) -> None:
    """With torch.compile the module is not changed; its graph is frozen later."""
    config = build.config(optimize=("freeze",), torch_compile_optional_parameters={})

    assert registry.optimize(config, loaded(ArtifactType.MODULE, module)) is module
