"""A recurrent network that reads handwritten digits a row of pixels at a time."""

from torch import Tensor, nn

HIDDEN = 64


class DigitsLSTM(nn.Module):
    """`row`: float32 [batch, 8], pixels 0 (paper) to 16 (ink); logits [batch, 10] of what was read.

    `hidden` and `cell`, both [batch, 64], are what it remembers of the rows before: zeros at the
    first row. What it returns of them goes with the next one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, HIDDEN)
        self.classifier = nn.Linear(HIDDEN, 10)

    def forward(self, row: Tensor, hidden: Tensor, cell: Tensor) -> dict[str, Tensor]:
        hidden, cell = self.cell(row / 16.0 - 0.5, (hidden, cell))  # 0..16 -> -0.5..0.5
        return {"logits": self.classifier(hidden), "new_hidden": hidden, "new_cell": cell}
