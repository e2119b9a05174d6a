"""Networks of the sizes that people serve on GPUs, with random weights; needs only torch.

The same file is `model.py` of a served model. The sizes of layers are those of He et al. (2015),
table 1; Dosovitskiy et al. (2021), table 1; Devlin et al. (2019), section 3; Liu et al. (2022),
section 2; Touvron et al. (2023), section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional


class Bottleneck(nn.Module):
    """Three convolutions and a way around them; the 3 x 3 one has the stride (v1.5)."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels = 4 * width
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(x)))
        out = functional.relu(self.bn2(self.conv2(out)))
        return functional.relu(self.bn3(self.conv3(out)) + self.downsample(x))


class ResNet50(nn.Module):
    """Images [batch, 3, 224, 224] to scores [batch, 1000]."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        layers: list[nn.Module] = []
        channels = 64
        for stage, count in enumerate(blocks):
            width = 64 << stage
            for block in range(count):
                layers.append(Bottleneck(channels, width, 2 if stage and not block else 1))
                channels = 4 * width
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(self.maxpool(functional.relu(self.bn1(self.conv1(x)))))
        scores: Tensor = self.fc(out.mean((2, 3)))
        return scores


class Encoder(nn.Module):
    """A transformer's layer; the norms are before its parts (ViT) or after them (BERT)."""

    def __init__(self, width: int, heads: int, *, norm_first: bool) -> None:
        super().__init__()
        self.heads, self.norm_first = heads, norm_first
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return result

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_first:
            x = x + self.attention(self.norm1(x))
            added: Tensor = self.mlp(self.norm2(x))
            return x + added
        x = self.norm1(x + self.attention(x))
        result: Tensor = self.norm2(x + self.mlp(x))
        return result


class ViT(nn.Module):
    """Images [batch, 3, 224, 224] to scores [batch, 1000], in patches of 16 x 16."""

    def __init__(self, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 197, width) * 0.02)
        layers = [Encoder(width, width // 64, norm_first=True) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), patches], 1) + self.positions
        scores: Tensor = self.head(self.norm(self.layers(tokens))[:, 0])
        return scores


class Bert(nn.Module):
    """Token ids [batch, 128] to an embedding of each token [batch, 128, width]."""

    def __init__(self, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(30522, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        layers = [Encoder(width, width // 64, norm_first=False) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        encoded: Tensor = self.layers(self.norm(self.words(x) + self.positions(places)))
        return encoded


class ConvNeXtBlock(nn.Module):
    """A depthwise 7 x 7 convolution and two linear layers, and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        out = self.scale * self.mlp(out)
        return x + out.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Images [batch, 3, 224, 224] to scores [batch, 1000]; by default ConvNeXt-T."""

    def __init__(self, blocks: tuple[int, ...] = (3, 3, 9, 3), width: int = 96) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, stride=4), nn.GroupNorm(1, width)]
        for stage, count in enumerate(blocks):
            if stage:
                layers += [nn.GroupNorm(1, width), nn.Conv2d(width, 2 * width, 2, stride=2)]
                width *= 2
            layers += [ConvNeXtBlock(width) for _ in range(count)]
        self.layers = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.layers(x).mean((2, 3))))
        return scores


class LlamaLayer(nn.Module):
    """A decoder's layer for one token, with the keys and values of all positions in a buffer."""

    cache: Tensor

    def __init__(self, width: int, positions: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = (nn.Linear(width, of * width, bias=False) for of in (3, 1))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)
        self.register_buffer("cache", torch.zeros(2, 1, width // 64, positions, 64))

    def forward(self, x: Tensor, place: Tensor, angles: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).view(1, 1, 3, -1, 64).permute(2, 0, 3, 1, 4)
        query, key = (_rotated(part, angles) for part in parts[:2])
        self.cache.index_copy_(3, place, torch.stack([key, parts[2]]))
        seen = torch.arange(self.cache.shape[3], device=x.device) <= place
        keys, values = self.cache
        mixed = functional.scaled_dot_product_attention(query, keys, values, seen[None])
        x = x + self.out(mixed.reshape(1, 1, -1))
        y = self.norm2(x)
        added: Tensor = self.down(functional.silu(self.gate(y)) * self.up(y))
        return x + added


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    left, right = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1).to(x.dtype)


class Llama(nn.Module):
    """A token to a stream of the tokens after it, greedily, in bfloat16; one stream at a time.

    `mode` is torch.compile's for the step of a token; empty: it is not compiled.
    """

    def __init__(
        self, width: int = 1024, depth: int = 16, positions: int = 512, mode: str = ""
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(32000, width)
        self.layers = nn.ModuleList(LlamaLayer(width, positions) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 32000, bias=False)
        self.bfloat16()
        self.step: Callable[[Tensor, Tensor], Tensor] = self._step
        if mode:
            self.step = torch.compile(self._step, mode=mode, fullgraph=True)

    def _step(self, token: Tensor, place: Tensor) -> Tensor:
        fractions = torch.arange(32, device=token.device) / 32
        angles = place * 10000.0**-fractions
        x = self.words(token)[None]
        for layer in self.layers:
            x = layer(x, place, angles)
        scores: Tensor = self.head(self.norm(x[0]))
        return scores.argmax(-1)

    def forward(self, first: int, count: int) -> Iterator[Tensor]:
        """`count` tokens after the one with this number, each int64 [1]."""
        token = torch.tensor([first], device=self.head.weight.device)
        for number in range(count):
            place = torch.tensor([number], device=token.device)
            # A copy: the next replay of a CUDA graph overwrites its result.
            token = self.step(token, place).clone()
            yield token
