"""The ladder: verdicts that add up, rungs that only help, limits that hold, and oracles that know the answer."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT, Cli
from torch import Tensor, nn

import certtool
from certtool.attack import AttackSettings
from certtool.bounds import Interval, ibp, rounding
from certtool.bounds.box import inner_edges
from certtool.bounds.lirpa import installed
from certtool.bounds.rounding import ROUNDED
from certtool.data import load_split
from certtool.epsilon import Epsilon
from certtool.errors import InputError
from certtool.models import Normalize
from certtool.verification import EpsResult, ImageVerdict, LadderSettings, Unsound, ladder, verify, verify_network
from certtool.verification.images import choose
from certtool.verification.ladder import Ladder
from certtool.verification.verdicts import Grade
from certtool.verification.worker import Worker, job_for

needs_lirpa = pytest.mark.skipif(installed() is None, reason="auto_LiRPA is not installed")
IBP = LadderSettings(method="ibp")
SHORT = AttackSettings(steps=10, restarts=2)


def eps(*texts: str) -> list[Epsilon]:
    return [Epsilon.parse(text) for text in texts]


# --- what every run must satisfy -------------------------------------------------------------------------------------


@needs_lirpa
def test_the_full_ladder_on_a_trained_model(robust_run: Path) -> None:
    checkpoint, split = certtool.load(robust_run), load_split("digits", "test")
    settings = LadderSettings(attack=SHORT, attack_certified=20)
    radii = eps("0.02", "0.1", "0.05")
    report = verify(checkpoint, split, radii, count=80, settings=settings)
    assert [str(result.eps) for result in report.results] == ["0.02", "0.1", "0.05"]
    intervals = verify(checkpoint, split, radii, count=80, settings=LadderSettings(method="ibp", attack=None))
    for result, plain in zip(report.results, intervals.results, strict=True):
        assert sum(result.count(v) for v in ("certified", "falsified", "unknown", "misclassified")) == 80
        assert result.certified_rigorous == plain.certified_rigorous == plain.certified_accuracy
        assert result.certified_accuracy >= plain.certified_accuracy
        assert result.attacked_accuracy is not None
        assert result.certified_accuracy <= result.attacked_accuracy <= result.clean_accuracy
        for image in result.images:
            assert image.grade == (
                {"ibp": "rigorous"}.get(image.rung, "float32") if image.verdict == "certified" else None
            )
    small, large, middle = report.results
    for inner, outer in ((small, middle), (middle, large)):
        for low, high in zip(inner.images, outer.images, strict=True):
            assert high.verdict != "certified" or low.verdict == "certified"
            assert low.verdict != "falsified" or high.verdict == "falsified"
    assert large.count("falsified") > 0
    for result in report.results:
        for index, witness in result.witnesses.items():
            edges = inner_edges(split.images[index : index + 1], 16, result.eps.value)
            assert edges.contains(witness.unsqueeze(0)).all()
            assert int(checkpoint.model(witness.unsqueeze(0)).argmax()) != int(split.labels[index])


def test_rigorous_is_nearly_all_of_float32(robust_run: Path) -> None:
    checkpoint, split = certtool.load(robust_run), load_split("digits", "test")
    reports = {
        arithmetic: verify(checkpoint, split, eps("0.1"), settings=LadderSettings("ibp", arithmetic, attack=None))  # type: ignore[arg-type]
        for arithmetic in ("rigorous", "float32")
    }
    proven = {
        name: {image.index for image in report.results[0].images if image.verdict == "certified"}
        for name, report in reports.items()
    }
    assert proven["rigorous"] <= proven["float32"]
    assert len(proven["float32"]) - len(proven["rigorous"]) <= 0.005 * len(split)


@needs_lirpa
def test_relaxations_certify_what_intervals_cannot(tmp_path: Path) -> None:
    """An ordinarily trained network: hopeless for intervals, mostly provable by CROWN."""
    overrides = {
        "train.method": "natural", "train.init": "xavier-uniform", "train.epochs": 10, "train.warmup.epochs": 1,
        "model.width": 4, "model.hidden": 32, "model.batch_norm": "none",
    }  # fmt: skip
    checkpoint = certtool.train("tiny_cnn7", overrides, out=tmp_path / "run", device="cpu")
    split = load_split("digits", "test")
    accuracy = {}
    for method in ("ibp", "crown", "alpha-crown"):
        settings = LadderSettings(method=method, attack=None)  # type: ignore[arg-type]
        accuracy[method] = (
            verify(checkpoint, split, eps("0.01"), count=60, settings=settings).results[0].certified_accuracy
        )
    assert accuracy["ibp"] < 0.05
    assert accuracy["crown"] >= accuracy["ibp"] + 0.3
    assert accuracy["alpha-crown"] >= accuracy["crown"]


# --- networks and images of one's own --------------------------------------------------------------------------------


def linear(weight: list[list[float]], bias: list[float]) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(len(weight[0]), len(weight)))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor(weight))
        model[1].bias.copy_(torch.tensor(bias))
    return model.eval()


def test_ones_own_network_with_a_known_answer() -> None:
    """z_0 - z_1 = 2 x_0 - 0.8: certified at radius eps exactly where x_0 - eps > 0.4."""
    model = linear([[2.0], [0.0]], [0.0, 0.8])
    x = torch.tensor([0.45, 0.5, 0.6, 0.9, 0.39]).view(5, 1, 1, 1)
    report = certtool.verify(model, eps="0.1", data=(x, torch.zeros(5).long()), method="ibp")
    verdicts = [image.verdict for image in report.results[0].images]
    assert verdicts == ["falsified", "falsified", "certified", "certified", "misclassified"] or verdicts[1] == "unknown"
    assert verdicts[0] == "falsified"
    margins = [image.margin for image in report.results[0].images]
    assert margins[3] == pytest.approx(0.8, abs=1e-5)


def test_a_network_in_training_mode_is_refused() -> None:
    with pytest.raises(InputError, match="training mode"):
        certtool.verify(
            linear([[1.0], [0.0]], [0.0, 0.0]).train(), eps="0.1", data=(torch.rand(2, 1, 1, 1), torch.zeros(2).long())
        )


@pytest.mark.parametrize(
    ("x", "message"),
    [(torch.full((2, 1, 1, 1), 1.5), r"outside \[0, 1\]"), (torch.full((2, 1, 1, 1), torch.nan), r"outside \[0, 1\]"),
     (torch.rand(3, 1, 1, 1), "3 images with 2 labels"), (torch.rand(0, 1, 1, 1), "0 images")],
)  # fmt: skip
def test_images_that_cannot_be(x: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        verify_network(linear([[1.0], [0.0]], [0.0, 0.0]), x, torch.zeros(2).long(), eps("0.1"), settings=IBP)


def test_ties_and_nan_are_never_certified() -> None:
    tie = linear([[0.0], [0.0]], [0.0, 0.0])
    x, labels = torch.rand(4, 1, 1, 1), torch.zeros(4).long()
    for arithmetic in ("rigorous", "float32"):
        settings = LadderSettings("ibp", arithmetic, attack=None)  # type: ignore[arg-type]
        assert verify_network(tie, x, labels, eps("0.1"), settings=settings).results[0].count("certified") == 0
        nan = linear([[float("nan")], [0.0]], [0.0, -1.0])
        assert verify_network(nan, x, labels, eps("0.1"), settings=settings).results[0].count("certified") == 0


def test_a_rule_without_rounding_lowers_the_grade() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    from certtool.bounds.rules import RULES, rule

    @rule(Twice)
    def twice(layer: Twice, z: Interval) -> Interval:
        return Interval(2 * z.center, 2 * z.radius)

    try:
        model = nn.Sequential(linear([[2.0], [0.0]], [0.0, 0.0]), Twice()).eval()
        report = verify_network(model, torch.full((1, 1, 1, 1), 0.9), torch.zeros(1).long(), eps("0.1"), settings=IBP)
        assert report.results[0].images[0].grade == "float32"
        assert "without a rounding rule" in report.warnings[0]
    finally:
        del RULES[Twice]


def test_choosing_images() -> None:
    split = load_split("digits", "test")
    assert choose(split, 3, None).indices == [0, 1, 2]
    assert choose(split, None, [5, 2]).indices == [5, 2]
    for count, indices, message in ((0, None, "no images"), (None, [], "no images"), (None, [999], "no image 999"),
                                    (2, [1], "exclude"), (None, [1, 1], "twice")):  # fmt: skip
        with pytest.raises(InputError, match=message):
            choose(split, count, indices)


def test_a_part_in_training_mode_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2), nn.BatchNorm1d(2)).eval()
    model[2].train()
    with pytest.raises(InputError, match="or a part of it"):
        verify_network(model, torch.rand(2, 1, 1, 1), torch.zeros(2).long(), eps("0.1"), settings=IBP)


def test_a_tensor_changed_under_two_names_is_noticed() -> None:
    """torch.fx sees `z += ...` as a new tensor; the network changes y too."""

    class Alias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Linear(2, 2)

        def forward(self, v: Tensor) -> Tensor:
            y = torch.flatten(v, 1) - 0.6
            z = y
            z += y * 100
            result: Tensor = self.c(y)
            return result

    with pytest.raises(InputError, match=r"something else than torch.fx sees"):
        verify_network(Alias().eval(), torch.rand(2, 1, 1, 2), torch.zeros(2).long(), eps("0.1"), settings=IBP)


def test_rigour_is_about_float32() -> None:
    model, x = linear([[2.0], [0.0]], [0.0, 0.0]), torch.full((1, 1, 1, 1), 0.9)
    with pytest.raises(InputError, match=r"not of torch.float32"):
        verify_network(model, x.double(), torch.zeros(1).long(), eps("0.1"), settings=IBP)
    model.register_buffer("unused", torch.zeros(1, dtype=torch.bfloat16))
    report = verify_network(model, x, torch.zeros(1).long(), eps("0.1"), settings=IBP)
    assert report.results[0].images[0].grade == "float32"
    assert "not in float32 throughout" in report.warnings[0]


def test_a_witness_below_falsifies_a_float32_proof_above() -> None:
    image = ImageVerdict(0, 0, "certified", "crown", "float32", 0.1)
    broken = ImageVerdict(0, 0, "falsified", "attack")
    witness = {0: torch.zeros(1)}
    results = {
        0: EpsResult(eps("0.2")[0], "crown", "rigorous", SHORT, (image,), {}, 0.0),
        1: EpsResult(eps("0.1")[0], "crown", "rigorous", SHORT, (broken,), witness, 0.0),
    }
    ladder._falsify_above(results, [0, 1])
    assert results[0].images[0].verdict == "falsified"
    rigorous = replace(image, rung="ibp", grade="rigorous")
    results[0] = replace(results[0], images=(rigorous,), witnesses={})
    with pytest.raises(Unsound):
        ladder._falsify_above(results, [0, 1])


# --- the attack keeps the proofs honest ------------------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", ["rigorous", "float32"])
def test_few_images_at_a_time_have_the_margins_of_all(
    arithmetic: Grade, robust_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, split = certtool.load(robust_run), load_split("digits", "test")
    found = []
    for room in (ladder.CACHE, 1):  # enough for all 23 images, and for one
        monkeypatch.setattr(ladder, "CACHE", room)
        settings = LadderSettings("ibp", arithmetic, attack=None)
        found.append(verify(checkpoint, split, eps("0.1"), count=23, settings=settings).results[0].images)
    assert [image.verdict for image in found[0]] == [image.verdict for image in found[1]]
    at_once, one_by_one = ([image.margin for image in images if image.margin is not None] for images in found)
    assert len(at_once) > 15
    assert one_by_one == pytest.approx(at_once, rel=1e-4 if arithmetic == "float32" else 1e-12)


def test_an_attack_that_beats_a_rigorous_proof_is_our_bug(robust_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rounding and radius thrown away everything looks certified; the attack on certified images must notice."""
    monkeypatch.setattr(
        ladder, "rounded_margins", lambda graph, box, labels, weights: torch.ones(len(labels), 10).double()
    )
    checkpoint, split = certtool.load(robust_run), load_split("digits", "test")
    with pytest.raises(Unsound, match=r"certified rigorously at eps 0.1") as caught:
        verify(checkpoint, split, eps("0.1"), settings=LadderSettings("ibp", attack=SHORT, attack_certified=300))
    assert caught.value.exit_code == 70
    assert caught.value.witness.shape == (1, 8, 8)


def test_an_attack_that_beats_a_float32_proof_falsifies_with_a_warning(
    robust_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "margin_bounds", lambda graph, box, labels, weights: torch.ones(len(labels), 10))
    checkpoint, split = certtool.load(robust_run), load_split("digits", "test")
    settings = LadderSettings("ibp", "float32", attack=SHORT, attack_certified=300)
    report = verify(checkpoint, split, eps("0.1"), count=50, settings=settings)
    assert report.results[0].count("falsified") > 0
    assert "beats a float32-grade proof" in report.warnings[0]


# --- mutations that the oracles must catch ---------------------------------------------------------------------------


def preprocessed() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(
        Normalize((0.5,), (0.2,)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 3),
    ).eval()
    with torch.no_grad():
        model[2].running_mean.normal_()
        model[2].running_var.uniform_(0.2, 2)
        model[2].weight.normal_()
    return model


def proofs_hold() -> None:
    """No sampled point of the box may have a margin below the one proven, and a tie may not be certified."""
    model, x = preprocessed(), torch.rand(40, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        labels = model(x).argmax(1)
    for radius in ("0.02", "0.1"):
        for image in (
            verify_network(model, x, labels, eps(radius), settings=LadderSettings("ibp", attack=None)).results[0].images
        ):
            corners = torch.randint(0, 2, (200, 1, 3, 3)).float() * 2 - 1
            points = (x[image.index] + float(radius) * corners).clamp(0, 1)
            with torch.no_grad():
                logits = model(points)
            margins = logits[:, image.label, None] - logits
            margins[:, image.label] = torch.inf
            assert image.margin is None or float(margins.min()) >= image.margin - 1e-5
    tie = linear([[0.0], [0.0]], [0.0, 0.0])
    settings = LadderSettings("ibp", "float32", attack=None)
    assert (
        verify_network(tie, torch.rand(1, 1, 1, 1), torch.zeros(1).long(), eps("0"), settings=settings)
        .results[0]
        .count("certified")
        == 0
    )


def _spread_without_abs(monkeypatch: pytest.MonkeyPatch) -> None:
    original = rounding._product
    monkeypatch.setattr(
        rounding,
        "_product",
        lambda layer, x, weight: original(layer, x, layer.weight if (weight >= 0).all() else weight),
    )


def _swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUNDED, nn.ReLU, lambda layer, z: Interval.from_bounds(z.upper.relu(), z.lower.relu()))


def _eps_after_normalisation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUNDED, Normalize, lambda layer, z: Interval((z.center - layer.mean) / layer.std, z.radius))


def _train_mode_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def batch(step: object) -> tuple[Tensor, Tensor]:
        module = step.module  # type: ignore[attr-defined]
        return torch.zeros_like(module.running_mean), torch.ones_like(module.running_var)

    monkeypatch.setattr(ibp, "running_statistics", batch)


def _ties_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "_positive", lambda margin: margin >= 0)
    monkeypatch.setattr(ladder, "check_counts", lambda result: None)


MUTATIONS = {
    "|W| dropped": _spread_without_abs,
    "lower and upper swapped": _swapped,
    "eps applied after normalisation": _eps_after_normalisation,
    "train-mode BatchNorm": _train_mode_batch_norm,
    ">= for >": _ties_count,
}


def test_unmutated_the_proofs_hold() -> None:
    proofs_hold()


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    with pytest.raises((AssertionError, InputError)):  # a wrong BatchNorm is no longer the network that was traced
        proofs_hold()


# --- the campaign against exact answers ------------------------------------------------------------------------------


def campaign(pairs: int, seed: int) -> dict[str, object]:
    script = Path(__file__).with_name("campaign.py")
    command = [sys.executable, "-W", "ignore", str(script), "--pairs", str(pairs), "--seed", str(seed)]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=1500)
    assert result.returncode == 0, result.stderr
    document: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return document


def test_no_rung_proves_what_is_false() -> None:
    found = campaign(200, seed=0)
    assert found["violations"] == []
    assert found["pairs"] == 200
    assert 20 < found["truly_robust"] < 190  # type: ignore[operator]


@pytest.mark.slow
def test_no_rung_proves_what_is_false_at_length() -> None:
    found = campaign(int(os.environ.get("CERTTOOL_CAMPAIGN", "2000")), seed=1000)
    assert found["violations"] == []


# --- the worker's limits ---------------------------------------------------------------------------------------------


def job() -> tuple[object, Interval, Tensor]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x = torch.rand(2, 1, 4, 4)
    return job_for(model, None, x, 3), Interval(x, torch.full_like(x, 0.01)), torch.tensor([0, 1])


@needs_lirpa
def test_a_worker_that_is_killed_costs_its_batch() -> None:
    task, box, labels = job()
    worker = Worker(task, 4 << 30, None)  # type: ignore[arg-type]
    try:
        assert not isinstance(worker.margins("CROWN", box, labels), str)
        worker._process.kill()
        worker._process.join()
        assert worker.margins("CROWN", box, labels) == "memory"
        assert not isinstance(worker.margins("CROWN", box, labels), str)
    finally:
        worker.close()


@needs_lirpa
@pytest.mark.parametrize("spare", [0, 2], ids=["no pipe", "no process"])
def test_a_worker_that_cannot_start_says_so_and_can_be_closed(spare: int) -> None:
    """A process that has as many files open as it may: the pipe takes two, the child needs more."""
    task, box, labels = job()
    worker, limits = Worker(task, 4 << 30, None), resource.getrlimit(resource.RLIMIT_NOFILE)  # type: ignore[arg-type]
    free = [os.dup(0) for _ in range(spare + 1)]
    for handle in free:
        os.close(handle)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], limits[1]))
    try:
        answer = worker.margins("CROWN", box, labels)
        worker.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert answer == "engine"
    assert worker.complaint == "its process cannot be started: too many open files"
    try:
        assert not isinstance(worker.margins("CROWN", box, labels), str)
    finally:
        worker.close()


@needs_lirpa
def test_a_worker_respects_its_deadline() -> None:
    task, box, labels = job()
    worker = Worker(task, 4 << 30, time.monotonic() + 0.2)  # type: ignore[arg-type]
    began = time.monotonic()
    assert worker.margins("CROWN", box, labels) == "time"
    assert worker.margins("CROWN", box, labels) == "time"
    assert time.monotonic() - began < 5
    worker.close()


@needs_lirpa
def test_too_little_memory_is_unknown_memory() -> None:
    """A network whose CROWN bounds need gigabytes, in a worker that may have a few hundred megabytes."""
    torch.manual_seed(0)
    body = [layer for channels in (3, 32, 32) for layer in (nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(32 * 32 * 32, 10)).eval()
    x = torch.rand(2, 3, 32, 32)
    labels = model(x).argmax(1)
    settings = LadderSettings("crown", attack=None, memory=400 << 20)
    result = verify_network(model, x, labels, eps("0.2"), settings=settings).results[0]
    assert [image.reason for image in result.images] == ["memory", "memory"]


def test_without_auto_lirpa_auto_goes_on_and_crown_says_how_to_install(
    robust_run: Path, process: Cli, tmp_path: Path
) -> None:
    """A process that cannot see the package: its metadata is hidden."""
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text(
        "import importlib.metadata as m\noriginal = m.version\ndef version(name):\n"
        "    if name == 'auto_LiRPA':\n        raise m.PackageNotFoundError(name)\n    return original(name)\n"
        "m.version = version\n"
    )
    path = os.pathsep.join([str(tmp_path), ENVIRONMENT.get("PYTHONPATH", "")])
    going_on = process("verify", robust_run, "--images", "5", "--no-attack", PYTHONPATH=path)
    assert going_on.returncode == 0
    assert "going on without linear relaxations" in going_on.stderr
    explicit = process("verify", robust_run, "--images", "5", "--method", "crown", PYTHONPATH=path)
    assert explicit.returncode == 3
    assert "pip install --no-deps auto_LiRPA==0.3" in explicit.stderr


def test_the_ladder_needs_a_known_method(robust_run: Path) -> None:
    checkpoint, split = certtool.load(robust_run), load_split("digits", "test")
    images = choose(split, 2, None)
    assert Ladder(checkpoint.model, images, IBP).rungs == []
    if installed() is not None:
        assert Ladder(checkpoint.model, images, LadderSettings("crown")).rungs == ["crown-ibp", "crown"]
    assert Fraction(1, 10) == eps("0.1")[0].value
