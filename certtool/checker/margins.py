"""What intervals prove of z_y - z_j: for every binary32 evaluation, or for exact arithmetic."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from certtool.checker.box import check_box
from certtool.checker.intervals import (
    BATCH,
    BINARY32,
    EXACT,
    Ball,
    Rounding,
    ball_of,
    largest_value,
    normalize,
    scaling_of,
    through,
    unless_overflow,
)
from certtool.checker.linear import batches
from certtool.checker.network import Affine, Array, Integers, Network


def rigorous_margins(network: Network, lower: Array, upper: Array, labels: Integers) -> Array:
    """Per image, what z_y - z_j is guaranteed to exceed, least over j, for every binary32 evaluation in the box.

    Already subtracted: all rounding, and the reserve of 1e-9 of the margin's scale. NaN or infinite where nothing can
    be said; ask `proven`.
    """
    return _interval_margins(network, lower, upper, labels, BINARY32)


def interval_margins(network: Network, lower: Array, upper: Array, labels: Integers) -> Array:
    """The same over the reals, evaluated in float64: no rounding of the network, no reserve."""
    return _interval_margins(network, lower, upper, labels, EXACT)


def _interval_margins(network: Network, lower: Array, upper: Array, labels: Integers, rounding: Rounding) -> Array:
    check_box(network, lower, upper, labels)
    margins = np.empty(len(labels))
    with np.errstate(over="ignore", invalid="ignore"):
        for batch in batches(len(labels), BATCH):
            ball = normalize(network, ball_of(lower[batch], upper[batch], rounding), rounding)
            ball = through(network.layers, ball, rounding)
            margins[batch] = least_margin(network.classifier, ball, labels[batch], rounding)
    return margins


def proven(margins: Array) -> npt.NDArray[np.bool_]:
    """A proof is a margin that is finite and strictly positive."""
    return np.isfinite(margins) & (margins > 0)


def least_margin(classifier: Affine, ball: Ball, labels: Integers, rounding: Rounding) -> Array:
    """The least of the margins, each below what binary32 makes of z_y - z_j.

    The network computes z_y and z_j apart, each with n + 1 roundings on its own |w||x|, so the error is
    gamma_{n+2} ((|W_y| + |W_j|)(|c| + r) + |b_y| + |b_j|), the one to spare for us; |W_y - W_j| would forget what
    cancels. Only over the reals may the rows be merged: (W_y - W_j) c - |W_y - W_j| r.
    """
    weight, bias = classifier.weight, classifier.bias
    merged, merged_bias = weight[labels][:, None] - weight, bias[labels][:, None] - bias
    real = _dot(merged, ball.center) - _dot(np.abs(merged), ball.radius) + merged_bias
    size = ball.reach @ np.abs(weight).T + np.abs(bias)
    scale = np.take_along_axis(size, labels[:, None].astype(np.intp), axis=1) + size
    magnitude = largest_value(classifier, scaling_of(classifier), ball)
    error = rounding.gamma(weight.shape[1] + 2) * scale + 2 * rounding.tiny * magnitude
    margins = real - unless_overflow(magnitude, error, rounding) - rounding.reserve * scale
    margins[np.arange(len(labels)), labels] = np.inf
    return np.asarray(margins.min(axis=1))


def _dot(rows: Array, x: Array) -> Array:
    """Of every image its own rows times its own vector."""
    return np.asarray((rows @ x[:, :, None])[:, :, 0])
