"""`certtool train`: one run, or a study of several recipes and seeds."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from certtool.cli.options import DataOption, DeviceOption, DownloadOption, JsonOption, QuietOption, SetOption
from certtool.errors import CertToolError, InputError, Interrupted, Problem, RecipeError

if TYPE_CHECKING:
    from certtool.recipe import Recipe
    from certtool.training import RunFailed

app = typer.Typer(add_completion=False)
EXAMPLES = """Examples:

certtool train tiny_cnn7

certtool train recipes/tiny_cnn7.toml --set seed=1 --set model.width=8

certtool train mnist_cnn7_w16 --download --out runs/mnist

certtool train --resume runs/tiny_cnn7/latest

certtool train tiny_cnn7_short tiny_cnn7_short_vanilla --seeds 0..4"""

MOST_SEEDS = 1000
STUDY_HINT = "the same command goes on where it stopped: `{}`"


@app.command(epilog=EXAMPLES)
def train(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE]...", help="A .toml file, or a bundled name: certtool recipe list."),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            "--seeds",
            metavar="LIST",
            help="A study, one run for each seed: 0..4 or 0,3,7. Done runs are passed over, others resumed.",
        ),
    ] = None,
    set_: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Run folder. Default: runs/NAME/STAMP. Study: DIR/NAME/seed-N."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that is in --out.")] = False,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Go on with an unfinished run.")
    ] = None,
    data: DataOption = None,
    download: DownloadOption = False,
    device: DeviceOption = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Take a few steps, estimate time and memory, write nothing.")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a network whose predictions can be proven robust. Ctrl-C saves; --resume goes on to the same result."""
    if resume is not None and (recipes or seeds is not None or set_ or out is not None or overwrite):
        raise InputError(
            "--resume goes on with a run exactly as it was started; it takes no recipe, --seeds, --set or --out",
            f"`certtool train --resume {resume}`",
        )
    if resume is None and not recipes:
        raise InputError("which recipe?", "`certtool train tiny_cnn7`; `certtool recipe list` shows the bundled ones")
    chosen = _load(recipes or [], set_ or [])  # a wrong recipe is told before torch is imported
    if dry_run:
        _dry_run(chosen, resume, data, download, device, json)
        return
    if seeds is not None or len(chosen) > 1:
        _refuse_in_a_study(set_ or [], seeds, overwrite)
        _study(chosen, None if seeds is None else seeds_from(seeds), out, data, download, device, json, quiet)
        return
    from certtool.device import device_for
    from certtool.distributed import joined, local_device
    from certtool.report.screen import Screen
    from certtool.report.train_view import view_for
    from certtool.training import new_run, resumed_run, stop_on_signal

    place = local_device(device_for(device))
    with joined(place) as world:
        if resume is not None:
            trainer = resumed_run(resume, data=data, download=download, device=place, world=world)
        else:
            trainer = new_run(
                chosen[0], out, overwrite=overwrite, data=data, download=download, device=place, world=world
            )
        screen = Screen(json=json, quiet=quiet or not world.leads)
        with stop_on_signal() as stopped, view_for(screen) as view:
            for event in trainer.run(stopped):
                if world.leads:
                    view.hear(event)


def _dry_run(
    recipes: list[Recipe], resume: Path | None, data: Path | None, download: bool, device: str, json: bool
) -> None:
    if resume is not None or len(recipes) != 1:
        raise InputError("--dry-run looks at one recipe", "`certtool train tiny_cnn7 --dry-run`")
    from certtool.device import device_for
    from certtool.report.screen import Screen
    from certtool.report.tables import show_estimate
    from certtool.training.estimate import estimate

    found = estimate(recipes[0], data=data, download=download, device=device_for(device))
    show_estimate(Screen(json=json), found)


def _load(references: list[str], overrides: list[str]) -> list[Recipe]:
    """Every recipe of the command, or what is wrong with all of them."""
    from certtool.recipe import load

    loaded: list[Recipe] = []
    problems: list[Problem] = []
    for reference in references:
        try:
            loaded.append(load(reference, overrides))
        except InputError as error:
            problems += error.problems
    if problems:
        raise RecipeError(list(dict.fromkeys(problems)))
    return loaded


def _refuse_in_a_study(overrides: list[str], seeds: str | None, overwrite: bool) -> None:
    if overwrite:
        raise InputError(
            "a study goes on with what its folders hold; --overwrite is for a single run",
            "remove the folder of a run to train it anew, or choose another --out",
        )
    if seeds is not None and any(override.partition("=")[0].strip() == "seed" for override in overrides):
        raise InputError("--seeds and --set seed say two things", "keep one of them")


def _study(
    recipes: list[Recipe],
    seeds: list[int] | None,
    out: Path | None,
    data: Path | None,
    download: bool,
    device: str,
    json: bool,
    quiet: bool,
) -> None:
    from certtool.device import device_for
    from certtool.distributed import local_device
    from certtool.report.screen import Screen
    from certtool.report.train_view import view_for
    from certtool.training import RUNS, RunFailed, plan_study, run_study, stop_on_signal

    # Under torchrun each process takes its share of the runs; a run is then one process's own.
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    planned = plan_study(recipes, seeds, RUNS if out is None else out)[rank::size]
    place, quiet = local_device(device_for(device)), quiet or rank > 0
    failures: list[RunFailed] = []
    again = STUDY_HINT.format(shlex.join(["certtool", *sys.argv[1:]]))
    with stop_on_signal() as stopped, view_for(Screen(json=json, quiet=quiet)) as view:
        try:
            for event in run_study(planned, stopped, data=data, download=download, device=place):
                view.hear(event)
                if isinstance(event, RunFailed):
                    failures.append(event)
                    _debug(event.error)
        except Interrupted as error:
            raise Interrupted(str(error), again) from None
        except KeyboardInterrupt:
            raise Interrupted("by Ctrl-C", again) from None
    if failures:
        raise _failed(failures)


def _failed(failures: list[RunFailed]) -> CertToolError:
    """What went wrong in which run, and the gravest of the exit codes."""
    problems = [
        replace(problem, message=f"{failure.recipe.name}, seed {failure.recipe.seed}: {problem.message}")
        for failure in failures
        for problem in failure.error.problems
    ]
    error = CertToolError(problems)
    error.exit_code = max(failure.error.exit_code for failure in failures)
    return error


def _debug(error: CertToolError) -> None:
    if os.environ.get("CERTTOOL_DEBUG"):
        import traceback

        traceback.print_exception(error)


def seeds_from(text: str) -> list[int]:
    """`0..4`, `0,3,7` or a mixture, as the seeds they name, in that order."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,10})\s*(?:\.\.\s*(\d{1,10})\s*)?", part)
        if match is None:
            raise InputError(
                f"--seeds {text}: `{part.strip()}` is not a seed", "as in `--seeds 0..4` or `--seeds 0,3,7`"
            )
        first, last = int(match[1]), int(match[2] if match[2] is not None else match[1])
        if last < first:
            raise InputError(f"--seeds {text}: the range {first}..{last} runs backwards", f"as in `{last}..{first}`")
        if last >= 2**31 or last - first >= MOST_SEEDS:
            limit = f"a seed is below {2**31:,}, and a range names at most {MOST_SEEDS:,}"
            raise InputError(f"--seeds {text}: `{part.strip()}` is too large", limit)
        seeds += range(first, last + 1)
    twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    if twice:
        raise InputError(f"--seeds {text}: seed {twice[0]} is named twice", "name each seed once")
    return seeds
