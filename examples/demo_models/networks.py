"""The two networks of the demo, with their requests and model folders."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import safetensors.torch
import torch
from demo_models.encoder import TOKENS, Encoder
from demo_models.resnet import ResNet50
from numpy.typing import NDArray
from torch import Tensor, nn

SOURCES = Path(__file__).parent
SEED = 0
IMAGES = 4  # one for each instance
TEXTS = 8  # the encoder's max_batch_size

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Network:
    """A network that is served twice, with its requests.

    Attributes:
        name: the name of the model of this backend.
        by_hand: the name of the model written by hand.
        source: the name of its class's file, and of its config's.
        input: the name of the input.
        output: the name of the output.
        rows: an input for each request, [n, ...].
        expected: the results of eager PyTorch, one row at a time, [n, ...].
    """

    name: str
    by_hand: str
    source: str
    module: nn.Module
    input: str
    output: str
    rows: Array
    expected: Array

    @property
    def models(self) -> tuple[str, str]:
        """Return the names of both models on the server."""
        return self.name, self.by_hand

    def write(self, repository: Path) -> None:
        """Write the model folder for this backend, and the one of the model written by hand."""
        config = (SOURCES / f"{self.source}.pbtxt").read_text()
        folders = {
            self.name: (config, {f"{self.source}.py": "model.py"}),
            self.by_hand: (
                config.replace("pytorch_py", "python"),
                {f"{self.source}.py": "network.py", "by_hand.py": "model.py"},
            ),
        }
        for name, (text, files) in folders.items():
            version = repository / name / "1"
            version.mkdir(parents=True)
            (repository / name / "config.pbtxt").write_text(text)
            for source, target in files.items():
                shutil.copy(SOURCES / source, version / target)
            safetensors.torch.save_file(self.module.state_dict(), version / "model.safetensors")


def build_resnet() -> Network:
    """Return a ResNet-50 with random weights."""
    torch.manual_seed(SEED)
    images = torch.rand(IMAGES, 3, 224, 224)
    module = ResNet50()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0
    with torch.no_grad():
        # Batch norm takes the statistics of these images. Without them all images have the same
        # scores, and a wrong answer would not be detected.
        module.train()(images)
    return _network("resnet50", "resnet", module, ("image", "scores"), images)


def build_encoder(texts: Path) -> Network:
    """Return the encoder with random weights; its requests are the first lines of a file."""
    torch.manual_seed(SEED)
    lines = [line.encode() for line in texts.read_text(encoding="utf-8").splitlines() if line]
    ids = torch.tensor([list(line[:TOKENS].ljust(TOKENS)) for line in lines[:TEXTS]])
    return _network("encoder", "encoder", Encoder(), ("ids", "embedding"), ids)


@torch.inference_mode()
def _network(
    name: str, source: str, module: nn.Module, names: tuple[str, str], rows: Tensor
) -> Network:
    module.eval()
    expected = torch.cat([module(row[None]) for row in rows])
    return Network(name, f"{name}_by_hand", source, module, *names, rows.numpy(), expected.numpy())
