import pytest
import torch
from torch import nn

from certtool import catalog
from certtool.bounds import ball, graph_of, propagate, relu_inputs
from certtool.checkpoint import parameter_count
from certtool.models import Normalize, build, skeleton
from certtool.models.batch_norm import PartialBatchNorm

CNN7 = catalog.Cnn7(arch="cnn7")
WIDE = catalog.WideResnet(arch="wide_resnet")


@pytest.mark.parametrize(
    ("arguments", "dataset", "parameters"),
    [
        (CNN7, "mnist", 13_259_338),
        (CNN7, "cifar10", 17_192_650),
        (CNN7.model_copy(update={"downsample": 2}), "tinyimagenet", 17_290_120),
        (WIDE, "mnist", 17_615_434),
        (WIDE, "cifar10", 21_547_882),
        (WIDE.model_copy(update={"widen": 10}), "tinyimagenet", 91_424_776),
    ],
)
def test_parameters_of_the_paper(arguments: catalog.Arguments, dataset: str, parameters: int) -> None:
    assert parameter_count(skeleton(arguments, catalog.DATASETS[dataset])) == parameters


def test_layers_of_the_regularisers() -> None:
    digits = catalog.DATASETS["digits"]
    small = {"width": 2, "hidden": 8}
    assert len(relu_inputs(graph_of(build(CNN7.model_copy(update=small), digits)))) == 6
    assert len(relu_inputs(graph_of(build(WIDE.model_copy(update=small | {"widen": 1}), digits)))) == 8


@pytest.mark.parametrize(("mode", "count"), [("full", 6), ("conv", 5), ("none", 0), ("center", 6), ("scale", 6)])
def test_batch_norm_modes(mode: str, count: int) -> None:
    model = build(catalog.Cnn7(arch="cnn7", width=2, hidden=8, batch_norm=mode), catalog.DATASETS["digits"])  # type: ignore[arg-type]
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d) if mode in ("full", "conv") else (PartialBatchNorm,)
    assert sum(isinstance(module, kinds) for module in model.modules()) == count


@pytest.mark.parametrize(("center", "scale"), [(True, False), (False, True), (True, True)])
def test_partial_batch_norm(center: bool, scale: bool) -> None:
    layer, x = PartialBatchNorm(3, center=center, scale=scale), torch.randn(64, 3, 4, 4) * 2 + 5
    y = layer(x)
    expected = x - x.mean((0, 2, 3), keepdim=True) if center else x
    if scale:
        expected = expected / (x.var((0, 2, 3), keepdim=True, correction=0) + 1e-5).sqrt()
    assert torch.allclose(y, expected, atol=1e-4)
    if center and scale:
        reference = nn.BatchNorm2d(3)
        reference(x)
        assert torch.allclose(layer.running_mean, reference.running_mean, atol=1e-6)
        assert torch.allclose(layer.running_var, reference.running_var, atol=1e-6)
        assert torch.allclose(layer.eval()(x), reference.eval()(x), atol=1e-5)


def test_normalize_means_eps_in_pixels() -> None:
    layer = nn.Sequential(Normalize((0.5, 0.25), (0.5, 0.25)))
    x = torch.rand(4, 2, 3, 3)
    box = propagate(graph_of(layer), ball(x, 0.1)).output
    assert torch.allclose(box.upper, layer((x + 0.1).clamp(0, 1)), atol=1e-6)
    assert torch.allclose(box.lower, layer((x - 0.1).clamp(0, 1)), atol=1e-6)
    assert layer.state_dict() == {}
