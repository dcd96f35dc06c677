"""Runs of the same recipe under several seeds: mean and standard deviation, beside the figures of the paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from certtool.errors import InputError
from certtool.recipe import Paper, Recipe, differences
from certtool.recipe.differences import WORDS
from certtool.training.runs import FoundRun, RunSummary, find_runs


@dataclass(frozen=True)
class Spread:
    """Of a share in [0, 1] over seeds; the sample deviation (n - 1), none of a single run."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(mean(values), stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class Group:
    """The finished runs of one recipe, one for each seed."""

    recipe: Recipe
    runs: tuple[RunSummary, ...]
    differs: dict[str, Any]  # keys in which it differs from the first group of the same name, with its values

    @property
    def clean_error(self) -> Spread:
        return Spread.of([1 - _figure(run.clean_accuracy) for run in self.runs])

    @property
    def verified_error(self) -> Spread:
        return Spread.of([1 - _figure(run.certified_accuracy) for run in self.runs])

    @property
    def paper(self) -> Paper | None:
        return self.recipe.paper

    def as_json(self) -> dict[str, Any]:
        runs = [
            {
                "path": run.path,
                "seed": run.seed,
                "clean_error": 1 - _figure(run.clean_accuracy),
                "verified_error": 1 - _figure(run.certified_accuracy),
                "seconds": run.seconds,
            }
            for run in self.runs
        ]
        return {
            "name": self.recipe.name,
            "dataset": self.recipe.data.dataset,
            "eps": str(self.recipe.threat.eps),
            "n": len(self.runs),
            "clean_error": asdict(self.clean_error),
            "verified_error": asdict(self.verified_error),
            "paper": None if self.paper is None else _paper_as_json(self.paper),
            "differs": {key: _plain(value) for key, value in self.differs.items()},
            "runs": runs,
        }


@dataclass(frozen=True)
class Comparison:
    groups: tuple[Group, ...]
    unfinished: tuple[RunSummary, ...]
    repeated: tuple[RunSummary, ...]  # the same recipe and seed once more: no new evidence

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": "certtool.compare/1",
            "split": "test",
            "verifier": "ibp, float32",
            "recipes": [group.as_json() for group in self.groups],
            "unfinished": [asdict(run) for run in self.unfinished],
            "repeated": [asdict(run) for run in self.repeated],
        }


def compare_runs(places: Iterable[Path]) -> Comparison:
    """Every run in or below the given folders, grouped by recipe; the seed is not part of it."""
    found: dict[Path, FoundRun] = {}
    for place in places:
        here = find_runs(place)
        if not here:
            raise InputError(f"there are no runs in `{place}`", "`certtool runs list` shows the runs there are")
        found |= {Path(run.summary.path).resolve(): run for run in here}
    groups: list[tuple[Recipe, list[RunSummary]]] = []
    unfinished, repeated = [], []
    for run in sorted(found.values(), key=lambda run: run.summary.seed):
        if not run.summary.finished:
            unfinished.append(run.summary)
            continue
        runs = _group_of(run.recipe, groups)
        if any(other.seed == run.summary.seed for other in runs):
            repeated.append(run.summary)
        else:
            runs.append(run.summary)
    groups.sort(key=lambda group: group[0].name)
    result = tuple(Group(recipe, tuple(runs), _difference(recipe, groups)) for recipe, runs in groups)
    return Comparison(result, tuple(unfinished), tuple(repeated))


def _group_of(recipe: Recipe, groups: list[tuple[Recipe, list[RunSummary]]]) -> list[RunSummary]:
    for known, runs in groups:
        if not differences(known, recipe, ignore=("seed", *WORDS)):
            return runs
    groups.append((recipe, []))
    return groups[-1][1]


def _difference(recipe: Recipe, groups: list[tuple[Recipe, list[RunSummary]]]) -> dict[str, Any]:
    first = next(other for other, _ in groups if other.name == recipe.name)
    pairs = differences(first, recipe, ignore=("seed", *WORDS))
    return {key: there for key, (_, there) in pairs.items()}


def _figure(share: float | None) -> float:
    assert share is not None, "a finished run has been evaluated"
    return share


def _paper_as_json(paper: Paper) -> dict[str, Any]:
    """Its figures as shares in [0, 1], like all others in JSON; the digits stay those that were printed."""
    values = paper.model_dump()
    shares = ("clean_error", "clean_deviation", "verified_error", "verified_deviation")
    return {
        key: round(value / 100, 6) if key in shares and value is not None else value for key, value in values.items()
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | list | None) else str(value)
