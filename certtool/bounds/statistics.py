"""What the regularisers and `inspect` look at: interval widths and ReLU states, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from certtool.bounds.graph import Graph
from certtool.bounds.ibp import Bounds
from certtool.bounds.interval import Interval
from certtool.bounds.together import ALONE, Together, means


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


def relu_statistics(graph: Graph, bounds: Bounds, together: Together = ALONE) -> ReluStatistics:
    """Statistics of every ReLU of the network, in order."""
    sources = relu_inputs(graph)
    return statistics_of(tuple(sources), [bounds.kept[source] for source in sources.values()], together)


def statistics_of(names: tuple[str, ...], layers: Sequence[Interval], together: Together = ALONE) -> ReluStatistics:
    """Means over batch and neurons together (paper, section 3.3 on warmup regularization)."""
    if not layers:
        nothing = torch.zeros(0)
        return ReluStatistics(names, nothing, nothing, nothing, nothing, nothing, nothing)
    centers = means((layer.center for layer in layers), together)
    terms = (term for layer, mean in zip(layers, centers, strict=True) for term in _terms(layer, mean))
    found = means(terms, together).view(len(layers), -1).unbind(1)
    radius, active, inactive, mean_active, mean_inactive, var_active, var_inactive = found
    return ReluStatistics(
        names=names,
        mean_width=2 * radius,
        active=active,
        inactive=inactive,
        alpha=_ratio(mean_active, -mean_inactive),
        beta=_ratio(var_active, var_inactive),
        both_states=((active > 0) & (inactive > 0)).to(radius.dtype),
    )


def _terms(z: Interval, mean: Tensor) -> Iterator[Tensor]:
    """What a layer's means are of: radius, states, and each state's part in mean and variance of the centers."""
    center = z.center
    active, inactive = (z.lower > 0).to(center.dtype), (z.upper < 0).to(center.dtype)
    yield z.radius
    yield active
    yield inactive
    yield active * center
    yield inactive * center
    squares = (center - mean).square()
    yield active * squares
    yield inactive * squares


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Safe for the gradient where the denominator is 0; `both_states` masks that case."""
    return numerator / torch.where(denominator == 0, torch.ones_like(denominator), denominator)
