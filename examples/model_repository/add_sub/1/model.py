"""Sum and difference of two vectors: a minimal model with two inputs and two outputs."""

from torch import Tensor, nn


class AddSub(nn.Module):
    """A module without weights; this file is the whole model."""

    # Inputs are bound by name, so the arguments are named as in config.pbtxt.
    def forward(self, INPUT0: Tensor, INPUT1: Tensor) -> tuple[Tensor, Tensor]:
        return INPUT0 + INPUT1, INPUT0 - INPUT1
