"""What the regularisers and `inspect` look at: interval widths and ReLU states, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from certtool.bounds.graph import Graph
from certtool.bounds.ibp import Bounds
from certtool.bounds.interval import Interval
from certtool.bounds.relu import interval_relu
from certtool.bounds.together import ALONE, Together, total_mean


@dataclass(frozen=True)
class ReluStatistics:
    """The inputs of all ReLUs over a batch: vectors, one entry a layer, with gradients where the bounds have them."""

    names: tuple[str, ...]
    mean_width: Tensor  # E(Delta_i)
    active: Tensor  # fraction with lower > 0
    inactive: Tensor  # fraction with upper < 0
    alpha: Tensor  # active over inactive contribution to the mean of the centers
    beta: Tensor  # the same for their variance
    both_states: Tensor  # 1 where both kinds of neurons exist, else 0: alpha and beta then mean nothing


def relu_inputs(graph: Graph) -> dict[str, str]:
    """For each ReLU the step whose bounds are its input."""
    return {step.name: step.inputs[0] for step in graph.relus}


def statistics_need(graph: Graph) -> tuple[str, ...]:
    """The steps to keep in `propagate` for `relu_statistics`: every ReLU and its input."""
    return tuple(name for pair in relu_inputs(graph).items() for name in pair)


def relu_statistics(graph: Graph, bounds: Bounds, together: Together = ALONE) -> ReluStatistics:
    """Statistics of every ReLU of the network, in order."""
    sources = relu_inputs(graph)
    layers = [(bounds.kept[source], bounds.kept[relu]) for relu, source in sources.items()]
    return _statistics(tuple(sources), [_layer_means(z, after, together) for z, after in layers])


def statistics_of(names: tuple[str, ...], layers: Sequence[Interval], together: Together = ALONE) -> ReluStatistics:
    """The same of intervals at hand, whether or not a ReLU comes after them."""
    return _statistics(names, [_layer_means(z, interval_relu(z), together) for z in layers])


def _statistics(names: tuple[str, ...], layers: list[Tensor]) -> ReluStatistics:
    """From each layer's means over batch and neurons together (paper, section 3.3 on warmup regularization)."""
    if not layers:
        nothing = torch.zeros(0)
        return ReluStatistics(names, nothing, nothing, nothing, nothing, nothing, nothing)
    radius, mean, active, inactive, c_active, c_inactive, cc_active, cc_inactive = torch.stack(layers).unbind(1)
    return ReluStatistics(
        names=names,
        mean_width=2 * radius,
        active=active,
        inactive=inactive,
        alpha=_ratio(c_active, -c_inactive),
        # E(s (c - m)^2) = E(s c^2) - 2 m E(s c) + m^2 E(s) for a state s: one look at the layer gives both moments.
        beta=_ratio(
            cc_active - 2 * mean * c_active + mean * mean * active,
            cc_inactive - 2 * mean * c_inactive + mean * mean * inactive,
        ),
        both_states=((active > 0) & (inactive > 0)).to(radius.dtype),
    )


def _layer_means(z: Interval, after: Interval, together: Together) -> Tensor:
    """Over the whole batch: radius, center, and for the active, then the inactive neurons their number, c and c^2."""
    wide = torch.promote_types(z.center.dtype, torch.float32)
    bounds = z.to(wide)
    sums = _Sums.apply(bounds.center, bounds.radius, after.center, after.radius)  # type: ignore[no-untyped-call]
    return total_mean(sums, z.center, together)


class _Sums(torch.autograd.Function):
    """What the regularisers know of a layer, summed in one pass over its bounds.

    Its gradient sees the states in the ReLU's result, as the ReLU's own does (relu.py): no mask is kept.
    """

    @staticmethod
    def forward(center: Tensor, radius: Tensor, after_center: Tensor, after_radius: Tensor) -> Tensor:
        active, inactive = (center - radius > 0).to(center.dtype), (center + radius < 0).to(center.dtype)
        square = center * center
        terms = (radius, center, active, inactive, active * center, inactive * center)
        return torch.stack([term.sum() for term in (*terms, active * square, inactive * square)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
        center, _, after_center, after_radius = inputs
        ctx.save_for_backward(center, after_center, after_radius)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        center, after_center, after_radius = ctx.saved_tensors
        radius, mean, _, _, c_active, c_inactive, cc_active, cc_inactive = grad.unbind()
        active = torch.where(after_center > after_radius, c_active + 2 * cc_active * center, 0.0)
        inactive = torch.where(after_center + after_radius == 0, c_inactive + 2 * cc_inactive * center, 0.0)
        return mean + active + inactive, radius.expand_as(center), None, None


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Safe for the gradient where the denominator is 0; `both_states` masks that case."""
    return numerator / torch.where(denominator == 0, torch.ones_like(denominator), denominator)
