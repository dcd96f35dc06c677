"""eps, learning rate and lambda as pure functions of the step, so that a resumed run is the same run."""

from __future__ import annotations

from dataclasses import dataclass

from certtool.recipe import Recipe


@dataclass(frozen=True)
class EpsSchedule:
    """eps over a warmup of `length` epochs from epoch `start` (counted from 1): a quartic, then a straight line.

    The quartic fills the first quarter and meets the line with the same slope, so eps grows gently where bounds are
    widest; its value there is target/13.
    """

    target: float
    start: int
    length: int
    steps_per_epoch: int

    def eps(self, step: int) -> float:
        """The radius at a step counted from 0."""
        first = (self.start - 1) * self.steps_per_epoch
        last = (self.start + self.length - 1) * self.steps_per_epoch
        middle = first + (last - first) // 4
        if step <= first:
            return 0.0
        if step >= last:
            return self.target
        rise = middle - first
        at_middle = self.target * rise / (4 * (last - middle) + rise)  # so that the slopes meet
        if step < middle:
            return at_middle * ((step - first) / rise) ** 4
        return at_middle + (self.target - at_middle) * (step - middle) / (last - middle)


@dataclass(frozen=True)
class Schedule:
    """Everything that changes from step to step."""

    recipe: Recipe
    steps_per_epoch: int

    @property
    def total_steps(self) -> int:
        return self.recipe.train.epochs * self.steps_per_epoch

    def epoch(self, step: int) -> int:
        """The epoch, counted from 1, that a step belongs to."""
        return step // self.steps_per_epoch + 1

    def eps(self, step: int) -> float:
        warmup = self.recipe.train.warmup
        if warmup is None or self.recipe.train.method == "natural":
            return 0.0
        target = float(self.recipe.threat.target)
        return EpsSchedule(target, warmup.start, warmup.epochs, self.steps_per_epoch).eps(step)

    def lr(self, step: int) -> float:
        """Milestone m: epochs 1..m use the rate before it."""
        passed = sum(self.epoch(step) > milestone for milestone in self.recipe.train.lr_milestones)
        return self.recipe.train.lr * self.recipe.train.lr_decay**passed

    def weight(self, step: int) -> float:
        """lambda = lambda_0 (1 - eps/eps_t): the regularisers fade as eps reaches its target (paper, section 3.4)."""
        regularizers = self.recipe.train.regularizers
        if not regularizers.terms or self.recipe.train.method == "natural":
            return 0.0
        return regularizers.weight * (1 - self.eps(step) / float(self.recipe.threat.target))

    def phase(self, step: int) -> str:
        """A word for what the step does: eps 0, growing, or at its target."""
        eps = self.eps(step)
        if self.recipe.train.method == "natural":
            return "natural"
        return "start" if eps == 0 else "warmup" if eps < float(self.recipe.threat.target) else "final"
