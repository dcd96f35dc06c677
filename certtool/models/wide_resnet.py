"""Wide-ResNet as certified training uses it: basic blocks with a convolutional shortcut, no pooling."""

from __future__ import annotations

from torch import Tensor, nn

from certtool.catalog import BatchNormMode, DatasetFacts, WideResnet
from certtool.models.residual import ResidualNetwork, norm, shortcut


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, channels: int, out: int, stride: int, mode: BatchNormMode) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1)
        self.bn1 = norm(mode, out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.bn2 = norm(mode, out)
        self.shortcut = shortcut(channels, out, stride, mode)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        result: Tensor = self.relu2(branch + self.shortcut(x))
        return result


class WideResNet(ResidualNetwork):
    def __init__(self, arguments: WideResnet, data: DatasetFacts) -> None:
        mode = arguments.batch_norm
        super().__init__(
            arguments,
            data,
            arguments.width * arguments.widen,
            lambda channels, out, stride: BasicBlock(channels, out, stride, mode),
        )
