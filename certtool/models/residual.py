"""What the residual networks of certified training share: three stages of blocks without pooling, then two layers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from certtool.catalog import BatchNormMode, DatasetFacts, Resnext, WideResnet
from certtool.models.batch_norm import batch_norm
from certtool.models.normalize import Normalize


def norm(mode: BatchNormMode, features: int, *, convolution: bool = True) -> nn.Module:
    return batch_norm(mode, features, convolution=convolution) or nn.Identity()


def shortcut(channels: int, out: int, stride: int, mode: BatchNormMode) -> nn.Module:
    """The other side of a block: the identity where neither width nor stride changes, else a 1x1 convolution."""
    if stride == 1 and channels == out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels, out, 1, stride), norm(mode, out))


class ResidualNetwork(nn.Module):
    """A convolution, three stages of blocks that double their filters and halve the image, a hidden layer.

    `block(channels, out, stride)` makes one; the first stage has `out` filters and the image's full size.
    """

    def __init__(
        self,
        arguments: WideResnet | Resnext,
        data: DatasetFacts,
        out: int,
        block: Callable[[int, int, int], nn.Module],
    ) -> None:
        super().__init__()
        channels, height, width = data.shape
        self.normalize = Normalize(data.mean, data.std)
        self.conv1 = nn.Conv2d(channels, arguments.width, 3, padding=1)
        self.bn1 = norm(arguments.batch_norm, arguments.width)
        self.relu1 = nn.ReLU()
        blocks: list[nn.Module] = []
        channels = arguments.width
        for stage, count in enumerate(arguments.blocks):
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(block(channels, out * 2**stage, stride))
                channels, height, width = out * 2**stage, -(-height // stride), -(-width // stride)
        self.blocks = nn.Sequential(*blocks)
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(channels * height * width, arguments.hidden)
        self.bn2 = norm(arguments.batch_norm, arguments.hidden, convolution=False)
        self.relu2 = nn.ReLU()
        self.classifier = nn.Linear(arguments.hidden, len(data.classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.bn1(self.conv1(self.normalize(x))))
        x = self.flatten(self.blocks(x))
        result: Tensor = self.classifier(self.relu2(self.bn2(self.linear(x))))
        return result
