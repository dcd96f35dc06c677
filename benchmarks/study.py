"""What the method gains at a short warmup: five seeds each with and without it, on the embedded digits.

    .venv/bin/python benchmarks/study.py             (ten runs, about a quarter of an hour on two cores)

Stopped, it goes on where it was when started again. The same by hand:

    certtool train tiny_cnn7_short tiny_cnn7_short_vanilla --seeds 0..4 --out runs/short_warmup --device cpu
    certtool runs compare runs/short_warmup --json       (indented, with versions: benchmarks/short_warmup.json)
    certtool runs compare runs/short_warmup --markdown   (benchmarks/short_warmup.md)
    python scripts/make_recipes_readme.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

import certtool

ROOT = Path(__file__).parents[1]
RECIPES = ("tiny_cnn7_short", "tiny_cnn7_short_vanilla")
SEEDS = "0..4"
RUNS = "runs/short_warmup"
TARGET = Path(__file__).with_name("short_warmup")


def run(*arguments: str, output: bool = False) -> str:
    """A command at the top of the checkout, so that the paths in the results are the same everywhere."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE if output else None).stdout


def main() -> None:
    run("-m", "certtool", "train", *RECIPES, "--seeds", SEEDS, "--out", RUNS, "--device", "cpu")
    document = json.loads(run("-m", "certtool", "runs", "compare", RUNS, "--json", output=True))
    versions = {"certtool": certtool.__version__, "torch": str(torch.__version__), "threads": torch.get_num_threads()}
    TARGET.with_suffix(".json").write_text(json.dumps(document | {"versions": versions}, indent=2) + "\n")
    table = run("-m", "certtool", "runs", "compare", RUNS, "--markdown", output=True)
    head = (
        "# The method at a short warmup\n\nWritten by `benchmarks/study.py`; the runs are in `short_warmup.json`.\n\n"
    )
    TARGET.with_suffix(".md").write_text(head + table)
    run("scripts/make_recipes_readme.py")


if __name__ == "__main__":
    main()
