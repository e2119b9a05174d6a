"""Modules and hooks to save. Not in the file of the tests: a class is saved with all it imports."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Tied(nn.Module):
    """Has one weight in two layers, a view of it in a buffer, and arguments by keyword only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("view", self.embedding.weight.data[:2])

    def forward(self, *, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.head(self.embedding(ids)), ids.sum(1)


class Nested(nn.Module):
    def forward(
        self, x: Tensor, extra: dict[str, Tensor], pair: tuple[Tensor, Tensor]
    ) -> dict[str, Tensor]:
        return {"y": x + extra["bias"] * pair[0] - pair[1]}


class Keys(nn.Module):
    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"double": batch["a"] * 2, "first": batch["b"][:, :1]}


class Total(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


class Running(nn.Module):
    """The first row of its batches does not depend on others, as in a recurrent module."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(0)


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        # One value of two answers may be close by chance, but not all of a row.
        return x + torch.tensor([[10 ** random.uniform(0, 30) for _ in row] for row in x])


class Branches(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor if x.sum() > 0 else x


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sub_(0.5)


class Bytes:
    """Hooks that take a file of four bytes."""

    def preprocess(self, data: bytes) -> Tensor:
        if data[0]:
            raise ValueError("not such a file")
        return torch.tensor(list(data)) / 255


class Labels:
    """Hooks that read a tokenizer in their folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def preprocess_batch(self, text: list[str]) -> Any:
        return self.tokenizer(text, padding=True, return_tensors="pt")

    def postprocess(self, result: Any) -> dict[str, Any]:
        shares = result.logits.softmax(0)
        return {"label": ["bad", "good"][int(shares.argmax())], "share": shares.max()}
