"""`certtool recipe list | show | check | copy`: discover, read, validate, take a copy to edit. No torch in here."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from certtool.cli.options import JsonOption, SetOption
from certtool.errors import InputError, RecipeError

if TYPE_CHECKING:
    from certtool.recipe import Recipe

app = typer.Typer(
    name="recipe",
    help="Find, read, check and copy recipes.",
    no_args_is_help=True,
    add_completion=False,
    epilog="Start with: certtool recipe list",
)

Reference = Annotated[str, typer.Argument(metavar="RECIPE", help="A .toml file, recipe:NAME, or a bundled name.")]


@app.command("list", epilog="Example: certtool recipe list --dataset cifar10 --grep vanilla")
def list_(
    dataset: Annotated[str | None, typer.Option("--dataset", metavar="NAME", help="Only on this data set.")] = None,
    arch: Annotated[str | None, typer.Option("--arch", metavar="NAME", help="Only with this architecture.")] = None,
    table: Annotated[
        int | None, typer.Option("--table", metavar="N", help="Only rows of this table of the paper.")
    ] = None,
    grep: Annotated[
        str | None, typer.Option("--grep", metavar="TEXT", help="Only where this occurs in name or description.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """The bundled recipes, all or some of them."""
    from certtool import recipe
    from certtool.catalog import ARCHITECTURES, DATASETS
    from certtool.report.screen import Screen, plain_table

    _known("data set", dataset, DATASETS)
    _known("architecture", arch, ARCHITECTURES)
    every = [recipe.load(f"recipe:{name}") for name in recipe.bundled()]
    chosen = [one for one in every if _wanted(one, dataset, arch, table, grep)]
    screen = Screen(json=json)
    if json:
        screen.document({"schema": "certtool.recipes/1", "recipes": [_row(one) for one in chosen]})
        return
    if chosen:
        rows = plain_table("name", "what", left=2)
        rows.columns[0].no_wrap, rows.columns[1].no_wrap = True, False
        for one in chosen:
            rows.add_row(one.name, one.summary)
        screen.table(rows)
    count = f"{len(chosen)} of {len(every)} recipes" if len(chosen) < len(every) else f"{len(every)} recipes"
    screen.note(f"{count}; --dataset, --arch, --table and --grep choose among them")


def _known(what: str, name: str | None, names: Collection[str]) -> None:
    if name is not None and name not in names:
        raise InputError(f"there is no {what} `{name}`", "one of " + ", ".join(f"`{known}`" for known in sorted(names)))


def _wanted(one: Recipe, dataset: str | None, arch: str | None, table: int | None, grep: str | None) -> bool:
    row = "" if one.paper is None else one.paper.row
    return (
        dataset in (None, one.data.dataset)
        and arch in (None, one.model.arch)
        and (table is None or (one.paper is not None and table in one.paper.tables))
        and (grep is None or grep.casefold() in f"{one.name} {one.summary} {row}".casefold())
    )


def _row(chosen: Recipe) -> dict[str, Any]:
    return {
        "name": chosen.name,
        "summary": chosen.summary,
        "dataset": chosen.data.dataset,
        "arch": chosen.model.arch,
        "eps": str(chosen.threat.eps),
        "epochs": chosen.train.epochs,
        "method": chosen.train.method,
        "paper": None if chosen.paper is None else chosen.paper.model_dump(),
    }


@app.command(epilog="Example: certtool recipe show tiny_cnn7 --set train.epochs=50")
def show(reference: Reference, set_: SetOption = None, json: JsonOption = False) -> None:
    """The resolved recipe: every key, also those left at their defaults."""
    from certtool import recipe
    from certtool.report.screen import Screen

    chosen = recipe.load(reference, set_ or [])
    screen = Screen(json=json)
    if json:
        values = chosen.model_dump(by_alias=True, exclude_none=True)
        screen.document({"schema": "certtool.recipe/1", "recipe": values})
    else:
        screen.text(recipe.render(chosen))


@app.command(epilog="Example: certtool recipe check mine.toml")
def check(reference: Reference, set_: SetOption = None, json: JsonOption = False) -> None:
    """Say whether a recipe is right; if not, every problem at once (exit 1)."""
    from certtool import recipe
    from certtool.report.screen import Screen

    screen = Screen(json=json)
    try:
        chosen = recipe.load(reference, set_ or [])
    except RecipeError as error:
        screen.error(error)
        raise typer.Exit(1) from None
    if json:
        screen.document({"schema": "certtool.check/1", "recipe": chosen.name, "ok": True})
    else:
        screen.text(f"{chosen.name}: ok")


@app.command(epilog="Example: certtool recipe copy tiny_cnn7 mine.toml")
def copy(
    reference: Reference, file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")]
) -> None:
    """Take a copy of a recipe, comments included, to edit; the paper's figures are not about what you make of it."""
    from certtool import recipe
    from certtool.files import write_atomically
    from certtool.report.screen import Screen

    source = recipe.find(reference)
    target = file / source.name if file.is_dir() else file
    if target.exists():
        raise InputError(f"`{target}` exists already", "choose another name, or remove it first")
    write_atomically(target, recipe.without_paper(source.read_text(encoding="utf-8")).encode())
    Screen().text(f"{target}")
