"""Intervals through a network, with and without rounding: every step's bound, derived where it is computed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from certtool.checker.linear import apply, batches, per_channel, scale
from certtool.checker.network import Affine, Array, Flatten, Network, Relu, Residual, Step

BATCH = 16  # images bounded together


@dataclass(frozen=True, eq=False)
class Ball:
    """Every value within `radius` of `center`, per element."""

    center: Array
    radius: Array

    @property
    def reach(self) -> Array:
        return np.abs(self.center) + self.radius


@dataclass(frozen=True)
class Rounding:
    """What a bound allows for."""

    unit: float  # relative error of an operation
    tiny: float  # absolute error of one that underflows, many times over
    largest: float  # magnitude below which nothing overflows
    own: float  # relative error of our own float64 where edges are taken
    reserve: float  # share of its scale that a margin must exceed

    def gamma(self, count: int) -> float:
        """|(1 + d_1)^(+-1) ... (1 + d_k)^(+-1) - 1| <= k u / (1 - k u) for |d_i| <= u, if k u < 1 (Higham, 3.1)."""
        product = count * self.unit
        return product / (1 - product) if product < 1 else math.inf


# Exact arithmetic: every term of rounding vanishes.
EXACT = Rounding(unit=0.0, tiny=0.0, largest=math.inf, own=0.0, reserve=0.0)
# binary32. The factor 1 + 2^-20 pays for our own float64: a bound with k roundings of ours beside k of theirs is off by
# k 2^-53 of the same absolute sum, and gamma_k exceeds k 2^-24 of it by k 2^-44, 512 times as much.
# `tiny` is 64 times 2^-126, the most an operation loses to underflow when subnormals are flushed (kept: 2^-150).
# `largest`: values bounded by 2^120 are far from 2^128, where binary32 overflows and every error bound ends.
# `own`: c + r and (l + u)/2 take two or three roundings of 2^-53 each; four are paid.
# `reserve`: another order of our own float64 sums cannot turn a proof around.
BINARY32 = Rounding(unit=2.0**-24 * (1 + 2.0**-20), tiny=2.0**-120, largest=2.0**120, own=2.0**-51, reserve=1e-9)


def ball_of(lower: Array, upper: Array, rounding: Rounding) -> Ball:
    """Any center will do if the radius, rounded up, reaches both edges."""
    center = (lower + upper) / 2
    return Ball(center, np.maximum(upper - center, center - lower) * (1 + rounding.own))


def edges_of(ball: Ball, rounding: Rounding) -> tuple[Array, Array]:
    slack = rounding.own * ball.reach
    return ball.center - ball.radius - slack, ball.center + ball.radius + slack


def _relu(ball: Ball, rounding: Rounding) -> Ball:
    """Monotone, and exact in floating point: the edges' images are the image's edges."""
    lower, upper = edges_of(ball, rounding)
    return ball_of(np.maximum(lower, 0), np.maximum(upper, 0), rounding)


def residual_sum(one: Ball, other: Ball, rounding: Rounding) -> Ball:
    """fl(p + q) = (p + q)(1 + d), |d| <= u: an error of at most u |p + q|.

    More is paid, gamma_2 (|p| + |q|), what `p + alpha q` needs: a certificate's margin is defined with that term, and
    two implementations can only be compared digit by digit if they bound the same thing. A flushed operand or result
    costs 3 x 2^-126. No test for overflow: p comes out of an affine layer, which bounds it by 2^120, and q from one too
    or from a chain of such sums, whose value the next affine layer tests.
    """
    error = rounding.gamma(2) * (one.reach + other.reach) + rounding.tiny
    return Ball(one.center + other.center, one.radius + other.radius + error)


def normalize(network: Network, ball: Ball, rounding: Rounding) -> Ball:
    """fl((x - m)/s), or fl(fl(x - m) fl(1/s)): (x - m)/s times two or three factors 1 + d, so gamma_3 |x - m|/s.

    |x - m| <= |c - m| + r. Flushing: x and x - m lose 2^-126/s each, 1/s loses 2^-126 |x - m|, the result 2^-126;
    together below 2^-120 (1 + |x - m|)(1 + 1/s), which also bounds every intermediate value.
    """
    mean, inverse = per_channel(network.mean, ball.center), 1 / per_channel(network.std, ball.center)
    shifted = Ball(ball.center - mean, ball.radius)
    magnitude = (1 + shifted.reach) * (1 + inverse)
    error = rounding.gamma(3) * shifted.reach * inverse + rounding.tiny * magnitude
    return Ball(shifted.center * inverse, unless_overflow(magnitude, ball.radius * inverse + error, rounding))


@dataclass(frozen=True, eq=False)
class _Scaling:
    """BatchNorm as a (y - mean) + beta with a = gamma / sqrt(var + eps); without one, 1, 0 and 0."""

    factor: Array
    mean: Array
    beta: Array
    size: Array  # (1 + |gamma|)(1 + 1/sqrt(var + eps)): not below |a|, |gamma|, 1/sqrt(var + eps) and 1


def scaling_of(step: Affine) -> _Scaling:
    norm, zero = step.batch_norm, np.zeros_like(step.bias)
    if norm is None:
        return _Scaling(zero + 1, zero, zero, zero + 1)
    inverse = 1 / np.sqrt(norm.var + norm.eps) if norm.scale else zero + 1
    mean = norm.mean if norm.center else zero
    return _Scaling(norm.gamma * inverse, mean, norm.beta, (1 + np.abs(norm.gamma)) * (1 + inverse))


def affine(step: Affine, ball: Ball, rounding: Rounding) -> Ball:
    """An affine layer with its BatchNorm, bounded on the unfolded parameters.

    A computed output is  sum_i a w_i x_i (1 + t_i) + a b (1 + t_b) - a mu (1 + t_mu) + beta (1 + t_beta),  where each
    1 + t collects the roundings on the way. A dot product of n terms and a bias: 1 product, at most n additions. The
    inverse deviation: eps rounded and added to var, halved by the root, then root and reciprocal: 3. So for w_i x_i
        as written       n + 1, - mu 1, inverse 3, its product 1, gamma 1, + beta 1           = n + 8
        scale and shift  n + 1, scale 3 + 1, its product 1, + shift 1                         = n + 7
        folded           w a: 3 + 1 + 1, then n + 1 in the dot product                        = n + 6
    and b, mu and beta meet no more than n + 7. All |t| <= g = gamma_{n+12}. With x = c + e, |e| <= r, |x| <= |c| + r:
        |output - (a (W c + b - mu) + beta)|  <=  |a| |W| r + g (|a| |W| (|c| + r) + |a| (|b| + |mu|) + |beta|).
    n counts the terms of one output: with groups those of its group. Zeros that padding, or a kernel blown up to all
    channels, puts between them are added without rounding.
    """
    scaling, fan_in = scaling_of(step), step.weight[0].size
    growth = rounding.gamma(fan_in + 12)
    steepness = np.abs(scaling.factor)
    constant = growth * (steepness * (np.abs(step.bias) + np.abs(scaling.mean)) + np.abs(scaling.beta))
    center = apply(step, step.weight, ball.center)
    center = scale(scaling.factor, center + per_channel(step.bias - scaling.mean, center), scaling.beta)
    spread = apply(step, np.abs(step.weight), (1 + growth) * ball.radius + growth * np.abs(ball.center))
    magnitude = largest_value(step, scaling, ball)
    radius = scale(steepness, spread, constant) + rounding.tiny * magnitude
    return Ball(center, unless_overflow(magnitude, radius, rounding))


def largest_value(step: Affine, scaling: _Scaling, ball: Ball) -> Array:
    """Per image, a bound M of every intermediate value, in whatever order; 2^-120 M also pays for underflow.

    An underflow costs at most 2^-126 times what it is multiplied with later. Flushed x_i or w_i: n max|W|, n max|x|
    times |a|; products and sums: 2 n |a|; gamma, or a itself when gamma is tiny: |W x + b - mu|, which is why |W| and
    |x| are multiplied here and b and mu stand in it; folded w a: n max|x|; the handful left: 1 or |a|. Below 12 M.
    """
    axes = tuple(range(1, ball.center.ndim))
    reach = ball.reach.max(axis=axes, keepdims=True)
    output = step.weight[0].size * (1 + reach) * (1 + np.abs(step.weight).max())
    output = output + np.abs(step.bias).max() + np.abs(scaling.mean).max()
    magnitude = np.asarray(scaling.size.max() * output + np.abs(scaling.beta).max())
    return magnitude.reshape(-1, *[1] * (step.weight.ndim - 1))


def unless_overflow(magnitude: Array, radius: Array, rounding: Rounding) -> Array:
    """NaN and infinity count as overflow: one of them anywhere leaves the whole image unproven."""
    return np.where(magnitude < rounding.largest, radius, np.inf)


def through(steps: tuple[Step, ...], ball: Ball, rounding: Rounding) -> Ball:
    for step in steps:
        match step:
            case Affine():
                ball = affine(step, ball, rounding)
            case Relu():
                ball = _relu(ball, rounding)
            case Flatten():
                ball = Ball(ball.center.reshape(len(ball.center), -1), ball.radius.reshape(len(ball.radius), -1))
            case Residual():
                branch = through(step.branch, ball, rounding)
                ball = residual_sum(branch, through(step.shortcut, ball, rounding), rounding)
    return ball


def forward(network: Network, x: Array) -> Array:
    """Logits in float64: the centers of balls without radius."""
    logits = np.empty((len(x), len(network.classifier.bias)))
    with np.errstate(over="ignore", invalid="ignore"):
        for batch in batches(len(x), BATCH):
            start = normalize(network, Ball(x[batch], np.zeros_like(x[batch])), EXACT)
            logits[batch] = affine(network.classifier, through(network.layers, start, EXACT), EXACT).center
    return logits
