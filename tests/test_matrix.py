"""The bundled recipes are the paper's matrix: every row is there, its figures are the printed ones, and it trains."""

from __future__ import annotations

import json
import math
import re
import runpy
import subprocess
import sys
import tempfile
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT, Cli

from certtool import recipe
from certtool.catalog import DATASETS
from certtool.checkpoint import parameter_count
from certtool.data import Split
from certtool.models import skeleton
from certtool.recipe import Recipe
from certtool.training import EpochDone, RunFolder, Trainer

ROOT = Path(__file__).parents[1]
PAPER = ROOT.parent / "shared" / "paper.tex"
METHODS = ("", "_vanilla", "_crown")
NETWORKS = ("cnn7", "wrn", "resnext")
ABLATIONS = ("_vanilla_no_bn", "_vanilla_conv_bn", "_no_regularizers", "_no_relu", "_no_tightness", "_no_init")
RADII = ("mnist_cnn7_eps0.1", "mnist_cnn7_eps0.3", "cifar10_cnn7_eps2", "cifar10_cnn7_eps16")
OWN = {
    "tiny_cnn7", "tiny_cnn7_short", "tiny_cnn7_short_vanilla", "tiny_cnn7_crown", "tiny_cnn7_crown_unfused",
    "mnist_cnn7_w16", "cifar10_cnn7_w16",
}  # fmt: skip
MATRIX = {
    *OWN,
    *(f"mnist_{network}{method}" for network, method in product(NETWORKS, METHODS)),
    *(f"{data}_{network}{schedule}{method}" for data, network, schedule, method
      in product(("cifar10", "tinyimagenet"), NETWORKS, ("", "_short"), METHODS)),
    *(f"cifar10_cnn7{schedule}{ablation}" for schedule, ablation in product(("", "_short"), ABLATIONS)),
    *(f"cifar10_cnn7_{mode}_bn" for mode in ("no", "center", "scale")),
    *(f"{radius}{method}" for radius, method in product(RADII, METHODS)),
    *(f"cifar10_cnn7_lambda{weight}" for weight in ("0.1", "0.2", "1", "2")),
    "cifar10_cnn7_crown_no_fusion",
}  # fmt: skip
PARAMETERS = {
    ("mnist", "cnn7"): 13_259_338, ("cifar10", "cnn7"): 17_192_650, ("tinyimagenet", "cnn7"): 17_290_120,
    ("mnist", "wide_resnet"): 17_615_434, ("cifar10", "wide_resnet"): 21_547_882,
    ("tinyimagenet", "wide_resnet"): 91_424_776,
    ("mnist", "resnext"): 13_677_706, ("cifar10", "resnext"): 17_611_018, ("tinyimagenet", "resnext"): 16_981_960,
}  # fmt: skip
# Two steps in one epoch: the first at radius 0, the second above it.
SHORTEST = {
    "data.batch_size": 4, "train.epochs": 1, "train.lr_milestones": [], "train.warmup.start": 1,
    "train.warmup.epochs": 1, "model.hidden": 8, "model.width": 2,
}  # fmt: skip
NARROW = {"cnn7": {}, "wide_resnet": {"model.widen": 1}, "resnext": {"model.bottleneck": 1}}


def test_the_whole_matrix_is_there() -> None:
    assert len(MATRIX) == 84
    assert set(recipe.bundled()) == MATRIX


@pytest.mark.parametrize("name", sorted(MATRIX))
def test_every_recipe_builds_and_trains(name: str) -> None:
    chosen = recipe.load(name)
    facts = DATASETS[chosen.data.dataset]
    if chosen.paper is not None and chosen.model.batch_norm == "full":
        assert parameter_count(skeleton(chosen.model, facts)) == PARAMETERS[facts.name, chosen.model.arch]
    small = recipe.load(name, recipe.overrides_from(SHORTEST | NARROW[chosen.model.arch]))
    metrics = metrics_of_an_epoch(small.model_copy(update={"name": "small", "summary": "", "paper": None}))
    assert 0 < metrics["eps"] <= float(chosen.threat.target)
    for figure in ("loss", "robust_ce", "grad_norm"):
        assert math.isfinite(metrics[figure])
        assert metrics[figure] > 0
    assert 0 <= metrics["test_certified_accuracy"] <= metrics["test_clean_accuracy"] <= 1


def test_crown_ibp_is_not_ibp_under_another_name() -> None:
    """The same network and images: only the bounds of the second step, above radius 0, differ."""
    losses = set()
    for name in ("mnist_cnn7_vanilla", "mnist_cnn7_crown", "cifar10_cnn7_crown_no_fusion"):
        small = recipe.load(name, recipe.overrides_from(SHORTEST | {"data.dataset": "mnist"}))
        losses.add(
            metrics_of_an_epoch(small.model_copy(update={"name": "small", "summary": "", "paper": None}))["loss"]
        )
    assert len(losses) == 3


def metrics_of_an_epoch(small: Recipe) -> dict[str, float]:
    return _metrics_of_an_epoch(recipe.render(small))


@cache
def _metrics_of_an_epoch(text: str) -> dict[str, float]:
    """Many recipes differ only in what is cut down here; they share one run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "small.toml"
        file.write_text(text)
        small = recipe.load(str(file))
        splits = (random_split(small.data.dataset, split) for split in ("train", "test"))
        run = RunFolder.create(small, Path(folder) / "run")
        events = list(Trainer(small, run, *splits, torch.device("cpu")).run())
        assert run.model.exists()
    (done,) = (event for event in events if isinstance(event, EpochDone))
    return done.metrics


def random_split(dataset: str, name: str) -> Split:
    facts, draw = DATASETS[dataset], torch.Generator().manual_seed(len(name))
    images = torch.randint(0, facts.scale + 1, (7, *facts.shape), dtype=torch.uint8, generator=draw)
    return Split(facts, name, images, torch.randint(0, len(facts.classes), (7,), generator=draw))


@pytest.mark.parametrize("name", sorted(MATRIX))
def test_a_row_reads_as_it_trains(name: str) -> None:
    """The words that a reader chooses by, against the keys that decide."""
    chosen = recipe.load(name)
    if chosen.paper is None:
        assert name in OWN
        return
    train, warmup = chosen.train, chosen.train.warmup
    assert warmup is not None
    before = warmup.start - 1
    schedule = f"{train.epochs} ({before}+{warmup.epochs}+{train.epochs - before - warmup.epochs})"
    assert schedule in chosen.paper.row or chosen.paper.tables == [9]
    for number, parts in re.findall(r"(\d+) epochs \((.*?)\)", chosen.summary):
        assert f"{number} ({parts})" == schedule
    for eps in re.findall(r"eps ([\d./]+)", f"{chosen.summary}, {chosen.paper.row}"):
        assert eps == str(chosen.threat.eps)
    for eps in re.findall(r"trained at ([\d./]+)", f"{chosen.summary}, {chosen.paper.row}"):
        assert eps == str(chosen.threat.train_eps)
    plain = "_vanilla" in name or "_crown" in name
    assert (train.method == "crown-ibp") == ("_crown" in name) == ("CROWN-IBP" in chosen.paper.row)
    assert (train.init == "xavier-uniform") == (plain or "_no_init" in name)
    expected = {"tightness", "relu"} - {term for term in ("tightness", "relu") if f"_no_{term}" in name}
    assert set(train.regularizers.terms) == (set() if plain or "_no_regularizers" in name else expected)
    assert train.loss_fusion == (("_no_fusion" not in name) if "_crown" in name else None)
    weight = re.search(r"_lambda([\d.]+)", name)
    normal = 0.1 if chosen.data.dataset == "tinyimagenet" else 0.5
    assert train.regularizers.weight == (float(weight[1]) if weight else normal)
    milestones = {("mnist", 70): [50, 60], ("cifar10", 70): [50, 60], ("cifar10", 160): [120, 140]}
    assert train.lr_milestones == milestones.get((chosen.data.dataset, train.epochs), [60, 70])
    assert (train.lr, train.lr_decay, train.grad_clip, train.regularizers.tolerance) == (5e-4, 0.2, 10.0, 0.5)
    assert chosen.data.batch_size == (256 if chosen.data.dataset == "mnist" else 128)


# The paper's tables, read from its source. A row is the numbers that it prints.


def rows(label: str, pattern: str) -> list[list[float]]:
    """The numbers with two decimals in the rows of the table with this label that match."""
    text = PAPER.read_text()
    tables = re.findall(r"\\begin\{table\*?\}.*?\\end\{table\*?\}", text, re.S)
    (table,) = (part for part in tables if f"\\label{{{label}}}" in part)
    lines = [line for line in re.split(r"\\\\", table) if re.search(pattern, line, re.S)]
    return [[float(number) for number in re.findall(r"\d+\.\d\d", line)] for line in lines]


def printed() -> dict[int, dict[str, list[float]]]:
    """Table, recipe, and its figures: clean error (with its deviation), verified error (with its deviation)."""
    found: dict[int, dict[str, list[float]]] = {number: {} for number in (1, 2, 4, 8, 9, 10)}
    main = rows("tab:main", r"Vanilla IBP &|CROWN-IBP~\\tnote\{a\} &|Ours &")
    settings = ("mnist_{}", "cifar10_{}_short", "cifar10_{}")
    for (setting, method), row in zip(product(settings, ("_vanilla", "_crown", "")), main, strict=True):
        for index, network in enumerate(NETWORKS):
            found[1][setting.format(network) + method] = row[4 * index : 4 * index + 4]
    tiny = rows("tab:tiny_imagenet", r"80 ?\(1\+")
    for (network, schedule), row in zip(product(NETWORKS, ("_short", "")), tiny, strict=True):
        for index, method in enumerate(("_vanilla", "_crown", "")):
            found[2][f"tinyimagenet_{network}{schedule}{method}"] = row[2 * index : 2 * index + 2]
    ablation = rows("table:ablation", r"times|checkmark")
    order = (
        "_vanilla_no_bn",
        "_vanilla_conv_bn",
        "_vanilla",
        "_no_regularizers",
        "_no_relu",
        "_no_tightness",
        "_no_init",
    )
    for tag, row in zip((*order, ""), [row for row in ablation if len(row) == 8], strict=True):
        found[4][f"cifar10_cnn7_short{tag}"], found[4][f"cifar10_cnn7{tag}"] = row[:4], row[4:]
    halves = [row for row in rows("tab:ablation_bn", r"times|checkmark") if len(row) == 8]
    for tag, row in zip(("_no_bn", "_center_bn", "_scale_bn", ""), halves, strict=True):
        found[8][f"cifar10_cnn7{tag}"] = row[4:]
    radii = [row for row in rows("tab:multi_eps", r"0\.2 &|0\.4 &|/255\}") if len(row) == 6]
    for radius, row in zip(RADII, radii, strict=True):
        for index, method in enumerate(("_vanilla", "_crown", "")):
            found[9][radius + method] = row[2 * index : 2 * index + 2]
    clean, verified = rows("tab:lambda", r"Standard error|Verified error")
    for index, tag in enumerate(("_lambda0.1", "_lambda0.2", "", "_lambda1", "_lambda2")):
        pair = slice(2 * index, 2 * index + 2)
        found[10][f"cifar10_cnn7{tag}"] = clean[pair] + verified[pair]
    return found


@pytest.mark.skipif(not PAPER.is_file(), reason=f"the paper's source is not at {PAPER}")
@pytest.mark.parametrize("table", [1, 2, 4, 8, 9, 10])
def test_the_figures_are_those_of_the_paper(table: int) -> None:
    expected = printed()[table]
    loaded = {name: recipe.load(name).paper for name in recipe.bundled()}
    assert {name for name, paper in loaded.items() if paper is not None and table in paper.tables} == set(expected)
    assert len(expected) == {1: 27, 2: 18, 4: 16, 8: 4, 9: 12, 10: 5}[table]
    for name, figures in expected.items():
        paper = loaded[name]
        assert paper is not None
        ours = (paper.clean_error, paper.clean_deviation, paper.verified_error, paper.verified_deviation)
        if (table, name) == (8, "cifar10_cnn7"):
            assert figures == [51.72, 0.40, 65.58, 0.30]  # the other tables print 0.32
            figures = [51.72, 0.40, 65.58, 0.32]
        assert [figure for figure in ours if figure is not None] == figures, name


@pytest.mark.skipif(not PAPER.is_file(), reason=f"the paper's source is not at {PAPER}")
def test_the_figure_from_the_running_text() -> None:
    paper = recipe.load("cifar10_cnn7_crown_no_fusion").paper
    assert paper is not None
    assert paper.tables == []
    assert rf"\rightarrow{paper.verified_error}\%$ if loss fusion is disabled" in PAPER.read_text()


def test_the_paper_s_figures_stay_with_their_experiment(tmp_path: Path) -> None:
    """A recipe on top of a row is another experiment; so is a row with another setting, but not with another seed."""
    (tmp_path / "mine.toml").write_text('base = "cifar10_cnn7"\nname = "mine"\n')
    assert recipe.load(str(tmp_path / "mine.toml")).paper is None
    row = recipe.load("cifar10_cnn7").paper
    assert row is not None
    kept = ["seed=3", "name=again", "train.eval_every=5", "model.width=64"]
    assert recipe.load("cifar10_cnn7", kept).paper == row
    assert recipe.load("cifar10_cnn7", ["model.width=32"]).paper is None
    assert recipe.load("cifar10_cnn7", ["train.regularizers.terms=['relu']"]).paper is None
    again = tmp_path / "again.toml"
    again.write_text(recipe.render(recipe.load("cifar10_cnn7", kept)))
    assert recipe.load(str(again)).paper == row


def test_another_network_starts_its_section_anew(tmp_path: Path) -> None:
    """TinyImageNet's CNN-7 has `downsample`, which no other network knows."""
    (tmp_path / "mine.toml").write_text('base = "tinyimagenet_cnn7"\nname = "mine"\n[model]\narch = "wide_resnet"\n')
    model = recipe.load(str(tmp_path / "mine.toml")).model
    assert (model.arch, model.width) == ("wide_resnet", 16)
    (tmp_path / "mine.toml").write_text(
        'base = "tinyimagenet_cnn7"\nname = "mine"\n[model]\narch = "cnn7"\nwidth = 3\n'
    )
    model = recipe.load(str(tmp_path / "mine.toml")).model
    assert (model.arch, model.width, model.downsample) == ("cnn7", 3, 2)


def test_the_list_narrows_and_fits(cli: Cli) -> None:
    everything = cli("recipe", "list")
    assert all(len(line.rstrip()) <= 80 for line in everything.stdout.splitlines())
    assert everything.stdout.isascii()
    assert f"{len(MATRIX)} recipes" in everything.stderr
    assert len(everything.stdout.splitlines()) < 90
    for options, expected in [
        (("--table", "8"), {f"cifar10_cnn7{tag}" for tag in ("", "_no_bn", "_center_bn", "_scale_bn")}),
        (("--dataset", "mnist", "--arch", "resnext"), {f"mnist_resnext{method}" for method in METHODS}),
        (("--grep", "LAPTOP"), {"mnist_cnn7_w16", "cifar10_cnn7_w16"}),
        (("--grep", "nothing of the kind"), set()),
    ]:
        listed = json.loads(cli("recipe", "list", *options, "--json").stdout)
        assert {row["name"] for row in listed["recipes"]} == expected
    some = cli("recipe", "list", "--grep", "laptop")
    assert f"2 of {len(MATRIX)} recipes" in some.stderr
    wrong = cli("recipe", "list", "--dataset", "cifar")
    assert wrong.returncode == 2
    assert "`cifar10`" in wrong.stderr


def test_the_readme_is_what_the_recipes_say() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_recipes_readme.py"), "--check"]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    text = (ROOT / "recipes" / "README.md").read_text()
    assert text.count("\n| [cifar10_cnn7](cifar10_cnn7.toml) |") == 4
    for name in MATRIX:
        assert f"| [{name}]({name}.toml) |" in text
    assert text.isascii()


def test_the_readme_takes_the_benchmark_with_most_seeds(tmp_path: Path) -> None:
    measured = runpy.run_path(str(ROOT / "scripts" / "make_recipes_readme.py"))["measured"]
    accuracies = [
        {"clean_accuracy": 0.9, "certified_accuracy": 0.8},
        {"clean_accuracy": 0.92, "certified_accuracy": 0.8},
    ]
    (tmp_path / "one.json").write_text(json.dumps({"results": {"tiny_cnn7": {"runs": accuracies}, "nobody": {}}}))
    assert {name: str(figures) for name, figures in measured(tmp_path).items()} == {
        "tiny_cnn7": "9.00 +- 1.41 / 20.00 +- 0.00 (2)"
    }
    errors = [{"clean_error": share, "verified_error": 0.5} for share in (0.1, 0.2, 0.3)]
    groups = [
        {"name": "tiny_cnn7", "differs": {}, "runs": errors},
        {"name": "tiny_cnn7", "differs": {"model.width": 4}, "runs": 2 * errors},
        {"name": "tiny_cnn7_short", "differs": {}, "runs": errors[:1]},
    ]
    (tmp_path / "two.json").write_text(json.dumps({"schema": "certtool.compare/1", "recipes": groups}))
    assert {name: str(figures) for name, figures in measured(tmp_path).items()} == {
        "tiny_cnn7": "20.00 +- 10.00 / 50.00 +- 0.00 (3)",
        "tiny_cnn7_short": "10.00 / 50.00 (1)",
    }
