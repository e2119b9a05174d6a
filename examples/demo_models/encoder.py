"""A small text encoder: four transformer layers that turn token ids into one embedding."""

import torch
from torch import Tensor, nn

VOCABULARY = 256  # bytes of UTF-8
TOKENS = 64
WIDTH = 128


class Encoder(nn.Module):
    """Token ids [batch, 64] to an embedding [batch, 128]. An id above 255 raises IndexError."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(TOKENS, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=4 * WIDTH, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers=4)

    def forward(self, ids: Tensor) -> Tensor:
        embedding: Tensor = self.layers(self.tokens(ids) + self.positions).mean(1)
        return embedding
