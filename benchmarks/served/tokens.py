"""A network that makes tokens, greedily: as a generator, and with begin() and step()."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

_TOKENS = 256


class State(NamedTuple):
    """What a stream keeps between two tokens: hidden is [width]."""

    hidden: Tensor
    token: Tensor
    left: int


class Apart(nn.Module):
    """Each stream makes its own steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(_TOKENS, width)
        self.recurrence = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, _TOKENS)

    def forward(self, first: int, count: int) -> Iterator[Tensor]:
        """`count` tokens after the one with this number, each int32 [1]."""
        token, hidden = torch.tensor([first]), None
        for _ in range(count):
            read, hidden = self.recurrence(self.embedding(token)[:, None], hidden)
            token = self.head(read[:, 0]).argmax(1)
            yield token.int()


class Together(Apart):
    """The streams share their steps."""

    def begin(self, first: int, count: int) -> State:
        return State(torch.zeros(self.recurrence.hidden_size), torch.tensor(first), count)

    def step(self, states: list[State]) -> list[tuple[State | None, Tensor]]:
        hidden = torch.stack([one.hidden for one in states])[None]
        tokens = torch.stack([one.token for one in states])[:, None]
        read, hidden = self.recurrence(self.embedding(tokens), hidden)
        chosen = self.head(read[:, 0]).argmax(1)
        return [
            (State(kept, token, one.left - 1) if one.left > 1 else None, sent)
            for one, kept, token, sent in zip(
                states, hidden[0], chosen, chosen.int()[:, None], strict=True
            )
        ]
