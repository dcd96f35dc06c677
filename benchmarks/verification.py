"""Interval verification, clean verdict included, against auto_LiRPA's; the rigorous rung; the whole ladder.

    CERTTOOL_DATA=... python benchmarks/verification.py

Images are CIFAR-10's test set; the network has its initial weights, and its own answers count as the labels, so that
every image is bounded. All candidates take the same images in turn; auto_LiRPA's better batch size counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from measure import interleaved, machine, own_peak, say
from other_side import OtherSide
from torch import nn

import certtool
from certtool import recipe
from certtool.bounds import ball, certified_mask
from certtool.catalog import DATASETS
from certtool.data import Split, load_both
from certtool.epsilon import Epsilon
from certtool.models import build
from certtool.verification.images import choose
from certtool.verification.ladder import Ladder, LadderSettings

EPS = Epsilon.parse("8/255")
BATCH = 128


def ours(model: nn.Module, split: Split, arithmetic: Any) -> Callable[[], None]:
    """Clean verdict and intervals; its network is made ready before, as auto_LiRPA's is."""
    settings = LadderSettings(method="ibp", arithmetic=arithmetic, attack=None, batch_size=BATCH)
    ladder = Ladder(model, choose(split, None, None), settings)

    def run() -> None:
        ladder.climb([EPS])

    return run


def interval_rung(model: nn.Module, split: Split, arithmetic: Any) -> Callable[[], None]:
    """The rung alone, for all images whatever the clean verdict."""
    settings = LadderSettings(method="ibp", arithmetic=arithmetic, attack=None, batch_size=BATCH)
    ladder = Ladder(model, choose(split, None, None), settings)

    def run() -> None:
        for rows in torch.split(torch.arange(len(split)), BATCH):
            ladder.interval_margins(rows, ladder.images.outer(rows, EPS.value).interval())

    return run


def theirs(model: nn.Module, split: Split, size: int) -> Callable[[], None]:
    """The clean verdict and the interval margins, so many images at once; normalisation is done before."""
    other = OtherSide(model, split.pixels(split.images[:2]))
    other.bounded.eval()

    @torch.no_grad()
    def run() -> None:
        for rows in torch.split(torch.arange(len(split)), size):
            x, labels = split.pixels(split.images[rows]), split.labels[rows]
            right = other.bounded(other.normalize(x)).argmax(1) == labels
            box = ball(x, float(EPS))
            margins = other.margins(other.box(box.lower, box.upper), labels, 10)
            (certified_mask(margins, labels) & right).sum().item()

    return run


def compared(width: int, images: int, parts: int, test: Split) -> dict[str, Any]:
    """Images a second, and ratios; `parts` parts of the images, each taken by all three in turn."""
    model = build(recipe.load("cifar10_cnn7", [f"model.width={width}"]).model, DATASETS["cifar10"], "ibp", 0).eval()
    part = test.first(images // parts)
    with torch.no_grad():
        answers = [model(part.pixels(rows)).argmax(1) for rows in torch.split(part.images, BATCH)]
    part = replace(part, labels=torch.cat(answers))
    found = interleaved(
        {
            "float32": ours(model, part, "float32"),
            "auto_LiRPA": theirs(model, part, BATCH),
            "auto_LiRPA, 32 at once": theirs(model, part, 32),
            "float32 rung": interval_rung(model, part, "float32"),
            "rigorous rung": interval_rung(model, part, "rigorous"),
        },
        repeats=parts,
        warm=1,
    )
    speeds = {name: len(part) / timing.wall for name, timing in found.items()}
    say(f"  width {width}: " + ", ".join(f"{name} {speed:.0f} images/s" for name, speed in speeds.items()))
    return {
        "width": width,
        "images": len(part) * parts,
        "images_per_second": speeds,
        "float32 / auto_LiRPA": speeds["float32"] / max(v for k, v in speeds.items() if k.startswith("auto_LiRPA")),
        "rigorous / float32": speeds["float32 rung"] / speeds["rigorous rung"],
    }


def ladder() -> dict[str, Any]:
    """The zoo's digits model with every rung: seconds from the start of a rung to the start of the next."""
    model = certtool.load("tiny_cnn7")
    split = load_both(recipe.load("tiny_cnn7").data, None)[1]
    began: dict[str, float] = {}
    whole = time.perf_counter()

    def note(rung: str, done: int, total: int) -> None:
        began[rung] = time.perf_counter()

    result = Ladder(
        model.model, choose(split, None, None), LadderSettings(), preprocessing="normalize", progress=note
    ).climb([Epsilon.parse("0.1")])[0]
    certified = sum(image.verdict == "certified" for image in result.images)
    seconds, last = {}, whole
    for rung, moment in began.items():
        seconds[rung], last = moment - last, moment
    return {"model": "tiny_cnn7", "eps": "0.1", "images": len(split), "certified": certified,
            "seconds": time.perf_counter() - whole, "rungs": seconds}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    asked = parser.parse_args()
    test = load_both(recipe.load("cifar10_cnn7").data, None)[1]
    widths = [compared(16, asked.images, 10, test), compared(64, min(asked.images, 1000), 5, test)]
    print(json.dumps({"intervals": widths, "ladder": ladder(), "peak_memory": own_peak(), "machine": machine()}))


if __name__ == "__main__":
    main()
