"""How long a run would take, and how much memory, from a few timed steps of each phase on this machine."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from certtool.checkpoint import parameter_count
from certtool.data import load_both, plan_epoch
from certtool.distributed import World
from certtool.evaluation import interval_accuracy
from certtool.memory import peak_memory
from certtool.recipe import Recipe
from certtool.training.loop import Trainer
from certtool.training.methods import check_engine
from certtool.training.run_folder import RunFolder
from certtool.training.speed import settled

TIMED = 3  # steps of each phase, after one that warms up


@dataclass(frozen=True)
class Phase:
    """Steps of one kind: all at eps 0, growing, or at its target."""

    name: str
    steps: int
    seconds_per_step: float


@dataclass(frozen=True)
class Estimate:
    recipe: str
    device: str
    threads: int
    parameters: int
    train_images: int
    compiled: bool
    phases: tuple[Phase, ...]
    evaluation_seconds: float  # of the whole test set, once
    evaluations: int
    memory: int  # bytes, the most this process had while it took these steps

    @property
    def seconds(self) -> float:
        steps = sum(phase.steps * phase.seconds_per_step for phase in self.phases)
        return steps + self.evaluations * self.evaluation_seconds

    def as_json(self) -> dict[str, Any]:
        phases = [dict(phase.__dict__) for phase in self.phases]
        return {"schema": "certtool.estimate/1"} | self.__dict__ | {"phases": phases, "seconds": self.seconds}


def estimate(recipe: Recipe, *, data: Path | None, download: bool, device: torch.device) -> Estimate:
    """Real steps on real images with a network that is thrown away; nothing is written."""
    check_engine(recipe)
    train, test = load_both(recipe.data, data, download=download)
    recipe = settled(recipe, len(train), train.facts, device, World())
    trainer = Trainer(recipe, RunFolder(Path()), train, test, device)
    schedule = trainer.schedule
    kinds = [schedule.phase(step) for step in range(schedule.total_steps)]
    counts = Counter(kinds)
    phases = [
        Phase(name, count, _seconds_per_step(trainer, kinds.index(name) + count // 2)) for name, count in counts.items()
    ]
    every = recipe.train.eval_every
    evaluations = 1 + (recipe.train.epochs - 1) // every if every else 1
    return Estimate(
        recipe.name, str(device), torch.get_num_threads(), parameter_count(trainer.model), len(trainer.train),
        recipe.train.compile == "on", tuple(phases), _evaluation_seconds(trainer), evaluations, peak_memory(device),
    )  # fmt: skip


def _seconds_per_step(trainer: Trainer, step: int) -> float:
    """The median of a few steps of one phase, each with the first batch of an epoch: all but the last are full."""
    plan = plan_epoch(len(trainer.train), trainer.augmentation, trainer.recipe.seed, 1)
    taken = []
    for _ in range(1 + TIMED):
        began = time.perf_counter()
        trainer.step(step, plan, 0)
        trainer.meter.means()  # waits for the device
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def _evaluation_seconds(trainer: Trainer) -> float:
    part = trainer.test.first(min(256, len(trainer.test)))
    began = time.perf_counter()
    interval_accuracy(trainer.model, part, float(trainer.recipe.threat.eps))
    return (time.perf_counter() - began) * len(trainer.test) / len(part)
