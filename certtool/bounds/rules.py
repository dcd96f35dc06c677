"""One pure rule per operation: the tightest interval of its result, given intervals of its inputs.

A rule for a module is called as `rule(layer, *inputs)`, a rule for a function or a tensor method exactly as that
function is, with an Interval where it takes the perturbed tensor. All rules together are interval bound propagation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certtool.bounds.interval import Interval
from certtool.bounds.relu import interval_relu
from certtool.errors import InputError

Rule = Callable[..., Interval]
RuleT = TypeVar("RuleT", bound=Rule)
RuleTable = dict[Any, Rule]
RULES: RuleTable = {}
# A table with this key bounds BatchNorm, with the affine layer before it or None, by a rule of its own (rounding.py).
BATCH_NORM = "BatchNorm"


def rule(*ops: Any) -> Callable[[RuleT], RuleT]:
    """Register the interval rule of a module type, a function, or a tensor method (by its name)."""

    def register(function: RuleT) -> RuleT:
        for op in ops:
            RULES[op] = function
        return function

    return register


def rule_for(op: Any, rules: RuleTable = RULES) -> Rule | None:
    """The rule of an operation. A subclass inherits its parent's rule unless it computes something else."""
    if op in rules:
        return rules[op]
    if isinstance(op, type):
        for parent in op.__mro__[1:]:
            same = all(getattr(op, name, None) is getattr(parent, name, None) for name in ("forward", "_conv_forward"))
            if parent in rules and same:
                return rules[parent]
    return None


class Affine(Protocol):
    """What a rule needs of an affine layer, so that a layer with BatchNorm folded into it serves as well."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor | None: ...


@dataclass(frozen=True)
class Folded:
    """An affine layer with the scale and shift of the BatchNorm behind it in its weights."""

    layer: nn.Module
    weight: Tensor
    bias: Tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def fold(layer: nn.Module, scale: Tensor, shift: Tensor) -> Folded:
    """a (W z + b) + d = (a W) z + (a b + d), one row of W at a time."""
    weight, bias = layer.weight, layer.bias
    rows = scale.reshape(-1, *[1] * (weight.dim() - 1))  # type: ignore[operator]
    return Folded(layer, weight * rows, shift if bias is None else bias * scale + shift)  # type: ignore[operator]


@dataclass(frozen=True)
class Ready(Folded):
    """The same for many batches: what bounds need of its weights is computed once."""

    sizes: Tensor  # |W|
    largest: Tensor  # the largest of them


def ready(layer: Any) -> Ready:
    if isinstance(layer, Ready):
        return layer
    weight, bias = layer.weight, layer.bias
    sizes = weight.abs()
    return Ready(layer, weight, weight.new_zeros(len(weight)) if bias is None else bias, sizes, sizes.max())


def sizes_of(layer: Affine) -> Tensor:
    """|W|"""
    return layer.sizes if isinstance(layer, Ready) else layer.weight.abs()


@rule(nn.Linear)
def linear(layer: Affine, z: Interval) -> Interval:
    """Exact for one affine layer: |W| carries the radius (paper, eq. 3)."""
    return Interval(F.linear(z.center, layer.weight, layer.bias), F.linear(z.radius, sizes_of(layer)))


@rule(nn.Conv2d)
def conv2d(layer: Any, z: Interval) -> Interval:
    """A convolution is affine: the same with its kernel (paper, section 3.1)."""
    return Interval(
        convolve(layer, z.center, layer.weight, layer.bias),
        convolve(layer, z.radius, sizes_of(layer), None),
    )


def convolve(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The layer's convolution with another kernel; its padding copies pixels, so it serves a radius too."""
    if layer.padding_mode != "zeros":
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        return F.conv2d(x, weight, bias, layer.stride, 0, layer.dilation, layer.groups)
    return F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)


def scale_and_shift(z: Interval, scale: Tensor, shift: Tensor) -> Interval:
    """BatchNorm with given statistics is affine in each channel (paper, section 3.3 on Batch Normalization)."""
    shape = (1, -1, *[1] * (z.center.dim() - 2))
    scale, shift = scale.view(shape), shift.view(shape)
    return Interval(z.center * scale + shift, z.radius * scale.abs())


@rule(nn.ReLU)
def relu(layer: nn.ReLU, z: Interval) -> Interval:
    return interval_relu(z)


@rule(F.relu, torch.relu, "relu")
def relu_function(z: Interval, inplace: bool = False) -> Interval:
    return interval_relu(z)


@rule(nn.LeakyReLU)
def leaky_relu(layer: nn.LeakyReLU, z: Interval) -> Interval:
    return leaky_relu_function(z, layer.negative_slope)


@rule(F.leaky_relu)
def leaky_relu_function(z: Interval, negative_slope: float = 0.01, inplace: bool = False) -> Interval:
    if negative_slope < 0:
        raise InputError(f"LeakyReLU with the negative slope {negative_slope} is not monotone; there is no rule for it")
    return _monotone(lambda x: F.leaky_relu(x, negative_slope), z)


@rule(nn.MaxPool2d)
def max_pool(layer: nn.MaxPool2d, z: Interval) -> Interval:
    return _monotone(layer, z)


@rule(F.max_pool2d)
def max_pool_function(z: Interval, *args: Any, **kwargs: Any) -> Interval:
    return _monotone(lambda x: F.max_pool2d(x, *args, **kwargs), z)


@rule(nn.AvgPool2d, nn.AdaptiveAvgPool2d)
def average_pool(layer: nn.Module, z: Interval) -> Interval:
    """A mean has weights of one sign, so it carries center and radius alike."""
    return Interval(layer(z.center), layer(z.radius).abs())


@rule(F.avg_pool2d)
def average_pool_function(z: Interval, *args: Any, **kwargs: Any) -> Interval:
    return Interval(F.avg_pool2d(z.center, *args, **kwargs), F.avg_pool2d(z.radius, *args, **kwargs).abs())


@rule(F.adaptive_avg_pool2d)
def adaptive_average_pool_function(z: Interval, output_size: Any) -> Interval:
    return Interval(F.adaptive_avg_pool2d(z.center, output_size), F.adaptive_avg_pool2d(z.radius, output_size))


@rule(nn.Flatten)
def flatten(layer: nn.Flatten, z: Interval) -> Interval:
    return _rearrange(layer, z)


@rule(torch.flatten, "flatten")
def flatten_function(z: Interval, start_dim: int = 0, end_dim: int = -1) -> Interval:
    return _rearrange(lambda x: torch.flatten(x, start_dim, end_dim), z)


@rule("view", "reshape")
def reshape_method(z: Interval, *shape: Any) -> Interval:
    return _rearrange(lambda x: x.reshape(*shape), z)


@rule(torch.reshape)
def reshape(z: Interval, shape: Sequence[int]) -> Interval:
    return _rearrange(lambda x: x.reshape(*shape), z)


@rule("contiguous")
def contiguous(z: Interval) -> Interval:
    return z


@rule(nn.Identity, nn.Dropout)
def identity(layer: nn.Module, z: Interval) -> Interval:
    if isinstance(layer, nn.Dropout) and layer.training and layer.p > 0:
        raise InputError("Dropout draws at random in training mode, so there is no bound", "call `model.eval()` first")
    return z


@rule(operator.add, torch.add, "add", operator.iadd)
def add(x: Interval | Tensor | float, y: Interval | Tensor | float) -> Interval:
    """Also a residual sum: the branches' intervals add up as if independent."""
    if isinstance(x, Interval) and isinstance(y, Interval):
        return Interval(x.center + y.center, x.radius + y.radius)
    z, constant = (x, y) if isinstance(x, Interval) else (y, x)
    assert isinstance(z, Interval)
    center = z.center + constant  # type: ignore[operator]
    return Interval(center, z.radius.expand_as(center))


@rule(operator.sub, torch.sub, "sub", operator.isub)
def subtract(x: Interval | Tensor | float, y: Interval | Tensor | float) -> Interval:
    return add(x, negate(y) if isinstance(y, Interval) else -y)


@rule(operator.neg, torch.neg)
def negate(z: Interval) -> Interval:
    return Interval(-z.center, z.radius)


@rule(operator.mul, torch.mul, "mul", operator.imul)
def multiply(x: Interval | Tensor | float, y: Interval | Tensor | float) -> Interval:
    """By a constant only: the product of two perturbed tensors has no rule here."""
    if isinstance(x, Interval) and isinstance(y, Interval):
        raise InputError("the product of two perturbed tensors has no rule", "only scaling by a constant has one")
    z, constant = (x, y) if isinstance(x, Interval) else (y, x)
    assert isinstance(z, Interval)
    return Interval(z.center * constant, z.radius * abs(constant))  # type: ignore[operator, arg-type]


@rule(operator.truediv, torch.div, "div")
def divide(x: Interval, y: Tensor | float | Interval) -> Interval:
    if isinstance(y, Interval) or not isinstance(x, Interval):
        raise InputError("division by a perturbed tensor has no rule", "only scaling by a constant has one")
    return Interval(x.center / y, x.radius / abs(y))  # type: ignore[operator]


@rule(torch.cat, torch.concat)
def concatenate(tensors: Sequence[Interval | Tensor], dim: int = 0) -> Interval:
    parts = [z if isinstance(z, Interval) else Interval(z, torch.zeros_like(z)) for z in tensors]
    return Interval(torch.cat([z.center for z in parts], dim), torch.cat([z.radius for z in parts], dim))


def _monotone(function: Callable[[Tensor], Tensor], z: Interval) -> Interval:
    """A function that never falls takes bounds to bounds."""
    return Interval.from_bounds(function(z.lower), function(z.upper))


def _rearrange(function: Callable[[Tensor], Tensor], z: Interval) -> Interval:
    return Interval(function(z.center), function(z.radius))
