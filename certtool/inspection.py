"""Where bounds widen and which neurons are dead: the paper's diagnosis of a network, layer by layer."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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
from certtool.models.normalize import input_step

Statistics = Literal["batch", "running"]
SUMS = (operator.add, torch.add, operator.iadd)


@dataclass(frozen=True)
class Layer:
    """An affine layer with the BatchNorm behind it, or a residual sum.

    `growth` is the mean width here over that at the ReLU before (or the input): definition 1, left side, measured.
    `difference_gain` is its right side, from the weights alone; with BatchNorm the two differ. States are fractions of
    the ReLU that follows, None where none does.
    """

    name: str
    kind: str
    fan_in: int | None
    difference_gain: float | None
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

    eps: Epsilon
    images: int
    statistics: Statistics
    layers: tuple[Layer, ...]
    tightness: float
    relu: float

    def as_json(self) -> dict[str, Any]:
        return {
            "init": None,
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
    model: nn.Module, x: Tensor, eps: Epsilon, *, statistics: Statistics = "running", tolerance: float = 0.5
) -> Inspection:
    """Bounds of a batch of images in [0, 1], and what they say of every layer. The model is left as it is."""
    if len(x) == 0:
        raise InputError("there are no images to inspect with", "`--images` must be at least 1")
    if statistics == "batch":
        model = copy.deepcopy(model)  # BatchNorm moves its running statistics in training mode
    graph = graph_of(model)
    places = list(_places(graph))
    start = input_step(graph)
    keep = {start, *(place.output for place in places), *(graph[step.name].inputs[0] for step in graph.relus)}
    bounds = propagate(graph, ball(x, float(eps)), clean=x if statistics == "batch" else None, keep=keep)
    layers = tuple(_layer(place, graph, bounds, start, tolerance) for place in places)
    names = tuple(step.name for step in graph.relus)
    whole = statistics_of(names, [bounds.kept[graph[name].inputs[0]] for name in names])
    tight = tightness_terms(_width(bounds, start), whole, tolerance)
    balance = relu_terms(whole, tolerance)
    means = [float(terms.mean()) if len(terms) else 0.0 for terms in (tight, balance)]
    return Inspection(eps, len(x), statistics, layers, *means)


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
    """The input of the nearest ReLU upstream, along the first argument; the network's input where there is none."""
    while step.inputs:
        step = graph[step.inputs[0]]
        if step.op in RELUS:
            return step.inputs[0]
    return input_step(graph)


def _layer(place: _Place, graph: Graph, bounds: Bounds, start: str, tolerance: float) -> Layer:
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
        name=place.step.name,
        kind="sum" if affine is None else "conv" if isinstance(affine, nn.Conv2d) else "linear",
        fan_in=None if affine is None else fan_in(affine),
        difference_gain=None if affine is None else difference_gain(affine),
        growth=width / max(float(_width(bounds, place.before)), 1e-30),
        mean_width=width,
        log_width_ratio=math.log(max(width, 1e-30) / max(input_width, 1e-30)),
        **states,
    )


def _width(bounds: Bounds, step: str) -> Tensor:
    return 2 * bounds.kept[step].radius.mean()
