"""A small recurrent network that continues a text, one character at a time."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

ALPHABET = "\n !'(),-.:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_CODES = {character: code for code, character in enumerate(ALPHABET)}


class Verse(NamedTuple):
    """The state of a stream between two characters.

    Attributes:
        hidden: the network's state after all characters so far, [width].
        last: the code of the next character to read.
        left: the number of remaining characters.
        temperature: variety of the sampling; 0 takes the most likely character.
    """

    hidden: Tensor
    last: Tensor
    left: int
    temperature: float


class Poet(nn.Module):
    """A model for continuous batching: begin() runs per request, step() for all streams.

    For training, `forward` takes codes [batch, length] and returns logits [batch, length, codes].
    """

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), 32)
        self.recurrence = nn.GRU(32, width, batch_first=True)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, codes: Tensor) -> Tensor:
        read, _ = self.recurrence(self.embedding(codes))
        return self.head(self.dropout(read))

    def begin(self, prompt: str, length: int, temperature: float = 0.5) -> Verse | None:
        """Read the prompt except its last character, which the first step reads."""
        device = self.head.weight.device
        codes = torch.tensor([_CODES.get(one, _CODES[" "]) for one in prompt or "\n"]).to(device)
        hidden = torch.zeros(1, self.recurrence.hidden_size, device=device)
        if len(codes) > 1:
            _, hidden = self.recurrence(self.embedding(codes[:-1]))
        return Verse(hidden[0], codes[-1], length, temperature) if length > 0 else None

    def step(self, verses: list[Verse]) -> list[tuple[Verse | None, list[str]]]:
        """Return the next state (None after the last character) and character of each stream."""
        hidden = torch.stack([one.hidden for one in verses])[None]
        codes = torch.stack([one.last for one in verses])[:, None]
        read, hidden = self.recurrence(self.embedding(codes), hidden)
        chosen = self.choose(self.head(read[:, 0]), [one.temperature for one in verses])
        return [
            (Verse(state, code, one.left - 1, one.temperature) if one.left > 1 else None, [text])
            for one, state, code, text in zip(
                verses, hidden[0], chosen, (ALPHABET[code] for code in chosen.tolist()), strict=True
            )
        ]

    def choose(self, logits: Tensor, temperatures: list[float]) -> Tensor:
        """Sample one code per row of logits."""
        heat = torch.tensor(temperatures, device=logits.device)
        drawn = torch.multinomial((logits / heat.clamp(min=0.01)[:, None]).softmax(1), 1)[:, 0]
        return torch.where(heat > 0, drawn, logits.argmax(1))
