"""auto_LiRPA's side of a comparison."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from certtool.bounds import Interval
from certtool.bounds.lirpa import _converted, _perturbed, auto_lirpa, margin_rows


class OtherSide:
    """A network through auto_LiRPA, which takes no Normalize as a layer: that is done before, by `normalize`."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.lirpa = auto_lirpa()
        inner = copy.deepcopy(model)
        self.normalize = inner.get_submodule("normalize")
        inner.set_submodule("normalize", nn.Identity())
        self.bounded: Any = _converted(self.lirpa, inner, self.normalize(x), {"conv_mode": "patches"})

    def box(self, lower: Tensor, upper: Tensor) -> Interval:
        return Interval.from_bounds(self.normalize(lower), self.normalize(upper))

    def margins(self, box: Interval, labels: Tensor, classes: int) -> Tensor:
        """Interval lower bounds of logit_label - logit_k, 0 at the label."""
        others, rows = margin_rows(labels, classes, box.center.dtype)
        bound, _ = self.bounded.compute_bounds(
            x=(_perturbed(self.lirpa, box),), C=rows, IBP=True, method=None, bound_upper=False
        )
        return torch.zeros(others.shape).masked_scatter(others, bound)
