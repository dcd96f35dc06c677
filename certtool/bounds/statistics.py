"""What the regularisers and `inspect` look at: interval widths and ReLU states, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from certtool.bounds.graph import Graph
from certtool.bounds.ibp import Bounds
from certtool.bounds.interval import Interval


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
    """For each ReLU the step whose bounds are its input; keep those in `propagate`."""
    return {step.name: step.inputs[0] for step in graph.relus}


def relu_statistics(graph: Graph, bounds: Bounds) -> ReluStatistics:
    """Statistics of every ReLU of the network, in order."""
    sources = relu_inputs(graph)
    return statistics_of(tuple(sources), [bounds.kept[source] for source in sources.values()])


def statistics_of(names: tuple[str, ...], layers: Sequence[Interval]) -> ReluStatistics:
    """Means over batch and neurons together (paper, section 3.3 on warmup regularization)."""
    if not layers:
        nothing = torch.zeros(0)
        return ReluStatistics(names, nothing, nothing, nothing, nothing, nothing, nothing)
    sums = torch.stack([torch.stack(_sums(layer)) for layer in layers]).unbind(1)
    radius, active, inactive, mean_active, mean_inactive, var_active, var_inactive = sums
    return ReluStatistics(
        names=names,
        mean_width=2 * radius,
        active=active,
        inactive=inactive,
        alpha=_ratio(mean_active, -mean_inactive),
        beta=_ratio(var_active, var_inactive),
        both_states=((active > 0) & (inactive > 0)).to(radius.dtype),
    )


def _sums(z: Interval) -> list[Tensor]:
    """One layer's means: radius, states, and what each state contributes to mean and variance of the centers."""
    center = z.center
    active, inactive = (z.lower > 0).to(center.dtype), (z.upper < 0).to(center.dtype)
    squares = (center - center.mean()).square()
    terms = (
        z.radius,
        active,
        inactive,
        active * center,
        inactive * center,
        active * squares,
        inactive * squares,
    )
    return [term.mean() for term in terms]


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Safe for the gradient where the denominator is 0; `both_states` masks that case."""
    return numerator / torch.where(denominator == 0, torch.ones_like(denominator), denominator)
