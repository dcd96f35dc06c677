"""Where bounds widen and which neurons are dead: the paper's diagnosis of a network, layer by layer."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor, nn

from certtool.bounds import Bounds, Graph, Step, ball, graph_of, propagate
from certtool.bounds.graph import AFFINE, RELUS, is_batch_norm
from certtool.bounds.regularizers import relu_terms, tightness_terms
from certtool.bounds.statistics import statistics_of
from certtool.epsilon import Epsilon
from certtool.errors import InputError
from certtool.models import difference_gain, fan_in
from certtool.models.initialise import INITIALISERS, follows_residual_sum, hidden_affine_steps
from certtool.models.normalize import input_step

Statistics = Literal["batch", "running"]
SUMS = (operator.add, torch.add, operator.iadd)


@dataclass(frozen=True)
class Layer:
    """An affine layer with the BatchNorm behind it, or a residual sum.

    `growth` is the mean width here over that at the ReLU before (or the input): definition 1, left side, measured.
    `difference_gain` is its right side, from the weights alone; with BatchNorm the two differ. `expected_gain` is what
    the closed form of an initialisation predicts. States are fractions of the ReLU that follows, None where none does.
    """

    name: str
    kind: str  # conv | linear | sum
    batch_norm: bool
    fan_in: int | None
    difference_gain: float | None
    expected_gain: float | None
    growth: float
    mean_width: float
    log_width_ratio: float
    active: float | None
    inactive: float | None
    unstable: float | None
    tightness: float | None
    relu: float | None


@dataclass(frozen=True)
class Inspection:
    """All layers of one network over one batch at one radius."""

    title: str
    init: str | None  # the initialisation, for a network that has not been trained
    eps: Epsilon
    images: int
    statistics: Statistics
    layers: tuple[Layer, ...]
    tightness: float
    relu: float

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "init": self.init,
            "statistics": self.statistics,
            "layers": [asdict(layer) for layer in self.layers],
            "regularizers": {"tightness": self.tightness, "relu": self.relu},
        }


@dataclass(frozen=True)
class _Place:
    """A layer in the graph: its step, the step that holds its output, the ReLU that reads it, the ReLU before it."""

    step: Step
    output: str
    relu: str | None
    before: str


@torch.no_grad()
def inspect(
    model: nn.Module,
    x: Tensor,
    eps: Epsilon,
    *,
    statistics: Statistics = "running",
    tolerance: float = 0.5,
    title: str = "network",
    init: str | None = None,
) -> Inspection:
    """Bounds of a batch of images in [0, 1], and what they say of every layer. The model is left as it is."""
    if len(x) == 0:
        raise InputError("there are no images to inspect with", "`--images` must be at least 1")
    if statistics == "batch":
        model = copy.deepcopy(model)  # BatchNorm moves its running statistics in training mode
    graph = graph_of(model)
    places = list(_places(graph))
    start = input_step(graph)
    keep = {start, *(place.output for place in places), *(step.inputs[0] for step in graph.relus)}
    bounds = propagate(graph, ball(x, float(eps)), clean=x if statistics == "batch" else None, keep=keep)
    layers = tuple(_layer(place, graph, bounds, start, tolerance, init) for place in places)
    names = tuple(step.name for step in graph.relus)
    whole = statistics_of(names, [bounds.kept[step.inputs[0]] for step in graph.relus])
    terms = tightness_terms(_width(bounds, start), whole, tolerance), relu_terms(whole, tolerance)
    tight, balance = (float(term.mean()) if len(term) else 0.0 for term in terms)
    return Inspection(title, init, eps, len(x), statistics, layers, tight, balance)


def inspect_initialisation(
    draw: Callable[[int], nn.Module],
    x: Tensor,
    eps: Epsilon,
    *,
    init: str,
    trials: int,
    statistics: Statistics,
    title: str,
) -> Inspection:
    """The mean over `trials` networks that `draw(seed)` makes: what an initialisation does to bounds, not one draw."""
    runs = [
        inspect(draw(seed), x, eps, statistics=statistics, title=title, init=init) for seed in range(max(trials, 1))
    ]
    layers = tuple(_mean_layer(group) for group in zip(*(run.layers for run in runs), strict=True))
    tight, balance = fmean(run.tightness for run in runs), fmean(run.relu for run in runs)
    return replace(runs[0], layers=layers, tightness=tight, relu=balance)


def _mean_layer(group: Sequence[Layer]) -> Layer:
    means: dict[str, Any] = {
        field.name: fmean(getattr(layer, field.name) for layer in group)
        for field in fields(Layer)
        if isinstance(getattr(group[0], field.name), float)
    }
    return replace(group[0], **means)


def _places(graph: Graph) -> Iterator[_Place]:
    users: dict[str, list[Step]] = {}
    for step in graph.steps:
        for name in step.inputs:
            users.setdefault(name, []).append(step)
    for step in graph.steps:
        if step.op not in (*AFFINE, *SUMS):
            continue
        output, readers = step.name, users.get(step.name, [])
        if len(readers) == 1 and is_batch_norm(readers[0].module):
            output, readers = readers[0].name, users.get(readers[0].name, [])
        relu = next((reader.name for reader in readers if reader.op in RELUS), None)
        yield _Place(step, output, relu, _relu_before(graph, step))


def _relu_before(graph: Graph, step: Step) -> str:
    """The input of the nearest ReLU upstream, along the first argument; the network's input where there is none.

    A sum grows against the ReLU that both of its branches start from, so the ones inside a branch do not count.
    """
    if step.op in SUMS:
        upstream = [_relus_upstream(graph, name) for name in step.inputs]
        common = [name for name in upstream[0] if all(name in other for other in upstream[1:])]
        return common[0] if common else input_step(graph)
    return next(iter(_relus_upstream(graph, step.inputs[0])), input_step(graph))


def _relus_upstream(graph: Graph, name: str) -> list[str]:
    """Inputs of the ReLUs from a step back to the image, nearest first, along first arguments."""
    found, step = [], graph[name]
    while True:
        if step.op in RELUS:
            found.append(step.inputs[0])
        if not step.inputs:
            return found
        step = graph[step.inputs[0]]


def _layer(place: _Place, graph: Graph, bounds: Bounds, start: str, tolerance: float, init: str | None) -> Layer:
    width, input_width = float(_width(bounds, place.output)), float(_width(bounds, start))
    module = place.step.module
    affine = module if isinstance(module, nn.Conv2d | nn.Linear) else None
    states: dict[str, float | None] = dict.fromkeys(("active", "inactive", "unstable", "tightness", "relu"))
    if place.relu is not None:
        figures = statistics_of((place.relu,), [bounds.kept[place.output]])
        active, inactive = float(figures.active), float(figures.inactive)
        tight = float(tightness_terms(_width(bounds, start), figures, tolerance))
        balance = float(relu_terms(figures, tolerance))
        states = dict(zip(states, (active, inactive, 1 - active - inactive, tight, balance), strict=True))
    return Layer(
        name=place.step.name if affine is not None else f"sum before {place.relu}",
        kind="sum" if affine is None else "conv" if isinstance(affine, nn.Conv2d) else "linear",
        batch_norm=place.output != place.step.name,
        fan_in=None if affine is None else fan_in(affine),
        difference_gain=None if affine is None else difference_gain(affine),
        expected_gain=None if init is None else _expected(graph, place.step, init),
        growth=width / max(float(_width(bounds, place.before)), 1e-30),
        mean_width=width,
        log_width_ratio=math.log(max(width, 1e-30) / max(input_width, 1e-30)),
        **states,
    )


def _expected(graph: Graph, step: Step, init: str) -> float | None:
    """The closed form of this initialisation; half of it behind a residual sum, where IBP weights are halved."""
    gain = INITIALISERS[init].gain
    if gain is None or step.name not in {hidden.name for hidden in hidden_affine_steps(graph)}:
        return None
    assert isinstance(step.module, nn.Conv2d | nn.Linear)
    halved = init == "ibp" and follows_residual_sum(graph, step)
    return gain(fan_in(step.module)) / (2 if halved else 1)


def _width(bounds: Bounds, step: str) -> Tensor:
    return 2 * bounds.kept[step].radius.mean()
