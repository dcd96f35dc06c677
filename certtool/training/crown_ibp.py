"""CROWN-IBP as a training method: linear relaxation at the start of the warmup, intervals at its end.

The bound is (1 - eps/eps_t) crown + (eps/eps_t) ibp, of the margins or, with loss fusion, of the sum in the loss.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from certtool.bounds import Bounds, Interval, upper_margins
from certtool.bounds.crown import CrownBounds
from certtool.distributed import SharedBatch
from certtool.training.objective import Objective, robust_cross_entropy

# A smaller share of CROWN in the mix is none.
SMALLEST_SHARE = 1e-5


class CrownObjective(Objective):
    """The loss of CROWN-IBP; regularisers, clean figures and the count of certified images are the interval bounds'."""

    def __init__(
        self, model: nn.Module, terms: Collection[str], tolerance: float, *, example: Tensor, target: float, fused: bool
    ) -> None:
        super().__init__(model, terms, tolerance)
        self.target, self.fused = target, fused
        first = None if self.input_step == self.graph.steps[0].name else self.input_step
        self.crown = CrownBounds(model, self.graph, example, preprocessing=first)

    def robust_ce(
        self, box: Interval, bounds: Bounds, margins: Tensor, labels: Tensor, radius: Tensor, batch: SharedBatch
    ) -> Tensor:
        share = 1 - float(radius) / self.target
        if share < SMALLEST_SHARE:
            return robust_cross_entropy(margins, labels, batch)
        if self.fused:
            losses = self._fused(share, box, bounds, margins, labels)
            return losses.mean() if batch.alone else losses.sum() / batch.images
        crown = self.crown.lower_margins(box, labels, margins.shape[1], bounds.norms)
        return robust_cross_entropy(share * crown + (1 - share) * margins, labels, batch)

    def _fused(self, share: float, box: Interval, bounds: Bounds, margins: Tensor, labels: Tensor) -> Tensor:
        """The loss of each image."""
        sums = ExponentialSum.between(-upper_margins(self.graph, bounds, labels), -margins)
        crown = sums.crown(self.crown.lower(box, sums.rows(labels), bounds.norms).squeeze(1))
        return torch.log(share * crown + (1 - share) * sums.interval) + sums.top


@dataclass(frozen=True)
class ExponentialSum:
    """Upper bounds of sum_j exp(d_j - top), d_j = z_j - z_y between given bounds: the sum in the cross-entropy.

    Everything is divided by exp(top), top an image's greatest bound, so that wide bounds do not overflow; the loss adds
    top again after the logarithm, which also takes its gradient out.
    """

    lower: Tensor  # image by class
    upper: Tensor
    top: Tensor  # image

    @classmethod
    def between(cls, lower: Tensor, upper: Tensor) -> ExponentialSum:
        return cls(lower, upper, upper.detach().amax(1))

    @property
    def interval(self) -> Tensor:
        """Each exponential at its greatest."""
        return self._greatest.sum(1)

    def rows(self, labels: Tensor) -> Tensor:
        """sum_j slope_j (z_y - z_j) as one row over the logits: what CROWN must bound from below."""
        slopes = self._slopes
        total = slopes.sum(1, keepdim=True)
        return (torch.zeros_like(slopes).scatter(1, labels.unsqueeze(1), total) - slopes).unsqueeze(1)

    def crown(self, lower: Tensor) -> Tensor:
        """exp lies below its chords, exp(d) <= exp(u) + slope (d - u), so the sum lies below a linear function of d.

        `lower` bounds the sum of slope_j (z_y - z_j). A sum of exponentials is never below that of their least values;
        rounding could be.
        """
        chords = (self._greatest - self._slopes * self.upper).sum(1) - lower
        least = torch.exp(self.lower.detach() - self.top.unsqueeze(1)).sum(1)
        return torch.maximum(chords, least.clamp(min=torch.finfo(least.dtype).tiny))

    @property
    def _greatest(self) -> Tensor:
        return torch.exp(self.upper - self.top.unsqueeze(1))

    @property
    def _slopes(self) -> Tensor:
        """(exp(u) - exp(l)) / (u - l)."""
        return self._greatest * _mean_decay(self.upper - self.lower)


def _mean_decay(width: Tensor) -> Tensor:
    """(1 - exp(-w)) / w, by its series where w is so small that the quotient's gradient would be noise."""
    small = width < 1e-4
    safe = torch.where(small, torch.ones_like(width), width)
    return torch.where(small, 1 - width / 2 + width.square() / 6, -torch.expm1(-safe) / safe)
