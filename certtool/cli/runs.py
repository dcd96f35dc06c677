"""`certtool runs list | compare`"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from certtool.cli.options import JsonOption
from certtool.errors import InputError

app = typer.Typer(name="runs", help="What has been trained here.", no_args_is_help=True, add_completion=False)


@app.command("list", epilog="Example: certtool runs list runs/tiny_cnn7")
def list_(
    root: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to look.")] = Path("runs"),
    json: JsonOption = False,
) -> None:
    """Every run below a folder: how far it came, and its figures on the test set."""
    from certtool.report.screen import Screen
    from certtool.report.tables import show_runs
    from certtool.training import list_runs

    screen = Screen(json=json)
    found = list_runs(root)
    if json:
        screen.document({"schema": "certtool.runs/1", "runs": [asdict(run) for run in found]})
    else:
        show_runs(screen, found)


@app.command(epilog="Example: certtool runs compare runs/tiny_cnn7_short runs/tiny_cnn7_short_vanilla")
def compare(
    places: Annotated[
        list[Path] | None, typer.Argument(metavar="[DIR]...", help="Runs, or folders of them. Default: runs.")
    ] = None,
    json: JsonOption = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
) -> None:
    """Clean and verified error of each recipe: mean and deviation over its seeds, beside the paper's figures."""
    if json and markdown:
        raise InputError("--json and --markdown are two outputs", "choose one of them")
    from certtool.report import compare_view
    from certtool.report.screen import Screen
    from certtool.training import RUNS, compare_runs

    screen = Screen(json=json)
    comparison = compare_runs(places or [RUNS])
    if json:
        screen.document(comparison.as_json())
    elif markdown:
        screen.text(compare_view.markdown(comparison))
    else:
        compare_view.show_comparison(screen, comparison)
