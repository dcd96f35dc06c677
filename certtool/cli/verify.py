"""`certtool verify`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from certtool.cli.options import (
    DataOption,
    DeviceOption,
    DownloadOption,
    EpsOption,
    ImagesOption,
    JsonOption,
    ModelArgument,
)
from certtool.epsilon import Epsilon
from certtool.errors import InputError

if TYPE_CHECKING:
    from certtool.checkpoint import Checkpoint
    from certtool.data import Split
    from certtool.report.screen import Screen
    from certtool.verification import LadderSettings, VerifyReport

app = typer.Typer(add_completion=False)
EXAMPLES = """Examples:

certtool verify runs/tiny_cnn7/latest

certtool verify model.safetensors --eps 2/255 --eps 8/255 --certificate proof.json

certtool verify model.safetensors --method ibp --no-attack --fail-under 0.85

certtool verify model.safetensors --recheck proof.json --sample 50

certtool verify model.safetensors --image digit.png --label 3

certtool verify model.safetensors --radius"""

PROOF, ATTACK, LIMITS, OTHER = "What is proven", "Attack", "Limits", "Other questions"


@app.command(epilog=EXAMPLES)
def verify(
    model: ModelArgument,
    eps: EpsOption = None,
    method: Annotated[
        str, typer.Option(help="How far to climb: auto, ibp, crown-ibp, crown or alpha-crown.", rich_help_panel=PROOF)
    ] = "auto",
    arithmetic: Annotated[
        str, typer.Option(help="Interval proofs: rigorous (rounding included) or float32.", rich_help_panel=PROOF)
    ] = "rigorous",
    images: ImagesOption = None,
    indices: Annotated[str | None, typer.Option("--indices", metavar="A,B-C", help="These images only.")] = None,
    split: Annotated[str, typer.Option("--split", help="test or train.")] = "test",
    data: DataOption = None,
    download: DownloadOption = False,
    attack_steps: Annotated[int, typer.Option("--attack-steps", help="Steps of PGD.", rich_help_panel=ATTACK)] = 40,
    restarts: Annotated[int, typer.Option("--restarts", help="Starts of PGD.", rich_help_panel=ATTACK)] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Of its random starts.", rich_help_panel=ATTACK)] = 0,
    no_attack: Annotated[bool, typer.Option("--no-attack", help="Only prove.", rich_help_panel=ATTACK)] = False,
    attack_certified: Annotated[
        int,
        typer.Option("--attack-certified", metavar="N", help="Attack N certified images too.", rich_help_panel=ATTACK),
    ] = 0,
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", help="Images at once.", rich_help_panel=LIMITS)
    ] = 128,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", help="Most memory to use, as 4GB. Default: half of what is free.", rich_help_panel=LIMITS
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", metavar="S", help="Seconds for linear relaxations.", rich_help_panel=LIMITS),
    ] = None,
    device: DeviceOption = "auto",
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="FILE", help="Write the certificate.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a report to look at.")] = None,
    recheck: Annotated[
        Path | None, typer.Option("--recheck", metavar="FILE", help="Check a certificate again.", rich_help_panel=OTHER)
    ] = None,
    sample: Annotated[
        int | None, typer.Option("--sample", metavar="K", help="With --recheck: K proofs only.", rich_help_panel=OTHER)
    ] = None,
    image: Annotated[
        Path | None, typer.Option("--image", metavar="FILE", help="One image of yours.", rich_help_panel=OTHER)
    ] = None,
    label: Annotated[
        str | None, typer.Option("--label", help="Its class; default: what the model says.", rich_help_panel=OTHER)
    ] = None,
    radius: Annotated[
        bool, typer.Option("--radius", help="The largest certified eps of each image.", rich_help_panel=OTHER)
    ] = False,
    fail_under: Annotated[
        float | None, typer.Option("--fail-under", metavar="X", help="Exit 1 if certified accuracy is below X.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Prove how many test images keep their label under every perturbation of size EPS."""
    radii = [Epsilon.parse(text) for text in eps or []]
    chosen = _indices(indices)
    _check_choices(method, arithmetic, split, fail_under)
    from certtool.checkpoint import load_images
    from certtool.cli.models import load_model
    from certtool.device import device_for
    from certtool.distributed import joined, local_device
    from certtool.report.screen import Screen
    from certtool.report.tables import show_verify
    from certtool.verification import verify, write_certificate
    from certtool.verification.shards import merged, share_of

    screen = Screen(json=json)
    checkpoint = load_model(screen, model)
    settings = _settings(method, arithmetic, None if no_attack else (attack_steps, restarts, seed), attack_certified,
                         batch_size, memory, time_limit)  # fmt: skip
    if image is not None:
        _one_image(screen, checkpoint, image, label, radii, settings)
        return
    source = load_images(checkpoint, split, data, download=download)
    if recheck is not None:
        _recheck(screen, checkpoint, source, recheck, sample, settings)
        return
    if radius:
        _radius(screen, checkpoint, source, images, chosen, settings)
        return
    place = local_device(device_for(device))
    with joined(place) as world, screen.rungs() as progress:
        if not world.alone:
            images, chosen = None, share_of(world, source, images, chosen)
        report = verify(
            checkpoint, source, radii or [checkpoint.eps], count=images, indices=chosen, settings=settings,
            device=place, progress=progress, warn=screen.note,
        )  # fmt: skip
        report = merged(world, report)
        if not world.leads:
            return
    show_verify(screen, report)
    if html is not None:
        _write_page(screen, checkpoint, source, report, html)
    if certificate is not None:
        write_certificate(report, certificate)
        screen.note(f"certificate: {certificate}")
        screen.note(f"  certtool verify {model} --recheck {certificate}")
    if fail_under is not None and any(result.certified_accuracy < fail_under for result in report.results):
        worst = min(result.certified_accuracy for result in report.results)
        screen.note(f"certified accuracy {worst:.4f} is below {fail_under}")
        raise typer.Exit(1)


def _write_page(screen: Screen, checkpoint: Checkpoint, split: Split, report: VerifyReport, file: Path) -> None:
    from certtool.files import write_atomically
    from certtool.report.html import verify_page

    page = verify_page(report, split, lambda image: int(checkpoint.model(image.unsqueeze(0)).argmax()))
    write_atomically(file, page.encode())
    screen.note(f"report: {file}")


def _check_choices(method: str, arithmetic: str, split: str, fail_under: float | None) -> None:
    for option, value, known in (
        ("--method", method, ("auto", "ibp", "crown-ibp", "crown", "alpha-crown")),
        ("--arithmetic", arithmetic, ("rigorous", "float32")),
        ("--split", split, ("test", "train")),
    ):
        if value not in known:
            raise InputError(f"{option} {value}: there is no such choice", "one of " + ", ".join(known))
    if fail_under is not None and not 0 <= fail_under <= 1:
        raise InputError(f"--fail-under {fail_under} is not a fraction", "as in `--fail-under 0.85`")


def _indices(text: str | None) -> list[int] | None:
    """`3,7,10-14` as a list."""
    if text is None:
        return None
    try:
        ranges = [part.split("-") for part in text.split(",")]
        return [index for ends in ranges for index in range(int(ends[0]), int(ends[-1]) + 1)]
    except ValueError:
        raise InputError(f"--indices {text} cannot be read", "as in `--indices 0,5,10-14`") from None


def _settings(
    method: str,
    arithmetic: str,
    attack: tuple[int, int, int] | None,
    attack_certified: int,
    batch_size: int,
    memory: str | None,
    time_limit: float | None,
) -> LadderSettings:
    from certtool.attack import AttackSettings
    from certtool.memory import OWN_GROWTH, SHARE, free_memory, own_memory, parse_memory
    from certtool.verification import LadderSettings

    if batch_size < 1:
        raise InputError(f"--batch-size {batch_size}", "at least 1")
    if attack is not None and (attack[0] < 1 or attack[1] < 1):
        raise InputError("an attack needs at least one step and one start", "or give `--no-attack`")
    # What is given is for all processes together: this one grows by its batches, the worker by what it is allowed.
    budget = int(free_memory() * SHARE) if memory is None else parse_memory(memory) - own_memory() - OWN_GROWTH
    if budget < 256 << 20:
        raise InputError(f"--memory {memory} leaves nothing to work with", "give at least 2GB")
    return LadderSettings(
        method=method,  # type: ignore[arg-type]
        arithmetic=arithmetic,  # type: ignore[arg-type]
        attack=None if attack is None else AttackSettings(*attack),
        attack_certified=attack_certified,
        batch_size=batch_size,
        memory=budget,
        time_limit=time_limit,
    )


def _one_image(
    screen: Screen,
    checkpoint: Checkpoint,
    file: Path,
    label: str | None,
    radii: list[Epsilon],
    settings: LadderSettings,
) -> None:
    from certtool.report.tables import show_image
    from certtool.verification import verify
    from certtool.verification.one_image import read_image

    split = read_image(file, checkpoint, label)
    with screen.rungs() as progress:
        report = verify(
            checkpoint, split, radii or [checkpoint.eps], settings=settings, progress=progress, warn=screen.note
        )
    show_image(screen, report, checkpoint.dataset.classes)


def _radius(
    screen: Screen,
    checkpoint: Checkpoint,
    split: Split,
    images: int | None,
    indices: list[int] | None,
    settings: LadderSettings,
) -> None:
    from dataclasses import replace

    from certtool.report.tables import show_radii
    from certtool.verification import largest_radii
    from certtool.verification.images import choose
    from certtool.verification.ladder import Ladder

    chosen = choose(split, images, indices)
    ladder = Ladder(checkpoint.model, chosen, replace(settings, method="ibp"), warn=screen.note)
    with screen.progress("bisection") as progress:
        radii = largest_radii(ladder, chosen, progress)
    show_radii(screen, radii)


def _recheck(
    screen: Screen, checkpoint: Checkpoint, split: Split, file: Path, sample: int | None, settings: LadderSettings
) -> None:
    from certtool.report.tables import show_recheck
    from certtool.verification.recheck import recheck

    if sample is not None and sample < 1:
        raise InputError(f"--sample {sample}", "at least 1")
    with screen.rungs() as progress:
        outcome = recheck(checkpoint, split, file, sample=sample, settings=settings, progress=progress)
    show_recheck(screen, outcome)
    if outcome.differences:
        raise typer.Exit(1)
