"""Order and augmentation of training images: pure functions of (seed, epoch, index), so a resumed epoch is the same."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from certtool.catalog import Augmentation


@dataclass(frozen=True)
class EpochPlan:
    """One epoch's draws for every image: its place in the order, whether it is mirrored, how far it is shifted."""

    order: Tensor
    mirrored: Tensor
    rows: Tensor
    columns: Tensor


def plan_epoch(count: int, augmentation: Augmentation, seed: int, epoch: int) -> EpochPlan:
    """Drawn on the CPU, so that every device sees the same epoch."""
    generator = torch.Generator().manual_seed(_mix(seed, epoch))
    order = torch.randperm(count, generator=generator)
    mirrored = torch.rand(count, generator=generator) < (0.5 if augmentation.flip else 0.0)
    reach = augmentation.padding
    rows, columns = (torch.randint(-reach, reach + 1, (count,), generator=generator) for _ in range(2))
    return EpochPlan(order, mirrored, rows, columns)


def _mix(seed: int, epoch: int) -> int:
    """One number for both: torch's generator looks only at the low 32 bits, so `seed << 32 | epoch` would not do."""
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:4])


def augment(images: Tensor, plan: EpochPlan, indices: Tensor) -> Tensor:
    """Shift by whole pixels, repeating the edge (a crop of the padded image), and mirror; one gather for both."""
    _, _, height, width = images.shape
    rows, columns, mirrored = (draw[indices].to(images.device) for draw in (plan.rows, plan.columns, plan.mirrored))
    row = (torch.arange(height, device=images.device) + rows[:, None]).clamp(0, height - 1)
    column = torch.arange(width, device=images.device).expand(len(images), width)
    column = torch.where(mirrored[:, None], width - 1 - column, column)
    column = (column + columns[:, None]).clamp(0, width - 1)
    image = torch.arange(len(images), device=images.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return images[image, channel, row[:, None, :, None], column[:, None, None, :]]
