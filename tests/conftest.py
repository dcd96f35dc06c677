"""Shared helpers: the command line as a user runs it, small recipes, real data where it is at hand."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings
from inside import run_inside

if TYPE_CHECKING:
    from hub import Hub

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

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))),
    reason="torch.compile needs a C++ compiler, and there is none",
)

Cli = Callable[..., subprocess.CompletedProcess[str]]


def small_settings(**more: object) -> list[str]:
    """SMALL as `--set` options; `train__epochs=2` overrides `train.epochs`."""
    values = SMALL | {key.replace("__", "."): value for key, value in more.items()}
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """`certtool ...` in an empty folder, inside this process: the same entry, words and exit code, in less time."""

    def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return run_inside([str(word) for word in arguments], tmp_path, ENVIRONMENT | environment)

    return run


@pytest.fixture
def process(tmp_path: Path) -> Cli:
    """`certtool ...` in an empty folder, as a process of its own: for what depends on that, and now and then."""

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


def once(tmp_path_factory: pytest.TempPathFactory, name: str, build: Callable[[Path], None]) -> Path:
    """A folder that the first worker who needs it builds, and all others wait for and read.

    It counts as built by the mark beside it, which comes last; the lock goes with the worker that holds it.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, mark = base / name, base / f"{name}.built"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not mark.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that died, or failed, half-way
            folder.mkdir()
            build(folder)
            mark.touch()
    return folder


def certtool_in(folder: Path, *arguments: str | Path) -> None:
    done = run_inside([str(word) for word in arguments], folder, ENVIRONMENT)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def robust_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network good enough that every verdict occurs: about 94 % clean, 83 % certified at eps 0.05."""
    settings = small_settings(
        model__hidden=32, train__epochs=24, train__lr=3e-3, train__lr_milestones=[18], train__warmup__epochs=12,
        data__batch_size=64, threat__eps=0.05,
    )  # fmt: skip
    train = ("train", "tiny_cnn7", "--out", "robust", *settings)
    return once(tmp_path_factory, "robust_run", lambda place: certtool_in(place, *train)) / "robust"


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished small run, shared by every test that only reads it."""
    train = ("train", "tiny_cnn7", "--out", "small", *small_settings())
    return once(tmp_path_factory, "small_run", lambda place: certtool_in(place, *train)) / "small"


@pytest.fixture(scope="session")
def proof(robust_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of the robust run at two radii, with witnesses."""
    verify = ("verify", robust_run, "--eps", "0.05", "--eps", "0.02", "--method", "ibp", "--images", "60",
              "--attack-steps", "10", "--restarts", "1", "--certificate", "proof.json")  # fmt: skip
    return once(tmp_path_factory, "proof", lambda place: certtool_in(place, *verify)) / "proof.json"


@pytest.fixture(scope="session")
def files(robust_run: Path, proof: Path) -> dict[str, bytes]:
    """What a published model consists of, card and picture aside."""
    from certtool import checkpoint
    from certtool.zoo.staging import stage

    return stage(checkpoint.load(robust_run), [proof]).files


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """The client in this process has read its environment long ago; it reads proxies when its session is made."""
    from hub import Hub
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    from certtool.zoo import hub as hub_module

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(hub_module, "PAUSES", (0.05, 0.05, 0.1, 0.2, 0.4))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1,localhost")
    monkeypatch.setenv("CERTTOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "")
    close_session()
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub
        close_session()


def require_data(name: str, split: str = "test") -> None:
    """Skip, with the reason, where a real data set is not at hand."""
    from certtool.data import missing_files

    if missing_files(name, split):
        pytest.skip(f"{name} is not under CERTTOOL_DATA")
