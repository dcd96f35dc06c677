"""The attack: complete where an answer is known, inside the box always, repeatable."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import certtool
from certtool.attack import AttackSettings, attack
from certtool.bounds.box import inner_edges, inner_edges_of_floats
from certtool.data import load_split


@pytest.fixture(scope="module")
def natural(tmp_path_factory: pytest.TempPathFactory) -> certtool.Checkpoint:
    """An ordinary network, with no defence at all."""
    overrides = {
        "train.method": "natural", "train.init": "xavier-uniform", "train.epochs": 6, "train.warmup.epochs": 1,
        "model.width": 8, "model.hidden": 64,
    }  # fmt: skip
    return certtool.train("tiny_cnn7", overrides, out=tmp_path_factory.mktemp("natural") / "run", device="cpu")


def test_finds_every_counterexample_of_a_linear_classifier() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    x = torch.rand(300, 3, 2, 2)
    labels, eps = model(x).argmax(1), Fraction(1, 10)
    edges = inner_edges_of_floats(x, eps)
    found = attack(model, x, labels, edges, AttackSettings(steps=5, restarts=1))
    rows = model[1].weight[labels][:, None] - model[1].weight
    corner = torch.where(rows > 0, edges.lower.flatten(1)[:, None], edges.upper.flatten(1)[:, None])
    margins = torch.einsum("bkn,bkn->bk", rows, corner) + model[1].bias[labels][:, None] - model[1].bias
    exists = (margins < -1e-6).any(1)
    assert exists.any()
    assert not exists.all()
    assert (found.success >= exists).all()
    assert not (found.success & (margins.scatter(1, labels[:, None], torch.inf).min(1).values > 1e-6)).any()


def test_witnesses_lie_inside_and_change_the_label(natural: certtool.Checkpoint) -> None:
    split = load_split("digits", "test").first(100)
    x, edges = split.pixels(split.images), inner_edges(split.images, 16, Fraction(1, 10))
    found = attack(natural.model, x, split.labels, edges, AttackSettings(steps=10, restarts=2))
    assert found.success.any()
    assert edges.contains(found.witness)[found.success].all()
    for witness, label in zip(found.witness[found.success], split.labels[found.success], strict=True):
        assert int(natural.model(witness.unsqueeze(0)).argmax()) != int(label)
        assert witness.dtype == torch.float32


def test_the_seed_decides(natural: certtool.Checkpoint) -> None:
    split = load_split("digits", "test").first(60)
    x, edges = split.pixels(split.images), inner_edges(split.images, 16, Fraction(1, 50))

    def run(seed: int) -> Tensor:
        return attack(natural.model, x, split.labels, edges, AttackSettings(steps=5, restarts=3, seed=seed)).witness

    assert torch.equal(run(0), run(0))


def test_as_strong_as_a_second_implementation(natural: certtool.Checkpoint) -> None:
    foolbox = pytest.importorskip("foolbox")
    split = load_split("digits", "test")
    x, eps = split.pixels(split.images), 0.1
    ours = attack(natural.model, x, split.labels, inner_edges(split.images, 16, Fraction(1, 10)), AttackSettings())
    wrapped = foolbox.PyTorchModel(natural.model, bounds=(0, 1), device="cpu")
    theirs = torch.zeros(len(x), dtype=torch.bool)
    for _ in range(3):
        _, _, success = foolbox.attacks.LinfPGD(steps=40, random_start=True)(wrapped, x, split.labels, epsilons=eps)
        theirs |= success
    ours_left, theirs_left = 1 - ours.success.float().mean(), 1 - theirs.float().mean()
    assert ours_left <= theirs_left + 0.01
