"""What a data set is once its files are read: pixels in memory, their scale, and a fingerprint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from certtool.catalog import DatasetFacts
from certtool.errors import InputError


@dataclass(frozen=True)
class Split:
    """Images (N, C, H, W) as integers k whose value is k / scale, or as float32; and their labels, in a fixed order."""

    facts: DatasetFacts
    name: str  # train | test | validation
    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if tuple(self.images.shape[1:]) != self.facts.shape or len(self.images) != len(self.labels):
            raise InputError(
                f"{self.facts.name}: {self.name} images of shape {tuple(self.images.shape[1:])} "
                f"with {len(self.labels)} labels, expected {self.facts.shape}"
            )

    def __len__(self) -> int:
        return len(self.images)

    @cached_property
    def sha256(self) -> str:
        """A fingerprint of images and labels: other pixels, another order, another digest."""
        digest = hashlib.sha256()
        for tensor in (self.images, self.labels):
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()

    def to(self, device: torch.device) -> Split:
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def take(self, indices: Tensor) -> Split:
        return replace(self, images=self.images[indices], labels=self.labels[indices])

    def first(self, count: int) -> Split:
        """The first images of the split, in its fixed order."""
        if count < 1:
            raise InputError(f"{count} images were asked for", "ask for at least 1")
        return replace(self, images=self.images[:count], labels=self.labels[:count])

    def pixels(self, images: Tensor) -> Tensor:
        """The values float32(k / scale) of images; of floats, whose scale is 1, they themselves."""
        return images.to(torch.float32) / self.facts.scale


def hold_out(train: Split, fraction: float) -> tuple[Split, Split]:
    """Part of the training images as a validation set: the same ones for every seed of a recipe."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    count = round(fraction * len(train))
    if not 0 < count < len(train):
        raise InputError(f"data.validation_fraction = {fraction} leaves no images", "as in `validation_fraction = 0.1`")
    rest, held = order[count:].sort().values, order[:count].sort().values
    return train.take(rest), replace(train.take(held), name="validation")
