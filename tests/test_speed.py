"""The fast forms of the step compute what the plain ones do: written-down gradients, compiled passes, bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Cli, needs_compiler, small_settings
from torch import Tensor

from certtool import catalog, recipe
from certtool.bounds import Interval
from certtool.bounds.relu import interval_relu
from certtool.bounds.statistics import statistics_of
from certtool.distributed import World
from certtool.errors import InputError, OutsideError
from certtool.models import build
from certtool.training import speed
from certtool.training.compiled import compiled
from certtool.training.objective import Loss, Objective, Wish

TERMS = ["tightness", "relu"]
SMALL = {
    "cnn7": catalog.Cnn7(arch="cnn7", width=4, hidden=16),
    "wide_resnet": catalog.WideResnet(arch="wide_resnet", width=8, widen=1, hidden=16),
    "resnext": catalog.Resnext(arch="resnext", width=8, bottleneck=2, blocks=[1, 1, 1], hidden=8),
}
CPU = torch.device("cpu")
DIGITS = catalog.DATASETS["digits"]


def layer(seed: int = 0) -> Interval:
    """Active, inactive and unstable neurons; centers far from 0, so that the variance is a difference of squares."""
    draw = torch.Generator().manual_seed(seed)
    center = 3 * torch.randn(4, 6, dtype=torch.float64, generator=draw) + 2
    radius = 2 * torch.rand(4, 6, dtype=torch.float64, generator=draw)
    return Interval(center.requires_grad_(), radius.requires_grad_())


def test_the_relu_has_the_gradient_of_its_definition() -> None:
    z = layer()
    plain = Interval.from_bounds(torch.relu(z.lower), torch.relu(z.upper))
    weight = torch.linspace(-1, 2, 24, dtype=torch.float64).view(4, 6)
    for found in (interval_relu(z), plain):
        torch.testing.assert_close(found.center, plain.center, rtol=1e-15, atol=1e-15)
        torch.testing.assert_close(found.radius, plain.radius, rtol=1e-15, atol=1e-15)
    slopes = [
        torch.autograd.grad((weight * (a.center + 2 * a.radius.square())).sum(), (z.center, z.radius))
        for a in (interval_relu(z), plain)
    ]
    for one, two in zip(*slopes, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-14, atol=1e-14)


def test_layer_statistics_are_those_of_the_definition_with_their_gradient() -> None:
    z = layer(1)
    found = statistics_of(("a",), [z])
    active, inactive = (z.lower > 0).double(), (z.upper < 0).double()
    assert active.sum() > 0 < inactive.sum()
    squares = (z.center - z.center.mean()).square()
    alpha = (active * z.center).mean() / -(inactive * z.center).mean()
    beta = (active * squares).mean() / (inactive * squares).mean()
    expected = torch.stack([(2 * z.radius).mean(), active.mean(), inactive.mean(), alpha, beta])
    values = torch.cat([found.mean_width, found.active, found.inactive, found.alpha, found.beta])
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    weight = torch.tensor([1.0, 0.0, 0.0, 2.0, -3.0], dtype=torch.float64)
    slopes = [torch.autograd.grad((weight * v).sum(), (z.center, z.radius)) for v in (values, expected)]
    for one, two in zip(*slopes, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def step(arch: str, *, weight: float, compiled: bool, precision: str = "fp32") -> tuple[Loss, list[Tensor]]:
    """The loss and the gradients of one batch."""
    model = build(SMALL[arch], DIGITS, seed=3).train()
    draw = torch.Generator().manual_seed(0)
    x, labels = torch.rand(16, 1, 8, 8, generator=draw), torch.arange(16) % 10
    objective = Objective(model, TERMS, tolerance=0.5, precision=precision)
    if compiled:
        model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
        objective.compile(16)
    loss = objective(x, labels, 0.05, weight)
    loss.total.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return loss, gradients


@needs_compiler
@pytest.mark.parametrize(
    ("arch", "weight"),
    [
        ("cnn7", 0.5),
        pytest.param("cnn7", 0.0, marks=pytest.mark.slow),
        pytest.param("wide_resnet", 0.5, marks=pytest.mark.slow),
        pytest.param("resnext", 0.5, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_channels_last_pass_is_the_plain_one(arch: str, weight: float) -> None:
    """The whole pass is one graph (fullgraph), with the regularisers and without."""
    (plain, expected), (fast, found) = (step(arch, weight=weight, compiled=way) for way in (False, True))
    assert fast.total.item() == pytest.approx(plain.total.item(), rel=1e-5)
    assert int(fast.certified) == int(plain.certified)
    whole = float(torch.nn.utils.get_total_norm(expected))
    for one, two in zip(found, expected, strict=True):  # a bias before BatchNorm has no gradient but rounding
        assert float((one - two).norm()) <= 1e-3 * float(two.norm()) + 1e-5 * whole
    assert any(g.is_contiguous(memory_format=torch.channels_last) and g.dim() == 4 for g in found)


@needs_compiler
def test_compiled_sums_keep_their_digits() -> None:
    """Nearly equal numbers, as radii are, over some axes and over all: a chain of them rounds to one side."""
    draw = torch.Generator().manual_seed(0)
    x = 0.1 + 0.001 * torch.rand(64, 4, 32, 32, generator=draw)

    def sums(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.sum(), (x * scale).sum((0, 2, 3)), x.sum((-2, -1), keepdim=True).square()

    results, slopes = [], []
    for function, dtype in ((sums, torch.float64), (compiled(sums), torch.float32)):
        scale = torch.ones(1, 4, 1, 1, dtype=dtype, requires_grad=True)
        found = function(x.to(dtype), scale)
        slopes += torch.autograd.grad(found[1].sum(), scale)
        results.append(found)
    for exact, fast in (*zip(*results, strict=True), tuple(slopes)):
        torch.testing.assert_close(fast.double(), exact, rtol=1e-6, atol=0)


@needs_compiler
def test_a_compilation_that_fails_says_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing is compiled there yet
    with config.patch({"cpp.cxx": (None, str(tmp_path / "none"))}), pytest.raises(OutsideError) as caught:
        compiled(lambda x: (x * 3).exp().sum())(torch.ones(65))
    assert "torch.compile failed" in str(caught.value)
    assert str(tmp_path) in (caught.value.problems[0].hint or "")


@needs_compiler
@pytest.mark.slow
def test_one_process_may_train_many_networks() -> None:
    """torch counts compiled variants of a function over all of them, and with a whole graph fails at its limit."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            loss, _ = step("cnn7", weight=0.5, compiled=True)
            assert loss.total.isfinite()


def test_a_rare_pass_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller last batch, eps still 0; always the same ones, also resumed."""
    model = build(SMALL["cnn7"], DIGITS).train()
    objective = Objective(model, TERMS, tolerance=0.5)
    asked: list[Wish] = []
    monkeypatch.setattr(objective, "_compiled", lambda *args: asked.append(args[4]))
    monkeypatch.setattr(objective, "_compiled_images", 16)
    x, labels = torch.rand(16, 1, 8, 8), torch.arange(16) % 10
    assert objective(x[:15], labels[:15], 0.05, 0.5).total.isfinite()
    assert objective(x, labels, 0.0, 0.5).total.isfinite()
    assert asked == []
    objective(x, labels, 0.05, 0.5, observe=True)
    objective(x, labels, 0.05, 0.0)
    objective(x, labels, 0.05, 0.0, observe=True)
    assert [(wish.regularised, wish.observed) for wish in asked] == [(True, True), (False, False), (False, True)]


def test_bfloat16_is_for_the_passes_alone() -> None:
    loss, gradients = step("cnn7", weight=0.5, compiled=False, precision="bf16")
    plain, _ = step("cnn7", weight=0.5, compiled=False)
    assert loss.total.item() != plain.total.item()
    assert loss.total.item() == pytest.approx(plain.total.item(), rel=0.05)
    assert loss.layers is not None
    kinds = {loss.total.dtype, loss.robust_ce.dtype, loss.layers.mean_width.dtype, *(g.dtype for g in gradients)}
    assert kinds == {torch.float32}


@pytest.mark.parametrize("setting", ['train.precision="bf16"', 'train.compile="on"'])
def test_crown_ibp_has_neither(setting: str) -> None:
    method = ['train.method="crown-ibp"']
    recipe.load("tiny_cnn7", method)
    with pytest.raises(InputError) as caught:
        recipe.load("tiny_cnn7", [*method, setting])
    assert setting.split(".")[1].split("=")[0] in str(caught.value)


def test_standard_training_is_not_compiled() -> None:
    with pytest.raises(InputError, match="means nothing with method"):
        recipe.load("tiny_cnn7", ['train.method="natural"', 'train.compile="on"'])


def chosen(**overrides: object) -> recipe.Recipe:
    settings = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    return recipe.load("tiny_cnn7", settings)


@needs_compiler
def test_auto_is_decided_by_the_number_of_steps() -> None:
    images, alone = 1438, World()
    short, long = chosen(), chosen(train__epochs=1000)
    assert speed.settled(short, images, DIGITS, CPU, alone).train.compile == "off"
    assert speed.settled(long, images, DIGITS, CPU, alone).train.compile == "on"
    assert speed.settled(long, images, DIGITS, CPU, World(0, 2)).train.compile == "off"
    natural = recipe.load("tiny_cnn7", ['train.method="natural"', "train.epochs=1000"])
    assert speed.settled(natural, images, DIGITS, CPU, alone).train.compile == "off"
    with pytest.raises(InputError, match="one process"):
        speed.settled(chosen(train__compile="on"), images, DIGITS, CPU, World(0, 2))


def test_a_network_that_onednn_cannot_take_is_neither_compiled_nor_laid_out() -> None:
    """A strided 1x1 convolution of 4 channels: its gradient in channels_last corrupts memory."""
    narrow = recipe.load("tiny_cnn7", ['model={arch="wide_resnet",width=4,widen=1,hidden=16}', "train.epochs=1000"])
    model = build(narrow.model, DIGITS)
    assert speed.breaks_onednn(model)
    assert not speed.breaks_onednn(build(SMALL["wide_resnet"], DIGITS))
    assert speed.settled(narrow, 1438, DIGITS, CPU, World()).train.compile == "off"
    natural = narrow.model_copy(update={"train": narrow.train.model_copy(update={"method": "natural"})})
    assert speed.layout_for(natural, model) == torch.contiguous_format
    forced = narrow.model_copy(update={"train": narrow.train.model_copy(update={"compile": "on"})})
    with pytest.raises(InputError, match="oneDNN"):
        speed.settled(forced, 1438, DIGITS, CPU, World())


def test_without_a_compiler_auto_is_off_and_on_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "why_not", lambda device: "there is none")
    assert speed.settled(chosen(train__epochs=1000), 1438, DIGITS, CPU, World()).train.compile == "off"
    with pytest.raises(OutsideError, match=r"torch\.compile does not work here: there is none"):
        speed.settled(chosen(train__compile="on"), 1438, DIGITS, CPU, World())


@pytest.mark.slow
def test_a_missing_compiler_is_noticed_before_anything_is_written(process: Cli, tmp_path: Path) -> None:
    """A real process whose compiler cannot be found, and an empty cache."""
    surroundings = {"CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    result = process("train", "tiny_cnn7", "--out", "run", "--set", 'train.compile="on"', **surroundings)
    assert result.returncode == 1 or result.returncode == 3, result.stderr
    assert "torch.compile does not work here" in result.stderr
    assert not (tmp_path / "run").exists()


@needs_compiler
@pytest.mark.slow
def test_a_compiled_run_stopped_and_resumed_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """Also the layout of the optimiser's moments comes back: fused Adam goes by memory, not by shape."""
    from certtool.data import load_both
    from certtool.errors import Interrupted
    from certtool.training.loop import new_run, resumed_run

    overrides = [word for word in small_settings(train__compile='"on"', train__epochs=4) if word != "--set"]
    wanted = recipe.load("tiny_cnn7", overrides)
    assert len(load_both(wanted.data, None)[0]) == 1438
    for event in new_run(wanted, tmp_path / "whole", device=CPU).run():
        assert event is not None
    calls = iter(range(1_000_000))
    with pytest.raises(Interrupted):
        list(new_run(wanted, tmp_path / "parts", device=CPU).run(lambda: next(calls) == 17))
    resumed = resumed_run(tmp_path / "parts", device=CPU)
    assert resumed.recipe.train.compile == "on"
    list(resumed.run())
    whole, parts = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts
    text = (tmp_path / "parts" / "recipe.toml").read_text()
    assert 'compile = "on"' in text
