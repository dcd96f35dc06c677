"""Clean and interval-certified accuracy of a network on a split, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from certtool.bounds import Graph, ball, certified_mask, features_step, graph_of, lower_margins, propagate
from certtool.data import Split


@dataclass(frozen=True)
class Outcome:
    """Per image: whether the prediction is right, whether interval bounds prove it stays so, the least margin."""

    correct: Tensor
    certified: Tensor
    margin: Tensor


@dataclass(frozen=True)
class Accuracy:
    clean: float
    certified: float


@torch.no_grad()
def interval_outcome(model: nn.Module, graph: Graph, x: Tensor, labels: Tensor, eps: float) -> Outcome:
    """One batch. The margin is the least over the other classes; certified implies correct."""
    features = features_step(graph)
    bounds = propagate(graph, ball(x, eps), keep=() if features is None else (features,))
    margins = lower_margins(graph, bounds, labels)
    correct = model(x).argmax(1) == labels
    certified = certified_mask(margins, labels) & correct
    others = margins.scatter(1, labels.unsqueeze(1), torch.inf)
    return Outcome(correct, certified, others.min(1).values)


def interval_accuracy(model: nn.Module, split: Split, eps: float, batch_size: int = 256) -> Accuracy:
    """Over a whole split with running statistics; the model's mode is put back."""
    was_training = model.training
    model.eval()
    graph = graph_of(model)
    device = next(model.parameters()).device
    correct = certified = 0
    try:
        for start in range(0, len(split), batch_size):
            rows = slice(start, start + batch_size)
            x = split.pixels(split.images[rows].to(device))
            outcome = interval_outcome(model, graph, x, split.labels[rows].to(device), eps)
            correct += int(outcome.correct.sum())
            certified += int(outcome.certified.sum())
    finally:
        model.train(was_training)
    return Accuracy(correct / len(split), certified / len(split))
