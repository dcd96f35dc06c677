"""CROWN-IBP in training: the margins of a batch as linear functions of its pixels, with intervals at every ReLU.

The interval engine has walked the network before and knows what each BatchNorm was in this pass. Here BatchNorm is
folded into the layer before it, so what goes to auto_LiRPA has none: no second pass over the clean images, no other
batch statistics than the interval bounds', running statistics that nothing here can move.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from certtool.bounds.graph import AFFINE, Graph, Step, is_batch_norm
from certtool.bounds.interval import Interval
from certtool.bounds.lirpa import GivenWeights, dense_kernel, margin_rows, without_groups
from certtool.bounds.rules import fold, rule_for
from certtool.errors import InputError

Norms = Mapping[str, tuple[Tensor, Tensor]]


class CrownBounds:
    """Lower bounds of linear functions of the logits, with their gradient to the network's own parameters.

    `preprocessing` names the network's first layer where that is elementwise arithmetic on the image, as for
    `lirpa.BoundedModel`; `example` is one image.
    """

    def __init__(self, model: nn.Module, graph: Graph, example: Tensor, preprocessing: str | None = None) -> None:
        self._first = nn.Identity() if preprocessing is None else model.get_submodule(preprocessing)
        self._affine = tuple(step for step in graph.steps if isinstance(step.module, AFFINE))
        self._norm_of = {step.folds.name: step.name for step in graph.steps if step.folds is not None}
        for step in graph.steps:
            if is_batch_norm(step.module) and step.folds is None:
                raise InputError(
                    f"`{step.name}`: CROWN-IBP needs every BatchNorm right after a convolution or linear layer",
                    'train with `method = "ibp"`',
                )
        self._bounded = GivenWeights(_bare(model, graph, preprocessing), example)

    def lower(self, box: Interval, rows: Tensor, norms: Norms) -> Tensor:
        """Image by row, a lower bound of rows . z over the box; BatchNorm as in the pass that gave `norms`."""
        rule = rule_for(type(self._first))
        assert rule is not None
        return self._bounded.lower(rule(self._first, box), rows, self._weights(norms))

    def lower_margins(self, box: Interval, labels: Tensor, classes: int, norms: Norms) -> Tensor:
        """Image by class, the least z_y - z_j; the label's own column is 0."""
        others, rows = margin_rows(labels, classes, box.center.dtype)
        lower = self.lower(box, rows, norms)
        return torch.zeros_like(others, dtype=lower.dtype).masked_scatter(others, lower)

    def _weights(self, norms: Norms) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for step in self._affine:
            weight, bias = _folded(step, norms.get(self._norm_of.get(step.name, "")))
            weights |= {f"{step.name}.weight": weight, f"{step.name}.bias": bias}
        return weights


def _folded(step: Step, norm: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    layer = step.module
    assert isinstance(layer, AFFINE)
    weight, bias = layer.weight, layer.bias
    if norm is not None:
        folded = fold(layer, *norm)
        weight, bias = folded.weight, folded.bias
    elif bias is None:
        bias = weight.new_zeros(len(weight))
    return dense_kernel(weight, getattr(layer, "groups", 1)), bias


@torch.no_grad()
def _bare(model: nn.Module, graph: Graph, preprocessing: str | None) -> nn.Module:
    """A copy with affine layers, ReLUs and sums only: its weights are never looked at."""
    model = copy.deepcopy(model)
    for step in graph.steps:
        if is_batch_norm(step.module) or step.name == preprocessing:
            model.set_submodule(step.name, nn.Identity())
        elif isinstance(step.module, AFFINE) and step.module.bias is None:
            copied: nn.Module = model.get_submodule(step.name)
            copied.bias = nn.Parameter(step.module.weight.new_zeros(len(step.module.weight)))
    return without_groups(model)
