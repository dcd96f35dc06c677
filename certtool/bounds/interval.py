"""A box around a tensor: every entry lies within `radius` of `center`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Interval:
    """Center and radius carry an affine layer in two products (W c and |W| r); lower and upper are derived once.

    Not by `cached_property`: before Python 3.12 it takes a lock, which torch.compile cannot look through.
    """

    center: Tensor
    radius: Tensor

    @classmethod
    def from_bounds(cls, lower: Tensor, upper: Tensor) -> Interval:
        return cls((lower + upper) * 0.5, (upper - lower) * 0.5)

    @property
    def lower(self) -> Tensor:
        known = self.__dict__
        if "_lower" not in known:
            known["_lower"] = self.center - self.radius
        lower: Tensor = known["_lower"]
        return lower

    @property
    def upper(self) -> Tensor:
        known = self.__dict__
        if "_upper" not in known:
            known["_upper"] = self.center + self.radius
        upper: Tensor = known["_upper"]
        return upper

    def to(self, dtype: torch.dtype) -> Interval:
        return Interval(self.center.to(dtype), self.radius.to(dtype))

    @property
    def width(self) -> Tensor:
        return self.radius * 2

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.center.shape)


def ball(x: Tensor, eps: float | Tensor, low: float = 0.0, high: float = 1.0) -> Interval:
    """The l-infinity ball of radius eps around x, clipped to the range of a pixel."""
    return Interval.from_bounds((x - eps).clamp(low, high), (x + eps).clamp(low, high))
