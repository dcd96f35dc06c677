"""Several processes train as one does; a rank that dies leaves a run that any number of ranks can go on with."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT, Cli, small_settings
from safetensors.torch import load_file
from torch import Tensor

SCRIPT = Path(__file__).with_name("ranks.py")


def torchrun(ranks: int) -> list[str]:
    """A free port each time: tests run side by side."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    where = ["--nnodes", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node", str(ranks)]


def run(command: list[str], timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout)


def steps(ranks: int, folder: Path, *arguments: str) -> dict[str, Tensor]:
    out = folder / f"{ranks}.safetensors"
    start = [sys.executable] if ranks == 1 else torchrun(ranks)
    done = run([*start, str(SCRIPT), str(out), *arguments])
    assert done.returncode == 0, done.stderr[-2000:]
    return load_file(out)


@pytest.mark.parametrize("arch", ["cnn7", pytest.param("wide_resnet", marks=pytest.mark.slow)])
def test_two_ranks_train_as_one_in_float64(arch: str, tmp_path: Path) -> None:
    """Both regularisers on, the last batch uneven (25 images for two ranks)."""
    one, two = (steps(ranks, tmp_path, "float64", arch) for ranks in (1, 2))
    assert len(one["losses"]) == 20
    torch.testing.assert_close(two["losses"], one["losses"], rtol=1e-9, atol=1e-9)
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-7, msg=name)


@pytest.mark.slow
def test_the_first_step_in_float32(tmp_path: Path) -> None:
    one, two = (steps(ranks, tmp_path, "float32", "cnn7") for ranks in (1, 2))
    torch.testing.assert_close(two["losses"][:1], one["losses"][:1], rtol=1e-5, atol=0)


@pytest.mark.slow
def test_natural_training_is_shared_too(tmp_path: Path) -> None:
    natural = ["train.method=natural", "train.regularizers.terms=[]"]
    one, two = (steps(ranks, tmp_path, "float64", "cnn7", *natural) for ranks in (1, 2))
    torch.testing.assert_close(two["losses"], one["losses"], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_accumulated_is_the_mean_of_parts_each_with_its_own_statistics(tmp_path: Path) -> None:
    """And shared between ranks it is the same again."""
    whole = steps(1, tmp_path, "float64", "cnn7")
    one, two = (steps(ranks, tmp_path, "float64", "cnn7", "train.accumulate=3") for ranks in (1, 2))
    torch.testing.assert_close(two["losses"], one["losses"], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(one["losses"], whole["losses"], rtol=1e-6)  # BatchNorm saw parts


@pytest.mark.slow
def test_without_batchnorm_and_regularisers_parts_add_up_to_the_whole(tmp_path: Path) -> None:
    plain = ["model.batch_norm=none", "train.regularizers.terms=[]"]
    whole = steps(1, tmp_path, "float64", "cnn7", *plain)
    parts = steps(1, tmp_path, "float64", "cnn7", *plain, "train.accumulate=3")
    torch.testing.assert_close(parts["losses"], whole["losses"], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_and_one_rank_goes_on(tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "run"
    settings = small_settings(train__epochs=40, train__lr_milestones=[30])
    command = [*torchrun(2), "-m", "certtool", "train", "tiny_cnn7", "--out", str(folder), *settings]
    job = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert job.poll() is None, job.communicate()[1][-2000:]
        time.sleep(0.02)
    os.kill(_ranks_of(job.pid)[-1], signal.SIGKILL)
    _, err = job.communicate(timeout=120)
    assert job.returncode != 0
    assert "certtool failed in a way it should not" not in err
    state = load_header(folder / "last.safetensors")
    saved = state["step"]
    assert saved >= 24  # two epochs of twelve steps
    done = cli("train", "--resume", folder, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["first_step"] == saved
    assert len(metrics.read_text().splitlines()) == 40
    assert (folder / "model.safetensors").exists()


def load_header(file: Path) -> dict[str, int]:
    from certtool import safefile

    return safefile.read(file).header


def _ranks_of(parent: int) -> list[int]:
    """The workers torchrun started, by rank."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    ranked = {}
    for child in map(int, children):
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        rank = [v for v in variables if v.startswith(b"RANK=")]
        if rank:
            ranked[int(rank[0].removeprefix(b"RANK="))] = child
    return [ranked[rank] for rank in sorted(ranked)]


@pytest.mark.slow
def test_an_interrupt_stops_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = small_settings(train__epochs=40, train__lr_milestones=[30])
    command = [*torchrun(2), "-m", "certtool", "train", "tiny_cnn7", "--out", str(folder), *settings]
    job = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (folder / "metrics.jsonl").exists():
        assert job.poll() is None, job.communicate()[1][-2000:]
        time.sleep(0.02)
    os.kill(_ranks_of(job.pid)[1], signal.SIGTERM)  # one rank alone is told
    _, err = job.communicate(timeout=120)
    assert f"certtool train --resume {folder}" in err
    assert load_header(folder / "last.safetensors")["step"] >= 12


@pytest.mark.slow
def test_verify_shares_the_images(robust_run: Path, cli: Cli, tmp_path: Path) -> None:
    options = ["--eps", "0.05", "--eps", "0.02", "--method", "ibp", "--images", "41", "--attack-steps", "5", "--json"]
    alone = cli("verify", robust_run, *options, "--certificate", "alone.json")
    assert alone.returncode == 0, alone.stderr
    proof = tmp_path / "shared.json"
    shared = run([*torchrun(2), "-m", "certtool", "verify", str(robust_run), *options, "--certificate", str(proof)])
    assert shared.returncode == 0, shared.stderr[-2000:]
    documents = [json.loads(output) for output in (alone.stdout, shared.stdout)]
    assert documents[1]["images"] == 41
    for one, two in zip(documents[0]["results"], documents[1]["results"], strict=True):
        assert (one["eps"], one["counts"]["certified"]) == (two["eps"], two["counts"]["certified"])
        assert one["certified_rigorous"] == two["certified_rigorous"]
        assert one["clean_accuracy"] == two["clean_accuracy"]
    assert cli("verify", robust_run, "--recheck", proof).returncode == 0


@pytest.mark.slow
def test_a_wrong_recipe_is_told_once(tmp_path: Path) -> None:
    done = run([*torchrun(2), "-m", "certtool", "train", "tiny_cnn8"])
    assert done.returncode != 0
    assert done.stderr.count("there is no recipe called `tiny_cnn8`") == 1


@pytest.mark.slow
def test_an_error_of_another_rank_alone_is_told_too(tmp_path: Path) -> None:
    """The first rank is well and says nothing; the second lacks a file."""
    script = tmp_path / "ranks.sh"
    script.write_text('if [ "$RANK" = 1 ]; then exec "$@" train nowhere.toml; else sleep 60; fi\n')
    done = run([*torchrun(2), "--no-python", "sh", str(script), sys.executable, "-m", "certtool"])
    assert done.returncode != 0
    assert done.stderr.count("nowhere.toml") == 1
