"""The training loop: a generator of events. It computes and saves; it never prints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from certtool import checkpoint
from certtool.catalog import NO_AUGMENTATION
from certtool.checkpoint import parameter_count
from certtool.data import EpochPlan, Split, absolute_path, augment, hold_out, load_both, plan_epoch
from certtool.device import fits, in_layout
from certtool.distributed import World
from certtool.errors import CertToolError, Exit, Interrupted
from certtool.evaluation import interval_accuracy
from certtool.files import write_atomically
from certtool.models import build
from certtool.recipe import Recipe
from certtool.training import state
from certtool.training.events import EpochDone, Event, Finished, Progress, Started
from certtool.training.meter import Meter
from certtool.training.methods import check_engine, objective_for
from certtool.training.objective import Loss
from certtool.training.run_folder import RunFolder
from certtool.training.schedule import Schedule
from certtool.training.speed import layout_for, settled

ALONE = World()
SAVE_EVERY = 300.0  # seconds; and after every epoch
LOOK_EVERY = 0.25  # seconds between two looks at the device's sums
AGREE_EVERY = 10  # steps on an accelerator between two questions to all ranks whether to stop
OBSERVE_EVERY = 10  # steps between two measurements of the bounds where no regulariser needs them


class Diverged(CertToolError):
    exit_code = Exit.ANSWER_IS_NO


class Trainer:
    """One run, from its first step or from where it was left."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        train: Split,
        test: Split,
        device: torch.device,
        world: World = ALONE,
    ) -> None:
        self.recipe, self.folder, self.device, self.world = recipe, folder, device, world
        self.validation: Split | None = None
        if recipe.data.validation_fraction > 0:
            train, self.validation = hold_out(train, recipe.data.validation_fraction)
        self.header = checkpoint.header_for(recipe, train, recipe.train.epochs)
        self.train, self.test = (split.to(device) if fits(split, device) else split for split in (train, test))
        model = build(recipe.model, train.facts, recipe.train.init, recipe.seed)
        self.layout = layout_for(recipe, model)
        self.model = in_layout(model.to(device), self.layout).train()
        self.objective = objective_for(recipe, self.model, train.facts)
        self.schedule = Schedule(recipe, math.ceil(len(train) / recipe.data.batch_size))
        fused = device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=recipe.train.lr, fused=fused)
        self.meter = self._new_meter()
        self.standing = state.Standing()
        augmented = recipe.data.augment == "standard"
        self.augmentation = train.facts.augmentation if augmented else NO_AUGMENTATION

    def resume(self) -> None:
        """Take up the saved state, if there is one: the leader's, whatever the number of ranks that saved it."""
        file = self.world.share(self.folder.read_last() if self.world.leads else None)
        if file is not None:
            where = str(self.folder.last)
            images = self.header["dataset"]["train_sha256"]
            self.standing = state.restore(file, where, self.model, self.optimizer, self.meter, self.recipe, images)
        if self.world.leads:
            self.folder.cut_metrics(self.standing.step)
        self.world.wait()

    def run(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """Every epoch that is still to do. `stopped` is asked between steps; a yes saves and raises Interrupted."""
        yield self._started()
        steps, first = self.schedule.steps_per_epoch, self.standing.step
        clock = Clock(self.standing.seconds, first, self.schedule.total_steps)
        for epoch in range(first // steps + 1, self.recipe.train.epochs + 1):
            yield from self._epoch(epoch, clock, stopped)
        already = first == self.schedule.total_steps
        yield Finished(self.recipe, self.folder.path, self.folder.model, self._last_metrics(), clock.seconds(), already)

    def _epoch(self, epoch: int, clock: Clock, stopped: Callable[[], bool]) -> Iterator[Event]:
        steps = self.schedule.steps_per_epoch
        plan = plan_epoch(len(self.train), self.augmentation, self.recipe.seed, epoch)
        began = time.monotonic() - self.standing.epoch_seconds
        for step in range(self.standing.step, epoch * steps):
            self.step(step, plan, step - (epoch - 1) * steps)
            self.standing = replace(self.standing, step=step + 1)
            if self._all_stop(stopped(), step):
                self._save(clock, time.monotonic() - began)
                raise self._interrupted()
            if clock.due_to_save() and step + 1 < epoch * steps:
                self._save(clock, time.monotonic() - began)
            if clock.due_to_look():
                yield self._progress(step, clock, time.monotonic() - began)
        metrics = self._finish_epoch(epoch, time.monotonic() - began)
        if self.world.leads:
            self.folder.append_metrics(metrics)
        self.meter = self._new_meter()
        if epoch == self.recipe.train.epochs and self.recipe.train.selection == "last":
            self._save_model(self.header)
        self._save(clock, 0.0)
        self.world.wait()
        yield EpochDone(metrics, clock.left(self.standing.step))

    def step(self, step: int, plan: EpochPlan, number: int) -> None:
        """One batch: loss, gradient, clip, Adam. The batch may come in parts, and ranks may share each part."""
        size = self.recipe.data.batch_size
        indices = plan.order[number * size : (number + 1) * size]
        self.optimizer.zero_grad(set_to_none=True)
        for part in torch.split(indices, math.ceil(len(indices) / self.recipe.train.accumulate)):
            loss = self._loss(step, plan, part)
            share = len(part) / len(indices)
            (loss.total if share == 1 else loss.total * share).backward()  # type: ignore[no-untyped-call]
            self.meter.add(loss, len(part), self.world)
        self.world.total_gradients(self.model.parameters())
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.train.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.lr(step)
        self.optimizer.step()
        self.meter.count_step(norm)

    def _loss(self, step: int, plan: EpochPlan, indices: Tensor) -> Loss:
        x, labels = self._batch(plan, self.world.part(indices))
        batch = self.world.batch(len(indices))
        if self.recipe.train.method == "natural":
            return self.objective.natural(x, labels, batch)
        eps, weight = self.schedule.eps(step), self.schedule.weight(step)
        return self.objective(x, labels, eps, weight, observe=step % OBSERVE_EVERY == 0, batch=batch)

    def _all_stop(self, asked: bool, step: int) -> bool:
        """A signal reaches ranks at different steps; they agree, on a GPU only now and then: it has to wait for it."""
        if self.device.type != "cpu" and not self.world.alone and step % AGREE_EVERY:
            return False
        return self.world.any(asked, self.device)

    def _batch(self, plan: EpochPlan, indices: Tensor) -> tuple[Tensor, Tensor]:
        there = indices.to(self.train.images.device)
        images, labels = self.train.images[there].to(self.device), self.train.labels[there].to(self.device)
        if self.augmentation != NO_AUGMENTATION:
            images = augment(images, plan, indices)
        return self.train.pixels(images).contiguous(memory_format=self.layout), labels

    def _finish_epoch(self, epoch: int, seconds: float) -> dict[str, object]:
        step, means = self.standing.step, self.meter.means()
        if not math.isfinite(means["loss"]) or not math.isfinite(means["grad_norm"]):
            raise Diverged(
                f"the loss is no longer finite in epoch {epoch}; the state after epoch {epoch - 1} is kept",
                "try a smaller `train.lr` or a longer `train.warmup.epochs`",
            )
        metrics: dict[str, object] = {
            "epoch": epoch,
            "step": step,
            "phase": self.schedule.phase(step - 1),
            "eps": self.schedule.eps(step - 1),
            "lr": self.schedule.lr(step - 1),
            "lambda": self.schedule.weight(step - 1),
            **means,
            "seconds": seconds,
            "images_per_second": len(self.train) / max(seconds, 1e-9),
        }
        return metrics | self._evaluate(epoch)

    def _evaluate(self, epoch: int) -> dict[str, float]:
        """Test figures when they are due; with `selection = "validation"` the best epoch so far becomes the model."""
        train, eps = self.recipe.train, float(self.recipe.threat.eps)
        result: dict[str, float] = {}
        if epoch == train.epochs or (train.eval_every and epoch % train.eval_every == 0):
            accuracy = interval_accuracy(self.model, self.test, eps, self.world)
            result |= {"test_clean_accuracy": accuracy.clean, "test_certified_accuracy": accuracy.certified}
        warm = (
            self.schedule.eps(self.standing.step - 1) >= float(self.recipe.threat.target) or train.method == "natural"
        )
        if self.validation is not None and (warm or epoch == train.epochs):
            accuracy = interval_accuracy(self.model, self.validation, eps, self.world)
            result |= {
                "validation_clean_accuracy": accuracy.clean,
                "validation_certified_accuracy": accuracy.certified,
            }
            figure = accuracy.clean if train.method == "natural" else accuracy.certified
            if train.selection == "validation" and figure >= self.standing.best:
                self.standing = replace(self.standing, best=figure)
                self._save_model(self.header | {"epochs": epoch})
        return result

    def _save(self, clock: Clock, epoch_seconds: float) -> None:
        self.standing = replace(self.standing, epoch_seconds=epoch_seconds, seconds=clock.seconds())
        if self.world.leads:
            images = self.header["dataset"]["train_sha256"]
            content = state.encode(self.model, self.optimizer, self.meter, self.recipe, images, self.standing)
            write_atomically(self.folder.last, content)
        clock.saved()

    def _save_model(self, header: dict[str, Any]) -> None:
        if self.world.leads:
            checkpoint.save(self.folder.model, self.model, header)

    def _new_meter(self) -> Meter:
        return Meter([relu.name for relu in self.objective.graph.relus], self.device)

    def _started(self) -> Started:
        return Started(
            self.recipe,
            self.folder.path,
            str(self.device),
            parameter_count(self.model),
            len(self.train),
            len(self.test),
            self.schedule.steps_per_epoch,
            self.standing.step,
        )

    def _progress(self, step: int, clock: Clock, epoch_seconds: float) -> Progress:
        speed = self.meter.counts["images"] / max(epoch_seconds, 1e-9)
        return Progress(
            step + 1,
            self.schedule.epoch(step),
            self.schedule.phase(step),
            self.schedule.eps(step),
            self.schedule.lr(step),
            self.schedule.weight(step),
            self.meter.means(),
            speed,
            clock.left(step + 1),
        )

    def _interrupted(self) -> Interrupted:
        return Interrupted(
            f"stopped after step {self.standing.step} of {self.schedule.total_steps}; nothing is lost",
            f"go on with `certtool train --resume {self.folder.path}`",
        )

    def _last_metrics(self) -> dict[str, object]:
        return self.folder.metrics()[-1]


class Clock:
    """Seconds spent, also in earlier sittings of the same run; when to look, when to save; what is left."""

    def __init__(self, spent: float, first_step: int, total_steps: int) -> None:
        self.began = time.monotonic()
        self.spent, self.first_step, self.total_steps = spent, first_step, total_steps
        self.last_look = self.last_save = self.began

    def seconds(self) -> float:
        return self.spent + time.monotonic() - self.began

    def left(self, step: int) -> float:
        done = max(step - self.first_step, 1)
        return (time.monotonic() - self.began) / done * (self.total_steps - step)

    def due_to_look(self) -> bool:
        due = time.monotonic() - self.last_look >= LOOK_EVERY
        if due:
            self.last_look = time.monotonic()
        return due

    def due_to_save(self) -> bool:
        return time.monotonic() - self.last_save >= SAVE_EVERY

    def saved(self) -> None:
        self.last_save = time.monotonic()


def new_run(
    recipe: Recipe,
    out: Path | None,
    *,
    overwrite: bool = False,
    data: Path | None = None,
    download: bool = False,
    device: torch.device,
    world: World = ALONE,
) -> Trainer:
    """A run from its first step. Its folder is made last: a missing data set or engine leaves nothing behind."""
    check_engine(recipe)
    train, test = _splits(recipe, data, download, world)
    recipe = settled(recipe.at(absolute_path(recipe.data, data)), len(train), train.facts, device, world)
    folder = world.share(RunFolder.create(recipe, out, overwrite=overwrite) if world.leads else RunFolder(Path()))
    return Trainer(recipe, folder, train, test, device, world)


def resumed_run(
    path: Path, *, data: Path | None = None, download: bool = False, device: torch.device, world: World = ALONE
) -> Trainer:
    """A run from where its folder's saved state stands."""
    folder, recipe = RunFolder.open(path)
    check_engine(recipe)
    if world.leads:
        folder.sweep()
    trainer = Trainer(recipe, folder, *_splits(recipe, data, download, world), device, world)
    trainer.resume()
    return trainer


def _splits(recipe: Recipe, data: Path | None, download: bool, world: World) -> tuple[Split, Split]:
    """The leader first: it may have to download or decode what the others then find."""
    if not world.leads:
        world.wait()
    found = load_both(recipe.data, data, download=download)
    if world.leads:
        world.wait()
    return found
