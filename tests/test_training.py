"""Runs: what they write, that they can be stopped and killed, and that they end the same."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT, SMALL, Cli, small_settings

import certtool
from certtool import recipe
from certtool.errors import CertToolError, InputError
from certtool.training import EpochDone, Finished, Started, list_runs
from certtool.training.loop import Diverged
from certtool.training.run_folder import RunFolder

METRICS = {
    "epoch", "step", "phase", "eps", "lr", "lambda", "loss", "robust_ce", "clean_ce", "tightness", "relu", "active",
    "clean_accuracy", "certified_accuracy", "inactive", "unstable", "layers", "grad_norm", "seconds",
    "images_per_second",
}  # fmt: skip


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "certtool", "train", *arguments]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process: subprocess.Popen[str], seconds: float = 120) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def epochs_done(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_a_run_folder_holds_what_it_should(small_run: Path) -> None:
    assert {file.name for file in small_run.iterdir()} == {
        "recipe.toml", "metrics.jsonl", "last.safetensors", "model.safetensors",
    }  # fmt: skip
    lines = [json.loads(line) for line in (small_run / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["phase"] for line in lines] == ["start", "warmup", "warmup", "warmup", "final", "final"]
    for line in lines:
        assert line.keys() >= METRICS
        assert [layer["name"] for layer in line["layers"]] == [f"relu{n}" for n in range(1, 7)]
        assert line["active"] + line["inactive"] + line["unstable"] == pytest.approx(1)
    assert lines[-1].keys() >= {"test_clean_accuracy", "test_certified_accuracy"}
    assert "test_clean_accuracy" not in lines[0]
    assert lines[3]["lr"] == 1e-3
    assert lines[4]["lr"] == pytest.approx(2e-4)
    assert recipe.load(str(small_run / "recipe.toml")).model.width == 4


def test_the_seed_decides_the_bytes(small_run: Path, cli: Cli, tmp_path: Path) -> None:
    assert cli("train", "tiny_cnn7", "--out", "again", *small_settings()).returncode == 0
    assert cli("train", "tiny_cnn7", "--out", "other", *small_settings(seed=1)).returncode == 0
    expected = (small_run / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == expected
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != expected


def test_killed_three_times_a_run_ends_with_the_same_bytes(small_run: Path, cli: Cli, tmp_path: Path) -> None:
    """SIGKILL at random moments: while importing, in an epoch, between two."""
    folder, draw = tmp_path / "killed", random.Random()
    moments = sorted(draw.uniform(0.0, 5.5) for _ in range(3))
    first = ["tiny_cnn7", "--out", str(folder), *small_settings()]
    for moment in moments:
        resume = ["--resume", str(folder)] if (folder / "recipe.toml").exists() else [*first, "--overwrite"]
        process = start(folder, *resume)
        wait_for(lambda moment=moment: epochs_done(folder) >= int(moment), process)
        time.sleep((moment % 1) * 0.3)
        process.kill()
        process.communicate()
    resumed = cli("train", "--resume", folder)
    assert resumed.returncode == 0, resumed.stderr
    assert (folder / "model.safetensors").read_bytes() == (small_run / "model.safetensors").read_bytes(), moments
    assert epochs_done(folder) == 6
    figures = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    expected = [json.loads(line)["loss"] for line in (small_run / "metrics.jsonl").read_text().splitlines()]
    assert figures == pytest.approx(expected, rel=1e-9)
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(
    number: signal.Signals, small_run: Path, cli: Cli, tmp_path: Path
) -> None:
    folder = tmp_path / "stopped"
    process = start(folder, "tiny_cnn7", "--out", str(folder), *small_settings())
    wait_for(lambda: epochs_done(folder) >= 2, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted: stopped after step" in err
    assert f"certtool train --resume {folder}" in err
    with pytest.raises(InputError, match="has not finished"):
        certtool.load(folder)
    resumed = cli("train", "--resume", folder)
    assert resumed.returncode == 0
    assert "resumed after step" in resumed.stderr
    assert (folder / "model.safetensors").read_bytes() == (small_run / "model.safetensors").read_bytes()


def test_resuming_in_the_middle_of_an_epoch_keeps_its_sums(small_run: Path, tmp_path: Path) -> None:
    """Stopped after every few steps, the run and its metrics are those of the uninterrupted one."""
    from certtool.device import device_for
    from certtool.errors import Interrupted
    from certtool.training import new_run, resumed_run

    chosen = recipe.load("tiny_cnn7", recipe.overrides_from(SMALL))
    folder, device = tmp_path / "steps", device_for("cpu")
    trainer, sittings = new_run(chosen, folder, device=device), 1
    while True:
        steps = iter(range(1000))
        try:
            for _ in trainer.run(lambda steps=steps: next(steps) == 16):
                pass
            break
        except Interrupted:
            trainer, sittings = resumed_run(folder, device=device), sittings + 1
    assert sittings == 5  # 72 steps, 17 at a time
    assert (folder / "model.safetensors").read_bytes() == (small_run / "model.safetensors").read_bytes()
    for ours, expected in zip(RunFolder(folder).metrics(), RunFolder(small_run).metrics(), strict=True):
        for key in ("loss", "clean_accuracy", "certified_accuracy", "tightness", "grad_norm"):
            assert ours[key] == pytest.approx(expected[key], rel=1e-12)


def test_resuming_a_finished_run_changes_nothing(small_run: Path, cli: Cli, tmp_path: Path) -> None:
    shutil.copytree(small_run, tmp_path / "done")
    result = cli("train", "--resume", "done")
    assert result.returncode == 0
    assert "had already finished" in result.stderr
    assert (tmp_path / "done" / "model.safetensors").read_bytes() == (small_run / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "recipe.toml").unlink(), "not a run folder"),
        (lambda f: (f / "last.safetensors").write_bytes((f / "last.safetensors").read_bytes()[:-50]), "damaged"),
        (lambda f: (f / "last.safetensors").write_bytes(b""), "not a safetensors file"),
        (lambda f: shutil.copy(f / "model.safetensors", f / "last.safetensors"), "not the saved state of a run"),
        (lambda f: (f / "recipe.toml").write_text((f / "recipe.toml").read_text().replace("seed = 0", "seed = 7")),
         "belongs to another recipe"),
    ],
)  # fmt: skip
def test_a_foreign_or_damaged_folder_is_not_resumed(
    small_run: Path, cli: Cli, tmp_path: Path, damage, message: str
) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "copy"
    shutil.copytree(small_run, folder)
    (folder / "model.safetensors").touch()
    damage(folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    result = cli("train", "--resume", "copy")
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.slow
def test_latest_points_to_the_newest_run_and_runs_are_listed(cli: Cli, tmp_path: Path) -> None:
    for _ in range(2):
        assert (
            cli(
                "train", "tiny_cnn7", *small_settings(train__epochs=1, train__warmup__start=1, train__warmup__epochs=1)
            ).returncode
            == 0
        )
    runs = sorted(path.name for path in (tmp_path / "runs" / "tiny_cnn7").iterdir() if not path.is_symlink())
    assert len(runs) == 2
    assert os.readlink(tmp_path / "runs" / "tiny_cnn7" / "latest") == runs[-1]
    assert cli("verify", "runs/tiny_cnn7/latest").returncode == 0
    listed = json.loads(cli("runs", "list", "--json").stdout)
    assert [run["finished"] for run in listed["runs"]] == [True, True]
    assert cli("runs", "list").stdout.count("finished") == 2


def test_an_occupied_folder_is_not_overwritten_by_accident(small_run: Path, cli: Cli, tmp_path: Path) -> None:
    shutil.copytree(small_run, tmp_path / "taken")
    result = cli("train", "tiny_cnn7", "--out", "taken", *small_settings())
    assert result.returncode == 2
    assert "already holds a run" in result.stderr
    assert "--overwrite" in result.stderr
    assert (tmp_path / "taken" / "model.safetensors").exists()


def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    """The system refuses to let a file grow beyond 20 kB; the state of the run is larger."""
    folder = tmp_path / "full"
    process = subprocess.run(
        [sys.executable, "-m", "certtool", "train", "tiny_cnn7", "--out", str(folder), *small_settings()],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )  # fmt: skip
    assert process.returncode == 3
    assert "cannot write" in process.stderr
    assert "last.safetensors" in process.stderr
    assert "Traceback" not in process.stderr
    assert {file.name for file in folder.iterdir()} == {"recipe.toml", "metrics.jsonl"}


def test_a_folder_that_cannot_be_made(cli: Cli) -> None:
    result = cli("train", "tiny_cnn7", "--out", "/proc/certtool")
    assert result.returncode == 3
    assert "cannot create `/proc/certtool`" in result.stderr


def test_divergence_is_told(tmp_path: Path) -> None:
    overrides = SMALL | {"train.lr": 1e30, "model.batch_norm": "none"}
    with pytest.raises(Diverged, match="no longer finite") as caught:
        certtool.train("tiny_cnn7", overrides, out=tmp_path / "run", device="cpu")
    assert "train.lr" in str(caught.value.problems[0].hint)


def test_python_api_hears_events_and_returns_the_model(tmp_path: Path) -> None:
    events: list[object] = []
    overrides = SMALL | {"train.epochs": 2, "train.warmup.epochs": 1}
    model = certtool.train("tiny_cnn7", overrides, out=tmp_path / "run", device="cpu", on_event=events.append)
    assert isinstance(events[0], Started)
    assert sum(isinstance(event, EpochDone) for event in events) == 2
    assert isinstance(events[-1], Finished)
    assert model.model(torch.rand(3, 1, 8, 8)).shape == (3, 10)
    with pytest.raises(CertToolError, match="already holds a run"):
        certtool.train("tiny_cnn7", overrides, out=tmp_path / "run", device="cpu")


@pytest.mark.parametrize(
    "overrides",
    [
        {"train.method": "natural"},
        {"train.regularizers.terms": []},
        {"train.regularizers.terms": ["relu"]},
        {"train.regularizers.terms": ["tightness"]},
        *({"model.batch_norm": mode} for mode in ("conv", "none", "center", "scale")),
        *({"train.init": name} for name in ("xavier-normal", "kaiming-uniform", "kaiming-normal", "orthogonal")),
        {"threat.train_eps": "0.2"},
        {"model.arch": "wide_resnet", "model.widen": 1},
        {"model.arch": "resnext", "model.bottleneck": 1, "model.blocks": [1, 2, 1]},
        {"data.validation_fraction": 0.1, "train.selection": "validation"},
        {"train.eval_every": 1},
    ],
    ids=str,
)
def test_every_switch_of_the_ablations_trains(overrides: dict[str, object], tmp_path: Path) -> None:
    shortest = SMALL | {"train.epochs": 2, "train.warmup.start": 1, "train.warmup.epochs": 1, "data.batch_size": 512}
    finished: list[Finished] = []
    certtool.train(
        "tiny_cnn7", shortest | overrides, out=tmp_path / "run", device="cpu",
        on_event=lambda event: finished.append(event) if isinstance(event, Finished) else None,
    )  # fmt: skip
    metrics = RunFolder(tmp_path / "run").metrics()
    assert len(metrics) == 2
    assert all(0 <= line["clean_accuracy"] <= 1 and line["loss"] > 0 for line in metrics)
    assert "test_clean_accuracy" in metrics[-1]
    assert ("test_clean_accuracy" in metrics[0]) == ("train.eval_every" in overrides)
    assert ("validation_certified_accuracy" in metrics[-1]) == ("data.validation_fraction" in overrides)
    if overrides.get("train.method") == "natural":
        assert metrics[-1]["tightness"] is None
    assert finished[0].metrics["epoch"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tiny_cnn7_reaches_its_figures(seed: int, tmp_path: Path) -> None:
    certtool.train("tiny_cnn7", {"seed": seed}, out=tmp_path / "run", device="cpu")
    last = RunFolder(tmp_path / "run").metrics()[-1]
    assert last["test_clean_accuracy"] >= 0.93
    assert last["test_certified_accuracy"] >= 0.83


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_method_beats_vanilla_ibp_at_a_short_warmup(seed: int, tmp_path: Path) -> None:
    """By 5 points with each seed; benchmarks/short_warmup.json has five seeds and the means."""
    certified = {}
    for name in ("tiny_cnn7_short", "tiny_cnn7_short_vanilla"):
        certtool.train(name, {"seed": seed}, out=tmp_path / name, device="cpu")
        certified[name] = RunFolder(tmp_path / name).metrics()[-1]["test_certified_accuracy"]
    assert certified["tiny_cnn7_short"] >= certified["tiny_cnn7_short_vanilla"] + 0.05, certified


def test_list_runs_passes_over_what_is_none(tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "recipe.toml").write_text("nonsense")
    assert list_runs(tmp_path) == []
    assert list_runs(tmp_path / "nowhere") == []
