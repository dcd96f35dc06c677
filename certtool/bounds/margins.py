"""Lower bounds of z_y - z_j, the quantity that must stay positive (paper, eq. 1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from certtool.bounds.graph import Graph, Step
from certtool.bounds.ibp import NO_WEIGHTS, Bounds, Weights, propagate
from certtool.bounds.interval import Interval

MOST_DIFFERENCES = 1 << 22  # entries of W_y - W_j, image by class by feature, at once: 16 MB in float32


def features_step(graph: Graph) -> str | None:
    """The step whose bounds the merged last layer starts from; keep it in `propagate`."""
    return graph.classifier.inputs[0] if graph.classifier else None


def lower_margins(graph: Graph, bounds: Bounds, labels: Tensor) -> Tensor:
    """Image by class, the least z_y - z_j; the column of the label itself is 0.

    A linear last layer is merged with the subtraction, so that z_y and z_j move together: |W_y - W_j| carries the
    radius, not |W_y| + |W_j|.
    """
    if graph.classifier is None:
        return _unmerged(bounds.output, labels)
    return _merged(graph.classifier, bounds, labels).lower


def upper_margins(graph: Graph, bounds: Bounds, labels: Tensor) -> Tensor:
    """Image by class, the greatest z_y - z_j."""
    if graph.classifier is None:
        return -_unmerged(Interval(-bounds.output.center, bounds.output.radius), labels)
    return _merged(graph.classifier, bounds, labels).upper


def _merged(classifier: Step, bounds: Bounds, labels: Tensor) -> Interval:
    layer = classifier.module
    assert isinstance(layer, nn.Linear)
    features = bounds.kept[classifier.inputs[0]].to(layer.weight.dtype)
    logits = F.linear(features.center, layer.weight, layer.bias)
    center = logits.gather(1, labels.unsqueeze(1)) - logits
    return Interval(center, _spread(layer.weight, labels, features.radius))


def _spread(weight: Tensor, labels: Tensor, radius: Tensor) -> Tensor:
    """|W_y - W_j| r, image by class. Where classes are many, a few images at a time, computed again for the gradient:
    the differences of all images at once would be the largest tensor of the step."""
    few = max(1, MOST_DIFFERENCES // weight.numel())
    if len(labels) <= few:
        return _spread_at_once(weight, labels, radius)
    parts = zip(torch.split(labels, few), torch.split(radius, few), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([_spread_at_once(weight, *part) for part in parts])
    return torch.cat([checkpoint(_spread_at_once, weight, *part, use_reentrant=False) for part in parts])


def _spread_at_once(weight: Tensor, labels: Tensor, radius: Tensor) -> Tensor:
    rows = weight[labels].unsqueeze(1) - weight  # image, class, feature
    return torch.einsum("bkn,bn->bk", rows.abs(), radius)


def _unmerged(logits: Interval, labels: Tensor) -> Tensor:
    margins = logits.lower.gather(1, labels.unsqueeze(1)) - logits.upper
    return margins.scatter(1, labels.unsqueeze(1), 0.0)


def margin_bounds(graph: Graph, box: Interval, labels: Tensor, weights: Weights = NO_WEIGHTS) -> Tensor:
    """The margins of a batch with running statistics: what verification asks for."""
    keep = [name for name in (features_step(graph),) if name is not None]
    return lower_margins(graph, propagate(graph, box, keep=keep, weights=weights), labels)


def certified_mask(margins: Tensor, labels: Tensor) -> Tensor:
    """Images whose every margin to another class is finite and strictly positive; NaN and ties do not count."""
    others = margins.scatter(1, labels.unsqueeze(1), torch.inf)
    return (others > 0).all(1) & (margins < torch.inf).all(1)
