"""CNN-7: five convolutions and two linear layers, BatchNorm after each hidden one."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from certtool.catalog import Cnn7, DatasetFacts
from certtool.models.batch_norm import batch_norm
from certtool.models.normalize import Normalize


def cnn7(arguments: Cnn7, data: DatasetFacts) -> nn.Module:
    channels, height, width = data.shape
    filters = [arguments.width, arguments.width, *[2 * arguments.width] * 3]
    strides = [1, 1, 2, 1, 2 if arguments.downsample == 2 else 1]
    layers: OrderedDict[str, nn.Module] = OrderedDict(normalize=Normalize(data.mean, data.std))
    for number, (out, stride) in enumerate(zip(filters, strides, strict=True), start=1):
        layers[f"conv{number}"] = nn.Conv2d(channels, out, 3, stride, padding=1)
        _add(layers, number, batch_norm(arguments.batch_norm, out, convolution=True))
        channels, height, width = out, -(-height // stride), -(-width // stride)
    layers["flatten"] = nn.Flatten()
    layers["linear6"] = nn.Linear(channels * height * width, arguments.hidden)
    _add(layers, 6, batch_norm(arguments.batch_norm, arguments.hidden, convolution=False))
    layers["classifier"] = nn.Linear(arguments.hidden, len(data.classes))
    return nn.Sequential(layers)


def _add(layers: OrderedDict[str, nn.Module], number: int, norm: nn.Module | None) -> None:
    if norm is not None:
        layers[f"bn{number}"] = norm
    layers[f"relu{number}"] = nn.ReLU()
