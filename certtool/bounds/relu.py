"""ReLU of an interval, with a gradient that keeps nothing but the result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from certtool.bounds.interval import Interval


def bounded_relu(center: Tensor, radius: Tensor, half: float = 0.5) -> tuple[Tensor, Tensor]:
    """Center and radius of [ReLU(c - r), ReLU(c + r)].

    The radius is (c + r) / 2 between 0, where the neuron is inactive, and r, where it is active; the center is c, but
    never less than that radius. No edge is computed: few passes over memory, and an infinite radius makes no NaN.
    """
    after = (center + radius).mul_(half).relu_().clamp_(max=radius)
    return torch.maximum(center, after), after


class _IntervalRelu(torch.autograd.Function):
    """`bounded_relu` with its gradient written down.

    Where lower and upper are positive is seen in the result, which the next layer keeps anyway. Autograd would keep two
    masks or both edges for it, and a step of a narrow network is bound by memory, not arithmetic.
    """

    @staticmethod
    def forward(center: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        return bounded_relu(center, radius)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, center_grad: Tensor, radius_grad: Tensor) -> tuple[Tensor, Tensor]:
        center, radius = ctx.saved_tensors
        upper_grad = torch.where(center + radius > 0, center_grad + radius_grad, 0.0)
        lower_grad = torch.where(center > radius, center_grad - radius_grad, 0.0)
        return (upper_grad + lower_grad) * 0.5, (upper_grad - lower_grad) * 0.5


def interval_relu(z: Interval) -> Interval:
    return Interval(*_IntervalRelu.apply(z.center, z.radius))  # type: ignore[no-untyped-call]
