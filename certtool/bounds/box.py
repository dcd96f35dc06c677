"""The exact box of an image: [x - eps, x + eps] within [0, 1] over the rationals.

A pixel is the rational k / scale, or a float32 whose exact value counts. Bounds take its edges rounded outward to
float64 and wide enough for float32(k / scale), the value a network is really given; an attack takes them rounded inward
to float32, so that what it finds lies inside.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from certtool.bounds.interval import Interval


@dataclass(frozen=True)
class Edges:
    """Lower and upper edge of every pixel."""

    lower: Tensor
    upper: Tensor

    def interval(self) -> Interval:
        """Center and radius that contain both edges despite float64 rounding."""
        center = (self.lower + self.upper) * 0.5
        radius = torch.maximum(self.upper - center, center - self.lower)
        return Interval(center, torch.nextafter(radius, torch.full_like(radius, torch.inf)))

    def to(self, device: torch.device) -> Edges:
        return Edges(self.lower.to(device), self.upper.to(device))

    def contains(self, x: Tensor) -> Tensor:
        """Per image, whether every pixel lies within."""
        inside: Tensor = ((x >= self.lower) & (x <= self.upper)).flatten(1).all(1)
        return inside


def outer_edges(images: Tensor, scale: int, eps: Fraction) -> Edges:
    """In float64, rounded outward."""
    if images.is_floating_point():
        return outer_edges_of_floats(images, eps)
    return _look_up(images, outer_table(scale, eps), torch.float64)


def inner_edges(images: Tensor, scale: int, eps: Fraction) -> Edges:
    """In float32, rounded inward. Where no float32 lies inside, the given pixel itself."""
    if images.is_floating_point():
        return inner_edges_of_floats(images, eps)
    return _look_up(images, inner_table(scale, eps), torch.float32)


# Few integers, many pixels and batches: each integer's edges are computed once, exactly. A table is a row of lower and
# a row of upper edges.
@functools.lru_cache(maxsize=64)
def outer_table(scale: int, eps: Fraction) -> Tensor:
    def edges(k: int) -> tuple[float, float]:
        low, high = _exact(k, scale, eps)
        given = float(np.float32(k) / np.float32(scale))
        return min(_round(low, -1, np.float64), given), max(_round(high, +1, np.float64), given)

    return torch.tensor([edges(k) for k in range(scale + 1)], dtype=torch.float64).t().contiguous()


@functools.lru_cache(maxsize=64)
def inner_table(scale: int, eps: Fraction) -> Tensor:
    def edges(k: int) -> tuple[float, float]:
        low, high = _exact(k, scale, eps)
        inner = _round(low, +1, np.float32), _round(high, -1, np.float32)
        given = float(np.float32(k) / np.float32(scale))
        return inner if inner[0] <= inner[1] else (given, given)

    return torch.tensor([edges(k) for k in range(scale + 1)], dtype=torch.float64).t().contiguous()


def _look_up(images: Tensor, table: Tensor, kind: torch.dtype) -> Edges:
    lower, upper = table.to(images.device, kind)
    rows = images.long()
    return Edges(lower[rows], upper[rows])


def outer_edges_by_image(images: Tensor, scale: int, eps: Tensor) -> Edges:
    """Each image with a radius of its own that float64 holds exactly; two steps outward for rounding."""
    center, radius = images.double() / scale, eps.view(-1, *[1] * (images.dim() - 1))
    infinity = torch.full_like(center, torch.inf)
    low = torch.nextafter(torch.nextafter(center - radius, -infinity), -infinity).clamp(0, 1)
    high = torch.nextafter(torch.nextafter(center + radius, infinity), infinity).clamp(0, 1)
    given = (images.float() / scale).double()
    return Edges(torch.minimum(low, given), torch.maximum(high, given))


def outer_edges_of_floats(x: Tensor, eps: Fraction) -> Edges:
    """The same for images given as floats: their exact values are the centers. One step outward pays for rounding."""
    radius = _round(eps, +1, np.float64)
    low, high = x.double() - radius, x.double() + radius
    infinity = torch.full_like(low, torch.inf)
    return Edges(torch.nextafter(low, -infinity).clamp(0, 1), torch.nextafter(high, infinity).clamp(0, 1))


def inner_edges_of_floats(x: Tensor, eps: Fraction) -> Edges:
    """A step of float32 inward, but never past the image itself."""
    radius = _round(eps, -1, np.float64)
    low, high = (x.double() - radius).float(), (x.double() + radius).float()
    infinity = torch.full_like(low, torch.inf)
    return Edges(
        torch.minimum(torch.nextafter(low, infinity).clamp(0, 1), x),
        torch.maximum(torch.nextafter(high, -infinity).clamp(0, 1), x),
    )


def _exact(k: int, scale: int, eps: Fraction) -> tuple[Fraction, Fraction]:
    return max(Fraction(k, scale) - eps, Fraction(0)), min(Fraction(k, scale) + eps, Fraction(1))


def _round(value: Fraction, direction: int, kind: type[np.floating]) -> float:
    """The nearest float of this kind that is not below (direction +1) or not above (-1) the value."""
    number = kind(float(value))
    toward = kind(np.inf * direction)
    while (Fraction(float(number)) - value) * direction < 0:
        number = np.nextafter(number, toward)
    while (Fraction(float(np.nextafter(number, -toward))) - value) * direction >= 0:
        number = np.nextafter(number, -toward)
    return float(number)
