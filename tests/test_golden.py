"""Figures of our own making that must not move: one training step and one evaluation of a fixed small network.

They were written down once the engine agreed with the published code's figures (tests/test_parity.py; for ResNeXt with
auto_LiRPA's, tests/test_lirpa.py), and unlike those they are always at hand.
"""

from __future__ import annotations

import math

import pytest
import torch

from certtool import catalog
from certtool.bounds import ball, graph_of, margin_bounds
from certtool.models import build
from certtool.training.objective import Objective

FIGURES: dict[str, dict[str, float]] = {
    "cnn7": {
        "clean_ce": 3.179369182744432,
        "robust_ce": 158.30340227792814,
        "tightness": 0.8917216359753449,
        "relu": 0.4256444655599692,
        "total": 158.63274380331197,
        "last_width": 110.38696584951154,
        "active": 0.4166666666666667,
        "gradient": 1985.0482399942127,
        "margins": -8489.833232505865,
    },
    "wide_resnet": {
        "clean_ce": 2.8546667682574727,
        "robust_ce": 94.01977832618046,
        "tightness": 0.9125123884178008,
        "relu": 0.8233750742783192,
        "total": 94.45375019185448,
        "last_width": 64.70146686311148,
        "active": 0.45574951171875,
        "gradient": 525.697925155456,
        "margins": -19210.425549305954,
    },
    "resnext": {
        "clean_ce": 2.8799845977423844,
        "robust_ce": 9680.131653074934,
        "tightness": 0.9427440489676853,
        "relu": 0.3236301272525549,
        "total": 9680.44824661899,
        "last_width": 6751.561454894941,
        "active": 0.27347237723214285,
        "gradient": 207448.1110315553,
        "margins": -52329.943205542,
    },
}

ARGUMENTS: dict[str, catalog.Arguments] = {
    "cnn7": catalog.Cnn7(arch="cnn7", width=2, hidden=8),
    "wide_resnet": catalog.WideResnet(arch="wide_resnet", width=2, widen=1, hidden=8),
    "resnext": catalog.Resnext(arch="resnext", width=2, bottleneck=1, blocks=[1, 2, 1], hidden=8),
}


def fixed_network(arch: str) -> torch.nn.Module:
    """Weights by a formula, so that no random generator has a say; float64, so that no kernel has one either."""
    model = build(ARGUMENTS[arch], catalog.DATASETS["digits"]).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            steps = torch.arange(parameter.numel(), dtype=torch.float64).view_as(parameter)
            wave = torch.sin(1.7 * steps + number)
            parameter.copy_(
                wave * 1.5 / math.sqrt(max(parameter[0].numel(), 1)) if parameter.dim() > 1 else 1 + 0.3 * wave
            )
    return model


def fixed_batch() -> tuple[torch.Tensor, torch.Tensor]:
    steps = torch.arange(16 * 64, dtype=torch.float64).view(16, 1, 8, 8)
    return torch.sin(0.37 * steps).abs(), torch.arange(16) % 10


def figures(arch: str) -> dict[str, float]:
    model, (x, labels) = fixed_network(arch), fixed_batch()
    loss = Objective(model.train(), ["tightness", "relu"], 0.5)(x, labels, 0.01, 0.25, observe=True)
    loss.total.backward()
    assert loss.tightness is not None
    assert loss.relu is not None
    assert loss.layers is not None
    gradient = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    model.eval()
    with torch.no_grad():
        margins = margin_bounds(graph_of(model), ball(x, 0.01), labels)
    return {
        "clean_ce": loss.clean_ce.item(),
        "robust_ce": loss.robust_ce.item(),
        "tightness": loss.tightness.item(),
        "relu": loss.relu.item(),
        "total": loss.total.item(),
        "last_width": loss.layers.mean_width[-1].item(),
        "active": loss.layers.active.mean().item(),
        "gradient": gradient.item(),
        "margins": margins.sum().item(),
    }


@pytest.mark.parametrize("arch", sorted(FIGURES))
def test_figures_have_not_moved(arch: str) -> None:
    assert figures(arch) == pytest.approx(FIGURES[arch], rel=1e-9)
