"""The two warmup regularisers (paper, section 3.3 on warmup regularization)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from certtool.bounds.statistics import ReluStatistics

_TINY = 1e-12


def tightness_terms(input_width: Tensor, layers: ReluStatistics, tolerance: float) -> Tensor:
    """Each layer's share of L_tightness, in [0, 1]: ReLU(tau - E(Delta_0)/E(Delta_i)) / tau.

    Their mean penalises layers whose bounds are wider than the input's by more than 1/tau.
    """
    return F.relu(tolerance - input_width / layers.mean_width.clamp(min=_TINY)) / tolerance


def relu_terms(layers: ReluStatistics, tolerance: float) -> Tensor:
    """Each layer's share of L_relu, in [0, 2]; 0 for a layer without active or without inactive neurons.

    Their mean penalises layers whose active and inactive neurons contribute unequally.
    """
    ratios = torch.stack([layers.alpha, layers.beta])
    below_one = torch.minimum(ratios, 1 / ratios.clamp(min=_TINY))
    return layers.both_states * F.relu(tolerance - below_one).sum(0) / tolerance
