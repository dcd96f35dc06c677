"""Twenty steps of a real run, alone or as one of several ranks, in float64 or float32: losses and weights to a file.

torchrun --standalone --nproc-per-node 2 tests/ranks.py OUT.safetensors float64 cnn7
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from certtool import recipe as recipes
from certtool.data import Split, load_split
from certtool.distributed import joined
from certtool.training.loop import Trainer
from certtool.training.run_folder import RunFolder

STEPS = 20
MODELS = {
    "cnn7": ["model.width=4", "model.hidden=16"],
    "wide_resnet": ['model={arch="wide_resnet",width=4,widen=1,hidden=16}'],
}


def main(out: Path, kind: str, arch: str, *more: str) -> None:
    if kind == "float64":
        torch.set_default_dtype(torch.float64)
        Split.pixels = lambda self, images: images.double() / self.facts.scale  # type: ignore[method-assign]
    torch.set_num_threads(1)
    settings = ["data.batch_size=50", "train.warmup.start=1", "train.warmup.epochs=2", "train.epochs=2",
                "train.lr_milestones=[]"]  # fmt: skip
    chosen = recipes.load("tiny_cnn7_short", [*settings, *MODELS[arch], *more])
    train, test = load_split("digits", "train"), load_split("digits", "test")
    train = replace(train, images=train.images[:475], labels=train.labels[:475])  # the tenth batch has 25 images
    with joined(torch.device("cpu")) as world:
        trainer = Trainer(chosen, RunFolder(out.parent), train, test, torch.device("cpu"), world)
        result = {"losses": torch.tensor(losses(trainer))}
        if world.leads:
            named = trainer.model.state_dict().items()
            save_file(result | {name: value.contiguous() for name, value in named if value.is_floating_point()}, out)


def losses(trainer: Trainer) -> list[float]:
    from certtool.data import plan_epoch

    found, before = [], 0.0
    for step in range(STEPS):
        plan = plan_epoch(len(trainer.train), trainer.augmentation, 0, 1 + step // 10)
        trainer.step(step, plan, step % 10)
        whole = float(trainer.meter.sums[0])
        found.append((whole - before) / (25 if step % 10 == 9 else 50))
        before = whole
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
