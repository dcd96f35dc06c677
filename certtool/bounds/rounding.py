"""Interval rules with rounding errors: what they bound is the float32 network as it is computed, not as it is written.

The claim: every evaluation in IEEE binary32, round to nearest, in which each dot product is multiplications (or FMAs)
and additions in any order, and BatchNorm is computed as written, as scale and shift, or folded into the layer before
it, stays inside. The bounds themselves are computed in float64 on the unfolded parameters.

Model of an error. A sum of n products in any order has every term rounded at most n times, so
    |computed - exact| <= gamma_n sum_i |w_i x_i|,    gamma_k = k u / (1 - k u),
for any float32 input x. x itself lies in [c - r, c + r], so |x| <= |c| + r, and the interval of the computed values has
    radius' = |W| r + gamma |W| (|c| + r) = |W| ((1 + gamma) r + gamma |c|).
Bias and BatchNorm add operations on the same terms; 12 more roundings cover each of its three forms: the bias (1), mean
(1), scale gamma / sqrt(var + eps) with its own add, root, quotient and product (4), the product with it (1), shift (2).
Folding BatchNorm into W first and bounding that would understate the error: a (b - mu) + beta is small where b and mu
cancel, while their rounding errors do not. The same holds for margins: |W_y - W_j| is small where |W_y| + |W_j| is not.

The excess of u over 2^-24 pays for the float64 arithmetic here: it adds 2^-20 of a float32 rounding to every term, and
float64 makes errors of 2^-29 of one. Outside the claim: Winograd and FFT convolution, TF32, bf16, autocast, and a
convolution that accumulates on top of its residual shortcut.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certtool.bounds import rules
from certtool.bounds.graph import Graph, is_batch_norm
from certtool.bounds.ibp import NO_WEIGHTS, Weights, asks_for_shape, propagate, scale_and_shift_of
from certtool.bounds.interval import Interval
from certtool.bounds.relu import bounded_relu
from certtool.bounds.rules import BATCH_NORM, Ready, Rule, RuleTable, convolve, ready, rule_for

UNIT = 2.0**-24 * (1 + 2.0**-20)
UNDERFLOW = 2.0**-120  # a product, or an operand, below float32's normal range may be flushed to 0: 2^-126, with room
LARGEST = 2.0**120
OWN = 2.0**-51
BATCH_NORM_ROUNDINGS = 12
# A margin this small against its scale could come out otherwise in another float64 summation order.
SCALE_SHARE = 1e-9
UNFOLDED = 9 << 15  # entries of a convolution's matrix that one thread makes at once: 2.4 MB, which caches hold

RuleT = TypeVar("RuleT", bound=Rule)
ROUNDED: RuleTable = {}


def gamma(roundings: int) -> float:
    """The relative error of a term that was rounded so many times (Higham, Accuracy and Stability, section 3.1)."""
    product = roundings * UNIT
    return product / (1 - product) if product < 1 else math.inf  # a sum too long for float32 proves nothing


def rounded_rule(*ops: Any) -> Callable[[RuleT], RuleT]:
    """Register a rule that includes the rounding errors of its operation in float32. Inputs come in float64."""

    def register(function: RuleT) -> RuleT:
        for op in ops:
            ROUNDED[op] = function
        return function

    return register


def has_rounded_rules(graph: Graph) -> bool:
    """False for a network with an operation whose rounding nobody has bounded: it cannot be certified rigorously.

    That includes arithmetic among constants: it is done once, in float64 here, in float32 there.
    """
    constants: set[str] = set()
    shapes: set[str] = set()
    for step in graph.steps:
        if step.op == "constant":
            if step.name.startswith("_tensor_constant"):  # torch.fx computed it while it traced
                return False
            constants.add(step.name)
        elif asks_for_shape(step) or (step.inputs and set(step.inputs) <= shapes):
            shapes.add(step.name)  # whole numbers, which nothing rounds
        elif step.op == "input" or is_batch_norm(step.module):
            continue
        elif set(step.inputs) <= constants | shapes or rule_for(step.op, ROUNDED) is None:
            return False
    return True


def _magnitude(z: Interval) -> Tensor:
    """The largest absolute value a neuron can take."""
    return z.center.abs().add_(z.radius)


def _unless_overflow(radius: Tensor, largest: Tensor) -> Tensor:
    """Beyond 2^120 an intermediate value may reach 2^128, where binary32 overflows and every error bound ends."""
    return torch.where(largest < LARGEST, radius, torch.inf)


def _widened(z: Interval, roundings: int) -> Interval:
    """The result of an operation whose terms are as large as the result, rounded so many times."""
    size = _magnitude(z)
    return Interval(z.center, _unless_overflow(z.radius + gamma(roundings) * size + UNDERFLOW * (1 + size), size))


# --- affine layers, with and without BatchNorm -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Norm:
    """BatchNorm as a (x - mean) + beta; without BatchNorm a is 1, mean and beta are 0.

    `size` is not below |a|, |gamma|, 1/sqrt(var + eps) and 1: what an underflow may be multiplied with.
    """

    scale: Tensor
    mean: Tensor
    beta: Tensor
    size: Tensor


def _no_norm(like: Tensor) -> _Norm:
    one, zero = torch.ones_like(like), torch.zeros_like(like)
    return _Norm(one, zero, zero, one)


def _affine(layer: Any, z: Interval, norm: _Norm | None) -> Interval:
    layer = ready(layer)
    weight, bias = layer.weight, layer.bias
    norm = norm or _no_norm(bias)
    g = gamma(weight[0].numel() + BATCH_NORM_ROUNDINGS)
    size = _magnitude(z)
    largest = _largest(layer, norm, size)
    center = _product(layer, z.center, weight)
    spread = _product(layer, size.mul_(g).add_(z.radius), layer.sizes)  # g (|c| + r) + r, in the memory of |c| + r
    shape = (1, -1, *[1] * (center.dim() - 2))
    a, mean, beta, b = (t.view(shape) for t in (norm.scale, norm.mean, norm.beta, bias))
    largest = largest.view(-1, *[1] * (center.dim() - 1))
    constants = g * (a.abs() * (b.abs() + mean.abs()) + beta.abs()) + UNDERFLOW * largest  # image by channel
    radius = spread.mul_(a.abs()).add_(_unless_overflow(constants, largest))
    return Interval(center.mul_(a).add_(a * (b - mean) + beta), radius)


def _largest(layer: Ready, norm: _Norm, size: Tensor) -> Tensor:
    """Per image, a bound of every intermediate value; 2^-120 of it also pays for all underflow on the way."""
    terms = layer.weight[0].numel() * (1 + size.flatten(1).amax(1)) * (1 + layer.largest)
    output = terms + layer.bias.abs().max() + norm.mean.abs().max()
    return norm.size.max() * output + norm.beta.abs().max()


def _product(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    """In float64 torch unfolds a convolution's images into matrices, one a thread: as few at once as stay in cache."""
    if weight.dim() == 2:
        return F.linear(x, weight)
    unfolded = weight[0].numel() * x[0, 0].numel() // math.prod(layer.stride)
    few = torch.get_num_threads() * max(1, UNFOLDED // max(1, unfolded))
    return torch.cat([convolve(layer, part, weight, None) for part in torch.split(x, few)])


@rounded_rule(nn.Linear, nn.Conv2d)
def affine(layer: Any, z: Interval) -> Interval:
    return _affine(layer, z, None)


@rounded_rule(BATCH_NORM)
def batch_norm(norm: Any, layer: nn.Module | None, z: Interval, mean: Tensor, var: Tensor) -> Interval:
    """With the affine layer before it, or alone: then a product with one weight a channel."""
    parts = _norm_parts(norm, mean, var)
    if layer is not None:
        return _affine(layer, z, parts)
    shape = (1, -1, *[1] * (z.center.dim() - 2))
    a, mean, beta, size = (t.view(shape) for t in (parts.scale, parts.mean, parts.beta, parts.size))
    g = gamma(1 + BATCH_NORM_ROUNDINGS)
    error = g * (a.abs() * (_magnitude(z) + mean.abs()) + beta.abs())
    largest = size * (1 + _magnitude(z) + mean.abs()) + beta.abs()
    radius = a.abs() * z.radius + error + 12 * UNDERFLOW * largest
    return Interval(a * (z.center - mean) + beta, _unless_overflow(radius, largest))


def _norm_parts(norm: Any, mean: Tensor, var: Tensor) -> _Norm:
    """Any BatchNorm-like layer as a (x - mean) + beta: its affine map without a mean has shift beta."""
    scale, beta = scale_and_shift_of(norm, torch.zeros_like(mean), var)
    centers = getattr(norm, "center", True)
    weight = norm.weight if norm.weight is not None else torch.ones_like(mean)
    size = (1 + weight.abs()) * (1 + torch.rsqrt(var + norm.eps))
    return _Norm(scale, mean if centers else torch.zeros_like(mean), beta, size)


# --- operations that round nothing, and the others -------------------------------------------------------------------

# They copy values, so the plain rule already bounds what is computed.
COPIES = (
    nn.Flatten, torch.flatten, "flatten", "view", "reshape", torch.reshape, "contiguous", nn.Identity, nn.Dropout,
    operator.neg, torch.neg, torch.cat, torch.concat,
)  # fmt: skip
ROUNDED.update({op: rules.RULES[op] for op in COPIES})


def _outward(z: Interval) -> Interval:
    """Room for the float64 rounding of c - r and c + r, where an edge may be far smaller than either."""
    return Interval(z.center, _magnitude(z).mul_(OWN).add_(z.radius))


@rounded_rule(F.relu, torch.relu, "relu")
def relu_function(z: Interval, inplace: bool = False) -> Interval:
    """A neuron that keeps its sign is copied or 0, exactly. Of the others only c + r counts: rounded in float64 once as
    a sum and once as a product, which a little more than a half pays for."""
    return Interval(*bounded_relu(z.center, z.radius, half=0.5 + OWN))


@rounded_rule(nn.ReLU)
def relu(layer: nn.ReLU, z: Interval) -> Interval:
    return relu_function(z)


@rounded_rule(nn.MaxPool2d)
def max_pool(layer: nn.MaxPool2d, z: Interval) -> Interval:
    return rules.max_pool(layer, _outward(z))


@rounded_rule(F.max_pool2d)
def max_pool_function(z: Interval, *args: Any, **kwargs: Any) -> Interval:
    return rules.max_pool_function(_outward(z), *args, **kwargs)


@rounded_rule(operator.add, torch.add, "add", operator.iadd)
def add(x: Any, y: Any) -> Interval:
    """One rounding of the sum, one of a constant that float32 does not hold."""
    z = rules.add(x, y)
    size = sum(_magnitude(v) if isinstance(v, Interval) else torch.as_tensor(v).abs() for v in (x, y))
    return Interval(z.center, _unless_overflow(z.radius + gamma(2) * size, size + torch.zeros_like(z.radius)))


@rounded_rule(operator.sub, torch.sub, "sub", operator.isub)
def subtract(x: Any, y: Any) -> Interval:
    return add(x, rules.negate(y) if isinstance(y, Interval) else -y)


@rounded_rule(operator.mul, torch.mul, "mul", operator.imul)
def multiply(x: Any, y: Any) -> Interval:
    """The product, and the constant."""
    return _widened(rules.multiply(x, y), 3)


@rounded_rule(operator.truediv, torch.div, "div")
def divide(x: Any, y: Any) -> Interval:
    """A quotient, or a product with the reciprocal; and the constant."""
    return _widened(rules.divide(x, y), 4)


@rounded_rule(nn.LeakyReLU)
def leaky_relu(layer: nn.LeakyReLU, z: Interval) -> Interval:
    return _widened(rules.leaky_relu(layer, z), 3)


@rounded_rule(F.leaky_relu)
def leaky_relu_function(z: Interval, negative_slope: float = 0.01, inplace: bool = False) -> Interval:
    return _widened(rules.leaky_relu_function(z, negative_slope), 3)


@rounded_rule(nn.AvgPool2d, nn.AdaptiveAvgPool2d)
def average_pool(layer: nn.Module, z: Interval) -> Interval:
    return _averaged(layer, z)


@rounded_rule(F.avg_pool2d)
def average_pool_function(z: Interval, *args: Any, **kwargs: Any) -> Interval:
    return _averaged(lambda x: F.avg_pool2d(x, *args, **kwargs), z)


@rounded_rule(F.adaptive_avg_pool2d)
def adaptive_average_pool_function(z: Interval, output_size: Any) -> Interval:
    return _averaged(lambda x: F.adaptive_avg_pool2d(x, output_size), z)


def _averaged(pool: Callable[[Tensor], Tensor], z: Interval) -> Interval:
    """A sum of at most the whole image, then a quotient; the terms' sizes are averaged, not the average's size."""
    size = pool(_magnitude(z)).abs()
    pixels = z.center.shape[-1] * z.center.shape[-2]
    radius = pool(z.radius).abs() + gamma(pixels + 3) * size + UNDERFLOW * (1 + size)
    largest = pixels * _magnitude(z).flatten(1).amax(1).view(-1, *[1] * (radius.dim() - 1))  # of the sum, not the mean
    return Interval(pool(z.center), _unless_overflow(radius, largest.expand_as(radius)))


# --- margins ---------------------------------------------------------------------------------------------------------


def rounded_margins(graph: Graph, box: Interval, labels: Tensor, weights: Weights = NO_WEIGHTS) -> Tensor:
    """Image by class, what is left of z_y - z_j after all rounding errors; the label's own column is +inf.

    A positive entry proves that the float32 logits keep their order, in any order of summation.
    """
    classifier = graph.classifier
    if classifier is None:
        output = propagate(graph, box, rules=ROUNDED, weights=weights).output
        margins = output.lower.gather(1, labels.unsqueeze(1)) - output.upper
        margins = margins - SCALE_SHARE * (_magnitude(output) + _magnitude(output).gather(1, labels.unsqueeze(1)))
        return margins.scatter(1, labels.unsqueeze(1), torch.inf)
    last = classifier.inputs[0]
    features = propagate(graph, box, keep=(last,), rules=ROUNDED, weights=weights).kept[last]
    return merged_margins(classifier.module, features, labels)


def merged_margins(layer: Any, features: Interval, labels: Tensor) -> Tensor:
    """The last layer's rows subtracted for the bound, but not for its error: that is of two logits, each rounded."""
    layer = ready(layer)
    weight, bias = layer.weight, layer.bias
    logits = F.linear(features.center, weight, bias)
    exact_part = logits.gather(1, labels.unsqueeze(1)) - logits
    rows = (weight[labels].unsqueeze(1) - weight).abs()
    spread = torch.einsum("bkn,bn->bk", rows, features.radius)
    sizes = F.linear(_magnitude(features), layer.sizes, bias.abs())
    scale = sizes.gather(1, labels.unsqueeze(1)) + sizes
    n = weight.shape[1]
    largest = _largest(layer, _no_norm(bias), _magnitude(features)).unsqueeze(1)
    error = _unless_overflow((gamma(n + 2) + SCALE_SHARE) * scale + 2 * UNDERFLOW * largest, largest)
    margins: Tensor = exact_part - spread - error
    return margins.scatter(1, labels.unsqueeze(1), torch.inf)
