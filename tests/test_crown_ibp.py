"""CROWN-IBP in training: its bounds against the checker's and auto_LiRPA's own, its loss, its runs."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ENVIRONMENT, SMALL, Cli, small_settings
from hypothesis import given
from hypothesis import strategies as st
from test_checker import ARGUMENTS, FACTS, images, lively, written
from torch import Tensor, nn

from certtool import catalog, checker, checkpoint, recipe
from certtool.bounds import Interval, ball, features_step, graph_of, lower_margins, propagate, upper_margins
from certtool.bounds import lirpa as door
from certtool.bounds.crown import CrownBounds
from certtool.bounds.lirpa import BoundedModel, auto_lirpa, installed, margin_rows, without_groups
from certtool.data import load_split
from certtool.device import device_for
from certtool.errors import InputError, OutsideError
from certtool.models import build
from certtool.training import new_run
from certtool.training.crown_ibp import CrownObjective, ExponentialSum
from certtool.training.methods import objective_for
from certtool.training.objective import WHOLE, Objective, robust_cross_entropy

needs_lirpa = pytest.mark.skipif(installed() is None, reason="auto_LiRPA is not installed")
DIGITS = catalog.DATASETS["digits"]
SMALL_CNN7 = catalog.Cnn7(arch="cnn7", width=2, hidden=8)
CROWN = small_settings(train__method='"crown-ibp"')
TARGET = 0.1


def in_a_process_of_its_own(function: str, *arguments: object) -> None:
    """auto_LiRPA's repairs patch the whole process, so what needs it is a function here that another process calls."""
    here = Path(__file__).parent
    code = f"import torch, test_crown_ibp; torch.set_num_threads(1); test_crown_ibp.{function}{arguments!r}"
    environment = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr


def batch(count: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    split = load_split("digits", "train")
    chosen = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))[:count]
    return split.pixels(split.images[chosen]), split.labels[chosen]


def crown_objective(
    model: nn.Module, fused: bool, terms: tuple[str, ...] = (), shape: tuple[int, ...] = DIGITS.shape
) -> CrownObjective:
    example = torch.zeros(1, *shape, dtype=next(model.parameters()).dtype)
    return CrownObjective(model, terms, 0.5, example=example, target=TARGET, fused=fused)


# The bounds


def margins_agree(folder: str) -> None:
    """In evaluation mode: the checker's least margin, and every margin of auto_LiRPA with BatchNorm left to it."""
    labels = torch.tensor([0, 1, 2, 3, 1])
    lower, upper = checker.exact_box(images(5), 255, Fraction(2, 255))
    box = Interval.from_bounds(torch.from_numpy(lower), torch.from_numpy(upper))
    for name, arguments in ARGUMENTS.items():
        built = lively(build(arguments, FACTS, "xavier-uniform", seed=1), seed=len(name))
        model, network = written(built, arguments, Path(folder))
        graph = graph_of(model.double())
        crown = CrownBounds(model, graph, box.center[:1], preprocessing="normalize")
        margins = crown.lower_margins(box, labels, 4, propagate(graph, box).norms).detach()
        assert (margins.gather(1, labels[:, None]) == 0).all(), name
        ours = margins.scatter(1, labels[:, None], torch.inf).amin(1).numpy()
        theirs = checker.crown_ibp_margins(network, lower, upper, labels.numpy())
        assert np.abs(ours - theirs).max() < 1e-9 * np.abs(theirs).max(), name
        if arguments.batch_norm in ("full", "conv", "none"):  # the halves of BatchNorm are our own layers
            direct = BoundedModel(model, box.center[:1], preprocessing="normalize")
            expected = direct.lower_margins(box, labels, 4, "CROWN-IBP")
            assert (margins - expected).abs().max() < 1e-9 * expected.abs().max(), name


@needs_lirpa
def test_margins_are_those_of_the_checker(tmp_path: Path) -> None:
    """CNN-7, Wide-ResNet and ResNeXt, every way to switch BatchNorm."""
    in_a_process_of_its_own("margins_agree", str(tmp_path))


def directly(model: nn.Module, x: Tensor, box: Interval, labels: Tensor) -> Tensor:
    """auto_LiRPA as its manual says, BatchNorm in training mode, no Normalize."""
    lirpa = auto_lirpa()
    bounded = lirpa.BoundedModule(model, torch.zeros_like(x), bound_opts={"conv_mode": "patches"})
    model.train()
    bounded.train()
    perturbation = lirpa.PerturbationLpNorm(norm=float("inf"), x_L=box.lower, x_U=box.upper)
    perturbed = lirpa.BoundedTensor(x, perturbation)
    bounded(perturbed)  # BatchNorm's statistics
    others, rows = margin_rows(labels, 10, x.dtype)
    lower, _ = bounded.compute_bounds(x=(perturbed,), C=rows, method="CROWN-IBP", bound_upper=False)
    return torch.zeros(others.shape, dtype=x.dtype).masked_scatter(others, lower)


def training_mode_agrees() -> None:
    """Batch statistics of the clean images, with their gradient: margins and gradients of auto_LiRPA itself."""
    import warnings

    warnings.simplefilter("ignore")  # of the exporter
    x, labels = batch()
    x, box = x.double(), ball(x.double(), 0.03)
    ours = build(SMALL_CNN7, DIGITS, "ibp", seed=1).double().train()
    theirs = copy.deepcopy(ours)
    theirs.set_submodule("normalize", nn.Identity())  # the digits' is the identity
    expected = directly(theirs, x, box, labels)
    graph = graph_of(ours)
    crown = CrownBounds(ours, graph, x[:1], preprocessing="normalize")
    margins = crown.lower_margins(box, labels, 10, propagate(graph, box, clean=x).norms)
    assert (margins - expected).abs().max() < 1e-9 * expected.abs().max()
    robust_cross_entropy(margins, labels, WHOLE).backward()
    robust_cross_entropy(expected, labels, WHOLE).backward()
    largest = max(float(p.grad.abs().max()) for p in theirs.parameters() if p.grad is not None)
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert parameter.grad is not None, name
        assert other.grad is not None, name
        assert (parameter.grad - other.grad).abs().max() < 1e-8 * largest, name


@needs_lirpa
def test_training_mode_is_that_of_auto_lirpa() -> None:
    in_a_process_of_its_own("training_mode_agrees")


class Exponentials(nn.Module):
    """The sum in the loss, as auto_LiRPA can convert it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return torch.exp(torch.matmul(rows, self.model(x).unsqueeze(-1)).squeeze(-1)).sum(-1, keepdim=True)


def fused_bound_agrees() -> None:
    """auto_LiRPA's own relaxation of the sum, given the same bounds of z_j - z_y: those of the logits, subtracted."""
    import warnings

    warnings.simplefilter("ignore")
    lirpa = auto_lirpa()
    x, labels = batch()
    x, box = x.double(), ball(x.double(), 0.02)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 10))
    model.double()
    eye = torch.eye(10, dtype=torch.float64)
    rows = eye - eye[labels].unsqueeze(1)
    bounded = lirpa.BoundedModule(Exponentials(model), (x, rows), bound_opts={"conv_mode": "patches"})
    perturbation = lirpa.PerturbationLpNorm(norm=float("inf"), x_L=box.lower, x_U=box.upper)
    whole = torch.ones(len(x), 1, 1, dtype=torch.float64)
    _, expected = bounded.compute_bounds(
        x=(lirpa.BoundedTensor(x, perturbation), rows), C=whole, method="CROWN-IBP", bound_lower=False
    )
    graph = graph_of(model)
    bounds = propagate(graph, box)
    logits, own = bounds.output, labels.unsqueeze(1)
    differences = [
        (one - other.gather(1, own)).scatter(1, own, 0.0)
        for one, other in ((logits.lower, logits.upper), (logits.upper, logits.lower))
    ]
    sums = ExponentialSum.between(differences[0], differences[1])
    lower = CrownBounds(model, graph, x[:1]).lower(box, sums.rows(labels), bounds.norms)
    ours = sums.crown(lower.squeeze(1)) * torch.exp(sums.top)
    assert (ours - expected.squeeze(1)).abs().max() < 1e-9 * expected.max()


@needs_lirpa
def test_the_fused_bound_is_that_of_auto_lirpa() -> None:
    in_a_process_of_its_own("fused_bound_agrees")


@given(st.integers(0, 10**6), st.floats(-6, 3))
def test_chords_lie_above_the_exponentials(seed: int, size: float) -> None:
    """For points between the bounds, where the linear function is known exactly."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 7, (9,), generator=generator)
    ends = torch.randn(2, 9, 7, generator=generator, dtype=torch.float64) * 10**size
    lower, upper = (end.scatter(1, labels[:, None], 0.0) for end in (ends.amin(0), ends.amax(0)))
    share = torch.rand(20, 9, 7, generator=generator, dtype=torch.float64)
    share = torch.where(share < 0.3, share.round(), share)
    sums = ExponentialSum.between(lower, upper)
    for d in lower + share * (upper - lower):
        linear = (sums.rows(labels).squeeze(1) * d).sum(1)  # logits d, that of the label 0
        true = torch.exp(d - sums.top[:, None]).sum(1)
        assert (sums.crown(linear) >= true * (1 - 1e-9) - 1e-12).all()
        assert (sums.interval >= true).all()


def fused_bounds_hold() -> None:
    """Random networks, boxes and points: neither upper bound is below the sum at any point of the box."""
    for seed in range(40):
        torch.manual_seed(seed)
        layers = [
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, 2, 1, groups=seed % 2 + 1),
        ]
        layers += [nn.ReLU(), nn.Flatten(), nn.Linear(36, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5)]
        model = lively(nn.Sequential(*layers), seed).double()
        x, labels = torch.rand(4, 2, 6, 6, dtype=torch.float64), torch.randint(0, 5, (4,))
        box = ball(x, 10 ** -(seed % 4 + 0.5))
        graph = graph_of(model)
        with torch.no_grad():
            bounds = propagate(graph, box, keep={str(features_step(graph))})
            lower, upper = lower_margins(graph, bounds, labels), upper_margins(graph, bounds, labels)
            sums = ExponentialSum.between(-upper, -lower)
            crown = CrownBounds(model, graph, x[:1]).lower(box, sums.rows(labels), bounds.norms).squeeze(1)
            share = torch.rand(200, *x.shape, dtype=torch.float64)
            share[:100] = share[:100].round()  # corners
            points = box.lower + share * (box.upper - box.lower)
            logits = model(points.flatten(0, 1)).view(200, 4, 5)
        differences = logits - logits.gather(2, labels.expand(200, 4)[..., None])
        seen = torch.exp(differences - sums.top[:, None]).sum(2).amax(0)
        assert (-differences >= lower - 1e-9).all(), seed
        assert (-differences <= upper + 1e-9).all(), seed
        assert (sums.crown(crown) >= seen * (1 - 1e-9)).all(), seed
        assert (sums.interval >= seen * (1 - 1e-9)).all(), seed


@needs_lirpa
def test_the_fused_bound_is_never_below_the_sum() -> None:
    in_a_process_of_its_own("fused_bounds_hold")


def test_upper_margins_without_a_linear_last_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 4), nn.ReLU())
    x, labels = torch.rand(3, 2, 2, 2), torch.tensor([0, 1, 3])
    graph = graph_of(model)
    bounds = propagate(graph, ball(x, 0.1))
    lower, upper = lower_margins(graph, bounds, labels), upper_margins(graph, bounds, labels)
    logits = model(x)
    margins = logits.gather(1, labels[:, None]) - logits
    assert (lower <= margins).all()
    assert (margins <= upper).all()
    assert (upper.gather(1, labels[:, None]) == 0).all()


# The loss


def losses_mix() -> None:
    """(1 - eps/eps_t) crown + (eps/eps_t) ibp; at eps 0 nothing is bounded, at eps_t CROWN has no share."""
    x, labels = batch(32)
    x = x.double()
    for fused in (True, False):
        model = build(SMALL_CNN7, DIGITS, "ibp", seed=1).double().train()
        crown, plain = crown_objective(model, fused), Objective(model, (), 0.5)
        assert torch.equal(crown(x, labels, 0.0, 0.0).total, nn.functional.cross_entropy(model(x), labels))
        for eps in (TARGET, TARGET * (1 - 0.9e-5)):
            assert torch.equal(crown(x, labels, eps, 0.0).total, plain(x, labels, eps, 0.0).total)
        almost = TARGET * (1 - 1.1e-5)
        near, interval = crown(x, labels, almost, 0.0).total, plain(x, labels, almost, 0.0).total
        assert not torch.equal(near, interval)
        assert abs(float(near - interval)) < 1e-3 * float(interval)
        eps, share = 0.3 * TARGET, 0.7
        box = ball(x, eps)
        bounds = propagate(crown.graph, box, clean=x, keep={str(features_step(crown.graph))})
        margins = lower_margins(crown.graph, bounds, labels)
        if fused:
            sums = ExponentialSum.between(-upper_margins(crown.graph, bounds, labels), -margins)
            linear = sums.crown(crown.crown.lower(box, sums.rows(labels), bounds.norms).squeeze(1))
            whole = torch.exp(sums.top)
            mix = share * linear * whole + (1 - share) * torch.exp(-margins).sum(1)
            expected = mix.log().mean()
        else:
            linear = crown.crown.lower_margins(box, labels, 10, bounds.norms)
            expected = robust_cross_entropy(share * linear + (1 - share) * margins, labels, WHOLE)
        assert abs(float(crown(x, labels, eps, 0.0).total - expected)) < 1e-12 * float(expected)


@needs_lirpa
def test_the_mix_goes_from_crown_to_intervals() -> None:
    in_a_process_of_its_own("losses_mix")


def regularisers_count() -> None:
    x, labels = batch(32)
    model = build(SMALL_CNN7, DIGITS, "xavier-uniform", seed=1).train()
    for fused in (True, False):
        crown, plain = (
            crown_objective(model, fused, ("tightness", "relu")),
            Objective(model, ("tightness", "relu"), 0.5),
        )
        ours, theirs = crown(x, labels, 0.02, 0.5), plain(x, labels, 0.02, 0.5)
        for name in ("tightness", "relu", "clean_ce", "clean_correct", "certified"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert float(ours.tightness) > 0
        expected = ours.robust_ce + 0.5 * (ours.tightness + ours.relu)
        assert torch.allclose(ours.total, expected)
        assert not torch.equal(ours.robust_ce, theirs.robust_ce)


@needs_lirpa
def test_regularisers_are_those_of_the_interval_bounds() -> None:
    in_a_process_of_its_own("regularisers_count")


def statistics_move_once() -> None:
    x, labels = batch(32)
    for fused in (True, False):
        for mode in ("full", "center", "scale"):
            arguments = SMALL_CNN7.model_copy(update={"batch_norm": mode})
            model = build(arguments, DIGITS, "ibp", seed=1).train()
            expected = copy.deepcopy(model)
            expected(x)
            objective = crown_objective(model, fused)
            before = {name: value.clone() for name, value in model.named_buffers()}
            objective(x, labels, 0.02, 0.0).total.backward()
            assert model.training
            for name, value in expected.named_buffers():
                if "running" in name:
                    assert torch.allclose(model.get_buffer(name), value, rtol=1e-5, atol=1e-7), name
                    assert not torch.equal(model.get_buffer(name), before[name]), name
            assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@needs_lirpa
def test_running_statistics_are_those_of_one_clean_pass() -> None:
    in_a_process_of_its_own("statistics_move_once")


def wide_bounds_are_finite() -> None:
    """float32, bounds whose exponentials no float could hold, at the start of the warmup and in it."""
    x, labels = batch(32)
    for batch_norm in ("full", "none"):
        arguments = SMALL_CNN7.model_copy(update={"batch_norm": batch_norm})
        for fused in (True, False):
            model = build(arguments, DIGITS, "kaiming-uniform", seed=1).train()
            objective = crown_objective(model, fused)
            with torch.no_grad():
                model.classifier.weight *= 1000
            for eps in (1e-9, 1e-3, 0.9 * TARGET):
                model.zero_grad()
                loss = objective(x, labels, eps, 0.0)
                loss.total.backward()
                assert loss.total.isfinite()
                assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
            assert float(loss.robust_ce) > 1000  # alive: exp(1000) is infinite, in float64 too


@needs_lirpa
def test_very_wide_bounds_have_finite_gradients() -> None:
    in_a_process_of_its_own("wide_bounds_are_finite")


def unfoldable_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 10))
    with pytest.raises(InputError, match="needs every BatchNorm right after"):
        crown_objective(model, True)


@needs_lirpa
def test_a_batch_norm_elsewhere_is_refused() -> None:
    in_a_process_of_its_own("unfoldable_is_refused")


def test_a_grouped_kernel_keeps_its_gradient() -> None:
    layer = nn.Conv2d(4, 6, 3, groups=2)
    kernel = door.dense_kernel(layer.weight, 2)
    (kernel * torch.arange(kernel.numel()).view_as(kernel)).sum().backward()
    assert layer.weight.grad is not None
    numbers = torch.arange(kernel.numel()).view_as(kernel)
    assert torch.equal(layer.weight.grad[:3], numbers[:3, :2].float())
    assert torch.equal(layer.weight.grad[3:], numbers[3:, 2:].float())
    assert torch.equal(without_groups(nn.Sequential(layer))[0].weight, kernel)


# The runs


def test_which_objective_a_recipe_gets() -> None:
    chosen = recipe.load("tiny_cnn7", recipe.overrides_from(SMALL))
    assert type(objective_for(chosen, build(chosen.model, DIGITS), DIGITS)) is Objective


def test_a_missing_engine_is_told_before_anything_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(door, "installed", lambda: None)
    chosen = recipe.load("tiny_cnn7_crown")
    with pytest.raises(OutsideError, match="needs auto_LiRPA, which is not installed") as caught:
        new_run(chosen, tmp_path / "run", device=device_for("cpu"))
    assert "pip install --no-deps auto_LiRPA==0.3" in str(caught.value.problems[0].hint)
    assert not (tmp_path / "run").exists()


@needs_lirpa
@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_a_run_trains_and_its_seed_decides_the_bytes(fused: bool, cli: Cli, process: Cli, tmp_path: Path) -> None:
    """In new processes: auto_LiRPA warns when it is imported, and here it may have been long ago."""
    settings = [*CROWN, "--set", f"train.loss_fusion={str(fused).lower()}"]
    for name in ("one", "two"):
        result = process("train", "tiny_cnn7", "--out", name, *settings)
        assert result.returncode == 0, result.stderr
        assert "Warning" not in result.stderr
    first = (tmp_path / "one" / "model.safetensors").read_bytes()
    assert (tmp_path / "two" / "model.safetensors").read_bytes() == first
    header = checkpoint.load(tmp_path / "one").header
    assert header.method == "crown-ibp"
    assert f"loss_fusion = {str(fused).lower()}" in header.recipe
    assert cli("verify", "one", "--method", "ibp", "--no-attack").returncode == 0


@needs_lirpa
@pytest.mark.slow
def test_killed_and_resumed_a_run_ends_with_the_same_bytes(cli: Cli, tmp_path: Path) -> None:
    """Killed in the warmup, where CROWN counts."""
    assert cli("train", "tiny_cnn7", "--out", "whole", *CROWN).returncode == 0
    command = [sys.executable, "-m", "certtool", "train", "tiny_cnn7", "--out", "killed", *CROWN]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    result = cli("train", "--resume", "killed")
    assert result.returncode == 0, result.stderr
    expected = (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert (tmp_path / "killed" / "model.safetensors").read_bytes() == expected
