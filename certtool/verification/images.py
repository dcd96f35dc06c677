"""The images to verify, with their exact boxes: those of a data set, or tensors of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import torch
from torch import Tensor

from certtool.bounds.box import Edges, inner_edges, inner_edges_of_floats, outer_edges, outer_edges_of_floats
from certtool.data import Split
from certtool.errors import InputError


class Images(Protocol):
    """What the ladder asks of its images."""

    @property
    def labels(self) -> Tensor: ...
    @property
    def indices(self) -> list[int]: ...
    def values(self, rows: Tensor) -> Tensor: ...
    def outer(self, rows: Tensor, eps: Fraction) -> Edges: ...
    def inner(self, rows: Tensor, eps: Fraction) -> Edges: ...


@dataclass(frozen=True)
class SplitImages:
    """Part of a data set: pixel k means the rational k / scale, a float its own value."""

    split: Split
    indices: list[int]

    @property
    def labels(self) -> Tensor:
        return self.split.labels

    def values(self, rows: Tensor) -> Tensor:
        return self.split.pixels(self.split.images[rows])

    def outer(self, rows: Tensor, eps: Fraction) -> Edges:
        return outer_edges(self.split.images[rows], self.split.facts.scale, eps)

    def inner(self, rows: Tensor, eps: Fraction) -> Edges:
        return inner_edges(self.split.images[rows], self.split.facts.scale, eps)


@dataclass(frozen=True)
class FloatImages:
    """Somebody's tensors: the floats themselves are the centers."""

    x: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.x.dtype != torch.float32:
            raise InputError(f"images of {self.x.dtype}, not of torch.float32", "convert them with `.float()` first")
        if len(self.x) != len(self.labels):
            raise InputError(f"{len(self.x)} images with {len(self.labels)} labels")
        if not bool(((self.x >= 0) & (self.x <= 1)).all()):
            raise InputError("pixel values lie outside [0, 1]", "eps is in pixel units: let the network normalise")

    @property
    def indices(self) -> list[int]:
        return list(range(len(self.x)))

    def values(self, rows: Tensor) -> Tensor:
        return self.x[rows]

    def outer(self, rows: Tensor, eps: Fraction) -> Edges:
        return outer_edges_of_floats(self.x[rows], eps)

    def inner(self, rows: Tensor, eps: Fraction) -> Edges:
        return inner_edges_of_floats(self.x[rows], eps)


def choose(split: Split, count: int | None, indices: list[int] | None) -> SplitImages:
    """The first so many images of a split, or the ones named."""
    if count is not None and indices is not None:
        raise InputError("--images and --indices exclude each other", "give one of them")
    chosen = list(range(len(split))) if indices is None else indices
    if count is not None:
        chosen = chosen[:count] if count > 0 else []
    if not chosen:
        raise InputError("there are no images to verify", "`--images` must be at least 1")
    wrong = [index for index in chosen if not 0 <= index < len(split)]
    if wrong:
        raise InputError(f"there is no image {wrong[0]} in the {len(split)} of this split", f"0 to {len(split) - 1}")
    if len(set(chosen)) < len(chosen):
        raise InputError("an image is named twice in --indices")
    return SplitImages(split.take(torch.tensor(chosen)), chosen)
