"""Means over an epoch, summed on the device: nothing waits for a number until somebody reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from certtool.distributed import World
from certtool.training.objective import Loss

_PER_IMAGE = ("loss", "robust_ce", "clean_ce", "clean_accuracy", "certified_accuracy")
_PER_STEP = ("grad_norm",)
_OBSERVED = ("tightness", "relu")
_PER_LAYER = ("mean_width", "active", "inactive")


class Meter:
    """Sums of a loss's parts; statistics of the bounds count only in the steps that observed them."""

    def __init__(self, layers: Sequence[str], device: torch.device) -> None:
        self.layers = tuple(layers)
        self.device = device
        self.counts = {"images": 0, "steps": 0, "observed": 0}
        kind = torch.float32 if device.type == "mps" else torch.float64
        self.sums = torch.zeros(len(_PER_IMAGE) + len(_PER_STEP), dtype=kind, device=device)
        self.observed = torch.zeros(len(_OBSERVED) + len(_PER_LAYER) * len(layers), dtype=kind, device=device)

    def add(self, loss: Loss, images: int, world: World) -> None:
        """What ranks contribute to a loss sums to it; what they say of the bounds is already of the whole batch."""
        parts = [loss.total.detach(), loss.robust_ce, loss.clean_ce]
        counted = [loss.clean_correct, loss.certified]
        row = torch.stack([*[part * images for part in parts], *[count.to(parts[0].dtype) for count in counted]])
        self.sums[:-1] += world.total(row)
        self.counts["images"] += images
        if loss.tightness is not None and loss.relu is not None and loss.layers is not None:
            layers = torch.stack([loss.layers.mean_width, loss.layers.active, loss.layers.inactive], dim=1)
            self.observed += torch.cat([torch.stack([loss.tightness, loss.relu]), layers.flatten()]).detach()
            self.counts["observed"] += 1

    def count_step(self, grad_norm: Tensor) -> None:
        self.sums[-1] += grad_norm
        self.counts["steps"] += 1

    def means(self) -> dict[str, Any]:
        """Reads the device once. Statistics are None where no step observed them."""
        sums, observed = self.sums.tolist(), self.observed.tolist()
        images, steps, seen = (max(self.counts[key], 1) for key in ("images", "steps", "observed"))
        result: dict[str, Any] = dict(zip(_PER_IMAGE, (value / images for value in sums), strict=False))
        result |= dict(zip(_PER_STEP, (value / steps for value in sums[len(_PER_IMAGE) :]), strict=True))
        if self.counts["observed"] == 0:
            return result | dict.fromkeys((*_OBSERVED, "active", "inactive", "unstable")) | {"layers": []}
        result |= dict(zip(_OBSERVED, (value / seen for value in observed), strict=False))
        rows = [observed[i : i + len(_PER_LAYER)] for i in range(len(_OBSERVED), len(observed), len(_PER_LAYER))]
        layers = [
            {"name": name, **dict(zip(_PER_LAYER, (value / seen for value in row), strict=True))}
            for name, row in zip(self.layers, rows, strict=True)
        ]
        for state in ("active", "inactive"):
            result[state] = sum(layer[state] for layer in layers) / max(len(layers), 1)
        result["unstable"] = 1 - result["active"] - result["inactive"]
        return result | {"layers": layers}

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint in the middle of an epoch."""
        return {"sums": self.sums.cpu().double(), "observed": self.observed.cpu().double()}

    def restore(self, tensors: dict[str, Tensor], counts: dict[str, int]) -> None:
        self.sums.copy_(tensors["sums"])
        self.observed.copy_(tensors["observed"])
        self.counts = dict(counts)
