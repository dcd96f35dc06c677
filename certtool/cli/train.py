"""`certtool train`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from certtool.cli.options import DataOption, DeviceOption, DownloadOption, JsonOption, QuietOption, SetOption
from certtool.errors import InputError

EXAMPLES = """Examples:

certtool train tiny_cnn7

certtool train recipes/tiny_cnn7.toml --set seed=1 --set model.width=8

certtool train mnist_cnn7_small --download --out runs/mnist

certtool train --resume runs/tiny_cnn7/latest"""


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="A .toml file, or a bundled name: certtool recipe list."),
    ] = None,
    set_: SetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Run folder. Default: runs/NAME/STAMP.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that is in --out.")] = False,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Go on with an unfinished run.")
    ] = None,
    data: DataOption = None,
    download: DownloadOption = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a network whose predictions can be proven robust. Ctrl-C saves; --resume goes on to the same result."""
    if resume is not None and (recipe is not None or set_ or out is not None or overwrite):
        raise InputError(
            "--resume goes on with a run exactly as it was started; it takes no recipe, --set or --out",
            f"`certtool train --resume {resume}`",
        )
    if resume is None and recipe is None:
        raise InputError("which recipe?", "`certtool train tiny_cnn7`; `certtool recipe list` shows the bundled ones")
    from certtool.recipe import load

    chosen = None if recipe is None else load(recipe, set_ or [])  # a wrong recipe is told before torch is imported
    from certtool.device import device_for
    from certtool.distributed import joined, local_device
    from certtool.report.screen import Screen
    from certtool.report.train_view import view_for
    from certtool.training import new_run, resumed_run, stop_on_signal

    place = local_device(device_for(device))
    with joined(place) as world:
        if chosen is not None:
            trainer = new_run(chosen, out, overwrite=overwrite, data=data, download=download, device=place, world=world)
        else:
            assert resume is not None
            trainer = resumed_run(resume, data=data, download=download, device=place, world=world)
        screen = Screen(json=json, quiet=quiet or not world.leads)
        with stop_on_signal() as stopped, view_for(screen) as view:
            for event in trainer.run(stopped):
                if world.leads:
                    view.hear(event)
