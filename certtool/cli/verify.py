"""`certtool verify`"""

from __future__ import annotations

from pathlib import Path

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

EXAMPLES = """Examples:

certtool verify runs/tiny_cnn7/latest

certtool verify model.safetensors --eps 2/255 --eps 8/255 --json"""


def verify(
    model: ModelArgument,
    eps: EpsOption = None,
    images: ImagesOption = None,
    data: DataOption = None,
    download: DownloadOption = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> None:
    """Prove how many test images keep their label under every perturbation of size EPS."""
    radii = [Epsilon.parse(text) for text in eps or []]
    from certtool.checkpoint import load
    from certtool.data import load_split
    from certtool.device import device_for
    from certtool.report.screen import Screen
    from certtool.report.tables import show_verify
    from certtool.verification import verify

    screen = Screen(json=json)
    checkpoint = load(Path(model))
    split = load_split(checkpoint.header.dataset.name, "test", data, download=download)
    split = split if images is None else split.first(images)
    with screen.progress("interval bounds") as progress:
        report = verify(checkpoint, split, radii or [checkpoint.eps], device=device_for(device), progress=progress)
    show_verify(screen, report)
