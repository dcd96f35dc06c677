"""Lower bounds of z_y - z_j, the quantity that must stay positive (paper, eq. 1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from certtool.bounds.graph import Graph, Step
from certtool.bounds.ibp import Bounds, propagate
from certtool.bounds.interval import Interval


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
    features = bounds.kept[classifier.inputs[0]]
    rows = layer.weight[labels].unsqueeze(1) - layer.weight  # image, class, feature
    logits = bounds.output.center
    center = logits.gather(1, labels.unsqueeze(1)) - logits
    return Interval(center, torch.einsum("bkn,bn->bk", rows.abs(), features.radius))


def _unmerged(logits: Interval, labels: Tensor) -> Tensor:
    margins = logits.lower.gather(1, labels.unsqueeze(1)) - logits.upper
    return margins.scatter(1, labels.unsqueeze(1), 0.0)


def margin_bounds(graph: Graph, box: Interval, labels: Tensor) -> Tensor:
    """The margins of a batch with running statistics: what verification asks for."""
    keep = [name for name in (features_step(graph),) if name is not None]
    return lower_margins(graph, propagate(graph, box, keep=keep), labels)


def certified_mask(margins: Tensor, labels: Tensor) -> Tensor:
    """Images whose every margin to another class is finite and strictly positive; NaN and ties do not count."""
    others = margins.scatter(1, labels.unsqueeze(1), torch.inf)
    return (others > 0).all(1) & (margins < torch.inf).all(1)
