"""Both regularisers on numbers small enough to do by hand."""

import pytest
import torch

from certtool import catalog
from certtool.bounds import Interval, margins
from certtool.bounds.regularizers import relu_terms, tightness_terms
from certtool.bounds.statistics import statistics_of
from certtool.models import build
from certtool.training.objective import Objective


def layer(lower: list[float], upper: list[float], **kwargs: bool) -> Interval:
    return Interval.from_bounds(torch.tensor([lower], **kwargs), torch.tensor([upper], **kwargs))


def test_states_and_widths() -> None:
    figures = statistics_of(("a",), [layer([1.0, -3.0, -1.0, 0.0], [3.0, -1.0, 1.0, 2.0])])
    assert figures.mean_width.item() == 2.0
    assert figures.active.item() == 0.25  # strictly: the lower bound 0 does not count
    assert figures.inactive.item() == 0.25


def test_tightness_by_hand() -> None:
    figures = statistics_of(("a", "b"), [layer([0.0], [2.0]), layer([0.0], [8.0])])
    terms = tightness_terms(torch.tensor(2.0), figures, tolerance=0.5)
    # E0/E1 = 1 >= 0.5: nothing; E0/E2 = 1/4: (0.5 - 0.25) / 0.5
    assert terms.tolist() == [0.0, 0.5]


def test_relu_balance_by_hand() -> None:
    # centers 1, 1, -4: mean -2/3; active 1 + 1, inactive 4: alpha = 1/2 >= tau
    # variance: active 2 * (5/3)^2 = 50/9, inactive (10/3)^2 = 100/9: beta = 1/2
    figures = statistics_of(("a",), [layer([0.5, 0.5, -5.0], [1.5, 1.5, -3.0])])
    assert figures.alpha.item() == pytest.approx(0.5)
    assert figures.beta.item() == pytest.approx(0.5)
    assert relu_terms(figures, tolerance=0.5).item() == pytest.approx(0.0, abs=1e-6)
    assert relu_terms(figures, tolerance=1.0).item() == pytest.approx(1.0)


def test_ratio_above_one_counts_the_same() -> None:
    mirrored = statistics_of(("a",), [layer([3.0, -1.5, -1.5], [5.0, -0.5, -0.5])])
    assert mirrored.alpha.item() == pytest.approx(2.0)
    assert relu_terms(mirrored, tolerance=1.0).item() == pytest.approx(1.0)


@pytest.mark.parametrize(("lower", "upper"), [([1.0, -1.0], [2.0, 1.0]), ([-2.0, -1.0], [-1.0, 1.0]), ([-1.0], [1.0])])
def test_layer_without_both_states_is_skipped_and_has_finite_gradients(lower: list[float], upper: list[float]) -> None:
    z = layer(lower, upper, requires_grad=True)
    terms = relu_terms(statistics_of(("a",), [z]), tolerance=0.5)
    (gradient,) = torch.autograd.grad(terms.sum(), z.center)
    assert terms.item() == 0.0
    assert torch.isfinite(gradient).all()


def test_no_layers() -> None:
    assert len(relu_terms(statistics_of((), []), 0.5)) == 0


@pytest.mark.parametrize("eps", [0.0, 1e-4, 0.05])
@pytest.mark.parametrize("blocks", [[1, 1, 1], [2, 2, 2]])
def test_gradients_of_resnext(blocks: list[int], eps: float) -> None:
    """Finite everywhere, and the slope that finite differences measure: through groups, sums and identity shortcuts."""
    arguments = catalog.Resnext(arch="resnext", width=4, bottleneck=2, blocks=blocks, hidden=8)
    model = build(arguments, catalog.DATASETS["digits"], seed=1).double().train()
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(16, 1, 8, 8, dtype=torch.float64, generator=generator)
    objective, labels = Objective(model, ["tightness", "relu"], tolerance=0.5), torch.arange(16) % 10

    def loss() -> torch.Tensor:
        return objective(x, labels, eps, 0.5).total

    loss().backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    assert len(parameters) == len(list(model.parameters()))
    assert all(bool(torch.isfinite(p.grad).all()) for p in parameters if p.grad is not None)
    ways = [torch.randn(p.shape, dtype=torch.float64, generator=generator) * p.detach().abs() for p in parameters]
    slope = sum(float((p.grad * way).sum()) for p, way in zip(parameters, ways, strict=True) if p.grad is not None)
    values = []
    for step in (1e-7, -2e-7):
        with torch.no_grad():
            for parameter, way in zip(parameters, ways, strict=True):
                parameter += step * way
            values.append(float(loss()))
    assert (values[0] - values[1]) / 2e-7 == pytest.approx(slope, rel=1e-4, abs=1e-4)


def test_margins_of_many_classes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients are those of all images at once."""
    weight = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    labels, radius = torch.arange(11) % 7, torch.rand(11, 5, dtype=torch.float64, requires_grad=True)
    found = []
    for limit in (1 << 22, 3 * weight.numel(), 1):
        monkeypatch.setattr(margins, "MOST_DIFFERENCES", limit)
        spread = margins._spread(weight, labels, radius)
        found.append((spread, *torch.autograd.grad(spread.square().sum(), (weight, radius))))
        with torch.no_grad():
            assert torch.equal(margins._spread(weight, labels, radius), spread)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
