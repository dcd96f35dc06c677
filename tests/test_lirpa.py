"""The other engine: auto_LiRPA's interval bounds must be ours, and its relaxations no looser."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from certtool import catalog
from certtool.bounds import ball, graph_of, margin_bounds
from certtool.bounds.lirpa import INSTALL, Engine, installed
from certtool.models import build

pytestmark = pytest.mark.skipif(installed() is None, reason="auto_LiRPA is not installed")

ARGUMENTS = {
    "cnn7": catalog.Cnn7(arch="cnn7", width=4, hidden=32),
    "wide_resnet": catalog.WideResnet(arch="wide_resnet", width=4, widen=1, hidden=32),
}

# auto_LiRPA's repairs patch the whole process, so each comparison runs in one of its own.
COMPARISON = """
import sys, torch, test_lirpa
from certtool.bounds.lirpa import BoundedModel
torch.set_num_threads(1)
model, x, labels, box, ours = test_lirpa.setting(sys.argv[1])
bounded = BoundedModel(model, x[:1], preprocessing="normalize")
theirs = bounded.lower_margins(box, labels, 10, "IBP")
scale = theirs.abs().max()
print(float((theirs - ours).abs().max() / scale))
tighter = bounded.lower_margins(box, labels, 10, "CROWN-IBP")
print(float((theirs.sum() - tighter.sum()) / scale))
"""


def setting(arch: str):  # type: ignore[no-untyped-def]
    """A network that has seen some data, so that its running statistics are lively."""
    torch.manual_seed(0)
    model = build(ARGUMENTS[arch], catalog.DATASETS["cifar10"], "xavier-uniform", seed=3)
    model.train()
    with torch.no_grad():
        for _ in range(20):
            model(torch.rand(32, 3, 32, 32))
    model.eval()
    x, labels = torch.rand(4, 3, 32, 32), torch.tensor([0, 3, 5, 9])
    box = ball(x, 2 / 255)
    with torch.no_grad():
        return model, x, labels, box, margin_bounds(graph_of(model), box, labels)


CROWN_IBP = """
import sys, torch, numpy as np, certtool
from fractions import Fraction
from certtool import checker
from certtool.bounds.box import outer_edges
from certtool.bounds.lirpa import BoundedModel
from certtool.data import load_split
from certtool.verification.ladder import to_float32
torch.set_num_threads(1)
split = load_split("digits", "test").first(20)
model = certtool.load(sys.argv[1]).model
box = to_float32(outer_edges(split.images, 16, Fraction(1, 20)).interval(), torch.device("cpu"))
bounded = BoundedModel(model, box.center[:1], preprocessing="normalize")
margins = bounded.lower_margins(box, split.labels, 10, "CROWN-IBP")
theirs = margins.scatter(1, split.labels[:, None], torch.inf).min(1).values.numpy()
network = checker.read_network(open(sys.argv[1] + "/model.safetensors", "rb").read())
lower, upper = checker.exact_box(split.images.numpy(), 16, Fraction(1, 20))
ours = checker.crown_ibp_margins(network, lower, upper, split.labels.numpy())
print(np.abs(ours - theirs).max() / np.abs(ours).max())
"""


def test_crown_ibp_margins_are_those_of_the_checker(robust_run: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", CROWN_IBP, str(robust_run)]
    result = subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=300)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.split()[-1]) < 1e-4


@pytest.mark.parametrize("arch", sorted(ARGUMENTS))
def test_interval_margins_agree(arch: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", COMPARISON, arch]
    result = subprocess.run(
        command, cwd=sys.path[0] or ".", capture_output=True, text=True, env=_environment(), timeout=300
    )
    assert result.returncode == 0, result.stderr
    difference, looser = map(float, result.stdout.split()[-2:])
    assert difference < 1e-5
    assert looser < 0  # CROWN-IBP's margins are higher in sum: a tighter bound


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}


def test_importing_certtool_patches_nothing() -> None:
    names = "('auto_LiRPA', 'numpy.lib.arraysetops')"
    code = f"import certtool, certtool.bounds.lirpa, sys; print(*[name in sys.modules for name in {names}])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_which_engine_is_said() -> None:
    assert str(Engine("0.3", True)) == "auto_LiRPA 0.3 (repaired)"
    assert str(Engine("0.7.1", False)) == "auto_LiRPA 0.7.1"
    assert "--no-deps auto_LiRPA==0.3" in INSTALL


def test_a_plain_users_network() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 10))
    x = torch.rand(2, 3, 2, 2)
    margins = margin_bounds(graph_of(model), ball(x, 0.1), torch.tensor([1, 2]))
    assert margins.shape == (2, 10)
    assert (margins[[0, 1], [1, 2]] == 0).all()
