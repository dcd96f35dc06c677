"""`certtool doctor`"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import typer

from certtool.cli.options import JsonOption

app = typer.Typer(add_completion=False)
PACKAGES = ("torch", "torchvision", "numpy", "safetensors", "pydantic", "typer", "rich", "huggingface_hub")


@app.command()
def doctor(json: JsonOption = False) -> None:
    """Versions, engines, devices, data sets found, and how to get what is missing."""
    from certtool.report.screen import Screen

    screen, found = Screen(json=json), examine()
    if json:
        screen.document({"schema": "certtool.doctor/1", **found})
        return
    for title, part in found.items():
        if isinstance(part, dict):
            screen.text(title)
            for name, value in part.items():
                screen.text(f"  {name:<16} {value}")
        elif part:
            screen.text(title)
            for line in part:
                screen.text(f"  {line}")


def examine() -> dict[str, Any]:
    """Everything a bug report would want to know."""
    import torch

    from certtool.bounds.lirpa import INSTALL, installed
    from certtool.catalog import DATASETS, OWN_DATASETS
    from certtool.data import data_folder, missing_files
    from certtool.version import __version__

    engine = installed()
    data = {name: "embedded" if name == "digits" else _state(missing_files(name, "test")) for name in DATASETS}
    missing = [] if engine else [f"auto_LiRPA, for linear relaxations: {INSTALL}"]
    absent = [name for name, state in data.items() if state == "not found"]
    if absent:
        missing.append(f"{', '.join(absent)}: `certtool train ... --download`, or point CERTTOOL_DATA to a copy")
    versions = {"certtool": __version__, "python": platform.python_version()}
    accelerator = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "none"
    return {
        "versions": versions | {name: metadata.version(name) for name in PACKAGES},
        "engines": {"interval bounds": f"certtool {__version__}", "relaxations": str(engine or "not installed")},
        "device": {"accelerator": accelerator, "threads": torch.get_num_threads(), "cores": os.cpu_count()},
        "data sets": {"in": str(data_folder())}
        | data
        | {name: f"yours: {title}" for name, title in OWN_DATASETS.items()},
        "hub": {"endpoint": os.environ.get("HF_ENDPOINT", "https://huggingface.co")},
        "missing": missing,
    }


def _state(missing: list[Any]) -> str:
    return "not found" if missing else "found"
