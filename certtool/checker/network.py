"""What the checker knows of a network: steps with their parameters, as float64 arrays that hold float32 values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class BatchNorm:
    """y -> gamma (y - mean) / sqrt(var + eps) + beta; without `center` no mean, without `scale` no division."""

    gamma: Array
    beta: Array
    mean: Array
    var: Array
    eps: float
    center: bool
    scale: bool


@dataclass(frozen=True, eq=False)
class Affine:
    """A convolution (weight of four axes) or a linear layer (of two), and the BatchNorm behind it.

    In a convolution of several groups, a group of filters sees the group of channels with the same number.
    """

    weight: Array
    bias: Array
    stride: int
    padding: int
    batch_norm: BatchNorm | None
    groups: int = 1


@dataclass(frozen=True)
class Relu:
    pass


@dataclass(frozen=True)
class Flatten:
    pass


@dataclass(frozen=True, eq=False)
class Residual:
    """branch(x) + shortcut(x); no steps in the shortcut make it the identity."""

    branch: tuple[Step, ...]
    shortcut: tuple[Step, ...]


Step: TypeAlias = Affine | Relu | Flatten | Residual


@dataclass(frozen=True, eq=False)
class Network:
    """Parameters are float64 arrays that hold the float32 values of the file."""

    shape: tuple[int, int, int]
    mean: Array
    std: Array
    layers: tuple[Step, ...]
    classifier: Affine
