"""What the regularisers and `inspect` look at: interval widths and ReLU states, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from certtool.bounds.graph import Graph
from certtool.bounds.ibp import Bounds
from certtool.bounds.interval import Interval


@dataclass(frozen=True)
class LayerStatistics:
    """One ReLU's input over a batch; scalars, with gradients where the bounds have them."""

    mean_width: Tensor  # E(Delta_i)
    active: Tensor  # fraction with lower > 0
    inactive: Tensor  # fraction with upper < 0
    alpha: Tensor  # active over inactive contribution to the mean of the centers
    beta: Tensor  # the same for their variance
    both_states: Tensor  # 1 where both kinds of neurons exist, else 0: alpha and beta then mean nothing


def layer_statistics(z: Interval) -> LayerStatistics:
    """Means over batch and neurons together (paper, section 3.3 on warmup regularization)."""
    center = z.center
    active, inactive = (z.lower > 0).to(center.dtype), (z.upper < 0).to(center.dtype)
    count_active, count_inactive = active.sum(), inactive.sum()
    both_states = ((count_active > 0) & (count_inactive > 0)).to(center.dtype)
    squares = (center - center.mean()).square()
    return LayerStatistics(
        mean_width=2 * z.radius.mean(),
        active=count_active / center.numel(),
        inactive=count_inactive / center.numel(),
        alpha=_ratio((active * center).sum(), -(inactive * center).sum()),
        beta=_ratio((active * squares).sum(), (inactive * squares).sum()),
        both_states=both_states,
    )


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Safe for the gradient where the denominator is 0; the caller masks that case."""
    return numerator / torch.where(denominator == 0, torch.ones_like(denominator), denominator)


def relu_inputs(graph: Graph) -> dict[str, str]:
    """For each ReLU the step whose bounds are its input; keep those in `propagate`."""
    return {step.name: step.inputs[0] for step in graph.relus}


def relu_statistics(graph: Graph, bounds: Bounds) -> dict[str, LayerStatistics]:
    """Statistics of every ReLU of the network, by the ReLU's name."""
    return {name: layer_statistics(bounds.kept[source]) for name, source in relu_inputs(graph).items()}
