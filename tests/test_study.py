"""Studies: several recipes and seeds in one command that can be stopped, repeated and compared."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import stdev

import pytest
from conftest import ENVIRONMENT, Cli, small_settings
from test_training import epochs_done, wait_for

from certtool import recipe
from certtool.cli.train import seeds_from
from certtool.errors import InputError
from certtool.training import RunFolder, compare_runs, plan_study

SHORTEST = small_settings(train__epochs=2, train__warmup__start=1, train__warmup__epochs=1, data__batch_size=512)
TWO = ("tiny_cnn7", "tiny_cnn7_short_vanilla")


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0..4", [0, 1, 2, 3, 4]), ("0,3,7", [0, 3, 7]), ("7", [7]), ("2..2", [2]), (" 5 , 0 .. 2", [5, 0, 1, 2])],
)
def test_seeds(text: str, seeds: list[int]) -> None:
    assert seeds_from(text) == seeds


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "not a seed"), ("0-4", "not a seed"), ("a", "not a seed"), ("4..0", "backwards"), ("0..2,1", "named twice"),
     ("0..100000", "too large"), ("4000000000", "too large"), ("1,,2", "not a seed"), ("-1", "not a seed")],
)  # fmt: skip
def test_wrong_seeds(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        seeds_from(text)
    assert caught.value.problems[0].hint


def test_a_study_trains_what_is_missing_and_compares(cli: Cli, tmp_path: Path) -> None:
    first = cli("train", *TWO, "--seeds", "0..1", *SHORTEST)
    assert first.returncode == 0, first.stderr
    folders = [tmp_path / "runs" / name / f"seed-{seed}" for name in TWO for seed in (0, 1)]
    models = {folder: (folder / "model.safetensors").read_bytes() for folder in folders}
    assert len(set(models.values())) == 4
    for number, name, seed in [(1, TWO[0], 0), (2, TWO[0], 1), (3, TWO[1], 0), (4, TWO[1], 1)]:
        assert f"run {number} of 4: {name}, seed {seed}\n" in first.stderr
    assert "the study: 4 trained\n" in first.stderr
    assert all(len(line) <= 80 for line in first.stderr.splitlines())
    command = first.stderr.splitlines()[-1].strip()
    assert command == f"certtool runs compare runs/{TWO[0]} runs/{TWO[1]}"
    assert cli(*command.split()[1:]).stdout.count(" 2  ") == 2

    more = cli("train", *TWO, "--seeds", "1,2", "--json", *SHORTEST)
    lines = [json.loads(line) for line in more.stdout.splitlines()]
    assert {line["schema"] for line in lines} == {"certtool.train/1"}
    assert [(line["recipe"], line["seed"]) for line in lines if line["event"] == "run"] == [
        (name, seed) for name in TWO for seed in (1, 2)
    ]
    assert [(line["seed"], line["already"]) for line in lines if line["event"] == "finished"] == 2 * [
        (1, True), (2, False),
    ]  # fmt: skip
    assert all(line["recipe"] in TWO and line["seed"] == 2 for line in lines if line["event"] == "epoch")
    assert sum(line["event"] == "epoch" for line in lines) == 4
    assert {key: lines[-1][key] for key in ("event", "trained", "done_before", "failed")} == {
        "event": "study", "trained": 2, "done_before": 2, "failed": 0,
    }  # fmt: skip
    assert {folder: (folder / "model.safetensors").read_bytes() for folder in folders} == models


@pytest.mark.slow
def test_a_run_of_a_study_is_the_run_itself(small_run: Path, cli: Cli, tmp_path: Path) -> None:
    quiet = cli("train", "tiny_cnn7", "--seeds", "0", "--out", "here", "--quiet", *small_settings())
    assert quiet.stdout == "here/tiny_cnn7/seed-0/model.safetensors\n"
    assert quiet.stderr == ""
    assert (tmp_path / "here/tiny_cnn7/seed-0/model.safetensors").read_bytes() == (
        small_run / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_stopped_a_study_says_its_command_and_goes_on(small_run: Path, cli: Cli, tmp_path: Path) -> None:
    arguments = ["train", "tiny_cnn7", "--seeds", "0,1", "--out", "a study", *small_settings()]
    command = [sys.executable, "-m", "certtool", *arguments]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    first, second = (tmp_path / "a study" / "tiny_cnn7" / f"seed-{seed}" for seed in (0, 1))
    wait_for(lambda: epochs_done(first) >= 2, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted: in run 1 of 2, tiny_cnn7, seed 0: stopped after step" in err
    assert "the same command goes on where it stopped: `certtool train tiny_cnn7 --seeds 0,1 --out 'a study'" in err
    assert not (first / "model.safetensors").exists()
    assert not second.exists()
    unfinished = cli("runs", "compare", "a study")
    assert unfinished.returncode == 0
    assert "not finished, not counted: a study/tiny_cnn7/seed-0 (tiny_cnn7, seed 0, epoch " in unfinished.stdout

    again = cli(*arguments)
    assert again.returncode == 0, again.stderr
    assert "resumed after step" in again.stderr
    assert (first / "model.safetensors").read_bytes() == (small_run / "model.safetensors").read_bytes()
    assert (second / "model.safetensors").exists()


@pytest.mark.slow
def test_a_study_goes_on_after_a_failure_and_tells_it_at_the_end(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "wild.toml").write_text(
        'base = "tiny_cnn7"\nname = "wild"\n[train]\nlr = 1e30\n[model]\nbatch_norm = "none"\n'
    )
    result = cli("train", "wild.toml", "mnist_cnn7_w16", "tiny_cnn7", "--data", "nowhere", *SHORTEST)
    assert result.returncode == 3  # the gravest: the data set is not there; the divergence alone would be 1
    assert result.stderr.count("failed, the study goes on: ") == 2
    assert "the study: 1 trained, 2 failed\n" in result.stderr
    assert "\nerror: wild, seed 0: the loss is no longer finite" in result.stderr
    assert "\nerror: mnist_cnn7_w16, seed 0: " in result.stderr
    assert "Traceback" not in result.stderr
    assert (tmp_path / "runs/tiny_cnn7/seed-0/model.safetensors").exists()
    alone = cli("train", "wild.toml", "--seeds", "0", "--json", *SHORTEST)
    assert alone.returncode == 1
    lines = [json.loads(line) for line in alone.stdout.splitlines()]
    failed = next(line for line in lines if line.get("event") == "failed")
    assert (failed["recipe"], failed["seed"], failed["exit"]) == ("wild", 0, 1)
    assert lines[-1]["schema"] == "certtool.error/1"
    assert lines[-1]["exit"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny_cnn7", "--seeds", "0..4", "--overwrite"], "--overwrite is for a single run"),
        (["tiny_cnn7", "--seeds", "0..4", "--set", "seed=3"], "--seeds and --set seed"),
        (["tiny_cnn7", "tiny_cnn7"], "two recipes of the study are called `tiny_cnn7`"),
        (["tiny_cnn7", "tiny_cnn7_short", "--set", "name=same"], "two recipes of the study are called `same`"),
        (["--resume", "runs", "--seeds", "0"], "takes no recipe, --seeds"),
        (["tiny_cnn7", "nobody", "--seeds", "0"], "no recipe called `nobody`"),
        (["--seeds", "0"], "which recipe?"),
        (["tiny_cnn7", "--seeds", "x"], "not a seed"),
    ],
)
def test_what_a_study_refuses(arguments: list[str], words: str, cli: Cli, tmp_path: Path) -> None:
    result = cli("train", *arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_other_settings_is_neither_done_nor_resumed(tmp_path: Path) -> None:
    finished_run(
        tmp_path / "tiny_cnn7" / "seed-1", 0.5, 0.4, seed=1, **{"train.epochs": 70, "train.lr_milestones": [60]}
    )
    chosen = recipe.load("tiny_cnn7", ["train.lr_milestones=[60]"])
    assert len(plan_study([chosen], [0, 2], tmp_path)) == 2
    with pytest.raises(InputError, match=r"train\.epochs is `70` there and `100` here") as caught:
        plan_study([chosen], [0, 1], tmp_path)
    assert "train.lr" not in str(caught.value).replace("train.epochs", "")


def finished_run(folder: Path, clean: float, certified: float, name: str = "tiny_cnn7", **settings: object) -> None:
    """A run folder as a finished run leaves it, with the figures given."""
    chosen = recipe.load(name, recipe.overrides_from(settings))
    made = RunFolder.create(chosen, folder)
    figures = {"test_clean_accuracy": clean, "test_certified_accuracy": certified}
    made.append_metrics({"epoch": chosen.train.epochs, "step": 1, "seconds": 2.0, **figures})
    made.model.write_bytes(b"")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for seed, (clean, certified) in enumerate([(0.48, 0.34), (0.50, 0.35), (0.49, 0.345)]):
        finished_run(tmp_path / "a" / f"seed-{seed}", clean, certified, "cifar10_cnn7", seed=seed)
    finished_run(tmp_path / "b" / "again", 0.1, 0.1, "cifar10_cnn7", seed=1)
    finished_run(tmp_path / "b" / "narrow", 0.30, 0.25, "cifar10_cnn7", seed=0, **{"model.width": 8})
    finished_run(tmp_path / "c", 0.9, 0.8, "tiny_cnn7")
    RunFolder.create(recipe.load("tiny_cnn7", ["seed=1"]), tmp_path / "d")
    return tmp_path


def test_compare(runs: Path, cli: Cli) -> None:
    document = json.loads(cli("runs", "compare", "a", "b", ".", "--json").stdout)
    assert document["schema"] == "certtool.compare/1"
    main, narrow, tiny = document["recipes"]
    assert (main["name"], main["n"], [run["seed"] for run in main["runs"]]) == ("cifar10_cnn7", 3, [0, 1, 2])
    assert main["clean_error"]["mean"] == pytest.approx(0.51)
    assert main["clean_error"]["deviation"] == pytest.approx(stdev([0.52, 0.50, 0.51]))
    assert main["clean_error"]["deviation"] == pytest.approx(0.01)  # of the sample: n - 1
    assert main["verified_error"]["mean"] == pytest.approx(0.655)
    assert main["paper"] == {
        "tables": [1, 4, 8, 10], "row": "CIFAR-10, CNN-7, 160 (1+80+79), the method", "clean_error": 0.5172,
        "clean_deviation": 0.004, "verified_error": 0.6558, "verified_deviation": 0.0032, "repeats": 5,
    }  # fmt: skip
    assert (narrow["name"], narrow["n"], narrow["paper"]) == ("cifar10_cnn7", 1, None)
    assert narrow["differs"] == {"model.width": 8}
    assert narrow["clean_error"]["deviation"] is None
    assert (tiny["name"], tiny["n"], tiny["paper"], tiny["differs"]) == ("tiny_cnn7", 1, None, {})
    assert [run["path"] for run in document["unfinished"]] == ["d"]
    assert [run["path"] for run in document["repeated"]] == ["b/again"]


@pytest.mark.slow
def test_compare_reads_at_80_columns_and_as_markdown(runs: Path, cli: Cli) -> None:
    text = cli("runs", "compare", ".").stdout
    lines = [line.split() for line in text.splitlines()]
    assert ["cifar10_cnn7", "8/255", "3", "51.00", "+-", "1.00", "65.50", "+-", "0.50"] in lines
    assert ["the", "paper", "5", "51.72", "+-", "0.40", "65.58", "+-", "0.32"] in lines
    assert ["cifar10_cnn7", "[2]", "8/255", "1", "70.00", "75.00"] in lines
    assert "cifar10_cnn7 [2]: other settings than cifar10_cnn7: model.width = 8" in text
    assert "not finished, not counted: d (tiny_cnn7, seed 1, epoch 0 of 100)" in text
    assert "the same recipe and seed again, not counted: b/again" in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    assert text.isascii()
    markdown = cli("runs", "compare", "a", "c", "--markdown").stdout
    ours, paper = "8/255 | 3 | 51.00 +- 1.00 | 65.50 +- 0.50", "5 | 51.72 +- 0.40 | 65.58 +- 0.32"
    assert f"| `cifar10_cnn7` | {ours} | {paper} |\n" in markdown
    assert "| `tiny_cnn7` | 0.1 | 1 | 10.00 | 20.00 |  |  |  |\n" in markdown


def test_compare_needs_runs(cli: Cli, tmp_path: Path) -> None:
    for place in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(InputError, match="there are no runs in"):
            compare_runs([place])
    result = cli("runs", "compare")
    assert result.returncode == 2
    assert "there are no runs in `runs`" in result.stderr
    assert cli("runs", "compare", "--json", "--markdown").returncode == 2


def test_a_link_to_a_run_is_not_a_second_run(runs: Path) -> None:
    (runs / "latest").symlink_to("a/seed-0")
    assert len(compare_runs([runs / "a", runs / "latest"]).groups[0].runs) == 3
    assert compare_runs([runs / "a", runs / "latest"]).repeated == ()


def test_a_copy_leaves_the_paper_behind(cli: Cli, tmp_path: Path) -> None:
    assert cli("recipe", "copy", "cifar10_cnn7", "mine.toml").returncode == 0
    bundled, copied = recipe.bundled()["cifar10_cnn7"].read_text(), (tmp_path / "mine.toml").read_text()
    assert bundled.startswith(copied)
    assert tomllib.loads(copied) == {key: value for key, value in tomllib.loads(bundled).items() if key != "paper"}
    assert recipe.without_paper("[paper]\nrow = 1\n\n[data]\nx = [1]\n").strip() == "[data]\nx = [1]"
