"""What a training run tells while it goes on; a view on screen and the Python API listen to the same events."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from certtool.errors import CertToolError
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


@dataclass(frozen=True)
class NextRun:
    """A study comes to its next run; what follows is about that one."""

    number: int  # counted from 1
    of: int
    recipe: Recipe
    folder: Path


@dataclass(frozen=True)
class RunFailed:
    recipe: Recipe
    folder: Path
    error: CertToolError


@dataclass(frozen=True)
class StudyDone:
    trained: int
    done_before: int
    failed: int
    roots: tuple[Path, ...]  # the folders that hold the runs, one for each recipe


Event = Started | Progress | EpochDone | Finished
StudyEvent = Event | NextRun | RunFailed | StudyDone
