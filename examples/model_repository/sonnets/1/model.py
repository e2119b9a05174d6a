"""A small recurrent network that goes on with a text, one character at a time."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

ALPHABET = "\n !'(),-.:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_CODES = {character: code for code, character in enumerate(ALPHABET)}


class Verse(NamedTuple):
    """What a stream remembers from one character to the next.

    Attributes:
        hidden: the network's state after all that was read, [width].
        last: the code of the next character to be read.
        left: how many characters are still to come.
        temperature: how daring the choice of them is; 0 takes the likeliest.
    """

    hidden: Tensor
    last: Tensor
    left: int
    temperature: float


class Poet(nn.Module):
    """Written for continuous batching: begin() is called for each request, step() for all streams.

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
        """Read the prompt: all of it but the last character, which the first step will read."""
        device = self.head.weight.device
        codes = torch.tensor([_CODES.get(one, _CODES[" "]) for one in prompt or "\n"]).to(device)
        hidden = torch.zeros(1, self.recurrence.hidden_size, device=device)
        if len(codes) > 1:
            _, hidden = self.recurrence(self.embedding(codes[:-1]))
        return Verse(hidden[0], codes[-1], length, temperature) if length > 0 else None

    def step(self, verses: list[Verse]) -> list[tuple[Verse | None, list[str]]]:
        """The next character of every stream, and the state after it; None after the last one."""
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
        """A code for each row of logits."""
        heat = torch.tensor(temperatures, device=logits.device)
        drawn = torch.multinomial((logits / heat.clamp(min=0.01)[:, None]).softmax(1), 1)[:, 0]
        return torch.where(heat > 0, drawn, logits.argmax(1))
