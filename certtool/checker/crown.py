"""CROWN-IBP in plain float64: intervals at every ReLU, then margins pulled back to the input as linear functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from certtool.checker.box import check_box
from certtool.checker.intervals import EXACT, Ball, ball_of, edges_of, normalize, residual_sum, scaling_of, through
from certtool.checker.linear import batches, per_channel, total, transposed
from certtool.checker.network import Affine, Array, Flatten, Integers, Network, Relu, Residual, Step

_ROWS = 32  # classes pulled back together


def crown_ibp_margins(network: Network, lower: Array, upper: Array, labels: Integers) -> Array:
    """Per image, a lower bound of z_y - z_j over the box, least over j, in exact arithmetic (evaluated in float64).

    Interval bounds at every ReLU, then the margins pulled back to the input as linear functions.
    """
    check_box(network, lower, upper, labels)
    with np.errstate(all="ignore"):
        margins = [_crown_ibp(network, lower[i : i + 1], upper[i : i + 1], int(y)) for i, y in enumerate(labels)]
    return np.array(margins, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class _Seen:
    """A step and the ball that entered it; for a residual block also what its two sides have seen."""

    step: Step
    ball: Ball
    branch: tuple[_Seen, ...] = ()
    shortcut: tuple[_Seen, ...] = ()


@dataclass(frozen=True, eq=False)
class _Line:
    """Margins are at least rows . x + constant, x the value at this place of the network."""

    rows: Array
    constant: Array


def _crown_ibp(network: Network, lower: Array, upper: Array, label: int) -> float:
    box = ball_of(lower, upper, EXACT)
    seen, _ = _record(network.layers, normalize(network, box, EXACT))
    weight, bias = network.classifier.weight, network.classifier.bias
    others = np.delete(np.arange(len(bias)), label)
    least = [math.inf]
    for group in batches(len(others), _ROWS):
        chosen = others[group]
        line = _pull_back(seen, _Line(weight[label] - weight[chosen], bias[label] - bias[chosen]))
        least.append(_minimum(_before_normalize(network, line), box))
    return float(np.min(least))


def _record(steps: tuple[Step, ...], ball: Ball) -> tuple[tuple[_Seen, ...], Ball]:
    seen: list[_Seen] = []
    for step in steps:
        if isinstance(step, Residual):
            (branch, one), (shortcut, other) = _record(step.branch, ball), _record(step.shortcut, ball)
            seen.append(_Seen(step, ball, branch, shortcut))
            ball = residual_sum(one, other, EXACT)
        else:
            seen.append(_Seen(step, ball))
            ball = through((step,), ball, EXACT)
    return tuple(seen), ball


def _pull_back(seen: tuple[_Seen, ...], line: _Line) -> _Line:
    for place in reversed(seen):
        match place.step:
            case Affine():
                line = _before_affine(place.step, line, place.ball.center.shape[1:])
            case Relu():
                line = _before_relu(place.ball, line)
            case Flatten():
                line = _Line(line.rows.reshape(-1, *place.ball.center.shape[1:]), line.constant)
            case Residual():
                # rows . (p + q) is the sum of both; the constant may be counted on one side only.
                one = _pull_back(place.branch, line)
                other = _pull_back(place.shortcut, _Line(line.rows, np.zeros_like(line.constant)))
                line = _Line(one.rows + other.rows, one.constant + other.constant)
    return line


def _before_affine(step: Affine, line: _Line, shape: tuple[int, ...]) -> _Line:
    """rows . (a (W x + b - mu) + beta) = W^T (a rows) . x + rows . (a (b - mu) + beta)."""
    scaling = scaling_of(step)
    constant = scaling.factor * (step.bias - scaling.mean) + scaling.beta
    rows = transposed(step, line.rows * per_channel(scaling.factor, line.rows), shape)
    return _Line(rows, line.constant + total(line.rows * per_channel(constant, line.rows)))


def _before_relu(ball: Ball, line: _Line) -> _Line:
    """Positive coefficients take a line below ReLU, negative ones the chord above it, between l < 0 < u:

    t x <= relu(x) <= u/(u - l) (x - l),  t = 1 where u > -l, else 0: the smaller triangle (CROWN, adaptive slope).
    Stable units need no case of their own: u <= 0 gives 0 twice, l >= 0 gives x twice. NaN bounds stay NaN.
    """
    lower, upper = edges_of(ball, EXACT)
    chord = np.where(upper <= 0, 0.0, np.where(lower >= 0, 1.0, upper / (upper - lower)))
    below = (upper > -lower).astype(np.float64)
    positive, negative = np.maximum(line.rows, 0), np.minimum(line.rows, 0)
    height = negative * (-chord * np.minimum(lower, 0))
    return _Line(positive * below + negative * chord, line.constant + total(height))


def _before_normalize(network: Network, line: _Line) -> _Line:
    rows = line.rows / per_channel(network.std, line.rows)
    return _Line(rows, line.constant - total(rows * per_channel(network.mean, rows)))


def _minimum(line: _Line, box: Ball) -> float:
    """Of a linear function over a box; NaN if any row has one."""
    return float((line.constant + total(line.rows * box.center) - total(np.abs(line.rows) * box.radius)).min())
