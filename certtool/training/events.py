"""What a training run tells while it goes on; a view on screen and the Python API listen to the same events."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from certtool.recipe import Recipe


@dataclass(frozen=True)
class Started:
    recipe: Recipe
    folder: Path
    device: str
    parameters: int
    train_images: int
    test_images: int
    steps_per_epoch: int
    first_step: int  # greater than 0 when resumed


@dataclass(frozen=True)
class Progress:
    """A look into the running epoch, a few times a second at most."""

    step: int
    epoch: int
    phase: str
    eps: float
    lr: float
    weight: float
    means: dict[str, float]  # of the epoch so far
    images_per_second: float
    seconds_left: float


@dataclass(frozen=True)
class EpochDone:
    """One line of metrics.jsonl."""

    metrics: dict[str, Any]
    seconds_left: float


@dataclass(frozen=True)
class Finished:
    recipe: Recipe
    folder: Path
    model: Path
    metrics: dict[str, Any]
    seconds: float
    already: bool = field(default=False)  # the run was complete before it was asked for again


Event = Started | Progress | EpochDone | Finished
