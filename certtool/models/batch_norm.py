"""BatchNorm, whole or one half of it, as the ablations of the paper switch it (appendix, table on BatchNorm)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from certtool.catalog import BatchNormMode


class PartialBatchNorm(nn.Module):
    """BatchNorm that only centers (subtracts the mean) or only scales (divides by the standard deviation)."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, features: int, *, center: bool, scale: bool, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.center, self.scale, self.eps, self.momentum = center, scale, eps, momentum
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def scale_and_shift(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """The layer with these statistics as x * scale + shift; the bounds ask for it (bounds/ibp.py)."""
        scale = self.weight * torch.rsqrt(var + self.eps) if self.scale else self.weight
        shift = self.bias - mean * scale if self.center else self.bias
        return scale, shift

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            dims = [0, *range(2, x.dim())]
            var, mean = torch.var_mean(x, dims, correction=0)
            count = x.numel() // x.shape[1]
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var * (count / max(count - 1, 1)), self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        scale, shift = self.scale_and_shift(mean, var)
        shape = (1, -1, *[1] * (x.dim() - 2))
        return x * scale.view(shape) + shift.view(shape)


def batch_norm(mode: BatchNormMode, features: int, *, convolution: bool) -> nn.Module | None:
    """The layer that follows an affine one in this mode, or None where the mode has none there."""
    if mode == "none" or (mode == "conv" and not convolution):
        return None
    if mode in ("center", "scale"):
        return PartialBatchNorm(features, center=mode == "center", scale=mode == "scale")
    return nn.BatchNorm2d(features) if convolution else nn.BatchNorm1d(features)
