"""The runs of a folder at a glance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from certtool.checkpoint import RECIPE_FILE
from certtool.errors import CertToolError
from certtool.recipe import Recipe
from certtool.training.run_folder import RunFolder


@dataclass(frozen=True)
class RunSummary:
    """One run: how far it came, and its figures on the test set where it has finished."""

    path: str
    name: str
    seed: int
    dataset: str
    eps: str
    epochs_done: int
    epochs: int
    finished: bool
    clean_accuracy: float | None
    certified_accuracy: float | None
    seconds: float


@dataclass(frozen=True)
class FoundRun:
    summary: RunSummary
    recipe: Recipe


def list_runs(root: Path) -> list[RunSummary]:
    """Every run folder below `root`, oldest first; folders that are no runs are passed over."""
    return [run.summary for run in find_runs(root)]


def find_runs(root: Path) -> list[FoundRun]:
    """The same, with their recipes."""
    found = sorted(file.parent for file in root.rglob(RECIPE_FILE) if not _through_link(file.parent, root))
    return [run for folder in found if (run := _read(folder)) is not None]


def _through_link(folder: Path, root: Path) -> bool:
    """`latest` shows the same run a second time."""
    return any(part.is_symlink() for part in (folder, *folder.parents) if part != root and root in part.parents)


def _read(path: Path) -> FoundRun | None:
    try:
        folder, recipe = RunFolder.open(path)
    except CertToolError:
        return None
    metrics = folder.metrics()
    last = metrics[-1] if metrics else {}
    summary = RunSummary(
        path=str(path),
        name=recipe.name,
        seed=recipe.seed,
        dataset=recipe.data.dataset,
        eps=str(recipe.threat.eps),
        epochs_done=last.get("epoch", 0),
        epochs=recipe.train.epochs,
        finished=folder.finished(recipe),
        clean_accuracy=last.get("test_clean_accuracy"),
        certified_accuracy=last.get("test_certified_accuracy"),
        seconds=sum(line["seconds"] for line in metrics),
    )
    return FoundRun(summary, recipe)
