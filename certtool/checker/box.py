"""The exact box of an image, its edges rounded outward."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from certtool.checker.network import Array, Integers, Network
from certtool.errors import InputError


def exact_box(
    images: npt.NDArray[np.uint8] | npt.NDArray[np.float32], scale: int, eps: Fraction
) -> tuple[Array, Array]:
    """Edges of [k/s - eps, k/s + eps] within [0, 1] over the rationals, rounded outward to float64.

    Also inside: float32(k/s), the image the network is really given. It differs from k/s, so at eps = 0 (or below
    2^-25) the rational box alone would not contain it, and `certified` would not imply `clean`.

    Images of floats have scale 1; their exact values are the centers.
    """
    if images.dtype == np.float32:
        return _box_of_floats(images.astype(np.float64), scale, eps)
    if images.dtype != np.uint8 or scale < 1 or eps < 0 or (images.size and int(images.max()) > scale):
        raise InputError(f"a box needs uint8 pixels from 0 to {scale}, a positive scale and a radius of at least 0")
    edges = np.array([_edges(k, scale, eps) for k in range(min(scale, 255) + 1)])
    return edges[images, 0], edges[images, 1]


def _edges(k: int, scale: int, eps: Fraction) -> tuple[float, float]:
    value = Fraction(k, scale)
    given = float(np.float32(k) / np.float32(scale))  # one IEEE division, as the data loader does it
    return (
        min(_round_down(max(value - eps, Fraction(0))), given),
        max(-_round_down(-min(value + eps, Fraction(1))), given),
    )


def _box_of_floats(images: Array, scale: int, eps: Fraction) -> tuple[Array, Array]:
    """eps rounded up; sum and difference are off by half a step at most, and a whole one is added."""
    if scale != 1 or eps < 0 or not ((images >= 0) & (images <= 1)).all():
        raise InputError("a box of floats needs pixels in [0, 1], scale 1 and a radius of at least 0")
    radius = -_round_down(-eps)
    lower, upper = np.nextafter(images - radius, -np.inf), np.nextafter(images + radius, np.inf)
    return np.maximum(lower, 0.0), np.minimum(upper, 1.0)


def _round_down(exact: Fraction) -> float:
    """The largest float64 that is not above: float(Fraction) rounds to nearest, so at most one step off."""
    nearest = float(exact)
    return nearest if Fraction(nearest) <= exact else math.nextafter(nearest, -math.inf)


def check_box(network: Network, lower: Array, upper: Array, labels: Integers) -> None:
    """A box turned inside out would prove anything."""
    shape = (len(labels), *network.shape)
    if lower.shape != shape or upper.shape != shape or lower.dtype != np.float64 or upper.dtype != np.float64:
        raise InputError(f"the box has the shapes {lower.shape} and {upper.shape}, expected {shape} in float64")
    if not (lower <= upper).all():
        raise InputError("the box has a lower edge above the upper one, or NaN")
    if not np.issubdtype(labels.dtype, np.integer) or ((labels < 0) | (labels >= len(network.classifier.bias))).any():
        raise InputError(f"labels must be integers from 0 to {len(network.classifier.bias) - 1}")
