"""`certtool runs list`"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from certtool.cli.options import JsonOption

app = typer.Typer(help="What has been trained here.", no_args_is_help=True)


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
