"""A whole epoch of MNIST as `certtool train` does it: how much of it is the steps' arithmetic.

    CERTTOOL_DATA=... python benchmarks/epoch.py

The first steps of a run compile their pass, so the measurement begins after ten: data, logging, saving and all; the
test set is a line of its own.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import machine, own_peak, say

from certtool import recipe
from certtool.evaluation import interval_accuracy
from certtool.training.events import EpochDone, Progress
from certtool.training.loop import new_run

SETTINGS = ["model.width=8", "train.epochs=2", "train.warmup.epochs=1", "train.lr_milestones=[]", 'train.compile="on"']


class Stopwatch:
    """Adds up the seconds spent in a function."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def main() -> None:
    wanted = recipe.load("mnist_cnn7", SETTINGS)
    steps, batches = Stopwatch(), Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = new_run(wanted, Path(folder) / "run", device=torch.device("cpu"))
        trainer.step = steps.around(trainer.step)  # type: ignore[method-assign]
        trainer._batch = batches.around(trainer._batch)  # type: ignore[method-assign]
        began, first = 0.0, 0
        for event in trainer.run():
            if isinstance(event, Progress) and not first and event.step >= 10:
                began, first, steps.seconds, batches.seconds = time.perf_counter(), event.step, 0.0, 0.0
            if isinstance(event, EpochDone):
                break
        seconds, count = time.perf_counter() - began, trainer.schedule.steps_per_epoch - first
        began = time.perf_counter()
        interval_accuracy(trainer.model, trainer.test, float(wanted.threat.eps))
        evaluation = time.perf_counter() - began
    arithmetic = steps.seconds - batches.seconds
    parts = f"arithmetic {arithmetic:.1f} s, batches {batches.seconds:.1f} s"
    say(f"  epoch {seconds:.1f} s: {parts}; test set {evaluation:.1f} s")
    document = {
        "recipe": "mnist_cnn7",
        "settings": SETTINGS,
        "steps": count,
        "epoch_seconds": seconds,
        "step_seconds": steps.seconds,
        "arithmetic_seconds": arithmetic,
        "in_steps": steps.seconds / seconds,
        "in_arithmetic": arithmetic / seconds,
        "evaluation_seconds": evaluation,
        "peak_memory": own_peak(),
    }
    print(json.dumps(document | {"machine": machine()}))


if __name__ == "__main__":
    main()
