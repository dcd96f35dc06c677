"""ReLU of an interval, with a gradient that keeps nothing but the result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from certtool.bounds.interval import Interval


class _IntervalRelu(torch.autograd.Function):
    """Center and radius of [ReLU(c - r), ReLU(c + r)].

    Written down for the sake of its gradient: where lower and upper are positive is seen in the result, which the next
    layer keeps anyway. Autograd would keep two masks or both edges for it, and a step of a narrow network is bound by
    memory, not arithmetic.
    """

    @staticmethod
    def forward(center: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        lower, upper = (center - radius).relu_(), (center + radius).relu_()
        return (upper + lower).mul_(0.5), (upper - lower).mul_(0.5)  # an infinite radius stays one

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
