"""What a user brings: a module, in a file of its own."""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.classes = nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.classes(self.layers(image))
        return scores


def trained() -> Net:
    """Return the module with the same weights in each process."""
    torch.manual_seed(0)
    return Net().eval()
