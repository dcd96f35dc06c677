"""The training step against standard training and against auto_LiRPA: ratios, measured side by side.

    python benchmarks/step.py --width 16 --batch 128 --dataset cifar10

Every variant takes one step in turn, again and again; the figure is the median of its repeats, in CPU-seconds and in
wall-clock seconds, and its ratio to a standard step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certtool import recipe
from certtool.bounds import Interval
from certtool.bounds.lirpa import _converted, _perturbed, auto_lirpa, margin_rows
from certtool.bounds.regularizers import relu_terms, tightness_terms
from certtool.bounds.statistics import statistics_of
from certtool.catalog import DATASETS
from certtool.models import build
from certtool.training.objective import WHOLE, Objective

Step = Callable[[], Tensor]
EPS, WEIGHT, TOLERANCE = 4 / 255, 0.25, 0.5
TERMS = ("tightness", "relu")


def optimised(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    """Loss, gradient, clip, Adam: what every variant does around its loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        total = loss()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        return total.detach()

    return step


def ours(kind: str, model: nn.Module, x: Tensor, labels: Tensor, compiled: bool) -> Step:
    terms = TERMS if kind == "warmup" else ()
    objective = Objective(model, terms, TOLERANCE)
    if kind == "standard":
        forward = torch.compile(model, dynamic=False) if compiled else model
        return optimised(model, lambda: F.cross_entropy(forward(x), labels))
    if compiled:
        objective.compile()
    weight = WEIGHT if kind == "warmup" else 0.0
    return optimised(model, lambda: objective(x, labels, EPS, weight, batch=WHOLE).total)


def theirs(model: nn.Module, x: Tensor, labels: Tensor) -> Step:
    """The same interval step with the same regularisers, through auto_LiRPA; normalisation is done before."""
    lirpa = auto_lirpa()
    first = model.get_submodule("normalize")
    model.set_submodule("normalize", nn.Identity())
    with torch.no_grad():
        lower, upper = (first((x + shift).clamp(0, 1)) for shift in (-EPS, EPS))
        clean = first(x)
    bounded = _converted(lirpa, model, clean, {"conv_mode": "patches"})
    bounded.train()
    box = Interval.from_bounds(lower, upper)
    others, rows = margin_rows(labels, model(clean).shape[1], clean.dtype)
    relus = [node for node in bounded._modules.values() if type(node).__name__ == "BoundRelu"]

    def loss() -> Tensor:
        bounded(clean)  # BatchNorm's statistics come from the clean batch
        bound, _ = bounded.compute_bounds(x=(_perturbed(lirpa, box),), C=rows, IBP=True, method=None, bound_upper=False)
        margins = torch.zeros(others.shape).masked_scatter(others, bound)
        layers = [Interval.from_bounds(node.inputs[0].lower, node.inputs[0].upper) for node in relus]
        found = statistics_of(tuple(node.name for node in relus), layers)
        tight = tightness_terms((upper - lower).mean(), found, TOLERANCE).mean()
        return F.cross_entropy(-margins, labels) + WEIGHT * (tight + relu_terms(found, TOLERANCE).mean())

    return optimised(bounded, loss)


def measure(steps: dict[str, Step], repeats: int) -> dict[str, dict[str, float]]:
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for name, step in steps.items():  # compilation and first touches
        print(f"{name}: loss {float(step()):.6g}", flush=True)
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            cpu, wall = time.process_time(), time.perf_counter()
            step()
            taken[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return {
        name: {"cpu": statistics.median(c for c, _ in rows), "wall": statistics.median(w for _, w in rows)}
        for name, rows in taken.items()
    }


def variants(width: int, batch: int, dataset: str, compiled: bool) -> dict[str, Step]:
    facts = DATASETS[dataset]
    name = {"digits": "tiny_cnn7"}.get(dataset, f"{dataset}_cnn7")
    chosen = recipe.load(name, [f"model.width={width}"])
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(batch, *facts.shape, generator=draw)
    labels = torch.randint(0, len(facts.classes), (batch,), generator=draw)

    def fresh(channels_last: bool = True) -> tuple[nn.Module, Tensor]:
        model = build(chosen.model, facts, "ibp", 0).train()
        if not channels_last:
            return model, x
        layout = torch.channels_last
        return model.to(memory_format=layout), x.contiguous(memory_format=layout)

    def one(kind: str, compiled: bool = False, channels_last: bool = True) -> Step:
        model, images = fresh(channels_last)
        return ours(kind, model, images, labels, compiled)

    steps = {"standard": one("standard"), "warmup": one("warmup"), "vanilla": one("vanilla"),
             "warmup, contiguous": one("warmup", channels_last=False)}  # fmt: skip
    if compiled:
        steps |= {f"{kind}, compiled": one(kind, compiled=True) for kind in ("standard", "warmup", "vanilla")}
    return steps | {"auto_LiRPA, warmup": theirs(fresh(False)[0], x, labels)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-compile", action="store_true")
    asked = parser.parse_args()
    figures = measure(variants(asked.width, asked.batch, asked.dataset, not asked.no_compile), asked.repeats)
    base = figures["standard"]
    for name, row in figures.items():
        ratios = {f"{key}_ratio": row[key] / base[key] for key in ("cpu", "wall")}
        print(f"{name:<22} cpu {row['cpu']:.3f} s  wall {row['wall']:.3f} s  {ratios['cpu_ratio']:.2f} x standard")
    print(json.dumps({"width": asked.width, "batch": asked.batch, "dataset": asked.dataset, "figures": figures}))


if __name__ == "__main__":
    main()
