"""Projected gradient descent: looks for a perturbation that changes the label, and keeps the one it finds.

An attack proves nothing when it fails. It bounds accuracy from above, and it keeps the proofs honest: an image that is
certified must survive it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from certtool.bounds.box import Edges

TARGETS = 9  # classes tried one by one with a full step; all of them where there are at most ten


@dataclass(frozen=True)
class AttackSettings:
    steps: int = 40
    restarts: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Found:
    """Per image, whether a perturbation changes the label, and that perturbed image (the given one where none does)."""

    success: Tensor
    witness: Tensor


def attack(model: nn.Module, x: Tensor, labels: Tensor, edges: Edges, settings: AttackSettings) -> Found:
    """Every image by full steps towards each class, then by gradient descent on the margin, from random points too.

    A full step to a corner of the box is the whole answer for a linear network; descent is for the others.
    """
    hunt = _Hunt(model, labels, edges, x.clone(), torch.zeros(len(x), dtype=torch.bool, device=x.device))
    hunt.try_points(x.clamp(edges.lower, edges.upper))
    _full_steps(hunt, x)
    generator = torch.Generator().manual_seed(settings.seed)
    for restart in range(settings.restarts):
        if hunt.found.all():
            break
        _descend(hunt, _starting_point(x, edges, generator, restart), settings.steps)
    return Found(hunt.found, hunt.witness)


@dataclass(frozen=True)
class _Hunt:
    """What has been found so far. Only images still standing are worked on."""

    model: nn.Module
    labels: Tensor
    edges: Edges
    witness: Tensor
    found: Tensor

    @property
    def standing(self) -> Tensor:
        return (~self.found).nonzero().flatten()

    def edges_of(self, rows: Tensor) -> Edges:
        return Edges(self.edges.lower[rows], self.edges.upper[rows])

    @torch.no_grad()
    def try_points(self, points: Tensor, rows: Tensor | None = None) -> None:
        """Keep those that change the label, in this batch and alone: rounding may differ between the two."""
        rows = torch.arange(len(points), device=points.device) if rows is None else rows
        wrong = self.model(points).argmax(1) != self.labels[rows]
        for index in wrong.nonzero().flatten().tolist():
            row = rows[index]
            if not self.found[row] and int(self.model(points[index : index + 1]).argmax()) != int(self.labels[row]):
                self.witness[row] = points[index]
                self.found[row] = True


def _full_steps(hunt: _Hunt, x: Tensor) -> None:
    """To the corner of the box that the gradient of z_j - z_y points to, for the most threatening classes j."""
    with torch.no_grad():
        logits = hunt.model(x)
    rivals = logits.scatter(1, hunt.labels.unsqueeze(1), -torch.inf).argsort(1, descending=True)
    for place in range(min(TARGETS, logits.shape[1] - 1)):
        rows = hunt.standing
        if len(rows) == 0:
            return
        _, gradient = _margin(hunt.model, x[rows], hunt.labels[rows], rivals[rows, place])
        edges = hunt.edges_of(rows)
        corner = torch.where(gradient > 0, edges.lower, torch.where(gradient < 0, edges.upper, x[rows]))
        hunt.try_points(corner.clamp(edges.lower, edges.upper), rows)


def _descend(hunt: _Hunt, start: Tensor, steps: int) -> None:
    """Sign steps that shrink from a quarter of the box's width, against the strongest rival at each point."""
    rows = hunt.standing
    point, edges = start[rows], hunt.edges_of(rows)
    for step in range(steps):
        if len(rows) == 0:
            return
        size = (edges.upper - edges.lower) * 0.25 * (1 - step / steps)
        _, gradient = _margin(hunt.model, point, hunt.labels[rows], None)
        point = (point - size * gradient.sign()).clamp(edges.lower, edges.upper)
        hunt.try_points(point, rows)
        left = ~hunt.found[rows]
        rows, point, edges = rows[left], point[left], Edges(edges.lower[left], edges.upper[left])


def _margin(model: nn.Module, x: Tensor, labels: Tensor, rival: Tensor | None) -> tuple[Tensor, Tensor]:
    """z_y - z_j of each image and its gradient; j is the strongest other class where none is named."""
    x = x.detach().requires_grad_(True)
    logits = model(x)
    true = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    if rival is None:
        other = logits.scatter(1, labels.unsqueeze(1), -torch.inf).max(1).values
    else:
        other = logits.gather(1, rival.unsqueeze(1)).squeeze(1)
    margin = true - other
    (gradient,) = torch.autograd.grad(margin.sum(), x)
    return margin.detach(), gradient


def _starting_point(x: Tensor, edges: Edges, generator: torch.Generator, restart: int) -> Tensor:
    """The image itself first, then random points; drawn on the CPU, so that every device starts alike."""
    if restart == 0:
        return x.clamp(edges.lower, edges.upper)
    share = torch.rand(x.shape, generator=generator).to(x.device)
    return (edges.lower + share * (edges.upper - edges.lower)).clamp(edges.lower, edges.upper)
