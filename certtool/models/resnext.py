"""ResNeXt as certified training uses it: bottleneck blocks around a grouped convolution, no pooling."""

from __future__ import annotations

from torch import Tensor, nn

from certtool.catalog import BatchNormMode, DatasetFacts, Resnext
from certtool.models.residual import ResidualNetwork, norm, shortcut

EXPANSION = 2  # a block gives twice as many filters as its grouped convolution has


class Bottleneck(nn.Module):
    """1x1, grouped 3x3 and 1x1 convolutions beside a shortcut; the middle one has the stride."""

    def __init__(self, channels: int, out: int, stride: int, groups: int, mode: BatchNormMode) -> None:
        super().__init__()
        inner = out // EXPANSION
        self.conv1 = nn.Conv2d(channels, inner, 1)
        self.bn1 = norm(mode, inner)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, groups=groups)
        self.bn2 = norm(mode, inner)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(inner, out, 1)
        self.bn3 = norm(mode, out)
        self.shortcut = shortcut(channels, out, stride, mode)
        self.relu3 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.relu1(self.bn1(self.conv1(x)))
        branch = self.bn3(self.conv3(self.relu2(self.bn2(self.conv2(branch)))))
        result: Tensor = self.relu3(branch + self.shortcut(x))
        return result


class ResNeXt(ResidualNetwork):
    def __init__(self, arguments: Resnext, data: DatasetFacts) -> None:
        groups, mode = arguments.cardinality, arguments.batch_norm
        super().__init__(
            arguments,
            data,
            EXPANSION * groups * arguments.bottleneck,
            lambda channels, out, stride: Bottleneck(channels, out, stride, groups, mode),
        )
