"""A recurrent network for handwritten digits that gets one row of pixels per step."""

from torch import Tensor, nn

HIDDEN = 64


class DigitsLSTM(nn.Module):
    """`row`: float32 [batch, 8], pixels 0 (paper) to 16 (ink); result: logits [batch, 10].

    `hidden` and `cell`, both [batch, 64], are the state after the previous rows: zeros at the first
    row. The returned state is passed with the next row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, HIDDEN)
        self.classifier = nn.Linear(HIDDEN, 10)

    def forward(self, row: Tensor, hidden: Tensor, cell: Tensor) -> dict[str, Tensor]:
        hidden, cell = self.cell(row / 16.0 - 0.5, (hidden, cell))  # 0..16 -> -0.5..0.5
        return {"logits": self.classifier(hidden), "new_hidden": hidden, "new_cell": cell}
