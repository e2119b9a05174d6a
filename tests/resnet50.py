"""ResNet-50 with random weights: a network of realistic size for tests of the server.

After He et al., "Deep Residual Learning for Image Recognition" (2015), table 1, in the variant
known as v1.5: where a stage halves the resolution, the 3 x 3 convolution has the stride, not the
first 1 x 1. Parameters are named as in torchvision, so that its checkpoints fit.
"""

from torch import Tensor, nn
from torch.nn import functional

EXPANSION = 4  # output channels of a block for each of its inner channels
BLOCKS = (3, 4, 6, 3)  # in each of the four stages


class Bottleneck(nn.Module):
    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = width * EXPANSION
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(x)))
        out = functional.relu(self.bn2(self.conv2(out)))
        return functional.relu(self.bn3(self.conv3(out)) + self.downsample(x))


def stage(channels_in: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    """Only the first block changes the resolution and the number of channels."""
    first = Bottleneck(channels_in, width, stride)
    rest = [Bottleneck(width * EXPANSION, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(first, *rest)


class ResNet50(nn.Module):
    """Float32 images [batch, 3, 224, 224] to logits [batch, 1000]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = stage(64, 64, BLOCKS[0], stride=1)
        self.layer2 = stage(256, 128, BLOCKS[1], stride=2)
        self.layer3 = stage(512, 256, BLOCKS[2], stride=2)
        self.layer4 = stage(1024, 512, BLOCKS[3], stride=2)
        self.fc = nn.Linear(2048, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(functional.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits
