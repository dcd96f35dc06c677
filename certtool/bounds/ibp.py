"""Interval bound propagation: walk a network's steps and bound each with its rule.

In training the clean images walk along: BatchNorm takes its statistics from them, and bounds use those statistics as
a fixed affine map (paper, section 3.3 on Batch Normalization). In evaluation it uses the running ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from certtool.bounds.graph import Graph, Step, is_batch_norm, substitute, trace
from certtool.bounds.interval import Interval
from certtool.bounds.rules import RULES, Rule, fold, rule_for, scale_and_shift
from certtool.errors import InputError


@dataclass(frozen=True)
class Bounds:
    """What a pass found: the output's interval, those kept on request, and the clean output in training."""

    output: Interval
    kept: Mapping[str, Interval]
    clean: Tensor | None


def graph_of(model: nn.Module) -> Graph:
    """The network's steps; every operation has a rule, or the error names the one that has none."""
    graph = trace(model, known=lambda module: rule_for(type(module)) is not None or is_batch_norm(module))
    for step in graph.steps:
        if step.module is not None and not is_batch_norm(step.module) and rule_for(step.op) is None:
            _no_rule(step)
    return graph


def propagate(
    graph: Graph,
    box: Interval,
    *,
    clean: Tensor | None = None,
    keep: Collection[str] = (),
    rules: dict[Any, Rule] = RULES,
) -> Bounds:
    """Bounds of every step; `clean` given means training: its batch statistics bound everything."""
    bounds: dict[str, Any] = {}
    cleans: dict[str, Any] = {}
    kept: dict[str, Interval] = {}
    for step in graph.steps:
        if clean is not None:
            cleans[step.name] = clean if step.op == "input" else None
        bounds[step.name] = _bound(step, box, bounds, cleans, clean is not None, rules)
        if step.name in keep:
            kept[step.name] = bounds[step.name]
        for name in step.last_uses:
            bounds.pop(name, None)
            cleans.pop(name, None)
    output = bounds[graph.output]
    if not isinstance(output, Interval):
        raise InputError(f"the network's output `{graph.output}` does not depend on its input")
    return Bounds(output, kept, cleans.get(graph.output))


def _bound(
    step: Step,
    box: Interval,
    bounds: dict[str, Any],
    cleans: dict[str, Any],
    training: bool,
    rules: dict[Any, Rule],
) -> Any:
    if step.op == "input":
        return box
    if step.op == "constant":
        if training:
            cleans[step.name] = step.args[0]
        return step.args[0]
    if is_batch_norm(step.module):
        return _batch_norm(step, bounds, cleans, training, rules)
    if training:
        cleans[step.name] = _evaluate(step, cleans)
    if step.folded:
        return None
    args, kwargs = substitute(step.args, bounds), substitute(step.kwargs, bounds)
    if not _perturbed((args, kwargs)):
        return _call(step, args, kwargs)
    if step.op in ("size", "dim") or step.op is getattr:
        return _call(step, (args[0].center, *args[1:]), kwargs)
    function = rule_for(step.op, rules) or _no_rule(step)
    return function(*args, **kwargs) if step.module is None else function(step.module, *args, **kwargs)


def _batch_norm(
    step: Step, bounds: dict[str, Any], cleans: dict[str, Any], training: bool, rules: dict[Any, Rule]
) -> Interval:
    layer: Any = step.module
    (name,) = step.inputs
    if training:
        x = cleans[name]
        scale, shift = scale_and_shift_of(layer, *_batch_statistics(layer, x))
        shape = (1, -1, *[1] * (x.dim() - 2))
        cleans[step.name] = x * scale.view(shape) + shift.view(shape)
    else:
        if layer.running_mean is None:
            raise InputError(f"`{step.name}` keeps no running statistics, so its output depends on the batch")
        scale, shift = scale_and_shift_of(layer, layer.running_mean, layer.running_var)
    if step.folds is None:
        return scale_and_shift(bounds[name], scale, shift)
    affine = step.folds
    assert affine.module is not None
    function = rule_for(affine.op, rules)
    assert function is not None
    return function(fold(affine.module, scale, shift), bounds[affine.inputs[0]])


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


def _batch_statistics(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the clean batch, with their gradient; running statistics move once."""
    dims = [0, *range(2, x.dim())]
    var, mean = torch.var_mean(x, dims, correction=0)
    count = x.numel() // x.shape[1]
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
