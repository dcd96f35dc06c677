"""How a step's cost grows: with width, depth, batch, classes and ranks; each with its exponent.

    python benchmarks/scale.py

The warmup step of small networks on CIFAR-10's shape, eager (what torch.compile saves depends on little of this). The
exponent is the slope of log(processor seconds) between the last two sizes: 1 is proportional, 2 quadratic. For ranks,
wall-clock seconds of a step at the same whole batch, one thread each.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import interleaved, machine, say
from step import EPS, TERMS, TOLERANCE, WEIGHT, optimised
from torch import nn

from certtool import recipe
from certtool.catalog import DATASETS, Cnn7, DatasetFacts, Resnext
from certtool.models import build
from certtool.training.objective import Objective

DATA = DATASETS["cifar10"]
RANK_STEPS = 6


def step_of(model: nn.Module, data: DatasetFacts, batch: int) -> Callable[[], Any]:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(batch, *data.shape, generator=draw)
    labels = torch.randint(0, len(data.classes), (batch,), generator=draw)
    objective = Objective(model.train(), TERMS, TOLERANCE)
    return optimised(model, lambda: objective(x, labels, EPS, WEIGHT).total)


def cnn7(width: int = 8, batch: int = 32, classes: int = 10) -> Callable[[], Any]:
    data = replace(DATA, classes=tuple(map(str, range(classes))))
    return step_of(build(Cnn7(arch="cnn7", width=width, hidden=512), data), data, batch)


def resnext(blocks: int) -> Callable[[], Any]:
    arguments = Resnext(arch="resnext", width=8, bottleneck=2, blocks=[blocks] * 3, hidden=64)
    return step_of(build(arguments, DATA), DATA, 16)


def row(name: str, sizes: Sequence[int], make: Callable[[int], Callable[[], Any]]) -> dict[str, Any]:
    found = interleaved({str(size): make(size) for size in sizes}, repeats=5)
    seconds = {size: timing.cpu for size, timing in found.items()}
    small, large = (seconds[str(size)] for size in sizes[-2:])
    exponent = math.log(large / small) / math.log(sizes[-1] / sizes[-2])
    say(f"  {name}: " + ", ".join(f"{size}: {s * 1000:.0f} ms" for size, s in seconds.items()) + f"; ^{exponent:.2f}")
    return {"of": name, "cpu_seconds": seconds, "exponent": exponent}


def ranks(counts: Sequence[int] = (1, 2)) -> dict[str, Any]:
    """Through torchrun, as users start it."""
    seconds = {}
    for count in counts:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        result = subprocess.run([*command, __file__, "--rank"], check=True, capture_output=True, text=True)
        seconds[str(count)] = float(result.stdout.split()[-1])
    exponent = math.log(seconds[str(counts[-1])] / seconds[str(counts[-2])]) / math.log(counts[-1] / counts[-2])
    say(f"  ranks: {seconds}; ^{exponent:.2f}")
    return {"of": "ranks (wall-clock seconds)", "cpu_seconds": seconds, "exponent": exponent}


def one_rank() -> None:
    from certtool.data import load_split, plan_epoch
    from certtool.distributed import joined
    from certtool.training.loop import Trainer
    from certtool.training.run_folder import RunFolder

    torch.set_num_threads(1)
    chosen = recipe.load("tiny_cnn7", ["model.width=16", "data.batch_size=256"])
    with joined(torch.device("cpu")) as world:
        train, test = load_split("digits", "train"), load_split("digits", "test")
        trainer = Trainer(chosen, RunFolder(Path()), train, test, torch.device("cpu"), world)
        plan = plan_epoch(len(train), trainer.augmentation, 0, 1)
        taken = []
        for number in range(RANK_STEPS):
            began = time.perf_counter()
            trainer.step(trainer.schedule.total_steps // 4, plan, 0)
            world.wait()
            if number:
                taken.append(time.perf_counter() - began)
        if world.leads:
            print(median(taken))


def main() -> None:
    if "--rank" in sys.argv:
        one_rank()
        return
    rows = [
        row("width (CNN-7, batch 32)", (4, 8, 16, 32), lambda width: cnn7(width=width)),
        row("depth (ResNeXt, blocks a stage)", (1, 2, 4), resnext),
        row("batch (CNN-7, width 8)", (16, 32, 64, 128), lambda batch: cnn7(batch=batch)),
        row("classes (CNN-7, width 8)", (10, 200), lambda classes: cnn7(classes=classes)),
        ranks(),
    ]
    print(json.dumps({"rows": rows, "machine": machine()}))


if __name__ == "__main__":
    main()
