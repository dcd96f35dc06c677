"""The loss of one batch: robust cross-entropy and the weighted regularisers (paper, eq. for the full objective)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certtool.bounds import (
    Bounds,
    Graph,
    Interval,
    ReluStatistics,
    ball,
    certified_mask,
    features_step,
    graph_of,
    lower_margins,
    propagate,
    relu_statistics,
    statistics_need,
)
from certtool.bounds.ibp import clean_output
from certtool.bounds.regularizers import relu_terms, tightness_terms
from certtool.bounds.together import total_mean
from certtool.distributed import SharedBatch, World
from certtool.models.normalize import input_step

# Below this radius float32 bounds have no width to speak of, and the regularisers would see rounding.
SMALLEST_EPS = 1e-6
WHOLE = SharedBatch(World(), 0)  # a batch that this process has alone


@dataclass(frozen=True)
class Loss:
    """The parts of one batch's loss as tensors on the device: reading them is the caller's choice of moment."""

    total: Tensor
    robust_ce: Tensor
    clean_ce: Tensor
    clean_correct: Tensor  # images
    certified: Tensor  # images
    tightness: Tensor | None
    relu: Tensor | None
    layers: ReluStatistics | None


@dataclass(frozen=True)
class Wish:
    """What one pass is to compute beside the clean loss."""

    robust: bool  # the loss of the margins
    regularised: bool  # with the regularisers in the total
    observed: bool  # layer statistics


class Objective:
    """Bounds, margins, loss. `terms` are the regularisers that count; both are measured when `observe` asks."""

    def __init__(self, model: nn.Module, terms: Collection[str], tolerance: float, precision: str = "fp32") -> None:
        self.model = model
        self.precision = precision
        self.graph: Graph = graph_of(model)
        self.terms = frozenset(terms)
        self.tolerance = tolerance
        self.input_step = input_step(self.graph)
        features = features_step(self.graph)
        self._margins_need = () if features is None else (features,)
        self._statistics_need = (*statistics_need(self.graph), self.input_step)
        self._compiled = self.bounded
        self._compiled_images = -1

    def compile(self, images: int) -> None:
        """Let torch.compile fuse what is elementwise, two fifths of a step of a narrow network.

        For batches of this many images and eps above 0: an epoch's smaller last batch and a run's first step are not
        worth a compilation of their own. Which pass is compiled depends on the step alone: a resumed run does the same.
        """
        from certtool.training.compiled import compiled  # the compiler takes two seconds to import

        self._compiled = compiled(self.bounded)
        self._compiled_images = images

    def _autocast(self, x: Tensor) -> torch.autocast:
        """The passes may be in bfloat16. What is summed over a batch, the margins and the loss never are."""
        return torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def natural(self, x: Tensor, labels: Tensor, batch: SharedBatch) -> Loss:
        """Plain cross-entropy: nothing is bounded, nothing certified."""
        with self._autocast(x):
            logits = self.model(x) if batch.alone else clean_output(self.graph, x, batch)
        logits = logits.to(x.dtype)
        ce = cross_entropy(logits, labels, batch)
        correct = (logits.argmax(1) == labels).sum()
        return Loss(ce, ce.detach(), ce.detach(), correct, torch.zeros_like(correct), None, None, None)

    def __call__(
        self, x: Tensor, labels: Tensor, eps: float, weight: float, observe: bool = False, batch: SharedBatch = WHOLE
    ) -> Loss:
        """The method's loss at radius eps with lambda = weight; plain cross-entropy while eps is 0.

        Where ranks share the batch, each one's loss is its part of the whole: they sum to it.
        """
        regularised = weight > 0 and bool(self.terms)
        if eps == 0 and not regularised and not observe:
            return self.natural(x, labels, batch)
        wish = Wish(robust=eps > 0, regularised=regularised, observed=regularised or observe)
        # Radius and weight as tensors: a compiled pass serves every step of the schedule. Filled in place of copied: a
        # GPU need not be waited for.
        radius = torch.full((), max(eps, SMALLEST_EPS), dtype=x.dtype, device=x.device)
        share = torch.full_like(radius, weight / batch.world.size)
        bounded = self._compiled if wish.robust and len(x) == self._compiled_images else self.bounded
        return bounded(x, labels, radius, share, wish, batch)

    def bounded(
        self, x: Tensor, labels: Tensor, radius: Tensor, weight: Tensor, wish: Wish, batch: SharedBatch
    ) -> Loss:
        """One walk for clean images, centers and radii; then margins, loss, and what is measured of the layers."""
        wanted = self._margins_need + (self._statistics_need if wish.observed else ())
        box = ball(x, radius)
        with self._autocast(x):
            bounds = propagate(self.graph, box, clean=x, keep=set(wanted), together=batch)
        assert bounds.clean is not None
        logits = bounds.clean.to(x.dtype)
        margins = lower_margins(self.graph, bounds, labels)
        clean_ce = cross_entropy(logits, labels, batch)
        robust_ce = self.robust_ce(box, bounds, margins, labels, radius, batch) if wish.robust else clean_ce
        total, tight, balance, layers = robust_ce, None, None, None
        if wish.observed:
            with torch.set_grad_enabled(wish.regularised):
                layers = relu_statistics(self.graph, bounds, batch)
                input_width = 2 * mean_radius(bounds.kept[self.input_step], batch)
                tight = tightness_terms(input_width, layers, self.tolerance).mean()
                balance = relu_terms(layers, self.tolerance).mean()
        if wish.regularised:
            parts = {"tightness": tight, "relu": balance}
            # Every rank computes the same regularisers, of the whole batch: `weight` is its share of lambda.
            total = robust_ce + weight * sum(parts[term] for term in sorted(self.terms))  # type: ignore[misc]
        correct = (logits.detach().argmax(1) == labels).sum()
        certified = certified_mask(margins.detach(), labels).sum()
        return Loss(total, robust_ce.detach(), clean_ce.detach(), correct, certified, tight, balance, layers)

    def robust_ce(
        self, box: Interval, bounds: Bounds, margins: Tensor, labels: Tensor, radius: Tensor, batch: SharedBatch
    ) -> Tensor:
        """What the method makes of the interval bounds of one batch: here, the loss of their margins."""
        return robust_cross_entropy(margins, labels, batch)


def mean_radius(z: Interval, batch: SharedBatch) -> Tensor:
    return total_mean(z.radius.sum(), z.radius, batch)


def robust_cross_entropy(margins: Tensor, labels: Tensor, batch: SharedBatch) -> Tensor:
    """Of the worst logits the bounds allow: 0 for the label, minus the least margin elsewhere."""
    return cross_entropy(-margins, labels, batch)


def cross_entropy(logits: Tensor, labels: Tensor, batch: SharedBatch) -> Tensor:
    """The mean over the batch; of a shared one, what these images contribute to it."""
    if batch.alone:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits, labels, reduction="sum") / batch.images
