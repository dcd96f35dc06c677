"""`certtool recipe list | show | check | copy`: discover, read, validate, take a copy to edit. No torch in here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from certtool.cli.options import JsonOption, SetOption
from certtool.errors import InputError, RecipeError

app = typer.Typer(
    help="Find, read, check and copy recipes.",
    no_args_is_help=True,
    epilog="Start with: certtool recipe list",
)

Reference = Annotated[str, typer.Argument(metavar="RECIPE", help="A .toml file, recipe:NAME, or a bundled name.")]


@app.command("list")
def list_(json: JsonOption = False) -> None:
    """The bundled recipes."""
    from certtool import recipe
    from certtool.report.screen import Screen, plain_table

    screen = Screen(json=json)
    recipes = {name: recipe.load(f"recipe:{name}") for name in recipe.bundled()}
    if json:
        screen.document({"schema": "certtool.recipes/1", "recipes": [_row(r) for r in recipes.values()]})
        return
    table = plain_table("name", "data", "eps", "epochs", "what")
    table.columns[4].justify = "left"
    table.columns[4].no_wrap = False
    for name, chosen in recipes.items():
        table.add_row(name, chosen.data.dataset, str(chosen.threat.eps), str(chosen.train.epochs), chosen.summary)
    screen.table(table)


def _row(chosen: Any) -> dict[str, Any]:
    return {
        "name": chosen.name,
        "summary": chosen.summary,
        "dataset": chosen.data.dataset,
        "arch": chosen.model.arch,
        "eps": str(chosen.threat.eps),
        "epochs": chosen.train.epochs,
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
    """Take a copy of a recipe, comments included, to edit."""
    from certtool import recipe
    from certtool.files import write_atomically
    from certtool.report.screen import Screen

    source = recipe.find(reference)
    target = file / source.name if file.is_dir() else file
    if target.exists():
        raise InputError(f"`{target}` exists already", "choose another name, or remove it first")
    write_atomically(target, source.read_bytes())
    Screen().text(f"{target}")
