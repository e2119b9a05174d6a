"""Sum and difference of two vectors: the smallest model that has two inputs and two outputs."""

from torch import Tensor, nn


class AddSub(nn.Module):
    """Has no weights, so this file alone is the whole model."""

    # Inputs reach forward() by name, so the arguments are spelled as in config.pbtxt.
    def forward(self, INPUT0: Tensor, INPUT1: Tensor) -> tuple[Tensor, Tensor]:
        return INPUT0 + INPUT1, INPUT0 - INPUT1
