"""What `precision = "bf16"` costs in accuracy: the same short runs in both precisions, to benchmarks/precision.json.

    CERTTOOL_DATA=... .venv/bin/python benchmarks/precision.py [digits] [mnist]

Tens of minutes on a CPU without bfloat16 arithmetic, where it is emulated.

Both are evaluated in float32, as always. Narrow networks, few epochs: the question is the difference, not the figure.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import certtool
from certtool.training.run_folder import RunFolder

SMALL_MNIST = {
    "data.batch_size": 64,
    "data.validation_fraction": 0.8,  # held out: a fifth of the images is enough here
    "model.width": 4,
    "model.hidden": 64,
    "threat.eps": "0.1",
    "train.epochs": 4,
    "train.lr": 2e-3,
    "train.lr_milestones": [3],
    "train.warmup.epochs": 2,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("tiny_cnn7_short", {}),
    "mnist": ("mnist_cnn7", SMALL_MNIST),
}
TARGET = Path(__file__).with_name("precision.json")


def figures(recipe: str, overrides: dict[str, Any], precision: str) -> dict[str, float]:
    settings = overrides | {"train.precision": precision, "train.compile": "on"}
    with tempfile.TemporaryDirectory() as folder:
        certtool.train(recipe, settings, out=Path(folder) / "run", device="cpu")
        metrics = RunFolder(Path(folder) / "run").metrics()
    last = metrics[-1]
    return {kind: last[f"test_{kind}"] for kind in ("clean_accuracy", "certified_accuracy")}


def main() -> None:
    document = json.loads(TARGET.read_text()) if TARGET.exists() else {"verifier": "ibp, float32", "results": {}}
    for name in sys.argv[1:] or CASES:
        recipe, overrides = CASES[name]
        runs = {precision: figures(recipe, overrides, precision) for precision in ("fp32", "bf16")}
        versions = {"certtool": certtool.__version__, "torch": str(torch.__version__)}
        document["results"][name] = {"recipe": recipe, "overrides": overrides, **runs, "versions": versions}
        TARGET.write_text(json.dumps(document, indent=2) + "\n")
        print(name, runs, flush=True)


if __name__ == "__main__":
    main()
