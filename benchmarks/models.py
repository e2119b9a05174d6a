"""The models that every server of a comparison serves: networks, weights, example requests.

Needs only torch: each server imports it in its own environment. The same file is `model.py` in our
repository.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

SEED = 0
# All servers form batches of at most this many requests.
MAX_BATCH_SIZE = 8
TOKENS = 128
VOCABULARY = 1000


class Add(nn.Module):
    """Two vectors [batch, 16], added: the cost is that of the server."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right


class Mlp(nn.Module):
    """Features [batch, 784] to scores [batch, 10], through two layers of 1024."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.layers(features)
        return scores


class Block(nn.Module):
    """Two 3 x 3 convolutions and a way around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class ResNet18(nn.Module):
    """Images [batch, 3, 224, 224] to scores [batch, 1000].

    After He et al., "Deep Residual Learning for Image Recognition" (2015), table 1. Parameters are
    named as in torchvision.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(Block(64, 64, 1), Block(64, 64, 1))
        self.layer2 = nn.Sequential(Block(64, 128, 2), Block(128, 128, 1))
        self.layer3 = nn.Sequential(Block(128, 256, 2), Block(256, 256, 1))
        self.layer4 = nn.Sequential(Block(256, 512, 2), Block(512, 512, 1))
        self.fc = nn.Linear(512, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.maxpool(functional.relu(self.bn1(self.conv1(image))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


class Transformer(nn.Module):
    """Token ids [batch, 128] to one embedding [batch, 256] of the text: four encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 256)
        self.positions = nn.Parameter(torch.randn(TOKENS, 256))
        layer = nn.TransformerEncoderLayer(
            256, nhead=4, dim_feedforward=1024, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=4)

    def forward(self, ids: Tensor) -> Tensor:
        encoded: Tensor = self.encoder(self.tokens(ids) + self.positions)
        return encoded.mean(1)


class Step(nn.Module):
    """A step of an LSTM: values and states [batch, 128]."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(128, 128)

    def forward(
        self, x: Tensor, hidden: Tensor | None = None, cell: Tensor | None = None
    ) -> dict[str, Tensor]:
        state = None if hidden is None or cell is None else (hidden, cell)
        hidden, cell = self.cell(x, state)
        return {"y": hidden, "new_hidden": hidden, "new_cell": cell}


@dataclass(frozen=True)
class Parameter:
    """One input or output of a request, without the batch dimension.

    Attributes:
        dtype: Triton's name of the element type.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """A model of the comparison.

    Attributes:
        kind: its class in this file.
        tolerance: how far a batch may be from the eager forward of one row, absolute and relative.
        words: its description, for a table.
    """

    kind: Callable[[], nn.Module]
    inputs: tuple[Parameter, ...]
    output: Parameter
    tolerance: float
    words: str

    def build(self) -> nn.Module:
        """Return the module in eval mode with its weights, the same in every process."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(SEED)
            return self.kind().eval()

    def example(self) -> tuple[Tensor, ...]:
        """Return one request's inputs, without the batch dimension; the same in every process."""
        generator = torch.Generator().manual_seed(SEED)
        return tuple(_sample(spec, generator) for spec in self.inputs)

    @torch.inference_mode()
    def expected(self) -> Tensor:
        """Return the output of eager PyTorch for the example."""
        answer: Tensor = self.build()(*(tensor[None] for tensor in self.example()))
        return answer[0]


def _sample(parameter: Parameter, generator: torch.Generator) -> Tensor:
    if parameter.dtype == "INT64":
        return torch.randint(VOCABULARY, parameter.dims, generator=generator)
    return torch.rand(parameter.dims, generator=generator)


MODELS = {
    "add": Model(
        kind=Add,
        inputs=(Parameter("left", "FP32", (16,)), Parameter("right", "FP32", (16,))),
        output=Parameter("sum", "FP32", (16,)),
        tolerance=0.0,
        words="two vectors of 16, added",
    ),
    "mlp": Model(
        kind=Mlp,
        inputs=(Parameter("features", "FP32", (784,)),),
        output=Parameter("scores", "FP32", (10,)),
        tolerance=1e-5,
        words="MLP 784-1024-1024-10",
    ),
    "resnet18": Model(
        kind=ResNet18,
        inputs=(Parameter("image", "FP32", (3, 224, 224)),),
        output=Parameter("scores", "FP32", (1000,)),
        tolerance=1e-4,
        words="ResNet-18, 224 x 224",
    ),
    "transformer": Model(
        kind=Transformer,
        inputs=(Parameter("ids", "INT64", (TOKENS,)),),
        output=Parameter("embedding", "FP32", (256,)),
        tolerance=1e-4,
        words="transformer encoder, 4 layers of 256, 128 tokens",
    ),
}
