"""Interval bounds as properties: random networks of every operation, random boxes, float64.

Each property is a plain function, so that the last test can show that it fails when a rule is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import IMAGE_LAYERS, VECTOR_LAYERS, image_plans, lively, network, vector_plans
from torch import Tensor, nn

from certtool import catalog
from certtool.bounds import (
    Interval,
    affine_weights,
    ball,
    evaluation_weights,
    graph_of,
    ibp,
    lower_margins,
    margin_bounds,
    propagate,
    rules,
)
from certtool.bounds.rounding import rounded_margins
from certtool.bounds.rules import RULES
from certtool.models import build

SLACK = 1e-9
seeds = st.integers(0, 2**20)
radii = st.sampled_from([0.0, 1e-6, 0.01, 0.1, 0.5])


def batch(seed: int, count: int = 3) -> Tensor:
    return torch.rand(count, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def points(box: Interval, seed: int, count: int = 30) -> Tensor:
    """Inside the box: uniform points and random corners."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, *box.shape)
    uniform = torch.rand(shape, dtype=torch.float64, generator=generator) * 2 - 1
    corners = torch.randint(0, 2, shape, generator=generator).double() * 2 - 1
    return torch.cat([box.center + box.radius * uniform, box.center + box.radius * corners])


def contains_every_point(model: nn.Module, x: Tensor, eps: float, seed: int) -> None:
    box = ball(x, eps)
    output = propagate(graph_of(model), box).output
    with torch.no_grad():
        for point in points(box, seed):
            value = model(point)
            assert (value >= output.lower - SLACK).all()
            assert (value <= output.upper + SLACK).all()


def margins_hold_at_every_point(model: nn.Module, x: Tensor, eps: float, seed: int) -> None:
    box, labels = ball(x, eps), torch.arange(len(x)) % 5
    lower = margin_bounds(graph_of(model), box, labels)
    with torch.no_grad():
        for point in points(box, seed):
            logits = model(point)
            margins = logits.gather(1, labels[:, None]) - logits
            assert (margins >= lower - SLACK).all()


def without_radius_is_the_forward_value(model: nn.Module, x: Tensor) -> None:
    output = propagate(graph_of(model), Interval(x, torch.zeros_like(x))).output
    assert torch.allclose(output.center, model(x), rtol=1e-9, atol=1e-9)
    assert output.radius.abs().max() < 1e-9


def nests_as_eps_grows(model: nn.Module, x: Tensor) -> None:
    outputs = [propagate(graph_of(model), ball(x, eps)).output for eps in (0.0, 0.01, 0.05, 0.2)]
    for inner, outer in itertools.pairwise(outputs):
        assert (outer.lower <= inner.lower + SLACK).all()
        assert (outer.upper >= inner.upper - SLACK).all()


def one_affine_layer_is_exact(layer: nn.Module, x: Tensor, eps: float) -> None:
    """The bound is attained: at the corner that follows the signs of the weights."""
    box = ball(x, eps)
    output = propagate(graph_of(layer), box).output
    weight = torch.autograd.functional.jacobian(lambda v: layer(v.view_as(x[:1])).flatten(), x[:1].flatten())
    corners = box.center[0].flatten() + box.radius[0].flatten() * weight.sign()
    attained = torch.stack([layer(c.view_as(x[:1])).flatten()[i] for i, c in enumerate(corners)])
    assert torch.allclose(attained, output.upper[0].flatten(), rtol=1e-9, atol=1e-9)


@given(image_plans, vector_plans, seeds, radii)
@settings(max_examples=60)
def test_points_stay_inside(images: list[str], vectors: list[str], seed: int, eps: float) -> None:
    contains_every_point(network(images, vectors, seed), batch(seed), eps, seed)


@given(image_plans, vector_plans, seeds, radii)
@settings(max_examples=40)
def test_margins(images: list[str], vectors: list[str], seed: int, eps: float) -> None:
    margins_hold_at_every_point(network(images, vectors, seed), batch(seed), eps, seed)


@given(image_plans, vector_plans, seeds, radii)
@settings(max_examples=40)
def test_weights_made_ready_for_many_batches_bound_the_same(
    images: list[str], vectors: list[str], seed: int, eps: float
) -> None:
    graph = graph_of(network(images, vectors, seed))
    box, labels = ball(batch(seed), eps), torch.arange(3) % 5
    with torch.no_grad():
        fresh, reused = (margin_bounds(graph, box, labels, w) for w in ({}, evaluation_weights(graph)))
        torch.testing.assert_close(reused, fresh, rtol=1e-12, atol=1e-12)
        fresh, reused = (rounded_margins(graph, box, labels, w) for w in ({}, affine_weights(graph)))
        assert torch.equal(reused, fresh)


@pytest.mark.slow
@given(image_plans, vector_plans, seeds, radii)
@settings(max_examples=1500)
def test_points_stay_inside_at_length(images: list[str], vectors: list[str], seed: int, eps: float) -> None:
    contains_every_point(network(images, vectors, seed), batch(seed), eps, seed)
    margins_hold_at_every_point(network(images, vectors, seed), batch(seed), eps, seed)


ARCHITECTURES: dict[str, catalog.Arguments] = {
    "cnn7": catalog.Cnn7(arch="cnn7", width=2, hidden=8),
    "wide_resnet": catalog.WideResnet(arch="wide_resnet", width=2, widen=1, blocks=[1, 2, 1], hidden=8),
    "resnext": catalog.Resnext(arch="resnext", width=2, bottleneck=1, blocks=[1, 2, 1], hidden=8),
}


@pytest.mark.parametrize("arch", sorted(catalog.ARCHITECTURES))
@pytest.mark.parametrize("eps", [0.001, 0.1])
def test_every_architecture(arch: str, eps: float) -> None:
    facts = replace(
        catalog.DATASETS["cifar10"], shape=(2, 6, 6), mean=(0.4, 0.5), std=(0.2, 0.3), classes=tuple("abcde")
    )
    for seed in range(3):
        model = lively(build(ARCHITECTURES[arch], facts, "kaiming-normal", seed).double().eval())
        contains_every_point(model, batch(seed), eps, seed)
        margins_hold_at_every_point(model, batch(seed), eps, seed)
        without_radius_is_the_forward_value(model, batch(seed))
        nests_as_eps_grows(model, batch(seed))


@pytest.mark.parametrize("kind", IMAGE_LAYERS)
def test_every_image_layer(kind: str) -> None:
    for seed in range(4):
        contains_every_point(network([kind, "relu", kind], [], seed), batch(seed), 0.1, seed)


@pytest.mark.parametrize("kind", VECTOR_LAYERS)
def test_every_vector_layer(kind: str) -> None:
    for seed in range(4):
        contains_every_point(network([], [kind, "relu", kind], seed), batch(seed), 0.1, seed)


@given(image_plans, vector_plans, seeds)
@settings(max_examples=30)
def test_forward_value_and_nesting(images: list[str], vectors: list[str], seed: int) -> None:
    model = network(images, vectors, seed)
    without_radius_is_the_forward_value(model, batch(seed))
    nests_as_eps_grows(model, batch(seed))


@given(seeds, st.sampled_from(["linear", "conv", "grouped", "strided", "grouped and strided", "pointwise"]))
@settings(max_examples=30)
def test_affine_layer_is_exact(seed: int, kind: str) -> None:
    torch.manual_seed(seed)
    layers: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 5)),
        "conv": lambda: nn.Conv2d(2, 3, 3, padding=1),
        "grouped": lambda: nn.Conv2d(2, 4, 3, groups=2),
        "strided": lambda: nn.Conv2d(2, 3, 3, stride=2, dilation=2),
        "grouped and strided": lambda: nn.Conv2d(2, 6, 3, stride=2, padding=1, groups=2),
        "pointwise": lambda: nn.Conv2d(2, 3, 1, stride=2),
    }
    one_affine_layer_is_exact(layers[kind]().double(), batch(seed), 0.1)


def test_merged_margins_are_exact_for_a_linear_classifier() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 5)).double()
    x, labels = batch(0), torch.tensor([0, 1, 2])
    box, graph = ball(x, 0.1), graph_of(model)
    merged = margin_bounds(graph, box, labels)
    rows = model[1].weight[labels][:, None] - model[1].weight
    corner = box.center.flatten(1)[:, None] - box.radius.flatten(1)[:, None] * rows.sign()
    logits = torch.einsum("kn,bcn->bck", model[1].weight, corner) + model[1].bias
    at_corner = logits.gather(2, labels[:, None, None].expand(-1, 5, 1)).squeeze(2) - logits.diagonal(dim1=1, dim2=2)
    assert torch.allclose(merged, at_corner)
    unmerged = lower_margins(graph_of(nn.Sequential(model, nn.Identity())), propagate(graph, box), labels)
    assert (unmerged <= merged + SLACK).all()
    assert (unmerged < merged - 1e-3).any()


def test_training_statistics_bound_the_batch() -> None:
    """With the clean batch's statistics as fixed affine maps, perturbed images stay inside."""
    model, x = (
        network(["batchnorm", "relu", "conv", "batchnorm", "relu"], ["batchnorm", "relu"], 1),
        batch(5, count=8),
    )
    graph, box = graph_of(model.train()), ball(x, 0.05)
    bounds = propagate(graph, box, clean=x)
    assert bounds.clean is not None
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.momentum = 1.0
    model(x)  # running statistics become the batch's (with the unbiased variance)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var *= (8 * 36 - 1) / (8 * 36)
        elif isinstance(module, nn.BatchNorm1d):
            module.running_var *= 7 / 8
    model.eval()
    assert torch.allclose(model(x), bounds.clean)
    for point in points(box, 3):
        value = model(point)
        assert (value >= bounds.output.lower - SLACK).all()
        assert (value <= bounds.output.upper + SLACK).all()


def test_running_statistics_move_as_torch_moves_them() -> None:
    ours, theirs = (
        network(["batchnorm", "relu", "conv", "batchnorm"], ["linear", "batchnorm"], 3).train() for _ in "ab"
    )
    x = batch(2, count=6)
    for _ in range(3):
        propagate(graph_of(ours), ball(x, 0.1), clean=x)
        theirs(x)
    for (name, one), (_, other) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        if "num_batches" not in name:
            assert torch.allclose(one, other), name


# Each mutation is a bug somebody could make; the properties above must notice.


def _without_abs(op: Any) -> Callable[..., Interval]:
    def linear(layer: Any, z: Interval) -> Interval:
        f = torch.nn.functional
        return Interval(f.linear(z.center, layer.weight, layer.bias), f.linear(z.radius, layer.weight))

    def conv2d(layer: Any, z: Interval) -> Interval:
        radius = rules.convolve(layer, z.radius, layer.weight, None)
        return Interval(rules.convolve(layer, z.center, layer.weight, layer.bias), radius)

    def multiply(x: Any, y: Any) -> Interval:
        z, constant = (x, y) if isinstance(x, Interval) else (y, x)
        return Interval(z.center * constant, z.radius * constant)

    def swapped_relu(layer: Any, z: Interval) -> Interval:
        return Interval.from_bounds(torch.relu(z.upper), torch.relu(z.lower))

    def subtract(x: Any, y: Any) -> Interval:
        if isinstance(x, Interval) and isinstance(y, Interval):
            return Interval(x.center - y.center, x.radius - y.radius)
        return rules.subtract(x, y)

    return {nn.Linear: linear, nn.Conv2d: conv2d, "mul": multiply, nn.ReLU: swapped_relu, "sub": subtract}[op]


def _campaign(plans: Sequence[tuple[list[str], list[str]]]) -> None:
    for seed, (images, vectors) in enumerate(plans):
        model = network(images, vectors, seed)
        contains_every_point(model, batch(seed), 0.1, seed)
        margins_hold_at_every_point(model, batch(seed), 0.1, seed)


PLANS = [(["conv", "batchnorm", "relu", "batchnorm", "scaled", "difference"], ["linear", "batchnorm", "relu"])] * 3


def test_the_campaign_passes_unmutated() -> None:
    _campaign(PLANS)


@pytest.mark.parametrize("op", [nn.Linear, nn.Conv2d, "mul", nn.ReLU, "sub"])
def test_a_mutated_rule_is_caught(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import operator

    for key in {"mul": [operator.mul, torch.mul], "sub": [operator.sub]}.get(op, [op]):
        monkeypatch.setitem(RULES, key, _without_abs(op))
    with pytest.raises(AssertionError):
        _campaign(PLANS)


def test_batch_norm_without_abs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(z: Interval, scale: Tensor, shift: Tensor) -> Interval:
        shape = (1, -1, *[1] * (z.center.dim() - 2))
        return Interval(z.center * scale.view(shape) + shift.view(shape), z.radius * scale.view(shape))

    monkeypatch.setattr(ibp, "scale_and_shift", wrong)
    with pytest.raises(AssertionError):
        _campaign(PLANS)
