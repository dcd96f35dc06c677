"""Architectures: from arguments and a data set's facts to an initialised network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from certtool.catalog import ARCHITECTURES, Arguments, DatasetFacts
from certtool.models.cnn7 import cnn7
from certtool.models.initialise import difference_gain, fan_in, initialise
from certtool.models.normalize import Normalize
from certtool.models.resnext import ResNeXt
from certtool.models.wide_resnet import WideResNet

BUILDERS: dict[str, Callable[[Any, DatasetFacts], nn.Module]] = {
    "cnn7": cnn7,
    "wide_resnet": WideResNet,
    "resnext": ResNeXt,
}
assert set(BUILDERS) == set(ARCHITECTURES)

__all__ = ["BUILDERS", "Normalize", "build", "difference_gain", "fan_in", "initialise", "skeleton"]


def build(arguments: Arguments, data: DatasetFacts, init: str = "ibp", seed: int = 0) -> nn.Module:
    """A network at initialisation: the same seed gives the same weights, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BUILDERS[arguments.arch](arguments, data)  # type: ignore[attr-defined]
    initialise(model, init, seed)
    return model


def skeleton(arguments: Arguments, data: DatasetFacts) -> nn.Module:
    """A network without weights: its tensors have shapes and names but no memory yet."""
    with torch.device("meta"):
        return BUILDERS[arguments.arch](arguments, data)  # type: ignore[attr-defined]
