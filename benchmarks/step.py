"""The training step against standard training and against auto_LiRPA, side by side.

    python benchmarks/step.py --width 16 --batch 128             all variants in turn: medians and ratios, as JSON
    python benchmarks/step.py --only "warmup, compiled"          one variant alone: its peak memory

A step is loss, gradient, clip and Adam on one batch of CIFAR-10's shape. "warmup" is the method while eps grows, both
regularisers included; "after warmup" has none, as vanilla IBP never has: in certtool they are the same step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from measure import Timing, bf16_arithmetic, interleaved, machine, own_peak, say
from other_side import OtherSide
from torch import Tensor, nn

from certtool import recipe
from certtool.bounds import Interval
from certtool.bounds.regularizers import relu_terms, tightness_terms
from certtool.bounds.statistics import statistics_of
from certtool.catalog import DATASETS
from certtool.device import in_layout
from certtool.models import build
from certtool.training.objective import Objective

Step = Callable[[], Tensor]
EPS, WEIGHT, TOLERANCE = 4 / 255, 0.25, 0.5
TERMS = ("tightness", "relu")
DATA = DATASETS["cifar10"]
FEW = ("standard", "warmup, compiled", "warmup, compiled, bf16", "auto_LiRPA, warmup")


def optimised(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    """What every variant does around its loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        total = loss()
        total.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        return total.detach()

    return step


class Bench:
    """One network and one batch; every variant starts from the same weights."""

    def __init__(self, width: int, batch: int) -> None:
        self.arguments = recipe.load("cifar10_cnn7", [f"model.width={width}"]).model
        draw = torch.Generator().manual_seed(0)
        self.x = torch.rand(batch, *DATA.shape, generator=draw)
        self.labels = torch.randint(0, len(DATA.classes), (batch,), generator=draw)

    def fresh(self, layout: torch.memory_format) -> tuple[nn.Module, Tensor]:
        model = build(self.arguments, DATA, "ibp", 0).train()
        return in_layout(model, layout), self.x.contiguous(memory_format=layout)

    def ours(
        self,
        kind: str,
        *,
        compiled: bool = False,
        precision: str = "fp32",
        layout: torch.memory_format = torch.channels_last,
    ) -> Step:
        model, x = self.fresh(layout)
        if kind == "standard":
            forward = torch.compile(model, dynamic=False) if compiled else model
            return optimised(model, lambda: F.cross_entropy(forward(x), self.labels))
        objective = Objective(model, TERMS if kind == "warmup" else (), TOLERANCE, precision)
        if compiled:
            objective.compile(len(x))
        weight = WEIGHT if kind == "warmup" else 0.0
        return optimised(model, lambda: objective(x, self.labels, EPS, weight).total)

    def theirs(self) -> Step:
        """The same interval step with the same regularisers through auto_LiRPA; normalisation is done before."""
        model, x = self.fresh(torch.contiguous_format)
        other = OtherSide(model, x)
        with torch.no_grad():
            box, clean = other.box((x - EPS).clamp(0, 1), (x + EPS).clamp(0, 1)), other.normalize(x)
        other.bounded.train()
        relus = [node for node in other.bounded._modules.values() if type(node).__name__ == "BoundRelu"]

        def loss() -> Tensor:
            other.bounded(clean)  # BatchNorm's statistics come from the clean batch
            margins = other.margins(box, self.labels, len(DATA.classes))
            layers = [Interval.from_bounds(node.inputs[0].lower, node.inputs[0].upper) for node in relus]
            found = statistics_of(tuple(node.name for node in relus), layers)
            tight = tightness_terms(2 * box.radius.mean(), found, TOLERANCE).mean()
            return F.cross_entropy(-margins, self.labels) + WEIGHT * (tight + relu_terms(found, TOLERANCE).mean())

        return optimised(other.bounded, loss)

    def variants(self) -> dict[str, Callable[[], Step]]:
        found: dict[str, Callable[[], Step]] = {
            "standard": lambda: self.ours("standard"),
            "standard, compiled": lambda: self.ours("standard", compiled=True),
            "warmup, compiled": lambda: self.ours("warmup", compiled=True),
            "after warmup, compiled": lambda: self.ours("vanilla", compiled=True),
            "warmup, eager": lambda: self.ours("warmup", layout=torch.contiguous_format),
            "after warmup, eager": lambda: self.ours("vanilla", layout=torch.contiguous_format),
            "auto_LiRPA, warmup": self.theirs,
        }
        if bf16_arithmetic():
            found["warmup, compiled, bf16"] = lambda: self.ours("warmup", compiled=True, precision="bf16")
        return found


def ratios(found: dict[str, Timing]) -> dict[str, float]:
    """What the project promises, in processor time."""
    cpu = {name: timing.cpu for name, timing in found.items()}
    pairs = {
        "warmup / auto_LiRPA": ("warmup, compiled", "auto_LiRPA, warmup"),
        "warmup / standard": ("warmup, compiled", "standard"),
        "after warmup / standard": ("after warmup, compiled", "standard"),
        "warmup / vanilla IBP": ("warmup, compiled", "after warmup, compiled"),
        "bf16 / auto_LiRPA": ("warmup, compiled, bf16", "auto_LiRPA, warmup"),
    }
    return {name: cpu[one] / cpu[two] for name, (one, two) in pairs.items() if one in cpu and two in cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--only", help="one variant alone, for its peak memory")
    parser.add_argument("--few", action="store_true", help="no eager variants, nothing after warmup")
    asked = parser.parse_args()
    variants = Bench(asked.width, asked.batch).variants()
    document: dict[str, Any] = {"width": asked.width, "batch": asked.batch}
    if asked.only:
        step = variants[asked.only]()
        for _ in range(3):
            step()
        print(json.dumps(document | {"only": asked.only, "peak_memory": own_peak()}))
        return
    if asked.few:
        variants = {name: make for name, make in variants.items() if name in FEW}
    found = interleaved({name: make() for name, make in variants.items()})
    for name, timing in found.items():
        say(f"  {name:<24} {timing.cpu:.3f} cpu-s  {timing.wall:.3f} s  {timing.cpu / found['standard'].cpu:.2f} x")
    timings = {name: timing.__dict__ for name, timing in found.items()}
    print(json.dumps(document | {"steps": timings, "ratios": ratios(found), "machine": machine()}))


if __name__ == "__main__":
    main()
