"""Shared helpers: the command line as a user runs it, small recipes, real data where it is at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Small tensors on two workers: one thread each is fastest, and the same bits on every machine.
torch.set_num_threads(1)
settings.register_profile("certtool", deadline=None, print_blob=True)
settings.load_profile("certtool")

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "80"}
# A whole run of the method in seconds: a narrow network, six epochs, every phase of the schedule.
SMALL = {
    "model.width": 4,
    "model.hidden": 16,
    "train.epochs": 6,
    "train.lr_milestones": [4],
    "train.warmup.epochs": 3,
    "data.batch_size": 128,
}

Cli = Callable[..., subprocess.CompletedProcess[str]]


def small_settings(**more: object) -> list[str]:
    """SMALL as `--set` options; `train__epochs=2` overrides `train.epochs`."""
    values = SMALL | {key.replace("__", "."): value for key, value in more.items()}
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """`certtool ...` in an empty folder, as a process of its own."""

    def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "certtool", *map(str, arguments)],
            cwd=tmp_path,
            env=ENVIRONMENT | environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.fixture(scope="session")
def robust_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network good enough that every verdict occurs: about 94 % clean, 83 % certified at eps 0.05."""
    settings = small_settings(
        model__hidden=32, train__epochs=24, train__lr=3e-3, train__lr_milestones=[18], train__warmup__epochs=12,
        data__batch_size=64, threat__eps=0.05,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("run") / "robust"
    command = [sys.executable, "-m", "certtool", "train", "tiny_cnn7", "--out", str(folder), *settings]
    subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, timeout=300)
    return folder


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished small run, shared by every test that only reads it."""
    folder = tmp_path_factory.mktemp("run") / "small"
    command = [
        sys.executable,
        "-m",
        "certtool",
        "train",
        "tiny_cnn7",
        "--out",
        str(folder),
        *small_settings(),
    ]
    subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, timeout=300)
    return folder


def require_data(name: str, split: str = "test") -> None:
    """Skip, with the reason, where a real data set is not at hand."""
    from certtool.data import missing_files

    if missing_files(name, split):
        pytest.skip(f"{name} is not under CERTTOOL_DATA")
