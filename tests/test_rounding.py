"""Rounding: what float32 really computes stays inside, and what it can flip is not certified rigorously."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import image_plans, network, vector_plans
from torch import Tensor, nn

from certtool import catalog
from certtool.bounds import Interval, certified_mask, graph_of, margin_bounds, propagate, relu_inputs, rounding
from certtool.bounds.box import (
    inner_edges,
    inner_edges_of_floats,
    outer_edges,
    outer_edges_by_image,
    outer_edges_of_floats,
)
from certtool.bounds.relu import interval_relu
from certtool.bounds.rounding import ROUNDED, has_rounded_rules, rounded_margins
from certtool.models import build


def double(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double()


def cancelling_batch_norm(size: float = 2.0**20) -> nn.Module:
    """Bias and running mean are huge and equal: over the reals they vanish, in float32 they eat the signal."""
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, eps=0.0), nn.ReLU(), nn.Linear(2, 2)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.01, 0.01, 0.01, 0.01], [0.0, 0.0, 0.0, 0.0]]))
        model[0].bias.copy_(torch.tensor([size, 0.02]))
        model[1].running_mean.copy_(torch.tensor([size, 0.0]))
        model[3].weight.copy_(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))
        model[3].bias.zero_()
    return model


def nearly_equal_rows(size: float = 4096.0) -> nn.Module:
    """Two classifier rows that differ in their last bits: each logit is rounded far more coarsely than they differ."""
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 2)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        row = torch.rand(64) * size
        model[2].weight.copy_(torch.stack([row, row]))
        model[2].weight[0] += torch.rand(64) * 2e-4 * (size / 4096)
        model[2].bias.zero_()
        model[0].bias.fill_(1.0)
    return model


# --- the box ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [16, 255])
@pytest.mark.parametrize("eps", [Fraction(0), Fraction(1, 10), Fraction(8, 255), Fraction(1, 3), Fraction(1)])
def test_edges_are_on_the_right_side_of_the_rationals(scale: int, eps: Fraction) -> None:
    images = torch.arange(scale + 1, dtype=torch.uint8).view(-1, 1, 1, 1)
    outer, inner = outer_edges(images, scale, eps), inner_edges(images, scale, eps)
    by_image = outer_edges_by_image(images, scale, torch.full((scale + 1,), float(eps), dtype=torch.float64))
    for k in range(scale + 1):
        low, high = max(Fraction(k, scale) - eps, Fraction(0)), min(Fraction(k, scale) + eps, Fraction(1))
        given = Fraction(float(np.float32(k) / np.float32(scale)))
        assert Fraction(float(outer.lower[k])) <= min(low, given)
        assert Fraction(float(outer.upper[k])) >= max(high, given)
        if eps > 0:
            assert low <= Fraction(float(inner.lower[k])) <= Fraction(float(inner.upper[k])) <= high
        if Fraction(float(eps)) == eps:
            assert Fraction(float(by_image.lower[k])) <= min(low, given)
            assert Fraction(float(by_image.upper[k])) >= max(high, given)
    ball = outer.interval()
    assert (ball.center - ball.radius <= outer.lower).all()
    assert (ball.center + ball.radius >= outer.upper).all()


@given(st.floats(0, 1, width=32), st.fractions(0, Fraction(1, 2), max_denominator=10**6))
def test_edges_of_floats(value: float, eps: Fraction) -> None:
    x = torch.tensor([[[[value]]]])
    outer, inner = outer_edges_of_floats(x, eps), inner_edges_of_floats(x, eps)
    low, high = max(Fraction(value) - eps, Fraction(0)), min(Fraction(value) + eps, Fraction(1))
    assert Fraction(float(outer.lower)) <= low
    assert Fraction(float(outer.upper)) >= high
    assert low <= Fraction(float(inner.lower)) <= Fraction(value) <= Fraction(float(inner.upper)) <= high


# --- the layers ------------------------------------------------------------------------------------------------------


def stays_inside(model: nn.Module, x: Tensor) -> None:
    """At eps 0 the interval of every ReLU input and of the output is the rounding term alone."""
    graph = graph_of(double(model))
    sources = set(relu_inputs(graph).values())
    edges = Interval(x.double(), torch.zeros_like(x, dtype=torch.float64))
    bounds = propagate(graph, edges, keep=sources | {graph.output}, rules=ROUNDED)
    seen: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if name in bounds.kept:
            handles.append(
                module.register_forward_hook(lambda m, a, out, name=name: seen.__setitem__(name, out.clone()))
            )
    for batch in (1, 2, 16, 128):
        for memory in (torch.contiguous_format, torch.channels_last):
            part = x[:batch].contiguous(memory_format=memory) if x.dim() == 4 else x[:batch]
            with torch.no_grad():
                model.to(memory_format=memory)(part)
            for name, value in seen.items():
                interval = bounds.kept[name]
                error = (value.double() - interval.center[:batch]).abs()
                assert (error <= interval.radius[:batch]).all(), (name, batch, memory, float(error.max()))
    for handle in handles:
        handle.remove()
    assert len(seen) >= 1


ORDINARY: dict[str, catalog.Arguments] = {
    f"cnn7-{mode}": catalog.Cnn7(arch="cnn7", width=4, hidden=32, batch_norm=mode)  # type: ignore[arg-type]
    for mode in ("full", "none", "center", "scale")
} | {
    f"resnext-{mode}": catalog.Resnext(arch="resnext", width=4, bottleneck=2, hidden=32, batch_norm=mode)  # type: ignore[arg-type]
    for mode in ("full", "none")
}


@pytest.mark.parametrize("name", ORDINARY)
def test_torch_never_leaves_the_rounding_term(name: str) -> None:
    model = build(ORDINARY[name], catalog.DATASETS["cifar10"], "kaiming-normal", seed=1)
    model.train()
    with torch.no_grad():
        for _ in range(5):
            model(torch.rand(32, 3, 32, 32))
    assert has_rounded_rules(graph_of(model))
    stays_inside(model.eval(), torch.rand(128, 3, 32, 32))


RESIDUAL = {
    "wide_resnet": catalog.WideResnet(arch="wide_resnet", width=4, widen=1, hidden=32),
    "resnext": catalog.Resnext(arch="resnext", width=4, bottleneck=2, blocks=[1, 2, 1], hidden=32),
}


@pytest.mark.parametrize("arch", RESIDUAL)
@pytest.mark.parametrize("size", [1.0, 2.0**10, 2.0**20])
def test_torch_never_leaves_it_where_bias_and_mean_cancel(arch: str, size: float) -> None:
    arguments = RESIDUAL[arch]
    model = build(arguments, catalog.DATASETS["digits"], "kaiming-normal", seed=2).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.bias += size
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean += size
                module.running_var.uniform_(0.1, 2.0)
    stays_inside(model, torch.rand(128, 1, 8, 8))


def one_output(layer: nn.Conv2d, norm: nn.BatchNorm2d, z: Interval, place: tuple[int, int, int]) -> tuple[float, float]:
    """Center and radius of one value of a convolution with BatchNorm, term by term over the rationals."""
    out, row, column = place
    channels = layer.in_channels // layer.groups  # what a filter sees of the image, from its group's first channel on
    first = out // (layer.out_channels // layer.groups) * channels
    k, stride, padding = layer.kernel_size[0], layer.stride[0], layer.padding[0]
    n = channels * k * k
    unit = Fraction(1, 2**24) * (1 + Fraction(1, 2**20))
    g = (n + 12) * unit / (1 - (n + 12) * unit)
    center = spread = Fraction(0)
    for channel, down, across in itertools.product(range(channels), range(k), range(k)):
        y, x = row * stride - padding + down, column * stride - padding + across
        if 0 <= y < z.shape[2] and 0 <= x < z.shape[3]:
            w, c, r = (
                Fraction(float(value))
                for value in (
                    layer.weight[out, channel, down, across],
                    z.center[0, first + channel, y, x],
                    z.radius[0, first + channel, y, x],
                )
            )
            center += w * c
            spread += abs(w) * ((1 + g) * r + g * abs(c))
    assert layer.bias is not None
    assert norm.running_mean is not None
    assert norm.running_var is not None
    b, mean, beta = (Fraction(float(values[out])) for values in (layer.bias, norm.running_mean, norm.bias))
    a = Fraction(float(norm.weight[out]) / math.sqrt(float(norm.running_var[out]) + norm.eps))
    radius = abs(a) * spread + g * (abs(a) * (abs(b) + abs(mean)) + abs(beta))
    return float(a * (center + b - mean) + beta), float(radius)


@given(
    st.integers(0, 2**20), st.sampled_from([1, 2, 3, 6]), st.sampled_from([(1, 0), (3, 1), (3, 0)]), st.integers(1, 2)
)  # fmt: skip
@settings(max_examples=40)
def test_a_grouped_convolution_pays_for_its_own_fan_in(
    seed: int, groups: int, kernel: tuple[int, int], stride: int
) -> None:
    torch.manual_seed(seed)
    layer = nn.Conv2d(6, 12, kernel[0], stride, padding=kernel[1], groups=groups).double().requires_grad_(False)
    norm = nn.BatchNorm2d(12).double().eval().requires_grad_(False)
    for values in (norm.running_mean, norm.weight.data, norm.bias.data):
        values.normal_()  # type: ignore[union-attr]
    norm.running_var.uniform_(0.1, 2.0)  # type: ignore[union-attr]
    z = Interval(torch.randn(1, 6, 5, 6, dtype=torch.float64), torch.rand(1, 6, 5, 6, dtype=torch.float64) * 1e-6)
    with torch.no_grad():
        found = propagate(graph_of(nn.Sequential(layer, norm)), z, rules=ROUNDED).output
    for out in range(12):
        place = (out, seed % found.shape[2], out % found.shape[3])
        center, radius = one_output(layer, norm, z, place)
        assert found.center[0][place].item() == pytest.approx(center, rel=1e-12, abs=1e-12)
        # Not more either: a rounding or two added to the count would show. Underflow adds 1e-33.
        assert found.radius[0][place].item() == pytest.approx(radius, rel=1e-9)


@given(image_plans, vector_plans, st.integers(0, 2**20))
@settings(max_examples=25)
def test_every_operation_has_a_term_that_holds(images: list[str], vectors: list[str], seed: int) -> None:
    model = network(images, vectors, seed).float()
    assert has_rounded_rules(graph_of(double(model)))
    x = torch.rand(4, 2, 6, 6, generator=torch.Generator().manual_seed(seed))
    output = propagate(graph_of(double(model)), Interval(x.double(), 0 * x.double()), rules=ROUNDED).output
    with torch.no_grad():
        for part in (x, x[:1]):
            error = (model(part).double() - output.center[: len(part)]).abs()
            assert (error <= output.radius[: len(part)]).all()
    assert output.radius.max() < 1.0  # and it is not so wide as to say nothing


def relu_contains(relu: Callable[[Interval], Interval], seed: int) -> bool:
    """Over the rationals, for neurons of every kind and those on the border between two."""
    draw = torch.Generator().manual_seed(seed)
    center = torch.randn(400, dtype=torch.float64, generator=draw)
    radius = torch.rand(400, dtype=torch.float64, generator=draw) * 2
    radius[:100] = center[:100].abs() * (1 + torch.randint(-2, 3, (100,), generator=draw) * 2.0**-52)
    after = relu(Interval(center, radius))
    rows = zip(*(t.tolist() for t in (center, radius, after.center, after.radius)), strict=True)
    for c, r, c_after, r_after in (map(Fraction, row) for row in rows):
        if c_after - r_after > max(c - r, 0) or c_after + r_after < max(c + r, 0):
            return False
    return True


@pytest.mark.parametrize("seed", range(5))
def test_the_rigorous_relu_contains_the_exact_one(seed: int) -> None:
    assert relu_contains(lambda z: ROUNDED[nn.ReLU](nn.ReLU(), z), seed)
    assert relu_contains(ROUNDED["relu"], seed)
    assert not relu_contains(interval_relu, seed)  # half of c + r, and not a little more


def test_a_rule_without_a_term_cannot_certify_rigorously() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    from certtool.bounds.rules import RULES, rule

    @rule(Odd)
    def odd(layer: Odd, z: Interval) -> Interval:
        return Interval(2 * z.center, 2 * z.radius)

    try:
        assert not has_rounded_rules(graph_of(nn.Sequential(nn.Linear(2, 2), Odd())))
    finally:
        del RULES[Odd]


def test_overflow_is_never_certified() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).eval()
    with torch.no_grad():
        model[0].weight.fill_(1e30)
        model[2].weight.copy_(torch.tensor([[1e30, 1e30], [0.0, 0.0]]))
    x = torch.rand(3, 2)
    margins = rounded_margins(
        graph_of(double(model)), outer_edges_of_floats(x, Fraction(0)).interval(), torch.zeros(3).long()
    )
    assert not (margins > 0).all(1).any()


def test_arithmetic_among_constants_is_not_rigorous() -> None:
    class Constants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("t", torch.tensor([1e-3]))

        def forward(self, x: Tensor) -> Tensor:
            return x.view(x.shape[0], -1) + ((self.t + 1e5) - 1e5)

    assert not has_rounded_rules(graph_of(Constants()))
    plain = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    assert has_rounded_rules(graph_of(plain))


def test_sums_that_overflow_are_never_certified() -> None:
    class Huge(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            largest = torch.finfo(torch.float32).max
            return torch.relu(v * 2.0**105 + largest - largest - 2.0**108)

    x = torch.rand(2, 3)
    z = propagate(graph_of(Huge()), Interval(x.double(), 0 * x.double()), rules=ROUNDED).output
    assert torch.isinf(z.radius).all()
    pooled = nn.Sequential(nn.Conv2d(1, 1, 1), nn.AdaptiveAvgPool2d(1))
    with torch.no_grad():
        pooled[0].weight.fill_(2.0**115)
    image = torch.ones(1, 1, 32, 32)
    z = propagate(graph_of(double(pooled)), Interval(image.double(), 0 * image.double()), rules=ROUNDED).output
    assert torch.isinf(z.radius).all()


# --- labels that flip by rounding ------------------------------------------------------------------------------------


def flips(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Where some float32 evaluation of the network changes the label: alone, in a batch, as scale and shift."""
    with torch.no_grad():
        wrong = model(x).argmax(1) != labels
        for index in range(len(x)):
            wrong[index] |= bool(model(x[index : index + 1]).argmax() != labels[index])
    return wrong


def exact_labels(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return double(model)(x.double()).argmax(1)


def certified(model: nn.Module, x: Tensor, labels: Tensor, eps: Fraction, arithmetic: str) -> Tensor:
    box = outer_edges_of_floats(x, eps).interval()
    with torch.no_grad():
        if arithmetic == "rigorous":
            return (rounded_margins(graph_of(double(model)), box, labels) > 0).all(1)
        narrow = Interval(box.center.float(), box.radius.float())
        return certified_mask(margin_bounds(graph_of(model), narrow, labels), labels)


DELICATE = {"cancelling bias and mean": (cancelling_batch_norm, 4), "nearly equal rows": (nearly_equal_rows, 3)}


@pytest.mark.parametrize("name", DELICATE)
def test_what_rounding_flips_is_not_certified_rigorously(name: str) -> None:
    make, features = DELICATE[name]
    model, x = make(), torch.rand(200, features, generator=torch.Generator().manual_seed(3))
    labels = exact_labels(model, x)
    flipped = flips(model, x, labels)
    assert flipped.any(), "the example is not delicate enough"
    eps = Fraction(1, 10**6)
    assert not (certified(model, x, labels, eps, "rigorous") & flipped).any()
    # Interval bounds in float32 fold BatchNorm and merge rows, and so prove labels that float32 does not give.
    assert (certified(model, x, labels, eps, "float32") & flipped).any()


def check_delicate() -> None:
    for make, features in DELICATE.values():
        model, x = make(), torch.rand(200, features, generator=torch.Generator().manual_seed(3))
        labels = exact_labels(model, x)
        assert not (certified(model, x, labels, Fraction(1, 10**6), "rigorous") & flips(model, x, labels)).any()


# --- mutations that these tests must catch ---------------------------------------------------------------------------


def without_term(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "gamma", lambda roundings: 0.0)


def from_folded_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """The term of |a (b - mu) + beta| instead of |a| (|b| + |mu|) + |beta|: what folding first would give."""
    original = rounding._affine

    def folded(layer: object, z: Interval, norm: object) -> Interval:
        if norm is None:
            return original(layer, z, norm)  # type: ignore[arg-type]
        plain = copy.deepcopy(layer)
        scale = norm.scale  # type: ignore[attr-defined]
        rows = scale.view(-1, *[1] * (plain.weight.dim() - 1))  # type: ignore[attr-defined]
        bias = scale * (plain.bias - norm.mean) + norm.beta  # type: ignore[attr-defined]
        with torch.no_grad():
            plain.weight.mul_(rows)  # type: ignore[attr-defined]
            plain.bias.copy_(bias)  # type: ignore[attr-defined]
        return original(plain, z, None)

    monkeypatch.setattr(rounding, "_affine", folded)


def from_merged_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The term of |W_y - W_j| instead of |W_y| + |W_j|."""

    def merged(layer: nn.Linear, features: Interval, labels: Tensor) -> Tensor:
        rows = layer.weight[labels].unsqueeze(1) - layer.weight
        bias = layer.bias[labels].unsqueeze(1) - layer.bias
        size = features.center.abs() + features.radius
        exact = torch.einsum("bkn,bn->bk", rows, features.center) + bias
        spread = torch.einsum("bkn,bn->bk", rows.abs(), features.radius)
        error = rounding.gamma(layer.in_features + 2) * torch.einsum("bkn,bn->bk", rows.abs(), size)
        return (exact - spread - error).scatter(1, labels.unsqueeze(1), torch.inf)

    monkeypatch.setattr(rounding, "merged_margins", merged)


MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "rounding term removed": without_term,
    "taken from the folded bias": from_folded_bias,
    "taken from merged rows": from_merged_rows,
}


def test_unmutated_the_check_passes() -> None:
    check_delicate()


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    with pytest.raises(AssertionError):
        check_delicate()
