from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certtool import catalog
from certtool.bounds import ball, graph_of, propagate, relu_inputs
from certtool.checkpoint import parameter_count
from certtool.models import Normalize, build, skeleton
from certtool.models.batch_norm import PartialBatchNorm

CNN7 = catalog.Cnn7(arch="cnn7")
WIDE = catalog.WideResnet(arch="wide_resnet")
NEXT = catalog.Resnext(arch="resnext")
TINY = {  # the forms for TinyImageNet
    "cnn7": CNN7.model_copy(update={"downsample": 2}),
    "wide_resnet": WIDE.model_copy(update={"widen": 10}),
    "resnext": NEXT.model_copy(update={"width": 16, "bottleneck": 8, "blocks": [2, 2, 2]}),
}


@pytest.mark.parametrize(
    ("arguments", "dataset", "parameters"),
    [
        (CNN7, "mnist", 13_259_338),
        (CNN7, "cifar10", 17_192_650),
        (TINY["cnn7"], "tinyimagenet", 17_290_120),
        (WIDE, "mnist", 17_615_434),
        (WIDE, "cifar10", 21_547_882),
        (TINY["wide_resnet"], "tinyimagenet", 91_424_776),
        (NEXT, "mnist", 13_677_706),
        (NEXT, "cifar10", 17_611_018),
        (TINY["resnext"], "tinyimagenet", 16_981_960),
    ],
)
def test_parameters_of_the_paper(arguments: catalog.Arguments, dataset: str, parameters: int) -> None:
    assert parameter_count(skeleton(arguments, catalog.DATASETS[dataset])) == parameters


def basic(channels: int, out: int, stride: int) -> list[tuple[int, int, int, int]]:
    """Filters out, filters in a group, kernel and stride of a Wide-ResNet block, the shortcut last."""
    return [(out, channels, 3, stride), (out, out, 3, 1), (out, channels, 1, stride)]


def bottleneck(channels: int, w: int, stride: int) -> list[tuple[int, int, int, int]]:
    """The same of a ResNeXt block."""
    return [(w, channels, 1, 1), (w, w // 2, 3, stride), (2 * w, w, 1, 1), (2 * w, channels, 1, stride)]


CONVOLUTIONS = {
    "cnn7": [(64, 3, 3, 1), (64, 64, 3, 1), (128, 64, 3, 2), (128, 128, 3, 1), (128, 128, 3, 1)],
    "wide_resnet": [(16, 3, 3, 1), *basic(16, 128, 1), *basic(128, 256, 2), *basic(256, 512, 2)],
    "resnext": [(64, 3, 3, 1), *bottleneck(64, 64, 1), *bottleneck(128, 128, 2), *bottleneck(256, 256, 2)],
}
TINY_CONVOLUTIONS = {
    "cnn7": [*CONVOLUTIONS["cnn7"][:4], (128, 128, 3, 2)],
    "wide_resnet": [(16, 3, 3, 1), *basic(16, 160, 1), *basic(160, 320, 2), *basic(320, 640, 2)],
    # The second block of a stage has an identity shortcut, so no convolution there.
    "resnext": [
        (16, 3, 3, 1), *bottleneck(16, 16, 1), *bottleneck(32, 16, 1)[:3], *bottleneck(32, 32, 2),
        *bottleneck(64, 32, 1)[:3], *bottleneck(64, 64, 2), *bottleneck(128, 64, 1)[:3],
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "dataset", "convolutions", "flat"),
    [
        (CNN7, "cifar10", CONVOLUTIONS["cnn7"], 128 * 16 * 16),
        (WIDE, "cifar10", CONVOLUTIONS["wide_resnet"], 512 * 8 * 8),
        (NEXT, "cifar10", CONVOLUTIONS["resnext"], 512 * 8 * 8),
        (TINY["cnn7"], "tinyimagenet", TINY_CONVOLUTIONS["cnn7"], 32768),
        (TINY["wide_resnet"], "tinyimagenet", TINY_CONVOLUTIONS["wide_resnet"], 163840),
        (TINY["resnext"], "tinyimagenet", TINY_CONVOLUTIONS["resnext"], 32768),
    ],
)
def test_shapes_of_the_paper(
    arguments: catalog.Arguments, dataset: str, convolutions: list[tuple[int, int, int, int]], flat: int
) -> None:
    data = catalog.DATASETS[dataset]
    modules = list(skeleton(arguments, data).modules())
    found = [
        (*module.weight.shape[:3], module.stride[0])
        for module in modules
        if isinstance(module, nn.Conv2d) and module.padding[0] == module.kernel_size[0] // 2
    ]
    assert found == convolutions
    linear = [tuple(module.weight.shape) for module in modules if isinstance(module, nn.Linear)]
    assert linear == [(512, flat), (len(data.classes), 512)]
    norms = sum(isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) for module in modules)
    assert norms == len(convolutions) + 1
    affine = [module for module in modules if isinstance(module, nn.Conv2d | nn.Linear)]
    assert all(module.bias is not None for module in affine)
    assert len(affine) == len(convolutions) + 2


def test_resnext_forward_by_hand() -> None:
    """A network of 1, 2, 1 blocks once more from its parts: groups, strides, identity shortcut, ReLU after the sum."""
    arguments = catalog.Resnext(arch="resnext", width=6, cardinality=3, bottleneck=2, blocks=[1, 2, 1], hidden=5)
    data = replace(catalog.DATASETS["cifar10"], shape=(3, 7, 9))
    model = build(arguments, data, seed=3).train()
    for _ in range(3):
        model(torch.rand(16, 3, 7, 9))
    model = model.double().eval()
    state = model.state_dict()

    def layer(x: Tensor, name: str, bn: str, stride: int = 1, groups: int = 1) -> Tensor:
        weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        if weight.dim() == 2:
            x = x.flatten(1) @ weight.T + bias
        else:
            parts = zip(x.chunk(groups, 1), weight.chunk(groups), bias.chunk(groups), strict=True)
            x = torch.cat([F.conv2d(*part, stride=stride, padding=weight.shape[2] // 2) for part in parts], 1)
        mean, var, scale, shift = (
            state[f"{bn}.{part}"].view(1, -1, *[1] * (x.dim() - 2))
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (var + 1e-5).sqrt() * scale + shift

    x = torch.rand(2, 3, 7, 9, dtype=torch.float64)
    y = layer((x - model.normalize.mean) / model.normalize.std, "conv1", "bn1").relu()
    for number, stride in enumerate([1, 2, 1, 2]):
        name = f"blocks.{number}"
        branch = layer(y, f"{name}.conv1", f"{name}.bn1").relu()
        branch = layer(branch, f"{name}.conv2", f"{name}.bn2", stride, groups=3).relu()
        branch = layer(branch, f"{name}.conv3", f"{name}.bn3")
        if number != 2:
            y = layer(y, f"{name}.shortcut.0", f"{name}.shortcut.1", stride)
        y = (branch + y).relu()
    y = layer(y, "linear", "bn2").relu()
    logits = y @ state["classifier.weight"].T + state["classifier.bias"]
    assert logits.shape == (2, 10)
    assert torch.allclose(model(x), logits, rtol=1e-10, atol=1e-10)


def test_layers_of_the_regularisers() -> None:
    digits = catalog.DATASETS["digits"]
    small = {"width": 2, "hidden": 8}
    assert len(relu_inputs(graph_of(build(CNN7.model_copy(update=small), digits)))) == 6
    assert len(relu_inputs(graph_of(build(WIDE.model_copy(update=small | {"widen": 1}), digits)))) == 8
    narrow = NEXT.model_copy(update=small | {"bottleneck": 1})
    assert len(relu_inputs(graph_of(build(narrow, digits)))) == 11
    assert len(relu_inputs(graph_of(build(narrow.model_copy(update={"blocks": [2, 2, 2]}), digits)))) == 20


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
