"""Weights in the layout of the published code become ours: the same function, or an error that names every fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from nets import lively
from safetensors.torch import load_file
from torch import Tensor, nn

from certtool import catalog, checkpoint
from certtool.errors import InputError
from certtool.models import build, skeleton
from certtool.models.published import converted

PARITY = Path(__file__).parents[2] / "shared" / "parity"
CIFAR = catalog.DATASETS["cifar10"]
SMALL = replace(CIFAR, shape=(3, 12, 9))  # sides that stride 2 does not divide twice


# --- the three networks with the published names, normalisation outside ----------------------------------------------


def sequential(width: int, hidden: int, flat: int, last: int) -> nn.Module:
    layers: list[nn.Module] = []
    plan = [(3, width, 1), (width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1)]
    for channels, out, stride in [*plan, (2 * width, 2 * width, last)]:
        layers += [nn.Conv2d(channels, out, 3, stride, 1), nn.BatchNorm2d(out), nn.ReLU()]
    layers += [nn.Flatten(), nn.Linear(flat, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 10)]
    return nn.Sequential(*layers)


def pointwise(channels: int, out: int, stride: int) -> nn.Sequential:
    same = stride == 1 and channels == out
    return nn.Sequential() if same else nn.Sequential(nn.Conv2d(channels, out, 1, stride), nn.BatchNorm2d(out))


class WideBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, 1), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1), nn.BatchNorm2d(out)
        self.downsample = pointwise(channels, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.downsample(x))


class Wide(nn.Module):
    def __init__(self, hidden: int, flat: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(WideBlock(4, 8, 1))
        self.layer2 = nn.Sequential(WideBlock(8, 16, 2), WideBlock(16, 16, 1))
        self.layer3 = nn.Sequential(WideBlock(16, 32, 2))
        self.dense, self.dense_bn, self.fc = nn.Linear(flat, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        result: Tensor = self.fc(F.relu(self.dense_bn(self.dense(x.flatten(1)))))
        return result


class NextBlock(nn.Module):
    def __init__(self, channels: int, w: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, w, 1), nn.BatchNorm2d(w)
        self.conv2, self.bn2 = nn.Conv2d(w, w, 3, stride, 1, groups=2), nn.BatchNorm2d(w)
        self.conv3, self.bn3 = nn.Conv2d(w, 2 * w, 1), nn.BatchNorm2d(2 * w)
        self.shortcut = pointwise(channels, 2 * w, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class Next(nn.Module):
    def __init__(self, hidden: int, flat: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(NextBlock(4, 4, 1), NextBlock(8, 4, 1))
        self.layer2 = nn.Sequential(NextBlock(8, 8, 2))
        self.layer3 = nn.Sequential(NextBlock(16, 16, 2), NextBlock(32, 16, 1))
        self.linear1, self.bn_dense, self.linear2 = (
            nn.Linear(flat, hidden),
            nn.BatchNorm1d(hidden),
            nn.Linear(hidden, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        result: Tensor = self.linear2(F.relu(self.bn_dense(self.linear1(x.flatten(1)))))
        return result


CASES: dict[str, tuple[catalog.Architecture, Callable[[], nn.Module]]] = {
    "cnn7": (
        catalog.Cnn7(arch="cnn7", width=4, hidden=8),
        lambda: sequential(4, 8, 8 * 6 * 5, 1),
    ),
    "cnn7 halved twice": (
        catalog.Cnn7(arch="cnn7", width=4, hidden=8, downsample=2),
        lambda: sequential(4, 8, 8 * 3 * 3, 2),
    ),
    "wide_resnet": (
        catalog.WideResnet(arch="wide_resnet", width=4, widen=2, blocks=[1, 2, 1], hidden=8),
        lambda: Wide(8, 32 * 3 * 3),
    ),
    "resnext": (
        catalog.Resnext(arch="resnext", width=4, bottleneck=2, blocks=[2, 1, 2], hidden=8),
        lambda: Next(8, 32 * 3 * 3),
    ),
}


def published(name: str) -> nn.Module:
    torch.manual_seed(len(name))
    return lively(CASES[name][1]().eval())


def loaded(tensors: dict[str, Tensor], arch: catalog.Architecture, facts: catalog.DatasetFacts) -> nn.Module:
    """As a file's tensors are: every name and shape once more checked."""
    model = skeleton(arch, facts)
    checkpoint.fill(model, tensors, Path("converted"))
    return model.eval()


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("name", CASES)
def test_the_converted_network_is_the_published_one(name: str, prefix: str) -> None:
    reference, arch = published(name), CASES[name][0]
    state = {prefix + key: value for key, value in reference.state_dict().items()}
    model, x = loaded(converted(state, arch, SMALL), arch, SMALL), torch.rand(5, *SMALL.shape)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (SMALL.mean, SMALL.std))
    with torch.no_grad():
        assert torch.allclose(model(x), reference((x - mean) / std), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("name", CASES)
def test_our_own_names_are_taken_as_they_are(name: str, prefix: str) -> None:
    arch = CASES[name][0]
    own = checkpoint.weights(build(arch, SMALL, seed=1))
    result = converted({prefix + key: value for key, value in own.items()}, arch, SMALL)
    assert list(result) == list(own)
    assert all(torch.equal(value, own[key]) for key, value in result.items())
    assert all(not value.requires_grad and value.is_contiguous() for value in result.values())
    # Copies, so that neither side changes the other, even where the source gives one tensor two names.
    next(iter(result.values())).zero_()
    assert next(iter(own.values())).abs().max() > 0


def test_names_as_documented() -> None:
    """The published names, spelled out once."""
    layers = {name: {key.rpartition(".")[0] for key in published(name).state_dict()} for name in CASES}
    assert layers["cnn7"] == {str(n) for n in (0, 1, 3, 4, 6, 7, 9, 10, 12, 13, 16, 17, 19)}
    assert {"layer2.0.downsample.1", "layer2.1.conv2", "dense", "dense_bn", "fc"} <= layers["wide_resnet"]
    assert {"layer3.0.shortcut.0", "layer3.1.bn3", "linear1", "bn_dense", "linear2"} <= layers["resnext"]
    assert not {"layer2.1.downsample.0", "layer3.1.shortcut.0"} & (layers["wide_resnet"] | layers["resnext"])


@pytest.mark.parametrize("mode", ["conv", "none"])
def test_other_batch_norm_moves_the_numbers_of_the_sequential(mode: str) -> None:
    arch = catalog.Cnn7(arch="cnn7", width=4, hidden=8, batch_norm=mode)  # type: ignore[arg-type]
    layers = list(published("cnn7"))  # type: ignore[call-overload]
    dropped = (nn.BatchNorm1d,) if mode == "conv" else (nn.BatchNorm1d, nn.BatchNorm2d)
    reference = nn.Sequential(*(layer for layer in layers if not isinstance(layer, dropped)))
    model, x = loaded(converted(reference.state_dict(), arch, SMALL), arch, SMALL), torch.rand(5, *SMALL.shape)
    with torch.no_grad():
        assert torch.allclose(model[1:](x), reference(x), rtol=1e-5, atol=1e-5)  # type: ignore[index]


@pytest.mark.parametrize("name", ["cnn7_mnist", "cnn7_mnist_unbalanced", "wrn_cifar10"])
@pytest.mark.skipif(not PARITY.is_dir(), reason=f"the parity figures are not at {PARITY}")
def test_the_published_codes_own_files(name: str) -> None:
    tensors = load_file(PARITY / f"{name}.safetensors")
    state = {key.removeprefix("weights."): value for key, value in tensors.items() if key.startswith("weights.")}
    arch: catalog.Architecture = catalog.Cnn7(arch="cnn7", width=8, hidden=64)
    if name == "wrn_cifar10":
        arch = catalog.WideResnet(arch="wide_resnet", width=8, widen=1)
    facts = catalog.DATASETS["cifar10" if name == "wrn_cifar10" else "mnist"]
    model = loaded(converted(state, arch, facts), arch, facts)
    with torch.no_grad():
        logits = model(tensors["x_uint8"].float() / 255)
    assert (logits - tensors["eval.logits"]).abs().max() < 1e-5 * tensors["eval.logits"].abs().max()


# --- what is wrong is said, all of it --------------------------------------------------------------------------------


def faults(state: dict[str, Tensor], arch: catalog.Architecture) -> tuple[list[str], str]:
    with pytest.raises(InputError) as caught:
        converted(state, arch, SMALL)
    problems = caught.value.problems
    assert problems[-1].hint is not None
    return [problem.message for problem in problems], problems[-1].hint


@pytest.mark.parametrize("prefix", ["", "module."])
def test_every_fault_is_named_at_once(prefix: str) -> None:
    state = {prefix + key: value for key, value in published("resnext").state_dict().items()}
    for gone in ("layer1.0.conv2.weight", "bn_dense.running_var"):
        del state[prefix + gone]
    state[prefix + "layer4.0.conv1.weight"] = torch.zeros(1)
    state[prefix + "linear1.weight"] = torch.zeros(8, 7)
    state[prefix + "linear2.bias"] = torch.zeros(10, dtype=torch.float16)
    state[prefix + "conv1.bias"] = torch.full((4,), torch.nan)
    state[prefix + "bn1.running_var"] = -torch.ones(4)
    messages, hint = faults(state, CASES["resnext"][0])
    assert messages == [
        f"2 tensors are missing: `{prefix}layer1.0.conv2.weight`, `{prefix}bn_dense.running_var`",
        f"1 tensor is too many: `{prefix}layer4.0.conv1.weight`",
        f"`{prefix}conv1.bias` holds NaN or infinite values",
        f"`{prefix}bn1.running_var` has negative entries, which no variance has",
        f"`{prefix}linear1.weight` is (8, 7), expected (8, 288)",
        f"`{prefix}linear2.bias` is of torch.float16, not torch.float32",
    ]
    assert hint.startswith("expected is a resnext for cifar10 with width = 4, cardinality = 2, bottleneck = 2")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_other_types_are_not_cast(dtype: torch.dtype) -> None:
    state = {key: value.to(dtype) for key, value in published("cnn7").state_dict().items()}
    messages, _ = faults(state, CASES["cnn7"][0])
    assert len(messages) == 38  # 13 layers: 7 with weight and bias, 6 with four tensors
    assert all(message.endswith(f"is of {dtype}, not torch.float32") for message in messages)


def test_another_width_and_another_architecture() -> None:
    wider = catalog.Cnn7(arch="cnn7", width=5, hidden=8)
    messages, _ = faults(dict(published("cnn7").state_dict()), wider)
    assert "`0.weight` is (4, 3, 3, 3), expected (5, 3, 3, 3)" in messages
    messages, _ = faults(dict(published("cnn7").state_dict()), CASES["wide_resnet"][0])
    assert messages[0].startswith("80 tensors are missing: `conv1.weight`")
    assert messages[1].startswith("38 tensors are too many: `0.bias`, `0.weight`")
    messages, _ = faults({}, CASES["cnn7"][0])
    assert messages[0].startswith("38 tensors are missing: `0.weight`, `0.bias`")


def test_a_prefix_on_some_names_only_is_no_prefix() -> None:
    state = dict(published("cnn7").state_dict())
    state["module.0.weight"] = state.pop("0.weight")
    messages, _ = faults(state, CASES["cnn7"][0])
    assert messages == ["1 tensor is missing: `0.weight`", "1 tensor is too many: `module.0.weight`"]


def test_what_a_foreign_file_may_hold() -> None:
    state = dict(published("cnn7").state_dict())
    state["\x1b[31mred"] = torch.zeros(1)
    state["0.bias"] = state["0.bias"].to_sparse()
    state["19.bias"] = 3  # type: ignore[assignment]
    messages, _ = faults(state, CASES["cnn7"][0])
    assert messages[0] == r"1 tensor is too many: `\x1b[31mred`"
    assert messages[1:] == ["`0.bias` is no dense tensor but torch.sparse_coo", "`19.bias` is no dense tensor but int"]
