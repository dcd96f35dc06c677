"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document (train: JSON lines) to stdout.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Say only the result.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe, as in train.epochs=5. Repeatable."),
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="Folder of the data sets (default: CERTTOOL_DATA, else the cache), or where your own images lie.",
    ),
]
DownloadOption = Annotated[bool, typer.Option("--download", help="Fetch the data set if it is not there.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]
EpsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--eps",
        help="Radius in pixel units of [0, 1], exact: 8/255 or 0.1. Default: the model's. Repeatable.",
    ),
]
ImagesOption = Annotated[int | None, typer.Option("--images", metavar="N", help="Only the first N images.")]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A .safetensors file, a run folder, a zoo name, or hf://user/repo.", show_default=False
    ),
]
