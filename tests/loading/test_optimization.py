from __future__ import annotations

from typing import Any

import build
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.loading import registry
from torch_py_backend.loading.discovery import ArtifactType
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature.arguments import Signature


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        convolved: Tensor = self.convolution(x)
        return convolved

    @torch.jit.export
    def raw(self, x: Tensor) -> Tensor:
        return self.forward(x)


def loaded(kind: ArtifactType, owner: nn.Module | None, served: Any = None) -> Loaded:
    called: Any = served or owner
    return Loaded(build.artifact(kind), called, Signature(()), owner)


@pytest.mark.parametrize("kind", [ArtifactType.MODULE, ArtifactType.TORCHSCRIPT])
def test_channels_last_changes_the_layout_of_weights(kind: ArtifactType) -> None:
    owner: Any = Convolved() if kind is ArtifactType.MODULE else torch.jit.script(Convolved())
    config = build.config(optimize=("channels_last",))
    assert registry.optimize(config, loaded(kind, owner, owner.raw)) == owner.raw
    assert owner.convolution.weight.is_contiguous(memory_format=torch.channels_last)


def test_method_of_torchscript_is_frozen() -> None:
    script: Any = torch.jit.script(Convolved().eval())
    config = build.config(optimize=("freeze",), method="raw")
    with torch.inference_mode():
        model = loaded(ArtifactType.TORCHSCRIPT, script, script.raw)
        frozen: Any = registry.optimize(config, model)
        x = torch.rand(2, 3, 8, 8)
        torch.testing.assert_close(frozen(x), script.raw(x), rtol=1e-4, atol=1e-5)
    assert "GetAttr" not in str(frozen.graph)
