"""Random networks from every operation that has a rule, for the soundness properties."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from certtool.models import Normalize
from certtool.models.batch_norm import PartialBatchNorm

IMAGE_LAYERS = (
    "conv", "grouped", "strided", "dilated", "reflect", "batchnorm", "partial-center", "partial-scale", "relu", "leaky",
    "maxpool", "avgpool", "adaptive", "dropout", "identity", "residual", "difference", "scaled", "concat", "normalize",
    "shift", "negate", "functional", "depthwise", "pointwise", "bottleneck",
)  # fmt: skip
VECTOR_LAYERS = (
    "linear",
    "batchnorm",
    "relu",
    "leaky",
    "dropout",
    "identity",
    "residual",
    "scaled",
    "concat",
)
CHANNELS = 4

image_plans = st.lists(st.sampled_from(IMAGE_LAYERS), min_size=1, max_size=6)
vector_plans = st.lists(st.sampled_from(VECTOR_LAYERS), min_size=0, max_size=4)


class Residual(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.branch(x) + x
        return result


class Bottleneck(Residual):
    """A block of ResNeXt with an identity shortcut: BatchNorm after each convolution, ReLU after the sum."""

    def __init__(self, c: int) -> None:
        grouped = nn.Conv2d(c, c, 3, padding=1, groups=2)
        first = (nn.Conv2d(c, c, 1), nn.BatchNorm2d(c), nn.ReLU(), grouped, nn.BatchNorm2d(c), nn.ReLU())
        super().__init__(nn.Sequential(*first, nn.Conv2d(c, c, 1), nn.BatchNorm2d(c)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class Difference(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return (x - self.branch(x)) / 2


class Scaled(nn.Module):
    """By a constant, by a tensor of both signs, with a constant on either side."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("factor", torch.linspace(-1.5, 1.5, shape[0]).view(1, *shape))

    def forward(self, x: Tensor) -> Tensor:
        return -0.5 * x * self.factor


class Shift(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1 - (x + 0.25)


class Negate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x


class Concat(nn.Module):
    """Two branches side by side, brought back to the old width."""

    def __init__(self, one: nn.Module, other: nn.Module, merge: nn.Module) -> None:
        super().__init__()
        self.one, self.other, self.merge = one, other, merge

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.merge(torch.cat([self.one(x), torch.relu(self.other(x))], dim=1))
        return result


class Functional(nn.Module):
    """The same operations as functions."""

    def forward(self, x: Tensor) -> Tensor:
        f = torch.nn.functional
        y = f.leaky_relu(f.relu(x) - 0.5, 0.2)
        return f.avg_pool2d(y, 1) + f.max_pool2d(y, 3, stride=1, padding=1)


class Head(nn.Module):
    """Flatten by reshape with a size taken from the input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), -1)


def image_layer(kind: str) -> nn.Module:
    c = CHANNELS
    conv = nn.Conv2d(c, c, 3, padding=1)
    return {
        "conv": lambda: conv,
        "grouped": lambda: nn.Conv2d(c, c, 3, padding=1, groups=2, bias=False),
        "strided": lambda: nn.Conv2d(c, c, 3, stride=2, padding=1),
        "dilated": lambda: nn.Conv2d(c, c, 3, padding=2, dilation=2),
        "reflect": lambda: nn.Conv2d(c, c, 3, padding=1, padding_mode="circular"),
        "batchnorm": lambda: nn.BatchNorm2d(c),
        "partial-center": lambda: PartialBatchNorm(c, center=True, scale=False),
        "partial-scale": lambda: PartialBatchNorm(c, center=False, scale=True),
        "relu": nn.ReLU,
        "leaky": lambda: nn.LeakyReLU(0.1),
        "maxpool": lambda: nn.MaxPool2d(3, stride=1, padding=1),
        "avgpool": lambda: nn.AvgPool2d(3, stride=1, padding=1),
        "adaptive": lambda: nn.AdaptiveAvgPool2d(4),
        "dropout": lambda: nn.Dropout(0.5),
        "identity": nn.Identity,
        "residual": lambda: Residual(nn.Sequential(conv, nn.BatchNorm2d(c))),
        "difference": lambda: Difference(nn.Sequential(conv, nn.ReLU(inplace=True))),
        "scaled": lambda: Scaled(c, 1, 1),
        "concat": lambda: Concat(conv, nn.Conv2d(c, c, 1), nn.Conv2d(2 * c, c, 1)),
        "normalize": lambda: Normalize((0.1, 0.2, 0.3, 0.4), (0.5, 1.0, 2.0, 0.25)),
        "shift": Shift,
        "negate": Negate,
        "functional": Functional,
        "depthwise": lambda: nn.Conv2d(c, c, 3, stride=2, padding=1, groups=c),
        "pointwise": lambda: nn.Sequential(nn.Conv2d(c, c, 1, stride=2), nn.BatchNorm2d(c)),
        "bottleneck": lambda: Bottleneck(c),
    }[kind]()


def vector_layer(kind: str, n: int) -> nn.Module:
    return {
        "linear": lambda: nn.Linear(n, n),
        "batchnorm": lambda: nn.BatchNorm1d(n),
        "relu": nn.ReLU,
        "leaky": lambda: nn.LeakyReLU(0.3),
        "dropout": lambda: nn.Dropout(0.5),
        "identity": nn.Identity,
        "residual": lambda: Residual(nn.Sequential(nn.Linear(n, n), nn.ReLU())),
        "scaled": lambda: Scaled(n),
        "concat": lambda: Concat(nn.Linear(n, n), nn.Linear(n, n), nn.Linear(2 * n, n)),
    }[kind]()


def network(images: Sequence[str], vectors: Sequence[str], seed: int, classes: int = 5) -> nn.Module:
    """A float64 network in evaluation mode whose BatchNorm layers have lively statistics and weights of both signs."""
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Conv2d(2, CHANNELS, 3, padding=1), *(image_layer(kind) for kind in images))
    size = body.eval()(torch.zeros(1, 2, 6, 6)).numel()
    head = nn.Sequential(nn.Linear(size, 8), *(vector_layer(kind, 8) for kind in vectors), nn.Linear(8, classes))
    return lively(nn.Sequential(body, Head() if seed % 2 else nn.Flatten(), head).double().eval())


def lively(model: nn.Module) -> nn.Module:
    """BatchNorm layers get statistics and weights of both signs, so that nothing is the identity by accident."""
    for module in model.modules():
        if hasattr(module, "running_mean"):
            module.running_mean.normal_()
            module.running_var.uniform_(0.1, 2.0)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model
