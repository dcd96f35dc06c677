"""Weight initialisations, and the difference gain each of them gives (paper, definition 1 and table of gains)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from certtool.bounds import Graph, graph_of
from certtool.bounds.graph import RELUS, Step
from certtool.catalog import INITIALISATIONS


@dataclass(frozen=True)
class Initialiser:
    """How a weight with fan-in n is drawn, and the difference gain n/2 E|W| that follows from it."""

    draw: Callable[[Tensor, int, torch.Generator], object]
    gain: Callable[[int], float] | None  # None where there is no closed form


def _uniform(bound: Callable[[int], float], gain: Callable[[int], float]) -> Initialiser:
    return Initialiser(lambda w, n, g: w.uniform_(-bound(n), bound(n), generator=g), gain)


def _normal(deviation: Callable[[int], float], gain: Callable[[int], float]) -> Initialiser:
    return Initialiser(lambda w, n, g: w.normal_(0.0, deviation(n), generator=g), gain)


INITIALISERS: dict[str, Initialiser] = {
    # E|W| of N(0, s^2) is sqrt(2/pi) s, so s = sqrt(2 pi)/n makes the gain exactly 1 (paper, section 3.3).
    "ibp": _normal(lambda n: math.sqrt(2 * math.pi) / n, lambda n: 1.0),
    "xavier-uniform": _uniform(lambda n: 1 / math.sqrt(n), lambda n: math.sqrt(n) / 4),
    "xavier-normal": _normal(lambda n: 1 / math.sqrt(n), lambda n: math.sqrt(n / (2 * math.pi))),
    # The paper's table prints sqrt(3 n)/4 here; n/2 E|U(+-sqrt(6/n))| and its own measurements say sqrt(6 n)/4.
    "kaiming-uniform": _uniform(lambda n: math.sqrt(6 / n), lambda n: math.sqrt(6 * n) / 4),
    "kaiming-normal": _normal(lambda n: math.sqrt(2 / n), lambda n: math.sqrt(n / math.pi)),
    "orthogonal": Initialiser(lambda w, n, g: nn.init.orthogonal_(w, generator=g), None),
}
assert set(INITIALISERS) == set(INITIALISATIONS)


def fan_in(layer: nn.Conv2d | nn.Linear) -> int:
    """How many inputs an output of this layer sees; a grouped convolution sees its group's."""
    return layer.weight[0].numel()


def difference_gain(layer: nn.Conv2d | nn.Linear) -> float:
    """n/2 mean|W|: how much wider bounds become through this layer and the ReLU before it (paper, definition 1)."""
    return fan_in(layer) / 2 * float(layer.weight.detach().abs().mean())


@torch.no_grad()
def initialise(model: nn.Module, name: str, seed: int) -> None:
    """Draw every weight but the classifier's; biases and the classifier keep torch's default."""
    generator = torch.Generator().manual_seed(seed)
    graph = graph_of(model)
    for step in hidden_affine_steps(graph):
        layer = step.module
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        weight = torch.empty_like(layer.weight, device="cpu")
        INITIALISERS[name].draw(weight, fan_in(layer), generator)
        if name == "ibp" and follows_residual_sum(graph, step):
            weight /= 2  # the sum of two branches is twice as wide (paper, appendix A.3)
        layer.weight.copy_(weight)


def hidden_affine_steps(graph: Graph) -> list[Step]:
    """Convolutions and linear layers without the classifier."""
    affine = [step for step in graph.steps if isinstance(step.module, nn.Conv2d | nn.Linear)]
    return [step for step in affine if step is not graph.classifier]


def follows_residual_sum(graph: Graph, step: Step) -> bool:
    """True if the layer's input is ReLU(sum of branches), also with a flatten in between."""
    source = graph[step.inputs[0]]
    while source.op is nn.Flatten or source.op in (torch.flatten, "flatten", "view", "reshape"):
        source = graph[source.inputs[0]]
    if source.op not in RELUS:
        return False
    return graph[source.inputs[0]].op in (operator.add, torch.add)
