"""The independent checker: the same network from the same bytes, the same truth, and none of the certifying code."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ENVIRONMENT
from torch import nn

from certtool import catalog, checker, checkpoint, recipe, safefile
from certtool.bounds import graph_of, margin_bounds
from certtool.bounds.box import outer_edges
from certtool.bounds.rounding import rounded_margins
from certtool.checker import intervals
from certtool.checker.linear import apply, transposed
from certtool.checker.margins import least_margin as checked_margin
from certtool.checker.network import Affine, BatchNorm, Flatten, Relu, Step
from certtool.data import load_split
from certtool.errors import InputError
from certtool.models import build
from certtool.models.batch_norm import PartialBatchNorm

MODES = ("full", "conv", "none", "center", "scale")
# Three channels, constants that float32 rounds, and a height that stride 2 does not divide.
FACTS = replace(
    catalog.DATASETS["cifar10"], classes=("a", "b", "c", "d"), shape=(3, 7, 8), mean=(0.4914, 0.4822, 0.4465)
)
CNN7 = {mode: catalog.Cnn7(arch="cnn7", width=3, hidden=12, batch_norm=mode) for mode in MODES}
RESNET = {
    mode: catalog.WideResnet(arch="wide_resnet", width=2, widen=1, blocks=[1, 2, 1], hidden=8, batch_norm=mode)
    for mode in MODES
}
ARGUMENTS = {
    **{f"cnn7-{mode}": arguments for mode, arguments in CNN7.items()},
    **{f"wide_resnet-{mode}": arguments for mode, arguments in RESNET.items()},
    "cnn7-downsample": catalog.Cnn7(arch="cnn7", width=3, hidden=12, downsample=2),
    "resnext-two-groups": catalog.Resnext(arch="resnext", width=4, bottleneck=1, blocks=[1, 2, 1], hidden=8),
    # Three groups without BatchNorm; as wide as the first stage, so that its shortcut is the identity too.
    "resnext-three-groups": catalog.Resnext(
        arch="resnext", width=12, cardinality=3, bottleneck=2, hidden=8, batch_norm="none"
    ),
}


def lively(model: nn.Module, seed: int) -> nn.Module:
    """Running statistics and weights of both signs, so that nothing is the identity by accident."""
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "running_mean"):
            module.running_mean.normal_()
            module.running_var.uniform_(0.1, 2.0)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model.eval()


def header(arguments: catalog.Arguments, facts: catalog.DatasetFacts) -> dict[str, object]:
    """What `certtool train` would write, for another architecture and other images."""
    entries = checkpoint.header_for(recipe.load("tiny_cnn7"), load_split("digits", "train"), 1)
    data = {"classes": list(facts.classes), "shape": list(facts.shape), "scale": facts.scale}
    constants = {"mean": list(facts.mean), "std": list(facts.std)}
    return entries | {"arch": arguments.model_dump(), "dataset": entries["dataset"] | data | constants}


def written(model: nn.Module, arguments: catalog.Arguments, folder: Path) -> tuple[nn.Module, checker.Network]:
    """The network as torch and as the checker read it from one file."""
    file = folder / "model.safetensors"
    checkpoint.save(file, model, header(arguments, FACTS))
    return checkpoint.load(file).model, checker.read_network(file.read_bytes())


@pytest.fixture(params=sorted(ARGUMENTS))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[nn.Module, checker.Network]:
    arguments = ARGUMENTS[request.param]
    model = build(arguments, FACTS, "xavier-uniform", seed=1)
    return written(lively(model, seed=len(request.param)), arguments, tmp_path)


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *FACTS.shape), dtype=np.uint8)


def logits32(model: nn.Module, x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model.float()(torch.from_numpy(x.astype(np.float32))).double().numpy()


def least_margin(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    margins = logits[np.arange(len(labels)), labels][:, None] - logits
    margins[np.arange(len(labels)), labels] = np.inf
    return margins.min(axis=1)


def points(lower: np.ndarray, upper: np.ndarray, seed: int) -> np.ndarray:
    """A float32 point of each box: inside, on corners, or on edges, never outside by rounding."""
    low, high = lower.astype(np.float32), upper.astype(np.float32)
    low = np.where(low < lower, np.nextafter(low, np.float32(2)), low)
    high = np.where(high > upper, np.nextafter(high, np.float32(-2)), high)
    generator = np.random.default_rng(seed)
    share = generator.random(lower.shape) if seed % 3 else generator.integers(0, 2, lower.shape)
    share = np.where(generator.random(lower.shape) < 0.3, np.round(share), share)
    return np.clip((lower + share * (upper - lower)).astype(np.float32), low, np.maximum(low, high))


# --- reading and evaluating ------------------------------------------------------------------------------------------


def test_logits_are_those_of_torch_in_float64(pair: tuple[nn.Module, checker.Network]) -> None:
    model, network = pair
    x = np.random.default_rng(1).random((20, *FACTS.shape))
    with torch.no_grad():
        expected = model.double()(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(checker.forward(network, x), expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def test_margins_are_those_of_the_engine(pair: tuple[nn.Module, checker.Network]) -> None:
    """Two float64 implementations of one formula, for binary32 evaluations and for exact arithmetic."""
    model, network = pair
    graph, pixels = graph_of(model.double()), images(6)
    labels = np.arange(6) % 4
    for eps in (Fraction(0), Fraction(1, 255)):
        lower, upper = checker.exact_box(pixels, 255, eps)
        box = outer_edges(torch.from_numpy(pixels), 255, eps).interval()
        with torch.no_grad():
            rigorous = rounded_margins(graph, box, torch.from_numpy(labels)).min(1).values
            exact = margin_bounds(graph, box, torch.from_numpy(labels))
        exact = exact.scatter(1, torch.from_numpy(labels)[:, None], torch.inf).min(1).values
        for found, expected in (
            (checker.rigorous_margins(network, lower, upper, labels), rigorous),
            (checker.interval_margins(network, lower, upper, labels), exact),
        ):
            np.testing.assert_allclose(found, expected.numpy(), rtol=1e-9)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (1, 2, 0), (1, 1, 0)])
def test_convolutions_in_groups(groups: int, kernel: int, stride: int, padding: int) -> None:
    """The checker's own convolution is torch's, and its transpose is the adjoint: y . (W x) = (W^T y) . x."""
    generator = np.random.default_rng(groups)
    weight = generator.normal(size=(8, 4 // groups, kernel, kernel))
    step = Affine(weight, np.zeros(8), stride, padding, None, groups)
    x = generator.normal(size=(3, 4, 7, 6))
    found = apply(step, weight, x)
    expected = nn.functional.conv2d(
        torch.from_numpy(x), torch.from_numpy(weight), None, stride, padding, 1, groups
    ).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-12)
    rows = generator.normal(size=(5, *found.shape[1:]))
    back = transposed(step, rows, x.shape[1:])
    np.testing.assert_allclose(np.einsum("rchw,xchw->rx", rows, found), np.einsum("rchw,xchw->rx", back, x), atol=1e-10)


def test_the_digits_recipe_is_read(small_run: Path) -> None:
    """A model as `certtool train` leaves it, on the images it was trained for."""
    content = (small_run / "model.safetensors").read_bytes()
    network, split = checker.read_network(content), load_split("digits", "test").first(40)
    labels = split.labels.numpy()
    clean = split.images.numpy().astype(np.float32) / np.float32(16)
    expected = logits32(checkpoint.load(small_run).model, clean)
    np.testing.assert_allclose(checker.forward(network, clean.astype(np.float64)), expected, atol=1e-4)
    for eps in (Fraction(0), Fraction(1, 10)):
        margins = checker.rigorous_margins(network, *checker.exact_box(split.images.numpy(), 16, eps), labels)
        assert (margins < least_margin(expected, labels)).all()
    correct = expected.argmax(axis=1) == labels
    exact = checker.rigorous_margins(network, *checker.exact_box(split.images.numpy(), 16, Fraction(0)), labels)
    assert checker.proven(exact)[correct].all()
    assert not checker.proven(exact)[~correct].any()


def repacked(content: bytes, change) -> bytes:  # type: ignore[no-untyped-def]
    """The file with its outer header changed, its data untouched."""
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    change(entries)
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def edited(key: str, **values: object):  # type: ignore[no-untyped-def]
    def change(entries: dict) -> None:  # type: ignore[type-arg]
        ours = json.loads(entries["__metadata__"]["certtool"])
        ours[key] |= values
        entries["__metadata__"]["certtool"] = json.dumps(ours)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.pop("__metadata__"), "damaged header"),
        (lambda e: e["__metadata__"].update(certtool="[]"), "not an object"),
        (lambda e: e["__metadata__"].update(certtool='{"schema": "other"}'), "schema"),
        (lambda e: e["conv1.weight"].update(dtype="F16"), "not float32"),
        (lambda e: e["conv1.weight"].update(dtype="F64"), "not float32"),
        (lambda e: e["conv1.weight"].update(shape=[3, 3, 9]), "expected"),
        (lambda e: e["conv1.weight"].update(shape=[3, 3, 3]), "do not fit"),
        (lambda e: e.pop("conv1.weight"), "do not fit"),
        (lambda e: e["conv1.weight"].update(data_offsets=[0]), "damaged header"),
        (lambda e: e.update({"conv9.weight": e.pop("conv1.weight")}), "lacks the tensor"),
        (edited("arch", width=4), "expected"),
        (edited("arch", batch_norm="other"), "batch_norm"),
        (edited("arch", batch_norm="none"), "too many"),
        (edited("arch", downsample=3), "downsample"),
        (edited("arch", pooling=True), "pooling"),
        (edited("arch", arch="densenet"), "densenet"),
        (edited("arch", arch="resnext"), "downsample"),
        (edited("arch", arch=["cnn7"]), "no architecture"),
        (edited("dataset", mean=[0.5]), "one mean a channel"),
        (edited("dataset", mean=[0.5, 0.5, 10**400]), "float32 cannot hold"),
        (edited("dataset", mean=[0.5, 0.5, float("nan")]), "float32 cannot hold"),
        (edited("dataset", std=[0.5, 0.5, 1e-60]), "not positive"),
        (edited("dataset", classes=["a"]), "two classes"),
        (edited("dataset", shape=[3, 7]), "shape"),
    ],
)
def test_a_file_that_is_not_ours_is_refused(change, message: str) -> None:  # type: ignore[no-untyped-def]
    content = safefile.encode(checkpoint.weights(build(CNN7["full"], FACTS)), header(CNN7["full"], FACTS))
    with pytest.raises(InputError, match=message):
        checker.read_network(repacked(content, change))


def test_damaged_bytes_are_refused() -> None:
    model = build(CNN7["full"], FACTS)
    content = safefile.encode(checkpoint.weights(model), header(CNN7["full"], FACTS))
    for damaged in (b"", content[:7], content[:100], content[:-4], content + b"\0\0\0\0", b"\xff" * 100):
        with pytest.raises(InputError):
            checker.read_network(damaged)
    model.conv1.weight.data[0, 0, 0, 0] = float("nan")
    with pytest.raises(InputError, match="NaN"):
        checker.read_network(safefile.encode(checkpoint.weights(model), header(CNN7["full"], FACTS)))
    model.conv1.weight.data[0, 0, 0, 0] = 0
    model.bn1.running_var[0] = -1
    with pytest.raises(InputError, match="negative"):
        checker.read_network(safefile.encode(checkpoint.weights(model), header(CNN7["full"], FACTS)))


def test_a_name_that_stands_twice_is_refused() -> None:
    text = b'{"a": {}, "a": {}, "__metadata__": {"certtool": "{}"}}'
    with pytest.raises(InputError, match="twice"):
        checker.read_network(len(text).to_bytes(8, "little") + text)


# --- the box ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [16, 255, 100])  # float32(k/16) is k/16, float32(k/255) is above, k/100 either
@pytest.mark.parametrize("eps", [Fraction(8, 255), Fraction(1, 10), Fraction(0), Fraction(1), Fraction(1, 10**9)])
def test_the_box_is_exact(scale: int, eps: Fraction) -> None:
    values = np.arange(scale + 1, dtype=np.uint8).reshape(1, 1, 1, -1)
    lower, upper = (edges.ravel() for edges in checker.exact_box(values, scale, eps))
    for k in range(scale + 1):
        low, high = max(Fraction(k, scale) - eps, Fraction(0)), min(Fraction(k, scale) + eps, Fraction(1))
        given = float(torch.tensor(k, dtype=torch.uint8).to(torch.float32) / scale)
        assert Fraction(lower[k]) <= low
        assert Fraction(upper[k]) >= high
        assert lower[k] <= given <= upper[k]
        # Tight: one step further in would lose an edge or the image itself.
        assert lower[k] == given or Fraction(np.nextafter(lower[k], 2)) > low
        assert upper[k] == given or Fraction(np.nextafter(upper[k], -2)) < high
    assert lower.min() >= 0
    assert upper.max() <= 1


def test_an_impossible_box_is_refused(pair: tuple[nn.Module, checker.Network]) -> None:
    with pytest.raises(InputError):
        checker.exact_box(np.full((1, 1, 1, 1), 17, dtype=np.uint8), 16, Fraction(0))
    with pytest.raises(InputError):
        checker.exact_box(images(1), 255, Fraction(-1, 255))
    network, (lower, upper) = pair[1], checker.exact_box(images(2), 255, Fraction(1, 255))
    for arguments in (
        (upper, lower, np.array([0, 1])),
        (lower * np.nan, upper, np.array([0, 1])),
        (lower, upper, np.array([0, 4])),
        (lower, upper, np.array([-1, 0])),
        (lower, upper, np.array([0])),
        (lower.astype(np.float32), upper, np.array([0, 1])),
    ):
        for margins in (checker.rigorous_margins, checker.interval_margins, checker.crown_ibp_margins):
            with pytest.raises(InputError):
                margins(network, *arguments)


# --- rigorous margins ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [Fraction(0), Fraction(1, 2550), Fraction(2, 255)])
def test_no_float32_evaluation_in_the_box_is_below_either_margin(
    pair: tuple[nn.Module, checker.Network], eps: Fraction
) -> None:
    model, network = pair
    pixels = images(20)  # more than one batch, the last one uneven
    labels = logits32(model, pixels / np.float32(255)).argmax(axis=1)
    lower, upper = checker.exact_box(pixels, 255, eps)
    rigorous = checker.rigorous_margins(network, lower, upper, labels)
    plain = checker.interval_margins(network, lower, upper, labels)
    linear = checker.crown_ibp_margins(network, lower, upper, labels)
    assert np.isfinite(rigorous).all()
    assert (rigorous < plain).all()
    assert np.isfinite(linear).all()
    for seed in range(12):
        x = points(lower, upper, seed)
        assert (x >= lower).all()
        assert (x <= upper).all()
        exact = least_margin(checker.forward(network, x.astype(np.float64)), labels)
        assert (rigorous < least_margin(logits32(model, x), labels)).all()
        assert (rigorous < exact).all()
        assert (plain <= exact + 1e-9 * np.abs(exact)).all()
        assert (linear <= exact + 1e-9 * np.abs(exact)).all()


def test_a_bound_of_one_image_does_not_depend_on_its_neighbours(pair: tuple[nn.Module, checker.Network]) -> None:
    network, labels = pair[1], np.arange(20) % 4
    lower, upper = checker.exact_box(images(20), 255, Fraction(1, 255))
    for margins in (checker.rigorous_margins, checker.interval_margins, checker.crown_ibp_margins):
        together = margins(network, lower, upper, labels)
        alone = [margins(network, lower[i : i + 1], upper[i : i + 1], labels[i : i + 1])[0] for i in (0, 15, 16, 19)]
        np.testing.assert_allclose(together[[0, 15, 16, 19]], alone, rtol=1e-12)


class AsWritten(nn.Module):
    """BatchNorm operation by operation, in float32."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def shaped(values: torch.Tensor) -> torch.Tensor:
            return values.view(1, -1, *[1] * (x.dim() - 2))

        norm = self.norm
        deviation = torch.sqrt(norm.running_var + norm.eps)
        return (x - shaped(norm.running_mean)) / shaped(deviation) * shaped(norm.weight) + shaped(norm.bias)


NORMS = nn.BatchNorm2d | nn.BatchNorm1d


def as_written(model: nn.Module) -> nn.Module:
    return nn.Sequential(*(AsWritten(m) if isinstance(m, NORMS) else m for m in model.children()))


def scale_and_shift(model: nn.Module) -> nn.Module:
    def partial(norm: nn.Module) -> nn.Module:
        twin = PartialBatchNorm(norm.num_features, center=True, scale=True).eval()
        twin.load_state_dict({k: v for k, v in norm.state_dict().items() if k in twin.state_dict()})
        return twin

    return nn.Sequential(*(partial(m) if isinstance(m, NORMS) else m for m in model.children()))


def folded(model: nn.Module) -> nn.Module:
    layers: list[nn.Module] = []
    for module in model.children():
        if isinstance(module, nn.BatchNorm2d):
            layers[-1] = nn.utils.fusion.fuse_conv_bn_eval(layers[-1], module)
        elif isinstance(module, nn.BatchNorm1d):
            layers[-1] = nn.utils.fusion.fuse_linear_bn_eval(layers[-1], module)
        else:
            layers.append(module)
    return nn.Sequential(*layers)


WAYS = {"as it is": nn.Sequential, "as written": as_written, "scale and shift": scale_and_shift, "folded": folded}


@pytest.mark.parametrize("harm", ["bias", "rows", "center"])
def test_rounding_is_paid_where_it_is_worst(harm: str, tmp_path: Path) -> None:
    """Bias and mean that cancel, classifier rows nearly equal, large activations: the image alone, in four ways."""
    model = lively(build(CNN7["full"], FACTS, "xavier-uniform", seed=2), seed=3)
    with torch.no_grad():
        if harm == "bias":
            model.conv2.bias += 3e4
            model.bn2.running_mean += 3e4
        elif harm == "rows":
            model.classifier.weight += 3e3
        else:
            model.bn1.bias += 1e4
    model, network = written(model, CNN7["full"], tmp_path)
    pixels = images(60)
    given = pixels / np.float32(255)
    labels = logits32(model, given).argmax(axis=1)
    rigorous = checker.rigorous_margins(network, *checker.exact_box(pixels, 255, Fraction(0)), labels)
    exact = least_margin(checker.forward(network, given.astype(np.float64)), labels)
    seen = [least_margin(logits32(way(model), given), labels) for way in WAYS.values()]
    for margins in seen:
        assert (rigorous < margins).all()
    # The test is alive: the exact margin is no bound of what float32 computes.
    assert (np.min(seen, axis=0) < exact).mean() > 0.3


def harsh_layer(kind: str, harm: str) -> tuple[nn.Sequential, Affine, np.ndarray]:
    """One layer with its BatchNorm and inputs, all in float32, where one term of the error outweighs the others."""
    generator = torch.Generator().manual_seed(len(kind + harm))
    convolution, groups = kind != "linear", 2 if kind == "grouped" else 1
    affine = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=groups) if convolution else nn.Linear(40, 6)
    norm = nn.BatchNorm2d(6) if convolution else nn.BatchNorm1d(6)
    model = lively(nn.Sequential(affine, norm), seed=len(harm))
    x = torch.randn(50, 4, 7, 8, generator=generator) if convolution else torch.randn(50, 40, generator=generator)
    with torch.no_grad():
        if harm == "constants":
            affine.bias += 3e4
            norm.running_mean += 3e4
        elif harm == "center":
            x = x * 1e4
            affine.bias.zero_()
            norm.running_mean.zero_()
            norm.bias.zero_()
    weights = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}
    batch_norm = BatchNorm(
        weights["1.weight"], weights["1.bias"], weights["1.running_mean"], weights["1.running_var"], 1e-5, True, True
    )
    padding, stride = (1, 2) if convolution else (0, 1)
    return model, Affine(weights["0.weight"], weights["0.bias"], stride, padding, batch_norm, groups), x.numpy()


def outside(ball: intervals.Ball, values: np.ndarray) -> int:
    return int((np.abs(values - ball.center) > ball.radius).sum())


def forgetful(forgotten: str, step: Affine, ball: intervals.Ball) -> intervals.Ball:
    """The bound with one of its terms left out."""
    if forgotten == "everything":
        return intervals.affine(step, ball, intervals.EXACT)
    if forgotten == "constants":  # b and mu merged before the bound: g (|b| + |mu|) becomes g |b - mu|
        assert step.batch_norm is not None
        merged = replace(step.batch_norm, center=False)
        step = replace(step, bias=step.bias - step.batch_norm.mean, batch_norm=merged)
        return intervals.affine(step, ball, intervals.BINARY32)
    without = intervals.affine(step, intervals.Ball(0 * ball.center, ball.radius), intervals.BINARY32)
    return intervals.Ball(intervals.affine(step, ball, intervals.BINARY32).center, without.radius)


@pytest.mark.parametrize("kind", ["convolution", "grouped", "linear"])
@pytest.mark.parametrize("harm", ["everything", "constants", "center"])
def test_a_layer_contains_every_way_to_compute_it(kind: str, harm: str) -> None:
    model, step, x = harsh_layer(kind, harm)
    point = intervals.Ball(x.astype(np.float64), np.zeros(x.shape))
    ball, mutant = intervals.affine(step, point, intervals.BINARY32), forgetful(harm, step, point)
    caught = 0
    for way in WAYS.values():
        for size in (1, 2, 50):
            values = np.concatenate([logits32(way(model), x[i : i + size]) for i in range(0, 50, size)])
            assert outside(ball, values) == 0
            caught += outside(mutant, values)
    assert caught > 100


def test_normalisation_and_sums_contain_every_way_to_compute_them() -> None:
    generator = np.random.default_rng(0)
    constants = [generator.random(3).astype(np.float32).astype(np.float64) for _ in range(2)]
    network = checker.Network((3, 50, 50), constants[0], constants[1] + 2.0**-3, (), dense([[1], [1]], [0, 0]))
    x = generator.random((4, 3, 50, 50), dtype=np.float32)
    mean, std = (part.astype(np.float32).reshape(1, 3, 1, 1) for part in (network.mean, network.std))
    point = intervals.Ball(x.astype(np.float64), np.zeros(x.shape))
    ball = intervals.normalize(replace(network, std=std.ravel().astype(np.float64)), point, intervals.BINARY32)
    ways = ((x - mean) / std, (x - mean) * (np.float32(1) / std))
    for values in ways:
        assert outside(ball, values.astype(np.float64)) == 0
        assert (
            outside(intervals.Ball(ball.center, 0.2 * ball.radius), values.astype(np.float64)) > 0
        )  # not far too wide
    other = generator.normal(size=x.shape).astype(np.float32)
    total = intervals.residual_sum(
        point, intervals.Ball(other.astype(np.float64), np.zeros(x.shape)), intervals.BINARY32
    )
    assert outside(total, (x + other).astype(np.float64)) == 0
    assert outside(intervals.Ball(total.center, 0.4 * total.radius), (x + other).astype(np.float64)) > 0


def test_nearly_equal_rows_are_not_merged() -> None:
    """z_y and z_j are computed apart; with |W_y - W_j| for |W_y| + |W_j| the error would be understated."""
    generator = np.random.default_rng(0)
    rows = (3e3 + generator.normal(size=(4, 60))).astype(np.float32)
    x, labels = generator.random((200, 60), dtype=np.float32), np.arange(200) % 4
    point = intervals.Ball(x.astype(np.float64), np.zeros(x.shape))
    step = dense(rows.tolist(), [0] * 4)
    computed = least_margin((torch.from_numpy(x) @ torch.from_numpy(rows).T).double().numpy(), labels)
    assert (checked_margin(step, point, labels, intervals.BINARY32) < computed).all()
    merged = step.weight[labels][:, None] - step.weight
    error = intervals.BINARY32.gamma(62) * (np.abs(merged) @ point.reach[:, :, None])[:, :, 0]
    exact = least_margin(x.astype(np.float64) @ step.weight.T, labels)
    assert (exact - error.max(axis=1) > computed).sum() > 20


def dense(weight: list[list[float]], bias: list[float], norm: BatchNorm | None = None) -> Affine:
    values = [np.array(part, dtype=np.float32).astype(np.float64) for part in (weight, bias)]
    return Affine(values[0], values[1], 1, 0, norm)


def by_hand(layers: list[Affine], classifier: Affine, size: int = 1) -> checker.Network:
    steps: list[Step] = [Flatten()]
    for layer in layers:
        steps += [layer, Relu()]
    return checker.Network((1, 1, size), np.zeros(1), np.ones(1), tuple(steps), classifier)


SILENT = {
    # exact margins are positive; binary32 sees inf - inf, 0 - 0, and a BatchNorm scale that rounds to 0
    "overflow": by_hand(
        [dense([[2.0**70]], [0]), dense([[2.0**70]], [0])], dense([[2.0**-100], [-(2.0**-100)]], [0, 0])
    ),
    "underflow": by_hand([dense([[2.0**-70]], [0])], dense([[2.0**-85], [-(2.0**-85)]], [0, 0])),
    "flushed scale": by_hand(
        [
            dense([[2.0**55]], [0]),
            dense(
                [[2.0**55]],
                [0],
                BatchNorm(np.array([2.0**-149]), np.zeros(1), np.zeros(1), np.full(1, 4.0), 1e-5, True, True),
            ),
        ],
        dense([[1.0], [-1.0]], [0, 0]),
    ),
}


def in_float32(network: checker.Network, x: float) -> np.ndarray:
    """Logits of a network by hand, one unit wide, with BatchNorm as scale and shift."""
    value = np.float32(x)
    for step in network.layers:
        if isinstance(step, Affine):
            value = np.float32(step.weight.item()) * value + np.float32(step.bias.item())
            if step.batch_norm is not None:
                value = value * (np.float32(step.batch_norm.gamma.item()) / np.sqrt(np.float32(4) + np.float32(1e-5)))
    return network.classifier.weight.ravel().astype(np.float32) * value


@pytest.mark.parametrize("name", sorted(SILENT))
def test_values_outside_the_range_of_float32_prove_nothing(name: str) -> None:
    network, one, label = SILENT[name], np.ones((1, 1, 1, 1)), np.array([0])
    assert least_margin(checker.forward(network, one), label) > 0
    with np.errstate(over="ignore", under="ignore"):
        computed = in_float32(network, 1.0)
    assert not (np.isfinite(computed).all() and computed[0] > computed[1])
    assert not checker.proven(checker.rigorous_margins(network, one, one, label)).any()


def test_nothing_is_proven_of_a_tie_or_of_a_sum_too_long_for_float32() -> None:
    one, label = np.ones((1, 1, 1, 1)), np.array([0])
    tie = by_hand([dense([[1.0]], [0])], dense([[1.0], [1.0]], [0, 0]))
    assert not checker.proven(checker.rigorous_margins(tie, one, one, label)).any()
    assert intervals.BINARY32.gamma(2**24) == np.inf
    assert not checker.proven(np.array([np.nan, np.inf, -np.inf, 0.0, -1.0])).any()
    assert checker.proven(np.array([1e-300])).all()


def test_no_bound_of_infinite_values_is_finite() -> None:
    """A chord through infinity has no slope; it must not be taken for 0."""
    lower, label = np.full((1, 1, 1, 1), -1.0), np.array([0])
    steep = by_hand([dense([[2.0**127]], [0])] * 9, dense([[1.0], [-1.0]], [0, 1]))
    for margins in (checker.rigorous_margins, checker.interval_margins, checker.crown_ibp_margins):
        assert not np.isfinite(margins(steep, lower, -lower, label)).any()


# --- by hand ---------------------------------------------------------------------------------------------------------

# x in [-1, 1]^2; h1 = x1 + x2 in [-2, 2] (as wide below as above: lower line 0), h2 = x1 - x2 + 1 in [-1, 3].
HIDDEN = dense([[1, 1], [1, -1]], [0, 1])


@pytest.mark.parametrize(
    ("row", "interval", "linear"),
    [
        ([1, 1], 0, -1),  # 0 + h2
        ([-1, 1], -2, -2),  # -(h1 + 2)/2 + h2 = x1/2 - 3 x2/2
        ([1, -1], -3, -3),  # 0 - 3/4 (h2 + 1)
        ([-1, -1], -5, -4),  # -(h1 + 2)/2 - 3/4 (h2 + 1) = -5/4 x1 + x2/4 - 5/2
    ],
)
def test_margins_by_hand(row: list[float], interval: float, linear: float) -> None:
    network = by_hand([HIDDEN], dense([row, [0, 0]], [0, 0]), size=2)
    box = -np.ones((1, 1, 1, 2)), np.ones((1, 1, 1, 2))
    assert checker.crown_ibp_margins(network, *box, np.array([0])) == pytest.approx(linear, abs=1e-12)
    rigorous = checker.rigorous_margins(network, *box, np.array([0]))
    assert interval - 1e-4 < rigorous < interval
    assert checker.interval_margins(network, *box, np.array([0])) == pytest.approx(interval, abs=1e-12)


def test_linear_margins_are_exact_where_the_network_is_linear(pair: tuple[nn.Module, checker.Network]) -> None:
    """In a box too small to switch a ReLU, the bound is margin - sum |gradient| radius; torch has the gradient."""
    model, network = pair
    x, eps, labels = np.random.default_rng(5).random((4, *FACTS.shape)), 1e-9, np.array([0, 1, 2, 3])
    found = checker.crown_ibp_margins(network, x - eps, x + eps, labels)
    model = model.double()
    for image, label, margin in zip(x, labels, found, strict=True):
        point = torch.from_numpy(image)[None].requires_grad_()
        logits = model(point)[0]
        rows = [logits[label] - logits[other] for other in range(4) if other != label]
        slopes = [float(torch.autograd.grad(row, point, retain_graph=True)[0].abs().sum()) for row in rows]
        expected = min(row.item() - eps * slope for row, slope in zip(rows, slopes, strict=True))
        step = max(slopes) * eps
        assert margin == pytest.approx(expected, abs=1e-3 * step)


def test_rigorous_margins_cost_little(pair: tuple[nn.Module, checker.Network]) -> None:
    """The rounding terms stay small beside the margins of an ordinary network."""
    model, network = pair
    x = images(8) / np.float32(255)
    labels = logits32(model, x).argmax(axis=1)
    x = x.astype(np.float64)
    exact = least_margin(checker.forward(network, x), labels)
    scale = np.abs(checker.forward(network, x)).max()
    assert (exact - checker.rigorous_margins(network, x, x, labels) < 0.02 * scale).all()


# --- independence ----------------------------------------------------------------------------------------------------


def test_it_stands_alone() -> None:
    """Neither torch nor auto_LiRPA nor safetensors nor the engine it checks, not even indirectly."""
    code = """
import sys, certtool.checker
print([name for name in ("torch", "auto_LiRPA", "safetensors", "certtool.bounds") if name in sys.modules])
"""
    result = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout == "[]\n"
