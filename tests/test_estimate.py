"""`train --dry-run`: an estimate from real steps, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Cli, small_settings


def test_it_says_what_a_run_would_take_and_writes_nothing(cli: Cli, process: Cli, tmp_path: Path) -> None:
    done = process("train", "tiny_cnn7", "--dry-run", "--json", *small_settings())
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == "certtool.estimate/1"
    assert {phase["name"]: phase["steps"] for phase in document["phases"]} == {"start": 13, "warmup": 35, "final": 24}
    steps = sum(phase["steps"] * phase["seconds_per_step"] for phase in document["phases"])
    assert document["seconds"] == pytest.approx(steps + document["evaluation_seconds"])
    assert document["memory"] > 50 << 20
    assert not list(tmp_path.iterdir())
    shown = cli("train", "tiny_cnn7", "--dry-run", *small_settings()).stdout
    assert "in all" in shown


def test_it_is_for_one_recipe(cli: Cli) -> None:
    assert cli("train", "tiny_cnn7", "tiny_cnn7_short", "--dry-run").returncode == 2
