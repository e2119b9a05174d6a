"""ResNet-50, after He et al., "Deep Residual Learning for Image Recognition" (2015), table 1."""

from torch import Tensor, nn
from torch.nn import functional


class Bottleneck(nn.Module):
    """Three convolutions (1 x 1, 3 x 3, 1 x 1) and a shortcut around them."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels = 4 * width
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(x)))
        out = functional.relu(self.bn2(self.conv2(out)))
        return functional.relu(self.bn3(self.conv3(out)) + self.shortcut(x))


class ResNet50(nn.Module):
    """Images [batch, 3, 224, 224] to scores [batch, 1000]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        blocks: list[nn.Module] = []
        channels = 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(count):
                blocks.append(Bottleneck(channels, width, 1 if number else stride))
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(image)))
        x = self.blocks(functional.max_pool2d(x, 3, stride=2, padding=1))
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores
