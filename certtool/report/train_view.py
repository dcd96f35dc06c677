"""A training run on screen: live on a terminal, one line an epoch in a pipe, JSON lines for machines, or silence."""

from __future__ import annotations

import shlex
from contextlib import AbstractContextManager
from dataclasses import asdict
from types import TracebackType
from typing import Any, Protocol, Self

from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from certtool.recipe import Recipe
from certtool.report.screen import Screen, duration, percent
from certtool.training import (
    EpochDone,
    Finished,
    NextRun,
    Progress,
    RunFailed,
    Started,
    StudyDone,
    StudyEvent,
)

HEADER = "epoch     phase      eps     loss    clean  certified    img/s     left"


class View(AbstractContextManager["View"], Protocol):
    """Something that hears the events of a run, or of a study."""

    def hear(self, event: StudyEvent) -> None: ...


def view_for(screen: Screen) -> View:
    if screen.json:
        return JsonView(screen)
    if screen.quiet:
        return QuietView(screen)
    return LiveView(screen) if screen.err.is_terminal else PlainView(screen)


class QuietView(AbstractContextManager["QuietView"]):
    """Only the end: where the model is and what to type next."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def hear(self, event: StudyEvent) -> None:
        if isinstance(event, Finished):
            self.screen.text(str(event.model))


class JsonView(QuietView):
    """Every event but the looks in between, as a line each; each says which run it is of."""

    recipe: Recipe | None = None

    def hear(self, event: StudyEvent) -> None:
        if isinstance(event, NextRun | Started):
            self.recipe = event.recipe
        if isinstance(event, StudyDone):
            self.recipe = None
        if not isinstance(event, Progress):
            run = {} if self.recipe is None else {"recipe": self.recipe.name, "seed": self.recipe.seed}
            self.screen.document({"schema": "certtool.train/1", **event_as_json(event), **run})


class PlainView(QuietView):
    """One line an epoch."""

    place: NextRun | None = None  # in a study

    def hear(self, event: StudyEvent) -> None:
        if isinstance(event, NextRun):
            self.place = event
            self.screen.note(f"{'' if event.number == 1 else chr(10)}{place_of(event)}")
        elif isinstance(event, RunFailed):
            self.screen.note(f"failed, the study goes on: {event.error}")
        elif isinstance(event, StudyDone):
            for line in summary_of(event):
                self.screen.note(line)
        elif isinstance(event, Started):
            for line in introduction(event):
                self.screen.note(line)
            self.screen.note(HEADER)
            self.epochs = event.recipe.train.epochs
        elif isinstance(event, EpochDone):
            self.screen.note(epoch_line(event, self.epochs))
        elif isinstance(event, Finished):
            conclude(self.screen, event, alone=self.place is None)


class LiveView(PlainView):
    """A panel that stays at the bottom; finished epochs scroll by above it."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(screen)
        self.live = Live(console=screen.err, transient=True, auto_refresh=False)
        self.started: Started | None = None

    def __enter__(self) -> Self:
        self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.update(Text(""), refresh=True)
        self.live.__exit__(kind, error, trace)

    def hear(self, event: StudyEvent) -> None:
        if isinstance(event, Started):
            self.started = event
        if isinstance(event, Progress) and self.started is not None:
            title = self.started.recipe.name if self.place is None else place_of(self.place)
            self.live.update(panel(event, self.started, title), refresh=True)
        elif isinstance(event, Finished | RunFailed):
            self.live.update(Text(""), refresh=True)
            super().hear(event)
        else:
            super().hear(event)


def introduction(event: Started) -> list[str]:
    recipe = event.recipe
    eps = f"eps {recipe.threat.eps}"
    if recipe.threat.train_eps is not None:
        eps += f" (trained at {recipe.threat.train_eps})"
    lines = [
        f"{recipe.name}: {recipe.summary}" if recipe.summary else recipe.name,
        f"{recipe.model.arch}, {event.parameters:,} parameters; {recipe.data.dataset}, {event.train_images:,} images",
        f"{eps}, seed {recipe.seed}, {event.device}",
        f"run folder {event.folder}",
    ]
    if recipe.train.compile == "on":
        lines.append("compiled: the first step of each phase takes up to a minute longer")
    if event.first_step > 0:
        total = recipe.train.epochs * event.steps_per_epoch
        lines.append(f"resumed after step {event.first_step} of {total}")
    return lines


def epoch_line(event: EpochDone, epochs: int) -> str:
    m = event.metrics
    epoch = f"{m['epoch']}/{epochs}"
    line = (
        f"{epoch:>7}   {m['phase']:<7} {m['eps']:>7.5f} {m['loss']:>8.4f} {percent(m['clean_accuracy']):>8} "
        f"{percent(m['certified_accuracy']):>10} {m['images_per_second']:>8,.0f} {duration(event.seconds_left):>8}"
    )
    if "test_certified_accuracy" in m:
        line += (
            f"\n   test: clean {percent(m['test_clean_accuracy'])}, certified {percent(m['test_certified_accuracy'])}"
        )
    return line


def place_of(event: NextRun) -> str:
    return f"run {event.number} of {event.of}: {event.recipe.name}, seed {event.recipe.seed}"


def summary_of(event: StudyDone) -> list[str]:
    """How the study went, and the command that puts its figures side by side."""
    counts = {"trained": event.trained, "done before": event.done_before, "failed": event.failed}
    lines = ["", "the study: " + ", ".join(f"{count} {word}" for word, count in counts.items() if count)]
    if event.trained + event.done_before > 0:
        lines += ["next:", f"  certtool runs compare {shlex.join(map(str, event.roots))}"]
    return lines


def conclude(screen: Screen, event: Finished, *, alone: bool = True) -> None:
    """The figures, the file, and of a run that stands alone the exact commands to type next."""
    m, eps = event.metrics, event.recipe.threat.eps
    if event.already:
        screen.note("this run had already finished")
    else:
        screen.note(f"finished in {duration(event.seconds)}")
    if "test_certified_accuracy" in m:
        screen.text(
            f"test set: clean {percent(m['test_clean_accuracy'])}, certified {percent(m['test_certified_accuracy'])} "
            f"(interval bounds, float32, eps {eps})"
        )
    screen.text(f"model: {event.model}")
    if alone:
        screen.note("next:")
        screen.note(f"  certtool verify {event.model} --eps {eps}")
        screen.note(f"  certtool inspect {event.model}")


def panel(event: Progress, started: Started, title: str) -> Panel:
    """Phase, eps against its target, the loss and its parts, accuracies, speed and time left: nine lines."""
    recipe, means = started.recipe, event.means
    total = recipe.train.epochs * started.steps_per_epoch
    target = float(recipe.threat.target)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", style="dim")
    grid.add_column()
    grid.add_row("epoch", f"{event.epoch} of {recipe.train.epochs}, {event.phase}")
    grid.add_row("eps", _bar(event.eps, target, f"{event.eps:.5f} of {recipe.threat.target}"))
    grid.add_row(
        "loss",
        f"{means['loss']:.4f} = robust {means['robust_ce']:.4f} + lambda {event.weight:.3f} x regularisers",
    )
    if means.get("tightness") is not None:
        grid.add_row("bounds", f"tightness {means['tightness']:.3f}, ReLU balance {means['relu']:.3f}")
        states = ", ".join(f"{state} {percent(means[state])}" for state in ("active", "unstable", "inactive"))
        grid.add_row("ReLUs", states)
    certified = percent(means["certified_accuracy"])
    grid.add_row("accuracy", f"clean {percent(means['clean_accuracy'])}, certified at this eps {certified}")
    speed = f"{event.images_per_second:,.0f} images/s, {duration(event.seconds_left)} left"
    grid.add_row("run", _bar(event.step, total, speed))
    return Panel(grid, title=title, title_align="left", border_style="dim", width=80)


def _bar(done: float, total: float, caption: str) -> Table:
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(total=total, completed=done, width=24), Text(caption))
    return row


def event_as_json(event: StudyEvent) -> dict[str, Any]:
    if isinstance(event, NextRun):
        return {"event": "run", "run": event.number, "of": event.of, "folder": str(event.folder)}
    if isinstance(event, RunFailed):
        (problem, *_), code = event.error.problems, int(event.error.exit_code)
        return {"event": "failed", "folder": str(event.folder), "message": problem.message, "hint": problem.hint,
                "exit": code}  # fmt: skip
    if isinstance(event, StudyDone):
        return {"event": "study", "trained": event.trained, "done_before": event.done_before, "failed": event.failed,
                "folders": [str(root) for root in event.roots]}  # fmt: skip
    if isinstance(event, EpochDone):
        return {"event": "epoch", **event.metrics, "seconds_left": event.seconds_left}
    if isinstance(event, Started):
        values = {key: value for key, value in asdict(event).items() if key != "recipe"}
        return {"event": "started", "recipe": event.recipe.name, **values, "folder": str(event.folder)}
    assert isinstance(event, Finished)
    return {
        "event": "finished",
        "folder": str(event.folder),
        "model": str(event.model),
        "eps": str(event.recipe.threat.eps),
        "seconds": event.seconds,
        "already": event.already,
        **{key: value for key, value in event.metrics.items() if key.startswith("test_")},
    }
