import pytest
import torch
from torch import nn

from certtool import catalog
from certtool.bounds import graph_of
from certtool.epsilon import Epsilon
from certtool.inspection import inspect
from certtool.models import BUILDERS, build, difference_gain, fan_in, initialise
from certtool.models.initialise import INITIALISERS, follows_residual_sum, hidden_affine_steps


def layer_of(n: int) -> nn.Module:
    """The layers of CNN-7 on CIFAR-10 with these fan-ins, as hidden layers of a small network."""
    hidden = nn.Linear(n, 512) if n == 32768 else nn.Conv2d(n // 9, 64 if n < 1152 else 128, 3)
    head = nn.Linear(512, 10) if n == 32768 else nn.Conv2d(64 if n < 1152 else 128, 10, 1)
    return nn.Sequential(hidden, nn.ReLU(), nn.Flatten() if n == 32768 else nn.Identity(), head)


@pytest.mark.parametrize("n", [576, 1152, 32768])
def test_ibp_gain_is_one(n: int) -> None:
    model = layer_of(n)
    initialise(model, "ibp", seed=0)
    assert fan_in(model[0]) == n
    assert difference_gain(model[0]) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("name", [name for name, init in INITIALISERS.items() if init.gain])
def test_closed_forms(name: str) -> None:
    model = layer_of(1152)
    initialise(model, name, seed=0)
    gain = INITIALISERS[name].gain
    assert gain is not None
    assert difference_gain(model[0]) == pytest.approx(gain(1152), rel=0.02)


def test_orthogonal_rows() -> None:
    model = layer_of(1152)
    initialise(model, "orthogonal", seed=0)
    rows = model[0].weight.flatten(1)
    assert torch.allclose(rows @ rows.T, torch.eye(128), atol=1e-5)


def test_seed_decides_and_classifier_keeps_torchs_default() -> None:
    arguments, data = catalog.Cnn7(arch="cnn7", width=4, hidden=16), catalog.DATASETS["digits"]
    one, same, other = (
        build(arguments, data, "ibp", 1),
        build(arguments, data, "ibp", 1),
        build(arguments, data, "ibp", 2),
    )
    for name, value in one.state_dict().items():
        assert torch.equal(value, same.state_dict()[name])
    assert not torch.equal(one.conv2.weight, other.conv2.weight)
    assert one.classifier.weight.abs().max() <= 1 / 16**0.5
    assert one.classifier.weight.abs().max() > 0.9 / 16**0.5


def test_weights_after_a_residual_sum_are_halved() -> None:
    arguments = catalog.WideResnet(arch="wide_resnet", width=8, widen=4)
    model = build(arguments, catalog.DATASETS["cifar10"], "ibp", 0)
    graph = graph_of(model)
    halved = {step.name for step in hidden_affine_steps(graph) if follows_residual_sum(graph, step)}
    assert halved == {
        "blocks.1.conv1",
        "blocks.1.shortcut.0",
        "blocks.2.conv1",
        "blocks.2.shortcut.0",
        "linear",
    }
    for name in halved:
        assert difference_gain(model.get_submodule(name)) == pytest.approx(0.5, rel=0.06)
    assert difference_gain(model.get_submodule("blocks.1.conv2")) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(
    ("blocks", "halved"),
    [
        ([1, 1, 1], {"blocks.1.conv1", "blocks.1.shortcut.0", "blocks.2.conv1", "blocks.2.shortcut.0", "linear"}),
        # Behind an identity shortcut there is no second weight to halve.
        ([2, 1, 1], {"blocks.1.conv1", "blocks.2.conv1", "blocks.2.shortcut.0", "blocks.3.conv1",
                     "blocks.3.shortcut.0", "linear"}),
    ],
)  # fmt: skip
def test_resnext_gains(blocks: list[int], halved: set[str]) -> None:
    """A grouped convolution's fan-in is its group's; what reads ReLU(sum), the dense layer too, has half the gain."""
    arguments = catalog.Resnext(arch="resnext", width=32, bottleneck=16, blocks=blocks, hidden=64)
    model = build(arguments, catalog.DATASETS["cifar10"], "ibp", 0)
    graph = graph_of(model)
    steps = hidden_affine_steps(graph)
    assert {step.name for step in steps if follows_residual_sum(graph, step)} == halved
    for step in steps:
        layer = step.module
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        if layer.weight.numel() > 1000:  # enough entries for their mean
            expected = 0.5 if step.name in halved else 1.0
            assert difference_gain(layer) == pytest.approx(expected, rel=0.06), step.name
    last = model.blocks[-1].conv2
    assert last.groups == 2
    assert fan_in(last) == 64 * 9
    # n E|W| = 2 also output by output: no group draws from another's.
    assert (fan_in(last) / 2 * last.weight.abs().mean((1, 2, 3)) - 1).abs().max() < 0.15


@pytest.mark.parametrize("blocks", [[1, 1, 1], [2, 2, 2]])
def test_bounds_of_resnext_do_not_explode_at_initialisation(blocks: list[int]) -> None:
    """Without BatchNorm widths stay within a small factor from layer to layer, as the paper's rule promises."""
    arguments = catalog.Resnext(arch="resnext", width=16, bottleneck=8, blocks=blocks, hidden=64, batch_norm="none")
    x = torch.rand(4, 3, 32, 32)

    def largest_growth(init: str) -> float:
        model = build(arguments, catalog.DATASETS["cifar10"], init, 0)
        found = inspect(model, x, Epsilon.parse("2/255"), statistics="running", init=init)
        return max(layer.growth for layer in found.layers[:-1])

    assert largest_growth("ibp") < 3
    assert largest_growth("kaiming-normal") > 10


def test_registries_equal_the_catalog() -> None:
    assert set(BUILDERS) == set(catalog.ARCHITECTURES)
    assert set(INITIALISERS) == set(catalog.INITIALISATIONS)
