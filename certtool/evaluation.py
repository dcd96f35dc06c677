"""Clean and interval-certified accuracy of a network on a split, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from certtool.bounds import ball, certified_mask, evaluation_weights, graph_of, margin_bounds
from certtool.data import Split
from certtool.distributed import World

ALONE = World()


@dataclass(frozen=True)
class Accuracy:
    clean: float
    certified: float


@torch.no_grad()
def interval_accuracy(
    model: nn.Module, split: Split, eps: float, world: World = ALONE, batch_size: int = 256
) -> Accuracy:
    """Over a whole split with running statistics, each rank its part; the model's mode is put back."""
    was_training = model.training
    model.eval()
    graph = graph_of(model)
    weights = evaluation_weights(graph)
    device = next(model.parameters()).device
    counts = torch.zeros(2, device=device)
    try:
        for rows in torch.split(world.part(torch.arange(len(split))), batch_size):
            x = split.pixels(split.images[rows].to(device))
            labels = split.labels[rows].to(device)
            right = model(x).argmax(1) == labels
            proven = certified_mask(margin_bounds(graph, ball(x, eps), labels, weights), labels) & right
            counts += torch.stack([right.sum(), proven.sum()])
    finally:
        model.train(was_training)
    correct, certified = world.total(counts).tolist()
    return Accuracy(correct / len(split), certified / len(split))
