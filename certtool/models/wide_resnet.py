"""Wide-ResNet as certified training uses it: basic blocks with a convolutional shortcut, no pooling."""

from __future__ import annotations

from torch import Tensor, nn

from certtool.catalog import BatchNormMode, DatasetFacts, WideResnet
from certtool.models.batch_norm import batch_norm
from certtool.models.normalize import Normalize


def _norm(mode: BatchNormMode, features: int, *, convolution: bool = True) -> nn.Module:
    return batch_norm(mode, features, convolution=convolution) or nn.Identity()


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut, which is the identity where neither width nor stride changes."""

    def __init__(self, channels: int, out: int, stride: int, mode: BatchNormMode) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1)
        self.bn1 = _norm(mode, out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.bn2 = _norm(mode, out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride), _norm(mode, out))
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        result: Tensor = self.relu2(branch + self.shortcut(x))
        return result


class WideResNet(nn.Module):
    def __init__(self, arguments: WideResnet, data: DatasetFacts) -> None:
        super().__init__()
        channels, height, width = data.shape
        self.normalize = Normalize(data.mean, data.std)
        self.conv1 = nn.Conv2d(channels, arguments.width, 3, padding=1)
        self.bn1 = _norm(arguments.batch_norm, arguments.width)
        self.relu1 = nn.ReLU()
        blocks: list[nn.Module] = []
        channels = arguments.width
        for stage, count in enumerate(arguments.blocks):
            out = arguments.width * arguments.widen * 2**stage
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(BasicBlock(channels, out, stride, arguments.batch_norm))
                channels, height, width = out, -(-height // stride), -(-width // stride)
        self.blocks = nn.Sequential(*blocks)
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(channels * height * width, arguments.hidden)
        self.bn2 = _norm(arguments.batch_norm, arguments.hidden, convolution=False)
        self.relu2 = nn.ReLU()
        self.classifier = nn.Linear(arguments.hidden, len(data.classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.bn1(self.conv1(self.normalize(x))))
        x = self.flatten(self.blocks(x))
        result: Tensor = self.classifier(self.relu2(self.bn2(self.linear(x))))
        return result
