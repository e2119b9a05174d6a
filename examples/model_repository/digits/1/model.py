"""A small convolutional network for handwritten digits of 8 by 8 pixels."""

from torch import Tensor, nn


def block(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        # No bias: the batch normalisation that follows has its own.
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


class DigitsCNN(nn.Module):
    """`image`: float32 [batch, 1, 8, 8], pixels 0 (paper) to 16 (ink); result: logits [batch, 10].

    The scaling of the pixels is part of the network, so clients send them as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            block(1, 16),
            block(16, 32),
            nn.MaxPool2d(2),  # 8 x 8 -> 4 x 4
            block(32, 64),
            nn.MaxPool2d(2),  # 4 x 4 -> 2 x 2
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 2 * 2, 10))

    def forward(self, image: Tensor) -> Tensor:
        features = self.features(image / 16.0 - 0.5)  # 0..16 -> -0.5..0.5
        logits: Tensor = self.classifier(features)
        return logits
