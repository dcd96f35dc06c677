"""Who shares a batch: one process has it alone, or several have a part each and speak of the whole.

Means over the batch (BatchNorm's statistics, the regularisers' layer means) go through one of these, so that N
processes compute what one would, gradients included (certtool/distributed.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor


class Together(Protocol):
    """How sums over the images at hand become means over the batch."""

    @property
    def alone(self) -> bool: ...

    @property
    def images(self) -> int:
        """In the whole batch; asked only where it is not alone."""
        ...

    def sum(self, part: Tensor) -> Tensor:
        """Over all parts of the batch; its gradient is summed in the same way."""
        ...


class Alone:
    alone = True
    images = 0

    def sum(self, part: Tensor) -> Tensor:
        return part


ALONE = Alone()


def means(values: Iterable[Tensor], together: Together) -> Tensor:
    """The mean of each tensor over images and neurons of the whole batch, as a vector."""
    if together.alone:
        return torch.stack([value.mean() for value in values])
    sums, neurons = zip(*((value.sum(), math.prod(value.shape[1:])) for value in values), strict=True)
    whole = together.sum(torch.stack(sums))
    return whole / whole.new_tensor([together.images * count for count in neurons])
