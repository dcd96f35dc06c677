"""The largest radius at which interval bounds certify each image, by bisection over multiples of 1/4096."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from certtool.bounds import Interval
from certtool.bounds.box import outer_edges_by_image
from certtool.verification.images import SplitImages
from certtool.verification.ladder import Ladder

STEPS = 4096


@dataclass(frozen=True)
class Radii:
    """Per image the largest certified eps; 0 where the prediction is wrong or nothing is proven."""

    indices: tuple[int, ...]
    values: tuple[Fraction, ...]
    wrong: int
    arithmetic: str

    def quantile(self, share: float) -> Fraction:
        ordered = sorted(self.values)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    def distribution(self, bins: int = 10) -> list[tuple[float, int]]:
        """Lower edge and count of equal bins from 0 to the largest radius."""
        width = float(max(self.values)) / bins
        if width == 0:
            return [(0.0, len(self.values))]
        counts = [0] * bins
        for value in self.values:
            counts[min(int(float(value) / width), bins - 1)] += 1
        return [(number * width, count) for number, count in enumerate(counts)]

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": "certtool.radius/1",
            "images": len(self.values),
            "misclassified": self.wrong,
            "method": "ibp",
            "arithmetic": self.arithmetic,
            "median": str(self.quantile(0.5)),
            "index": list(self.indices),
            "radius": [str(value) for value in self.values],
        }


def largest_radii(ladder: Ladder, images: SplitImages, progress: Callable[[int, int], None]) -> Radii:
    """Every image on its own scale; twelve passes over all of them."""
    right = torch.tensor([image.verdict != "misclassified" for image in ladder.clean()])
    low, high = torch.zeros(len(right), dtype=torch.long), torch.full((len(right),), STEPS + 1)
    rounds = (STEPS).bit_length()
    for number in range(rounds):
        middle = (low + high) // 2
        proven = _proven(ladder, images, middle) & right & (middle > 0)
        low, high = torch.where(proven, middle, low), torch.where(proven, high, middle)
        progress(number + 1, rounds)
    values = tuple(Fraction(int(value), STEPS) for value in low)
    return Radii(tuple(images.indices), values, int((~right).sum()), ladder.arithmetic)


def _proven(ladder: Ladder, images: SplitImages, steps: Tensor) -> Tensor:
    """Whether each image is certified at its own radius, a multiple of 1/4096, which float64 holds exactly."""
    size, result = ladder.settings.batch_size, []
    for start in range(0, len(steps), size):
        rows = torch.arange(start, min(start + size, len(steps)))
        eps = steps[rows].double() / STEPS
        edges = outer_edges_by_image(images.split.images[rows], images.split.facts.scale, eps)
        box: Interval = edges.interval()
        margins = ladder.interval_margins(rows, box)
        result.append((margins > 0) & (margins < torch.inf))
    return torch.cat(result)
