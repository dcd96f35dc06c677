"""A box around a tensor: every entry lies within `radius` of `center`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class Interval:
    """Center and radius carry an affine layer in two products (W c and |W| r); lower and upper are derived once."""

    center: Tensor
    radius: Tensor

    @classmethod
    def from_bounds(cls, lower: Tensor, upper: Tensor) -> Interval:
        return cls((lower + upper) * 0.5, (upper - lower) * 0.5)

    @cached_property
    def lower(self) -> Tensor:
        return self.center - self.radius

    @cached_property
    def upper(self) -> Tensor:
        return self.center + self.radius

    @property
    def width(self) -> Tensor:
        return self.radius * 2

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.center.shape)


def ball(x: Tensor, eps: float, low: float = 0.0, high: float = 1.0) -> Interval:
    """The l-infinity ball of radius eps around x, clipped to the range of a pixel."""
    return Interval.from_bounds((x - eps).clamp(low, high), (x + eps).clamp(low, high))
