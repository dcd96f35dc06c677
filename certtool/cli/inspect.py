"""`certtool inspect`"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from certtool.cli.options import DataOption, DownloadOption, JsonOption, SetOption
from certtool.epsilon import Epsilon
from certtool.errors import InputError

if TYPE_CHECKING:
    from certtool.checkpoint import Checkpoint
    from certtool.inspection import Inspection, Statistics
    from certtool.recipe import Recipe
    from certtool.report.screen import Screen

app = typer.Typer(add_completion=False)
EXAMPLES = """Examples:

certtool inspect runs/tiny_cnn7/latest --html why.html

certtool inspect model.safetensors --compare other.safetensors

certtool inspect recipe:tiny_cnn7 --init ibp --init xavier-uniform --plot widths.png

certtool inspect                         (all initialisations, on recipe:tiny_cnn7)"""


@app.command(epilog=EXAMPLES)
def inspect(
    references: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL...|RECIPE]", help="Models or run folders, or a recipe at initialisation."),
    ] = None,
    set_: SetOption = None,
    eps: Annotated[str | None, typer.Option("--eps", help="Radius. Default: the model's or the recipe's.")] = None,
    init: Annotated[
        list[str] | None,
        typer.Option("--init", metavar="NAME", help="Initialisations to set side by side. Repeatable."),
    ] = None,
    trials: Annotated[int, typer.Option("--trials", metavar="N", help="Draws to average an initialisation over.")] = 5,
    images: Annotated[int, typer.Option("--images", metavar="N", help="How many test images to look through.")] = 128,
    statistics: Annotated[
        str | None, typer.Option("--statistics", help="BatchNorm: running (default of a model) or batch (of a recipe).")
    ] = None,
    compare: Annotated[str | None, typer.Option("--compare", metavar="MODEL", help="A second model beside it.")] = None,
    data: DataOption = None,
    download: DownloadOption = False,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Widths as .png, .svg or .pdf.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="A report to look at.")] = None,
    json: JsonOption = False,
) -> None:
    """Show per layer how bounds widen (difference gain, growth, width) and which ReLUs are active, unstable or dead."""
    radius = None if eps is None else Epsilon.parse(eps)
    _check(statistics, trials, images, plot)
    from certtool.diagnosis import compare as compared
    from certtool.diagnosis import diagnose
    from certtool.report.inspect_view import show_inspections, write_page, write_plot
    from certtool.report.screen import Screen

    others = [*(references or [])[1:], *([] if compare is None else [compare])]
    screen = Screen(json=json)
    subject = _Subject(screen, references[0] if references else None, set_ or [], init or [], others)
    found = subject.inspections(radius, trials, images, statistics, data, download)
    words = [finding for inspection in found for finding in diagnose(inspection)] if len(found) == 1 else []
    if len(subject.models) == 2:
        words = compared(found[0], found[1], subject.certified())
    if json:
        screen.document(subject.document(found, images) | {"findings": [asdict(word) for word in words]})
    else:
        show_inspections(screen, found, words)
    if plot is not None:
        write_plot(found, plot)
        screen.note(f"picture: {plot}")
    if html is not None:
        write_page(found, words, subject.history(), html)
        screen.note(f"report: {html}")


def _check(statistics: str | None, trials: int, images: int, plot: Path | None) -> None:
    if statistics not in (None, "running", "batch"):
        raise InputError(f"--statistics {statistics}: there is no such choice", "`running` or `batch`")
    if trials < 1 or images < 1:
        raise InputError("--trials and --images must be at least 1")
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"--plot {plot}: unknown kind of picture", "a name that ends in .png, .svg or .pdf")


class _Subject:
    """What is looked at: one model, two models, or a recipe's network under one or more initialisations."""

    def __init__(
        self, screen: Screen, reference: str | None, overrides: list[str], inits: list[str], others: list[str]
    ) -> None:
        from certtool.catalog import INITIALISATIONS
        from certtool.recipe.diagnose import did_you_mean

        for name in inits:
            if name not in INITIALISATIONS:
                raise InputError(f"--init {name}: there is no such initialisation", did_you_mean(name, INITIALISATIONS))
        if reference is None:
            reference, inits = "recipe:tiny_cnn7", inits or list(INITIALISATIONS)
        self.screen, self.reference, self.inits = screen, reference, inits
        self.recipe: Recipe | None = None
        self.models: list[Checkpoint] = []
        if _is_recipe(reference, inits):
            self._use_recipe(reference, overrides, others)
        else:
            self._use_models(reference, overrides, inits, others)

    def _use_recipe(self, reference: str, overrides: list[str], others: list[str]) -> None:
        from certtool.recipe import load

        if others:
            raise InputError(
                "--compare sets two models side by side, not a recipe", "give a model, or several `--init`"
            )
        self.recipe = load(reference, overrides)
        self.inits = self.inits or [self.recipe.train.init]

    def _use_models(self, reference: str, overrides: list[str], inits: list[str], others: list[str]) -> None:
        from certtool.cli.models import load_model

        if inits or overrides:
            raise InputError(
                f"--init and --set change a recipe, and `{reference}` is a model",
                f"give the recipe, as in `certtool inspect recipe:tiny_cnn7 --init {(inits or ['ibp'])[0]}`",
            )
        self.models = [load_model(self.screen, name) for name in (reference, *others)]

    def inspections(
        self, eps: Epsilon | None, trials: int, images: int, statistics: str | None, data: Path | None, download: bool
    ) -> list[Inspection]:
        from certtool.checkpoint import load_images
        from certtool.data import load_test
        from certtool.inspection import inspect, inspect_initialisation
        from certtool.models import build

        kind: Statistics = statistics or ("running" if self.recipe is None else "batch")  # type: ignore[assignment]
        if self.recipe is None:
            found, titles = [], _titles(self.models)
            for title, model in zip(titles, self.models, strict=True):
                split = load_images(model, "test", data, download=download).first(images)
                x = split.pixels(split.images)
                found.append(inspect(model.model, x, eps or model.eps, statistics=kind, title=title))
            return found
        recipe = self.recipe
        split = load_test(recipe.data, data, download=download).first(images)
        x, facts = split.pixels(split.images), split.facts
        return [
            inspect_initialisation(
                lambda seed, name=name: build(recipe.model, facts, name, seed),  # type: ignore[misc]
                x, eps or recipe.threat.eps, init=name, trials=trials, statistics=kind, title=f"{recipe.name}, {name}",
            )
            for name in self.inits
        ]  # fmt: skip

    def certified(self) -> tuple[float | None, float | None]:
        """Certified accuracy of both runs on their test sets, where their folders say so."""
        figures = [_last_metrics(model).get("test_certified_accuracy") for model in self.models]
        one, other = (figure if isinstance(figure, float) else None for figure in figures)
        return one, other

    def history(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """Metrics of the runs that the models came from."""
        pairs = zip(_titles(self.models), self.models, strict=True)
        return [(title, lines) for title, model in pairs if (lines := _metrics(model))]

    def document(self, found: list[Inspection], images: int) -> dict[str, Any]:
        model = self.models[0] if self.models else None
        return {
            "schema": "certtool.inspect/1",
            "model": None
            if model is None
            else {"name": model.header.name, "sha256": model.sha256, "arch": model.header.arch.arch},
            "dataset": model.header.dataset.name if model is not None else self.recipe.data.dataset,  # type: ignore[union-attr]
            "images": images,
            "eps": str(found[0].eps),
            "results": [inspection.as_json() for inspection in found],
        }


def _is_recipe(reference: str, inits: list[str]) -> bool:
    """`recipe:NAME`, a .toml file, or a bare bundled name where only a recipe makes sense."""
    from certtool.recipe import bundled
    from certtool.zoo import zoo_folder

    if reference.startswith("recipe:") or reference.endswith(".toml"):
        return True
    if reference in bundled() and not Path(reference).exists():
        if inits:
            return True
        model = f"`zoo:{reference}`" if (zoo_folder() / f"{reference}.toml").is_file() else "the path of a model"
        raise InputError(f"`{reference}` could be a recipe or a model", f"write `recipe:{reference}` or {model}")
    return False


def _titles(models: list[Checkpoint]) -> list[str]:
    """The models' names; with their folders where the names are the same."""
    names = [model.header.name for model in models]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({model.path.parent.name or model.path.name})" for name, model in zip(names, models, strict=True)]


def _metrics(model: Checkpoint) -> list[dict[str, Any]]:
    from certtool.training.run_folder import RunFolder

    return RunFolder(model.path.parent).metrics()


def _last_metrics(model: Checkpoint) -> dict[str, Any]:
    lines = _metrics(model)
    return lines[-1] if lines else {}
