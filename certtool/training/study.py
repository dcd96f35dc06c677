"""Several runs one after the other: each recipe with each seed, each in a folder that says how far it came.

The same study asked for again passes over what is done, resumes what was begun and starts what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from certtool.checkpoint import RECIPE_FILE
from certtool.errors import InputError, Interrupted, Problem, translated
from certtool.recipe import Recipe, differences
from certtool.training.events import Finished, NextRun, RunFailed, StudyDone, StudyEvent
from certtool.training.loop import new_run, resumed_run
from certtool.training.run_folder import RunFolder


@dataclass(frozen=True)
class PlannedRun:
    recipe: Recipe
    folder: Path


def plan_study(recipes: Sequence[Recipe], seeds: Sequence[int] | None, root: Path) -> list[PlannedRun]:
    """root/<name>/seed-<n> for each recipe and seed (without seeds: the recipe's own), refused where that cannot be."""
    planned = [
        PlannedRun(recipe.model_copy(update={"seed": seed}), root / recipe.name / f"seed-{seed}")
        for recipe in recipes
        for seed in (seeds if seeds is not None else [recipe.seed])
    ]
    problems = [problem for one in planned if (problem := _foreign(one)) is not None]
    folders = [one.folder for one in planned]
    for name in dict.fromkeys(one.recipe.name for one in planned if folders.count(one.folder) > 1):
        hint = "give each its own name, or set `name` in the file"
        problems.append(Problem(f"two recipes of the study are called `{name}`: their runs would share a folder", hint))
    if problems:
        raise InputError(problems)
    return planned


def _foreign(planned: PlannedRun) -> Problem | None:
    """A folder that holds a run of other settings: neither done nor to be resumed."""
    if not (planned.folder / RECIPE_FILE).is_file():
        return None
    _, found = RunFolder.open(planned.folder)
    differing = differences(planned.recipe, found)
    if not differing:
        return None
    words = ", ".join(
        f"{key} is {_word(there)} there and {_word(here)} here" for key, (here, there) in differing.items()
    )
    return Problem(
        f"`{planned.folder}` holds a run with other settings: {words}",
        "choose another folder with `--out`, or remove this one",
    )


def _word(value: object) -> str:
    return "not set" if value is None else f"`{value}`"


def run_study(
    planned: Sequence[PlannedRun],
    stopped: Callable[[], bool] = lambda: False,
    *,
    data: Path | None = None,
    download: bool = False,
    device: torch.device,
) -> Iterator[StudyEvent]:
    """Every run that is not done. One that fails is told and passed over; a wish to stop ends the study."""
    trained, before, failed = 0, 0, 0
    for number, one in enumerate(planned, start=1):
        if stopped():
            raise Interrupted(f"stopped before run {number} of {len(planned)}; nothing is lost")
        yield NextRun(number, len(planned), one.recipe, one.folder)
        try:
            for event in _events(one, stopped, data, download, device):
                if isinstance(event, Finished):
                    trained, before = trained + (not event.already), before + event.already
                yield event
        except Interrupted as error:
            raise Interrupted(f"in run {number} of {len(planned)}, {_title(one.recipe)}: {error}") from None
        except Exception as error:
            failed += 1
            yield RunFailed(one.recipe, one.folder, translated(error))
    yield StudyDone(trained, before, failed, tuple(dict.fromkeys(one.folder.parent for one in planned)))


def _events(
    one: PlannedRun, stopped: Callable[[], bool], data: Path | None, download: bool, device: torch.device
) -> Iterator[StudyEvent]:
    folder = RunFolder(one.folder)
    if folder.finished(one.recipe):
        metrics = folder.metrics()
        yield Finished(one.recipe, folder.path, folder.model, metrics[-1], sum(m["seconds"] for m in metrics), True)
    elif (one.folder / RECIPE_FILE).is_file():
        yield from resumed_run(one.folder, data=data, download=download, device=device).run(stopped)
    else:
        yield from new_run(one.recipe, one.folder, data=data, download=download, device=device).run(stopped)


def _title(recipe: Recipe) -> str:
    return f"{recipe.name}, seed {recipe.seed}"
