"""Write recipes/README.md from the recipes beside it and from the figures measured in benchmarks/*.json.

python scripts/make_recipes_readme.py
python scripts/make_recipes_readme.py --check      # exit 1 if the file is not what would be written
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from certtool import recipe
from certtool.recipe import Recipe

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "recipes" / "README.md"

HEAD = """# Recipes

{count} experiments, one TOML file each: {rows} of them are rows of the paper's tables. This file is written by
`scripts/make_recipes_readme.py` from the recipes beside it; change those.

```sh
certtool recipe list --dataset cifar10 --grep vanilla    # find one
certtool recipe show cifar10_wrn_short                   # read it, every key
certtool train cifar10_wrn_short --seeds 0..2            # train it with three seeds
certtool runs compare runs/cifar10_wrn_short             # mean and deviation, beside the paper's figures
```

A name is `DATASET_NETWORK[_short][_METHOD or what is changed]`. `tiny` stands for the embedded digits, `wrn` for
Wide-ResNet, `short` for the shorter of two schedules. Without a method the recipe is the paper's own: IBP
initialisation, BatchNorm after every layer, both regularisers. `vanilla` is plain IBP, `crown` is CROWN-IBP with loss
fusion, `no_X` is the method without X. Schedules read as epochs (at eps 0 + with growing eps + at the full eps).

Figures are errors on the test set in per cent, clean / verified by interval bounds: mean +- standard deviation and, in
brackets, the number of seeds. *Measured here* are the runs in `benchmarks/`.
"""
TITLES = {
    1: "MNIST and CIFAR-10",
    2: "TinyImageNet",
    4: "what each part contributes",
    8: "the two halves of BatchNorm",
    9: "other radii",
    10: "the weight of the regularisers",
}


@dataclass(frozen=True)
class Figures:
    """Errors in per cent, clean and verified, as mean and deviation; how many runs they are from."""

    clean: tuple[float | None, float | None]
    verified: tuple[float | None, float | None]
    runs: int | None

    def __str__(self) -> str:
        count = "" if self.runs is None else f" ({self.runs})"
        return f"{_spread(*self.clean)} / {_spread(*self.verified)}{count}"


def _spread(value: float | None, deviation: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if deviation is None else f"{value:.2f} +- {deviation:.2f}"


def measured(folder: Path = ROOT / "benchmarks") -> dict[str, Figures]:
    """The figures of every recipe that a benchmark has trained; the one with most seeds counts."""
    best: dict[str, Figures] = {}
    for file in sorted(folder.glob("*.json")):
        for name, clean, verified in _runs(json.loads(file.read_text())):
            figures = Figures(_statistics(clean), _statistics(verified), len(clean))
            if name not in best or (best[name].runs or 0) < len(clean):
                best[name] = figures
    return best


def _runs(document: dict[str, object]) -> Iterable[tuple[str, list[float], list[float]]]:
    """Name, clean and verified errors in per cent: of `certtool runs compare --json`, or of benchmarks/digits.py."""
    if document.get("schema") == "certtool.compare/1":
        for group in document["recipes"]:  # type: ignore[attr-defined]
            if group["runs"] and not group["differs"]:
                yield (
                    group["name"],
                    *([100 * run[kind] for run in group["runs"]] for kind in ("clean_error", "verified_error")),
                )
    elif isinstance(results := document.get("results"), dict):
        for name, result in results.items():
            if name in recipe.bundled():
                kinds = ("clean_accuracy", "certified_accuracy")
                yield (name, *([100 - 100 * run[kind] for run in result["runs"]] for kind in kinds))


def _statistics(values: list[float]) -> tuple[float, float | None]:
    return mean(values), stdev(values) if len(values) > 1 else None


def readme() -> str:
    recipes = {name: recipe.load(f"recipe:{name}") for name in recipe.bundled()}
    ours = measured()
    text = HEAD.format(count=len(recipes), rows=sum(bool(one.paper and one.paper.tables) for one in recipes.values()))
    text += _section("Made for this tool", [one for one in recipes.values() if one.paper is None], ours)
    for table, title in TITLES.items():
        chosen = [one for one in recipes.values() if one.paper is not None and table in one.paper.tables]
        text += _section(f"Table {table}: {title}", chosen, ours)
    chosen = [one for one in recipes.values() if one.paper is not None and not one.paper.tables]
    return text + _section("From the paper's running text", chosen, ours)


def _section(title: str, recipes: list[Recipe], ours: dict[str, Figures]) -> str:
    lines = [f"\n## {title}\n", "| recipe | what it is | paper | measured here |", "|---|---|---|---|"]
    for one in recipes:
        what, paper = one.summary, "-"
        if one.paper is not None:
            row = one.paper
            what = row.row
            clean, verified = (row.clean_error, row.clean_deviation), (row.verified_error, row.verified_deviation)
            paper = str(Figures(clean, verified, row.repeats))
        lines.append(f"| [{one.name}]({one.name}.toml) | {what} | {paper} | {ours.get(one.name, '-')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    text = readme()
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if TARGET.read_text() == text else f"{TARGET} is out of date: python scripts/make_recipes_readme.py")
    TARGET.write_text(text)


if __name__ == "__main__":
    main()
