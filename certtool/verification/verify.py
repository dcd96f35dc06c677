"""Verification of a checkpoint on part of a data set, or of anybody's network on anybody's images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from certtool.bounds.lirpa import installed
from certtool.checkpoint import Checkpoint
from certtool.data import Split
from certtool.epsilon import Epsilon
from certtool.errors import InputError
from certtool.verification.images import FloatImages, Images, choose
from certtool.verification.ladder import Ladder, LadderSettings, Progress
from certtool.verification.verdicts import EpsResult
from certtool.version import __version__


@dataclass(frozen=True)
class ModelInfo:
    name: str
    sha256: str | None  # None for a network that came from no file
    arch: str


@dataclass(frozen=True)
class DataInfo:
    name: str
    split: str
    sha256: str | None  # of the whole split, not only of the images chosen
    images: int


@dataclass(frozen=True)
class VerifyReport:
    """What was asked of which model on which images, and what is proven."""

    model: ModelInfo
    data: DataInfo
    results: tuple[EpsResult, ...]
    engine: str | None  # which auto_LiRPA did the linear relaxations
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": "certtool.verify/1",
            "model": dict(self.model.__dict__),
            "dataset": self.data.name,
            "split": self.data.split,
            "images": self.data.images,
            "norm": "linf",
            "results": [result.as_json() for result in self.results],
            "warnings": list(self.warnings),
            "versions": versions(self.engine),
        }


def versions(engine: str | None) -> dict[str, str]:
    found = {"certtool": __version__, "torch": str(torch.__version__)}
    return found | ({"auto_LiRPA": engine.removeprefix("auto_LiRPA ")} if engine else {})


def verify(
    checkpoint: Checkpoint,
    split: Split,
    eps: Sequence[Epsilon],
    *,
    count: int | None = None,
    indices: list[int] | None = None,
    settings: LadderSettings | None = None,
    device: torch.device | None = None,
    progress: Progress = lambda rung, done, total: None,
    warn: Callable[[str], None] = lambda text: None,
) -> VerifyReport:
    """A model from its file, on images of the data set it was trained for."""
    if split.facts.shape != checkpoint.dataset.shape:
        raise InputError(f"images of shape {split.facts.shape} for a network made for {checkpoint.dataset.shape}")
    if split.facts.classes != checkpoint.dataset.classes:
        raise InputError(f"the classes of the {split.facts.name} images are not those the network was made for")
    images = choose(split, count, indices)
    model = checkpoint.model.to(device or torch.device("cpu")).eval()
    header = checkpoint.header
    results, engine, warnings = _climb(model, images, eps, settings or LadderSettings(), "normalize", progress, warn)
    info = ModelInfo(header.name, checkpoint.sha256, header.arch.arch)
    data = DataInfo(split.facts.name, split.name, split.sha256, len(images.indices))
    return VerifyReport(info, data, results, engine, warnings)


def verify_network(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    eps: Sequence[Epsilon],
    *,
    settings: LadderSettings | None = None,
    progress: Progress = lambda rung, done, total: None,
    warn: Callable[[str], None] = lambda text: None,
) -> VerifyReport:
    """Any network torch.fx can trace, on float images in [0, 1]. Normalisation belongs into the network."""
    images = FloatImages(x, labels)
    if len(x) == 0:
        raise InputError("there are no images to verify")
    results, engine, warnings = _climb(model, images, eps, settings or LadderSettings(), None, progress, warn)
    info = ModelInfo(type(model).__name__, None, type(model).__name__)
    return VerifyReport(info, DataInfo("tensors", "given", None, len(x)), results, engine, warnings)


def _climb(
    model: nn.Module,
    images: Images,
    eps: Sequence[Epsilon],
    settings: LadderSettings,
    preprocessing: str | None,
    progress: Progress,
    warn: Callable[[str], None],
) -> tuple[tuple[EpsResult, ...], str | None, tuple[str, ...]]:
    warnings: list[str] = []

    def note(text: str) -> None:
        warnings.append(text)
        warn(text)

    ladder = Ladder(model, images, settings, preprocessing=preprocessing, progress=progress, warn=note)
    results = tuple(ladder.climb(eps))
    engine = str(installed()) if ladder.rungs else None
    return results, engine, tuple(warnings)
