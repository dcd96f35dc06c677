"""A network as a list of steps: which operation, on which earlier results. Walking it is `ibp.propagate`'s business."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from certtool.errors import InputError

RELUS: tuple[Any, ...] = (nn.ReLU, F.relu, torch.relu, "relu")
AFFINE = (nn.Conv2d, nn.Linear)


@dataclass(frozen=True)
class Result:
    """A reference to the value of an earlier step."""

    step: str


@dataclass(frozen=True)
class Step:
    """One operation. `op` is the key of its rule: a module's type, a function, or the name of a tensor method."""

    name: str  # a module's path in the network, or a function's name
    op: Any
    module: nn.Module | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    folds: Step | None = None  # BatchNorm only: the affine step before it, computed together with it
    folded: bool = False  # an affine step whose bounds are computed by the BatchNorm after it
    last_uses: tuple[str, ...] = ()  # results that no later step needs

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(ref.step for ref in _results((self.args, dict(self.kwargs))))


@dataclass(frozen=True)
class Graph:
    """The steps of a network in order. The first is its input, `output` names the step whose value it returns."""

    steps: tuple[Step, ...]
    output: str

    @property
    def relus(self) -> tuple[Step, ...]:
        """The layers of the regularisers (paper, section 3.1): bounds are taken at a ReLU's input."""
        return tuple(step for step in self.steps if step.op in RELUS)

    @property
    def first_affine(self) -> Step | None:
        """The convolution or linear layer that sees the pixels."""
        return next((step for step in self.steps if step.op in AFFINE), None)

    @property
    def classifier(self) -> Step | None:
        """The last layer if it is linear, so that it can be merged with the margins."""
        step = self[self.output]
        return step if step.op is nn.Linear and not step.folded else None

    def __getitem__(self, name: str) -> Step:
        return next(step for step in self.steps if step.name == name)


class _Tracer(fx.Tracer):
    """Keeps a module whole when a rule knows its type; otherwise looks inside."""

    def __init__(self, known: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.known = known

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self.known(m) or super().is_leaf_module(m, module_qualified_name)


def trace(model: nn.Module, known: Callable[[nn.Module], bool] = lambda module: False) -> Graph:
    """The steps of any network torch.fx can trace: no control flow that depends on values."""
    if known(model):
        model = nn.Sequential(model)  # a network of one layer is a single step, not that layer's inside
    for path, module in model.named_modules():
        _refuse_hidden_changes(module, path or type(model).__name__)
    try:
        nodes = list(_Tracer(known).trace(model).nodes)
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} cannot be traced: {str(error).splitlines()[0]}",
            "bounds need a network without control flow that depends on values (torch.fx)",
        ) from error
    names = _names(nodes)
    steps = [_step(node, model, names) for node in nodes if node.op != "output"]
    (output,) = [node.args[0] for node in nodes if node.op == "output"]
    if not isinstance(output, fx.Node):
        raise InputError(f"{type(model).__name__} returns {type(output).__name__}, not one tensor")
    if sum(step.op == "input" for step in steps) != 1:
        raise InputError(f"{type(model).__name__} takes several inputs; bounds need exactly one")
    result = names[output]
    _refuse_aliasing(steps, result)
    return Graph(tuple(_with_last_uses(_with_folding(steps, result), result)), result)


def _step(node: fx.Node, model: nn.Module, names: dict[fx.Node, str]) -> Step:
    convert: Any = lambda other: Result(names[other])  # noqa: E731
    args, kwargs = fx.map_arg(node.args, convert), fx.map_arg(dict(node.kwargs), convert)
    if node.op == "placeholder":
        return Step(names[node], "input", None, (), {})
    if node.op == "get_attr":
        return Step(names[node], "constant", None, (_attribute(model, str(node.target)),), {})
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return Step(names[node], type(module), module, tuple(args), kwargs)
    return Step(names[node], node.target, None, tuple(args), kwargs)


def _names(nodes: list[fx.Node]) -> dict[fx.Node, str]:
    """A module's path, a function's name; numbered where two steps would share one."""
    names: dict[fx.Node, str] = {}
    taken: set[str] = set()
    for node in nodes:
        base = str(node.target) if node.op == "call_module" else node.name
        name, number = base, 1
        while name in taken:
            number += 1
            name = f"{base}#{number}"
        taken.add(name)
        names[node] = name
    return names


def _attribute(model: nn.Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    value = getattr(model.get_submodule(owner), name)
    assert isinstance(value, Tensor)
    return value


def _refuse_hidden_changes(module: nn.Module, path: str) -> None:
    """A hook, or a forward replaced on the instance, changes what a layer computes without a rule knowing."""
    if module._forward_hooks or module._forward_pre_hooks:
        raise InputError(
            f"`{path}` ({type(module).__name__}) has forward hooks, which bounds cannot see",
            "remove them first, or bake them into the weights (torch.nn.utils.remove_weight_norm and the like)",
        )
    if "forward" in module.__dict__:
        raise InputError(f"the forward of `{path}` was replaced on the instance, which bounds cannot see")


def _is_in_place(step: Step) -> bool:
    method = isinstance(step.op, str) and step.op.endswith("_")
    flagged = bool(getattr(step.module, "inplace", False)) or step.kwargs.get("inplace") is True
    return method or flagged or step.op in (operator.iadd, operator.isub, operator.imul, operator.itruediv)


_VIEWS = (nn.Flatten, nn.Identity, nn.Dropout, torch.flatten, torch.reshape, "flatten", "view", "reshape", "contiguous")


def _refuse_aliasing(steps: list[Step], output: str) -> None:
    """An in-place operation also changes every other name of its argument; bounds take each name at its first value."""
    group: dict[str, int] = {}
    for number, step in enumerate(steps):
        in_place = _is_in_place(step)
        group[step.name] = group[step.inputs[0]] if step.inputs and (in_place or step.op in _VIEWS) else number
        if not in_place or not step.inputs:
            continue
        stale = {name for name, its in group.items() if its == group[step.name] and name != step.name}
        later = [name for other in steps[number + 1 :] for name in other.inputs]
        if stale & {*later, output}:
            raise InputError(
                f"`{step.name}` changes a tensor in place that is used again later",
                "use the form that returns a new tensor, such as `inplace=False`",
            )


def _with_folding(steps: list[Step], output: str) -> list[Step]:
    """Pair every BatchNorm with the affine layer that feeds it and nothing else."""
    users: dict[str, list[Step]] = {step.name: [] for step in steps}
    for step in steps:
        for name in step.inputs:
            users[name].append(step)
    by_name = {step.name: step for step in steps}
    pairs: dict[str, Step] = {}
    for step in steps:
        source = by_name[step.inputs[0]] if is_batch_norm(step.module) and step.inputs else None
        if source and source.op in AFFINE and len(users[source.name]) == 1 and source.name != output:
            pairs[step.name] = source
    folded = {source.name for source in pairs.values()}
    return [_replace(step, folds=pairs.get(step.name), folded=step.name in folded) for step in steps]


def is_batch_norm(module: nn.Module | None) -> bool:
    """torch's BatchNorm layers, and any layer that offers `scale_and_shift(mean, var)` as models.PartialBatchNorm."""
    torchs = isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and type(module).forward is nn.BatchNorm2d.forward
    return torchs or hasattr(module, "scale_and_shift")


def _with_last_uses(steps: list[Step], output: str) -> list[Step]:
    last: dict[str, str] = {}
    for step in steps:
        # A folded affine step passes its input on to the BatchNorm, which uses it.
        for name in (*step.inputs, *(step.folds.inputs if step.folds else ())):
            last[name] = step.name
    last.pop(output, None)
    return [_replace(step, last_uses=tuple(n for n, s in last.items() if s == step.name)) for step in steps]


def _replace(step: Step, **changes: Any) -> Step:
    return Step(**{**step.__dict__, **changes})


def _results(value: Any) -> list[Result]:
    if isinstance(value, Result):
        return [value]
    if isinstance(value, Mapping):
        return [result for item in value.values() for result in _results(item)]
    if isinstance(value, Collection) and not isinstance(value, str | Tensor):
        return [result for item in value for result in _results(item)]
    return []


def substitute(value: Any, values: Mapping[str, Any]) -> Any:
    """Arguments of a step with every reference replaced by the value it stands for."""
    if isinstance(value, Result):
        return values[value.step]
    if isinstance(value, Mapping):
        return {key: substitute(item, values) for key, item in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(substitute(item, values) for item in value)
    return value
