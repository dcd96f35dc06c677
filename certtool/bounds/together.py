"""Who shares a batch: one process has it alone, or several have a part each and speak of the whole.

Means over the batch (BatchNorm's statistics, the regularisers' layer means) go through one of these, so that N
processes compute what one would, gradients included (certtool/distributed.py).
"""

from __future__ import annotations

import math
from typing import Protocol

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


def total_mean(sums: Tensor, values: Tensor, together: Together) -> Tensor:
    """Sums over the images at hand and their neurons as means over those of the whole batch; `values` has the shape."""
    images = len(values) if together.alone else together.images
    return together.sum(sums / (images * math.prod(values.shape[1:])))
