"""Interval bound propagation: walk a network's steps and bound each with its rule.

In training the clean images walk along: BatchNorm takes its statistics from them, and bounds use those statistics as
a fixed affine map (paper, section 3.3 on Batch Normalization). In evaluation it uses the running ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from certtool.bounds.graph import Graph, Step, is_batch_norm, substitute, trace
from certtool.bounds.interval import Interval
from certtool.bounds.rules import (
    BATCH_NORM,
    RULES,
    Ready,
    RuleTable,
    conv2d,
    fold,
    linear,
    ready,
    rule_for,
    scale_and_shift,
)
from certtool.bounds.together import ALONE, Together
from certtool.errors import InputError

Weights = dict[str, Ready]  # by the step that uses them
NO_WEIGHTS: Weights = {}


@dataclass(frozen=True)
class Bounds:
    """What a pass found: the output's interval, those kept on request, and the clean output in training."""

    output: Interval
    kept: Mapping[str, Interval]
    clean: Tensor | None
    norms: Mapping[str, tuple[Tensor, Tensor]]  # every BatchNorm as the x * scale + shift it was in this pass


def graph_of(model: nn.Module) -> Graph:
    """The network's steps; every operation has a rule, or the error names the one that has none."""
    graph = trace(model, known=lambda module: rule_for(type(module)) is not None or is_batch_norm(module))
    for step in graph.steps:
        if step.module is not None and not is_batch_norm(step.module) and rule_for(step.op) is None:
            _no_rule(step)
    return graph


def affine_weights(graph: Graph) -> Weights:
    """Every affine layer, made ready once for many batches."""
    return {step.name: ready(step.module) for step in graph.steps if rule_for(step.op) in (linear, conv2d)}


def evaluation_weights(graph: Graph) -> Weights:
    """The same with BatchNorm folded, as it is in evaluation."""
    found = affine_weights(graph)
    for step in graph.steps:
        if step.folds is not None and step.folds.module is not None:
            norm = scale_and_shift_of(step.module, *running_statistics(step))
            found[step.name] = ready(fold(step.folds.module, *norm))
            found.pop(step.folds.name, None)
    return found


def propagate(
    graph: Graph,
    box: Interval,
    *,
    clean: Tensor | None = None,
    keep: Collection[str] = (),
    rules: RuleTable = RULES,
    together: Together = ALONE,
    weights: Weights = NO_WEIGHTS,
) -> Bounds:
    """Bounds of every step; `clean` given means training: its batch statistics bound everything."""
    cleans = {graph.steps[0].name: clean} if clean is not None else {}
    walk = _Walk({}, cleans, rules, clean, graph.first_affine, together, {}, weights)
    kept: dict[str, Interval] = {}
    for step in graph.steps:
        walk.bounds[step.name] = box if step.op == "input" else walk.bound(step)
        if step.name in keep:
            kept[step.name] = walk.bounds[step.name]
        for name in step.last_uses:
            walk.bounds.pop(name, None)
            walk.cleans.pop(name, None)
    output = walk.bounds[graph.output]
    if not isinstance(output, Interval):
        raise InputError(f"the network's output `{graph.output}` does not depend on its input")
    return Bounds(output, kept, walk.cleans.get(graph.output), walk.norms)


def clean_output(graph: Graph, clean: Tensor, together: Together) -> Tensor:
    """The training pass without bounds, for a batch that several processes share."""
    walk = _Walk({}, {graph.steps[0].name: clean}, RULES, clean, graph.first_affine, together, {}, NO_WEIGHTS)
    for step in graph.steps[1:]:
        if step.op == "constant":
            walk.cleans[step.name] = step.args[0]
        elif is_batch_norm(step.module):
            walk.clean_batch_norm(step)
        else:
            walk.cleans[step.name] = _evaluate(step, walk.cleans)
    output = walk.cleans[graph.output]
    assert isinstance(output, Tensor)
    return output


@dataclass(frozen=True)
class _Walk:
    """What is known half-way through a network: bounds, and clean values in training, by step."""

    bounds: dict[str, Any]
    cleans: dict[str, Any]
    rules: RuleTable
    clean: Tensor | None
    first_affine: Step | None
    together: Together
    norms: dict[str, tuple[Tensor, Tensor]]
    weights: Weights

    def bound(self, step: Step) -> Any:
        if step.op == "constant":
            self.cleans[step.name] = step.args[0]
            return step.args[0]
        if is_batch_norm(step.module):
            return self._batch_norm(step)
        if self.clean is not None:
            self.cleans[step.name] = _evaluate(step, self.cleans)
        if step.folded and self._folds(step):
            return None  # the BatchNorm behind it does its work
        args, kwargs = substitute(step.args, self.bounds), substitute(step.kwargs, self.bounds)
        if not _perturbed((args, kwargs)):
            return _call(step, args, kwargs)
        if asks_for_shape(step):
            return _call(step, (args[0].center, *args[1:]), kwargs)
        function = rule_for(step.op, self.rules) or _no_rule(step)
        if step.module is None:
            return function(*args, **kwargs)
        return function(self.weights.get(step.name, step.module), *args, **kwargs)

    def _folds(self, affine: Step) -> bool:
        """Not the first layer in training: raw pixels have a mean far from 0, and in a folded layer the gradient of
        BatchNorm's weight is then a small difference of large float32 sums (parity: off by 2e-3 of its size, against
        1e-5 unfolded)."""
        return self.clean is None or affine.name != getattr(self.first_affine, "name", None)

    def clean_batch_norm(self, step: Step) -> tuple[Tensor, Tensor]:
        """BatchNorm of the clean batch, and the affine map that it is for the bounds."""
        x = self.cleans[step.inputs[0]]
        scale, shift = scale_and_shift_of(step.module, *_batch_statistics(step.module, x, self.together))
        shape = (1, -1, *[1] * (x.dim() - 2))
        self.cleans[step.name] = (x * scale.view(shape) + shift.view(shape)).to(x.dtype)
        return scale, shift

    def _batch_norm(self, step: Step) -> Interval:
        layer: Any = step.module
        (name,) = step.inputs
        if self.clean is not None:
            scale, shift = self.clean_batch_norm(step)
        elif BATCH_NORM in self.rules:
            affine = step.folds or step
            module = self.weights.get(step.folds.name, step.folds.module) if step.folds else None
            return self.rules[BATCH_NORM](layer, module, self.bounds[affine.inputs[0]], *running_statistics(step))
        else:
            scale, shift = scale_and_shift_of(layer, *running_statistics(step))
        self.norms[step.name] = scale, shift
        if step.folds is None or not self._folds(step.folds):
            return scale_and_shift(self.bounds[name], scale, shift)
        assert step.folds.module is not None
        function = rule_for(step.folds.op, self.rules) or _no_rule(step.folds)
        layer = self.weights.get(step.name) or fold(step.folds.module, scale, shift)
        return function(layer, self.bounds[step.folds.inputs[0]])


def asks_for_shape(step: Step) -> bool:
    """What of a perturbed tensor does not depend on its values."""
    return step.op in ("size", "dim") or (step.op is getattr and step.args[1] in ("shape", "ndim", "dtype", "device"))


def running_statistics(step: Step) -> tuple[Tensor, Tensor]:
    layer: Any = step.module
    if layer.running_mean is None:
        raise InputError(f"`{step.name}` keeps no running statistics, so its output depends on the batch")
    return layer.running_mean, layer.running_var


def scale_and_shift_of(layer: Any, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """BatchNorm with these statistics as x * scale + shift."""
    if hasattr(layer, "scale_and_shift"):
        scale, shift = layer.scale_and_shift(mean, var)
        return scale, shift
    scale = torch.rsqrt(var + layer.eps)
    if layer.weight is None:
        return scale, -mean * scale
    scale = layer.weight * scale
    return scale, layer.bias - mean * scale


def _batch_statistics(layer: Any, x: Tensor, together: Together) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the clean batch, with their gradient; running statistics move once.

    Never in less than float32, whatever the precision of the pass.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = [0, *range(2, x.dim())]
    count = (len(x) if together.alone else together.images) * math.prod(x.shape[2:])
    mean = together.sum(x.sum(dims)) / count
    var = together.sum((x - mean.view(1, -1, *[1] * (x.dim() - 2))).square().sum(dims)) / count
    if layer.running_mean is not None and count > 1:
        with torch.no_grad():
            layer.running_mean.lerp_(mean, layer.momentum)
            layer.running_var.lerp_(var * (count / (count - 1)), layer.momentum)
    return mean, var


def _evaluate(step: Step, cleans: Mapping[str, Any]) -> Any:
    args, kwargs = substitute(step.args, cleans), substitute(step.kwargs, cleans)
    if getattr(step.module, "inplace", False):
        args = (
            args[0].clone(),
            *args[1:],
        )  # the layer's input is needed again, for its gradient or its bounds
    return _call(step, args, kwargs)


def _call(step: Step, args: Any, kwargs: Any) -> Any:
    if step.module is not None:
        return step.module(*args, **kwargs)
    if isinstance(step.op, str):
        return getattr(args[0], step.op)(*args[1:], **kwargs)
    return step.op(*args, **kwargs)


def _perturbed(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, Interval) or (isinstance(value, list | tuple) and any(_perturbed(v) for v in value))


def _no_rule(step: Step) -> NoReturn:
    op = step.op if isinstance(step.op, str) else getattr(step.op, "__name__", str(step.op))
    raise InputError(
        f"`{step.name}`: there is no interval rule for {op}",
        f"add one with `@certtool.bounds.rule({'nn.' if step.module is not None else ''}{op})`",
    )
