"""`certtool zoo list | show | fetch | publish | check | import`: certified models, and their proofs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from certtool.cli.options import DataOption, DownloadOption, JsonOption, QuietOption, SetOption
from certtool.epsilon import Epsilon
from certtool.errors import Exit, InputError

if TYPE_CHECKING:
    from certtool.checkpoint import Checkpoint
    from certtool.report.screen import Screen
    from certtool.verification.recheck import Recheck
    from certtool.zoo import Record
    from certtool.zoo.describe import Cost
    from certtool.zoo.layout import ModelFolder

app = typer.Typer(
    name="zoo",
    help="Find, fetch, check and publish certified models.",
    no_args_is_help=True,
    add_completion=False,
    epilog="Start with: certtool zoo list",
)
SORTS = ("name", "dataset", "eps", "clean", "certified", "parameters")
SampleOption = Annotated[
    int | None, typer.Option("--sample", metavar="K", help="Recompute K proofs of each radius, chosen at random.")
]


@app.command("list", epilog="Example: certtool zoo list --dataset digits --eps 0.1 --min-certified 0.85")
def list_(
    dataset: Annotated[str | None, typer.Option("--dataset", help="Models of this data set.")] = None,
    eps: Annotated[str | None, typer.Option("--eps", help="Models with a result at this radius.")] = None,
    min_certified: Annotated[
        float | None, typer.Option("--min-certified", metavar="X", help="At least this certified accuracy.")
    ] = None,
    sort: Annotated[str, typer.Option("--sort", help="name, dataset, eps, clean, certified or parameters.")] = "name",
    remote: Annotated[bool, typer.Option("--remote", help="Ask the Hub for models with the tag `certtool`.")] = False,
    json: JsonOption = False,
) -> None:
    """The models of the zoo, with what is proven of them. Offline, unless --remote."""
    from certtool.report.screen import Screen
    from certtool.report.zoo_view import show_records, show_remote
    from certtool.zoo.choose import Wish, choose

    if sort not in SORTS:
        raise InputError(f"--sort {sort}: there is no such order", "one of " + ", ".join(SORTS))
    if min_certified is not None and not 0 <= min_certified <= 1:
        raise InputError(f"--min-certified {min_certified} is not a fraction", "as in `--min-certified 0.85`")
    wish = Wish(dataset, None if eps is None else Epsilon.parse(eps), min_certified, sort)
    screen = Screen(json=json)
    if remote:
        if min_certified is not None:
            raise InputError("--min-certified needs figures that are checked", "the Hub only knows claims: fetch first")
        from certtool.zoo.remote import remote_models

        show_remote(screen, remote_models(dataset=dataset, eps=eps))
    else:
        show_records(screen, choose(wish))


@app.command(epilog="Example: certtool zoo show tiny_cnn7")
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A model of the zoo.")], json: JsonOption = False
) -> None:
    """Everything that is known of a model: figures, layers, and the command that trains it again."""
    from certtool.report.screen import Screen
    from certtool.report.zoo_view import show_record
    from certtool.zoo import find_record

    show_record(Screen(json=json), find_record(name.removeprefix("zoo:")))


@app.command(
    epilog="Examples:\n\ncerttool zoo fetch tiny_cnn7 --out model\n\ncerttool zoo fetch hf://user/repo@v1 --sample 50"
)
def fetch(
    reference: Annotated[str, typer.Argument(metavar="MODEL", help="A zoo name or hf://user/repo[@revision].")],
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="A copy here, besides the cache.")] = None,
    sample: SampleOption = None,
    data: DataOption = None,
    download: DownloadOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Fetch a model with its proof, compare every sha256, load it strictly, and keep it in the cache."""
    from certtool.report.screen import Screen
    from certtool.report.zoo_view import show_fetched
    from certtool.zoo.fetch import copy_to

    _check_sample(sample)
    screen = Screen(json=json, quiet=quiet)
    folder, pinned, record = _obtain(screen, reference)
    rechecked = None if sample is None else _recheck(screen, folder, sample, data, download)
    path = folder.path if out is None else copy_to(folder, out)
    show_fetched(screen, path, pinned, record, rechecked)
    if rechecked is not None and rechecked.differences:
        raise typer.Exit(Exit.ANSWER_IS_NO)


def _obtain(screen: Screen, reference: str) -> tuple[ModelFolder, str, Record | None]:
    from certtool.zoo import HubRef, ZooRef, find_record, parse_reference
    from certtool.zoo.fetch import fetch
    from certtool.zoo.records import zoo_folder
    from certtool.zoo.resolve import obtain

    ref = parse_reference(reference, [file.stem for file in zoo_folder().glob("*.toml")])
    with screen.download() as progress:
        if isinstance(ref, ZooRef):
            record = find_record(ref.name)
            found = obtain(record, progress, screen.note)
            return found.folder, found.source, record
        if isinstance(ref, HubRef):
            fetched = fetch(ref, progress)
            if fetched.note is not None:
                screen.note(fetched.note)
            return fetched.folder, str(fetched.ref), None
    raise InputError(f"`{reference}` is here already", "fetch takes a zoo name or `hf://user/repo[@revision]`")


def _check_sample(sample: int | None, least: int = 1) -> None:
    """A sample of nothing proves nothing, and must not read as if it did."""
    if sample is not None and sample < least:
        raise InputError(f"--sample {sample}", f"at least {least}")


def _recheck(screen: Screen, folder: ModelFolder, sample: int, data: Path | None, download: bool) -> Recheck:
    """Every certificate of the folder: its owner chooses their names, and with them which comes first."""
    from certtool import checkpoint
    from certtool.verification import read_certificate
    from certtool.verification.recheck import merged, recheck

    model, outcomes = checkpoint.load(folder.model), {}
    for file in folder.certificates:
        name = read_certificate(file).certificate.dataset.split
        split = checkpoint.load_images(model, name, data, download=download)
        with screen.rungs() as progress:
            outcomes[file.name] = recheck(model, split, file, sample=sample, progress=progress)
    return merged(outcomes)


@app.command(
    epilog="Examples:\n\ncerttool verify runs/x --eps 0.1 --certificate proof.json\n\n"
    "certtool zoo publish runs/x --repo user/name --certificate proof.json --tag v1"
)
def publish(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A .safetensors file or the folder of a finished run.")],
    repo: Annotated[str, typer.Option("--repo", metavar="USER/NAME", help="The repository on the Hub.")],
    certificate: Annotated[
        list[Path], typer.Option("--certificate", metavar="FILE", help="Of this model. Repeatable; the first leads.")
    ],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    tag: Annotated[str | None, typer.Option("--tag", help="Tag the commit, as v1.")] = None,
    licence: Annotated[str, typer.Option("--licence", help="Of the weights.")] = "apache-2.0",
    sample: SampleOption = None,
    data: DataOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Recheck and show the plan; publish nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: JsonOption = False,
) -> None:
    """Publish a model with a certificate that holds; without one, refuse."""
    from certtool.cli.models import load_model
    from certtool.report.figures import certified_curve
    from certtool.report.screen import Screen
    from certtool.report.zoo_view import show_plan, show_published
    from certtool.zoo.publish import plan, publish

    _check_sample(sample)
    screen = Screen(json=json)
    checkpoint = load_model(screen, model)
    rechecked = _proven(screen, checkpoint, certificate, sample, data)
    prepared = plan(
        checkpoint, certificate, rechecked, repo=repo, private=private, tag=tag, licence=licence,
        cost=cost_of(checkpoint), picture=certified_curve,
    )  # fmt: skip
    show_plan(screen, prepared, dry_run=dry_run)
    if dry_run:
        return
    if not yes and not screen.confirm(f"publish to {repo}?"):
        raise InputError("nothing was published", "add `--yes` to publish without being asked")
    show_published(screen, publish(prepared, bars=screen.shows_bars))


def _proven(
    screen: Screen, checkpoint: Checkpoint, certificates: list[Path], sample: int | None, data: Path | None
) -> tuple[Recheck, ...]:
    from certtool.checkpoint import load_images
    from certtool.verification import LadderSettings
    from certtool.zoo.publish import proven

    split = load_images(checkpoint, "test", data)
    with screen.rungs() as progress:
        return proven(checkpoint, split, certificates, sample, LadderSettings(), progress)


def cost_of(checkpoint: Checkpoint) -> Cost:
    """From the run's own metrics, where they lie beside the model."""
    import os

    from certtool.training import RunFolder
    from certtool.zoo.describe import Cost

    seconds = [float(line["seconds"]) for line in RunFolder(checkpoint.path.parent).metrics() if "seconds" in line]
    return Cost(sum(seconds), f"{os.cpu_count()} CPU cores") if seconds else Cost()


@app.command(epilog="Example: certtool zoo check --sample 20")
def check(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Models of the zoo; default: all.")] = None,
    sample: Annotated[
        int | None, typer.Option("--sample", metavar="K", help="Recompute K proofs of each radius; default: none.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Recompute every proof.")] = False,
    data: DataOption = None,
    json: JsonOption = False,
) -> None:
    """Check records against their files and certificates: hashes, counts, order, and proofs recomputed (exit 1)."""
    from certtool.report.screen import Screen
    from certtool.report.zoo_view import show_check
    from certtool.zoo import find_record, records
    from certtool.zoo.check import check

    _check_sample(sample, least=0)
    screen = Screen(json=json)
    chosen = [find_record(name.removeprefix("zoo:")) for name in names] if names else list(records().values())
    count = None if full else sample if sample is not None else 0
    with screen.download() as progress:
        outcomes = [check(record, sample=count, data=data, progress=progress) for record in chosen]
    show_check(screen, outcomes)
    if any(outcome.state == "fails" for outcome in outcomes):
        raise typer.Exit(Exit.ANSWER_IS_NO)
    if any(outcome.state == "unreachable" for outcome in outcomes):
        raise typer.Exit(Exit.OUTSIDE_WORLD)


@app.command(
    "import",
    epilog="Example: certtool zoo import cnn7_mnist.pth --arch cnn7 --dataset mnist --set model.width=8 --eps 0.3",
)
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE.pth", help="A local PyTorch state dict.")],
    arch: Annotated[str, typer.Option("--arch", help="cnn7, wide_resnet or resnext.")],
    dataset: Annotated[str, typer.Option("--dataset", help="The data set it was trained on.")],
    set_: SetOption = None,
    eps: Annotated[
        str | None, typer.Option("--eps", help="The radius it was trained for. Default: the usual one of the data set.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Of the model. Default: the file's.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Default: NAME.safetensors.")] = None,
    json: JsonOption = False,
) -> None:
    """Turn a PyTorch state dict, also a published one of the paper's authors, into one certtool file."""
    from certtool.report.screen import Screen
    from certtool.zoo.importing import describe, import_weights

    title = re.sub(r"[^A-Za-z0-9._-]", "_", name or file.stem)
    target = out or Path(f"{title}.safetensors")
    if target.exists():
        raise InputError(f"`{target}` exists already", "choose another name with `--out`")
    radius = None if eps is None else str(Epsilon.parse(eps))
    description = describe(title, arch, dataset, radius, set_ or [])
    model = import_weights(file, description, target)
    screen = Screen(json=json)
    if json:
        screen.document({"schema": "certtool.import/1", "path": str(target), "sha256": model.sha256,
                         "arch": description.arch.model_dump(), "eps": description.eps})  # fmt: skip
        return
    screen.text(str(target))
    if eps is None:
        screen.note(f"taken to be trained for eps {description.eps}; say another one with `--eps`")
    screen.note(f"  certtool verify {target} --eps {description.eps}")
