"""The two warmup regularisers (paper, section 3.3 on warmup regularization)."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from certtool.bounds import LayerStatistics

_TINY = 1e-12


def tightness(input_width: Tensor, layers: Collection[LayerStatistics], tolerance: float) -> Tensor:
    """L_tightness: penalises a layer whose mean width exceeds the input's by more than 1/tau (eq. for L_tightness)."""
    return _mean([tightness_term(input_width, layer, tolerance) for layer in layers], input_width)


def tightness_term(input_width: Tensor, layer: LayerStatistics, tolerance: float) -> Tensor:
    """One layer's share, in [0, 1]: ReLU(tau - E(Delta_0)/E(Delta_i)) / tau."""
    return F.relu(tolerance - input_width / layer.mean_width.clamp(min=_TINY)) / tolerance


def relu_balance(layers: Collection[LayerStatistics], tolerance: float) -> Tensor:
    """L_relu: penalises a layer whose active and inactive neurons contribute unequally (eq. for L_relu)."""
    terms = [relu_term(layer, tolerance) for layer in layers]
    return _mean(terms, terms[0] if terms else torch.zeros(()))


def relu_term(layer: LayerStatistics, tolerance: float) -> Tensor:
    """One layer's share, in [0, 2]; 0 for a layer without active or without inactive neurons."""
    missing = F.relu(tolerance - _below_one(layer.alpha)) + F.relu(tolerance - _below_one(layer.beta))
    return layer.both_states * missing / tolerance


def _below_one(ratio: Tensor) -> Tensor:
    return torch.minimum(ratio, 1 / ratio.clamp(min=_TINY))


def _mean(terms: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(terms).mean() if terms else torch.zeros_like(like)
