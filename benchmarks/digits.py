"""Train the recipes on the embedded digits with three seeds each; their test figures go to benchmarks/digits.json.

    .venv/bin/python benchmarks/digits.py            (about a quarter of an hour on two cores)

The README quotes this file.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import mean

import torch

import certtool
from certtool.training.run_folder import RunFolder

RECIPES = ("tiny_cnn7", "tiny_cnn7_short", "tiny_cnn7_short_vanilla")
SEEDS = (0, 1, 2)
TARGET = Path(__file__).with_name("digits.json")


def figures(recipe: str, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        certtool.train(recipe, {"seed": seed}, out=Path(folder) / "run", device="cpu")
        metrics = RunFolder(Path(folder) / "run").metrics()
    last = metrics[-1]
    return {
        "seed": seed,
        "clean_accuracy": last["test_clean_accuracy"],
        "certified_accuracy": last["test_certified_accuracy"],
        "training_seconds": round(sum(line["seconds"] for line in metrics), 1),
    }


def main() -> None:
    results = {}
    for recipe in RECIPES:
        runs = [figures(recipe, seed) for seed in SEEDS]
        averages = {f"mean_{key}": mean(run[key] for run in runs) for key in ("clean_accuracy", "certified_accuracy")}
        results[recipe] = {"runs": runs, **averages}
        print(recipe, averages)
    versions = {"certtool": certtool.__version__, "torch": str(torch.__version__), "threads": torch.get_num_threads()}
    document = {"eps": "0.1", "split": "test", "images": 359, "verifier": "ibp, float32", "results": results}
    TARGET.write_text(json.dumps(document | {"versions": versions}, indent=2) + "\n")


if __name__ == "__main__":
    main()
