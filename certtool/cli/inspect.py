"""`certtool inspect`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from certtool.cli.options import DataOption, DownloadOption, JsonOption, ModelArgument
from certtool.epsilon import Epsilon
from certtool.errors import InputError

EXAMPLES = """Examples:

certtool inspect runs/tiny_cnn7/latest

certtool inspect model.safetensors --statistics batch --json"""


def inspect(
    model: ModelArgument,
    eps: Annotated[str | None, typer.Option("--eps", help="Radius; default: the model's.")] = None,
    images: Annotated[int, typer.Option("--images", metavar="N", help="How many test images to look through.")] = 128,
    statistics: Annotated[str, typer.Option("--statistics", help="BatchNorm: running or batch.")] = "running",
    data: DataOption = None,
    download: DownloadOption = False,
    json: JsonOption = False,
) -> None:
    """Show per layer how bounds widen (difference gain, growth, width) and which ReLUs are active, unstable or dead."""
    radius = None if eps is None else Epsilon.parse(eps)
    if statistics not in ("running", "batch"):
        raise InputError(f"--statistics {statistics}: there is no such choice", "`running` or `batch`")
    from certtool.checkpoint import load
    from certtool.data import load_split
    from certtool.inspection import inspect
    from certtool.report.screen import Screen
    from certtool.report.tables import show_inspection

    screen = Screen(json=json)
    checkpoint = load(Path(model))
    split = load_split(checkpoint.header.dataset.name, "test", data, download=download).first(images)
    x = split.pixels(split.images)
    result = inspect(checkpoint.model, x, radius or checkpoint.eps, statistics=statistics)  # type: ignore[arg-type]
    if not json:
        show_inspection(screen, checkpoint.header.name, result)
        return
    header = checkpoint.header
    screen.document(
        {
            "schema": "certtool.inspect/1",
            "model": {"name": header.name, "sha256": checkpoint.sha256, "arch": header.arch.arch},
            "dataset": split.facts.name,
            "images": result.images,
            "eps": str(result.eps),
            "results": [result.as_json()],
        }
    )
