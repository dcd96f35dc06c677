"""Interval verification of a checkpoint on a split, one result a radius."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from certtool.bounds import graph_of
from certtool.checkpoint import Checkpoint
from certtool.data import Split
from certtool.epsilon import Epsilon
from certtool.errors import InputError
from certtool.evaluation import interval_outcome
from certtool.version import __version__


@dataclass(frozen=True)
class EpsResult:
    """Counts at one radius; the three add up to the number of images."""

    eps: Epsilon
    certified: int
    unknown: int
    misclassified: int
    seconds: float


@dataclass(frozen=True)
class VerifyReport:
    """What was asked of which model on which images, and what is proven."""

    name: str
    sha256: str
    arch: str
    dataset: str
    split: str
    images: int
    method: str
    arithmetic: str
    results: tuple[EpsResult, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": "certtool.verify/1",
            "model": {"name": self.name, "sha256": self.sha256, "arch": self.arch},
            "dataset": self.dataset,
            "split": self.split,
            "images": self.images,
            "norm": "linf",
            "results": [self._result(result) for result in self.results],
            "versions": {"certtool": __version__, "torch": str(torch.__version__)},
        }

    def _result(self, result: EpsResult) -> dict[str, Any]:
        return {
            "eps": str(result.eps),
            "method": self.method,
            "arithmetic": self.arithmetic,
            "clean_accuracy": 1 - result.misclassified / self.images,
            "attacked_accuracy": None,
            "certified_accuracy": result.certified / self.images,
            "counts": {
                "certified": result.certified,
                "falsified": 0,
                "unknown": result.unknown,
                "misclassified": result.misclassified,
            },
            "certified_by": {"ibp": result.certified},
            "unknown_reasons": {"bound": result.unknown},
            "attack": None,
            "seconds": result.seconds,
        }


def verify(
    checkpoint: Checkpoint,
    split: Split,
    eps: Sequence[Epsilon],
    *,
    device: torch.device,
    batch_size: int = 256,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> VerifyReport:
    """Interval bounds in float32 at every radius. `progress` hears of images done, over all radii."""
    if len(split) == 0:
        raise InputError("there are no images to verify", "`--images` must be at least 1")
    results = []
    for index, radius in enumerate(eps):
        done = index * len(split)
        results.append(_at(checkpoint, split, radius, device, batch_size, done, len(eps) * len(split), progress))
    header = checkpoint.header
    return VerifyReport(
        header.name, checkpoint.sha256, header.arch.arch, split.facts.name, split.name, len(split), "ibp", "float32",
        tuple(results)
    )  # fmt: skip


def _at(
    checkpoint: Checkpoint,
    split: Split,
    eps: Epsilon,
    device: torch.device,
    batch_size: int,
    done: int,
    total: int,
    progress: Callable[[int, int], None],
) -> EpsResult:
    began = time.monotonic()
    model = checkpoint.model.to(device).eval()
    graph = graph_of(model)
    certified = correct = 0
    for start in range(0, len(split), batch_size):
        rows = slice(start, start + batch_size)
        x = split.pixels(split.images[rows].to(device))
        outcome = interval_outcome(model, graph, x, split.labels[rows].to(device), float(eps))
        certified += int(outcome.certified.sum())
        correct += int(outcome.correct.sum())
        progress(done + min(start + batch_size, len(split)), total)
    return EpsResult(eps, certified, correct - certified, len(split) - correct, time.monotonic() - began)
