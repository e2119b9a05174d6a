import json
from pathlib import Path
from typing import Any

import build
import models
import pytest
import safetensors.torch
import scenarios
import torch
from scenarios import Writer
from torch import Tensor, nn

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine import sharing
from torch_py_backend.errors import ConfigError
from torch_py_backend.loading import discovery, registry, weights
from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.loading.weights import Mapped
from torch_py_backend.signature import introspection


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.conv(x)
        return result


# With a buffer that no file has.
SOURCE = models.source(Net).replace(
    "nn.Conv2d(3, 8, 3)",
    "nn.Conv2d(3, 8, 3)\n        self.register_buffer('steps', torch.arange(5), persistent=False)",
)
NET = Net().eval()
STATE = NET.state_dict()
BYTES = sum(tensor.nbytes for tensor in STATE.values())


def _shards(folder: Path) -> None:
    names = {}
    for number, (key, tensor) in enumerate(STATE.items()):
        names[key] = f"model-{number}.safetensors"
        safetensors.torch.save_file({key: tensor}, folder / names[key])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _exported(folder: Path) -> None:
    program = torch.export.export(NET, (torch.ones(2, 3, 8, 8),))
    torch.export.save(program, folder / "model.pt2")


def measured(folder: Path, write: Writer, **options: Any) -> Mapped:
    (folder / "1").mkdir(exist_ok=True)
    if write not in (_SCRIPT, _exported):
        build.write(folder, "model.py", SOURCE)
    write(folder / "1")
    config: ModelConfig = build.config(folder, **options)
    artifact = discovery.find(config)
    loaded = registry.load(artifact, config, torch.device("cpu"))
    registry.optimize(config, loaded)
    return sharing.mapped(config, loaded)


_SAVED, _SAFE, _SCRIPT = scenarios.saved(STATE), scenarios.safe(STATE), scenarios.script(NET)
_LEGACY = scenarios.saved(STATE, _use_new_zipfile_serialization=False)
_HALF = scenarios.saved({key: tensor.half() for key, tensor in STATE.items()})


@pytest.mark.parametrize("write", [_SAVED, _SAFE, _shards, _SCRIPT, _exported])
def test_instances_share_the_weights_of_a_file(write: Writer, tmp_path: Path) -> None:
    """Unless ENABLE_WEIGHT_SHARING is false."""
    shared = measured(tmp_path, write, enable_weight_sharing=True)
    assert shared == (BYTES, BYTES)
    for kind in ("CPU", "GPU"):
        copied = measured(tmp_path, write, enable_weight_sharing=False, kind=kind)
        assert copied.shared == 0


@pytest.mark.parametrize(
    ("write", "options"),
    [
        (_LEGACY, {}),
        (_HALF, {}),
        (_SAVED, {"optimize": ("channels_last",)}),
        (_SAVED, {"optimize": ("bf16",)}),
        (_SCRIPT, {"optimize": ("freeze",)}),
        (lambda folder: None, {"weights": "none"}),
    ],
    ids=["legacy", "converted", "channels_last", "16 bits", "frozen", "none"],
)
def test_weights_that_are_not_shared(
    write: Writer, options: dict[str, Any], tmp_path: Path
) -> None:
    """They are copied, which fails the load if sharing is required."""
    frozen = "freeze" in options.get("optimize", ())
    assert frozen or measured(tmp_path, write, **options).shared < BYTES
    for kind in ("CPU", "GPU") if frozen else ("CPU", "MODEL"):
        with pytest.raises(ConfigError, match="ENABLE_WEIGHT_SHARING is true, and the weights"):
            measured(tmp_path, write, enable_weight_sharing=True, kind=kind, **options)


# torch 2.13 no longer likes them; files that hold some are there all the same.
_QUANTISED = pytest.mark.filterwarnings(
    "ignore:.*quantize:UserWarning", "ignore:TypedStorage is deprecated:UserWarning"
)
# torch 2.14 says that it checks each that it reads.
_SPARSE = pytest.mark.filterwarnings("ignore:Validating sparse tensor:UserWarning")


class Odd(nn.Module):
    """State that is not a plain tensor: a sparse, a quantized and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("sparse", torch.eye(4).to_sparse())
        self.register_buffer("small", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result


@_QUANTISED
@_SPARSE
def test_unusual_tensors(tmp_path: Path) -> None:
    """Tensors of a file that are not plain are copied, beside the shared ones, and not measured."""
    saved, module = Odd(), Odd()
    path = build.write(tmp_path, "model.pt", b"")
    torch.save(saved.state_dict(), path)
    artifact = Artifact(ArtifactType.MODULE, path.with_suffix(".py"), path)
    weights.load_into(build.config(tmp_path), artifact, module)
    assert torch.equal(module.linear.weight, saved.linear.weight)
    for name, tensor in saved.named_buffers():
        filled: Any = module.get_buffer(name)
        dense = filled.dequantize() if filled.is_quantized else filled.to_dense()
        assert torch.equal(dense, tensor.dequantize() if tensor.is_quantized else tensor.to_dense())
    size = sum(parameter.nbytes for parameter in module.parameters())
    loaded = Loaded(artifact, module, introspection.from_function(module.forward), module)
    assert sharing.mapped(build.config(tmp_path), loaded) == (size, size)
