"""Layer 0 of every network: pixels in [0, 1] in, normalised values out. So eps always means pixels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from certtool.bounds import Graph, Interval, rule
from certtool.bounds.rounding import UNDERFLOW, gamma, rounded_rule


class Normalize(nn.Module):
    """(x - mean) / std in each channel. The constants travel in the checkpoint's header, not among its weights."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            # An explicit device: the constants stay real when the network is built on torch's meta device.
            constant = torch.tensor(values, device="cpu").view(1, -1, 1, 1)
            self.register_buffer(name, constant, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


@rule(Normalize)
def normalize(layer: Normalize, z: Interval) -> Interval:
    return Interval((z.center - layer.mean) / layer.std, z.radius / layer.std)


@rounded_rule(Normalize)
def rounded_normalize(layer: Normalize, z: Interval) -> Interval:
    """A difference and a quotient, or a product with the reciprocal: at most three roundings of terms this large."""
    plain = normalize(layer, z)
    shifted = (z.center - layer.mean).abs() + z.radius
    error = gamma(3) * shifted / layer.std + UNDERFLOW * (1 + shifted) * (1 + 1 / layer.std)
    return Interval(plain.center, plain.radius + error)


def input_step(graph: Graph) -> str:
    """Where the width of the input, E(Delta_0), is measured: after clipping and normalisation."""
    first = graph.steps[0].name
    return next((s.name for s in graph.steps if s.op is Normalize and s.inputs == (first,)), first)
