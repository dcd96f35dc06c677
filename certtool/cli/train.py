"""`certtool train`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from certtool.cli.options import DataOption, DeviceOption, DownloadOption, JsonOption, QuietOption, SetOption
from certtool.errors import InputError

if TYPE_CHECKING:
    from certtool.recipe import Recipe
    from certtool.training import RunFolder

EXAMPLES = """Examples:

certtool train tiny_cnn7

certtool train recipes/tiny_cnn7.toml --set seed=1 --set model.width=8

certtool train mnist_cnn7_small --download --out runs/mnist

certtool train --resume runs/tiny_cnn7/latest"""


def train(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="A .toml file, or a bundled name: certtool recipe list.")
    ] = None,
    set_: SetOption = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Run folder. Default: runs/NAME/STAMP.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that is in --out.")] = False,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="DIR", help="Go on with an unfinished run.")] = None,
    data: DataOption = None,
    download: DownloadOption = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a network whose predictions can be proven robust. Ctrl-C saves; --resume goes on to the same result."""
    from certtool.device import device_for
    from certtool.report.screen import Screen
    from certtool.report.train_view import view_for
    from certtool.training import start, stop_on_signal

    chosen, folder = _folder(recipe, set_ or [], out, overwrite, resume)
    screen = Screen(json=json, quiet=quiet)
    trainer = start(chosen, folder, data=data, download=download, device=device_for(device))
    with stop_on_signal() as stopped, view_for(screen) as view:
        for event in trainer.run(stopped):
            view.hear(event)


def _folder(
    recipe: str | None, overrides: list[str], out: Path | None, overwrite: bool, resume: Path | None
) -> tuple[Recipe, RunFolder]:
    """The recipe and its folder: a new one, or the one to go on with."""
    from certtool.recipe import load

    if resume is not None:
        if recipe is not None or overrides or out is not None:
            raise InputError(
                "--resume goes on with a run exactly as it was started; it takes no recipe, --set or --out",
                f"`certtool train --resume {resume}`",
            )
        from certtool.training import RunFolder

        folder, chosen = RunFolder.open(resume)
        return chosen, folder
    if recipe is None:
        raise InputError("which recipe?", "`certtool train tiny_cnn7`; `certtool recipe list` shows the bundled ones")
    chosen = load(recipe, overrides)  # a wrong recipe is told before torch is even imported
    from certtool.training import RunFolder

    return chosen, RunFolder.create(chosen, out, overwrite=overwrite)
