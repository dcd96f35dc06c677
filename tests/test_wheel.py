"""The wheel carries what it needs: installed elsewhere, it finds its recipes and trains."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, small_settings

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_wheel_trains_outside_the_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "certtool/bundled/recipes/tiny_cnn7.toml" in names
    assert "certtool/data/digits.npz" in names
    assert "certtool/bundled/zoo/tiny_cnn7.toml" in names
    assert "certtool/bundled/zoo/tiny_cnn7/model.safetensors" in names
    assert not [name for name in names if name.startswith(("tests", "runs", "benchmarks"))]
    assert wheel.stat().st_size < 1_500_000

    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    environment = ENVIRONMENT | {"PYTHONPATH": str(target)}
    where = subprocess.run(
        [sys.executable, "-c", "import certtool; print(certtool.__file__)"], cwd=tmp_path, env=environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert os.path.realpath(where.stdout.strip()).startswith(os.path.realpath(target))
    train = [sys.executable, "-m", "certtool", "train", "tiny_cnn7", "--out", "run", *small_settings()]
    result = subprocess.run(train, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "model.safetensors").exists()
    check = [sys.executable, "-m", "certtool", "zoo", "check", "tiny_cnn7", "--sample", "3"]
    result = subprocess.run(check, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
