"""Data sets by name: where they lie, how to get them, and their images in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from certtool.catalog import DATASETS, NO_AUGMENTATION, Augmentation
from certtool.data import cifar10, mnist, tinyimagenet
from certtool.data.augment import EpochPlan, augment, plan_epoch
from certtool.data.dataset import Split, hold_out
from certtool.data.digits import digits
from certtool.errors import InputError, OutsideError
from certtool.plain_text import plain

__all__ = [
    "NO_AUGMENTATION",
    "Augmentation",
    "EpochPlan",
    "Split",
    "augment",
    "data_folder",
    "hold_out",
    "load_split",
]
__all__ += ["missing_files", "plan_epoch"]


@dataclass(frozen=True)
class Source:
    """How a data set on disk is found, read and downloaded."""

    files: Callable[[Path, str], list[Path]]
    read: Callable[[Path, str], Split]
    download: Callable[[Path], None]


SOURCES: dict[str, Source] = {
    "mnist": Source(mnist.files, mnist.mnist, mnist.download),
    "cifar10": Source(cifar10.files, cifar10.cifar10, cifar10.download),
    "tinyimagenet": Source(tinyimagenet.files, tinyimagenet.tinyimagenet, tinyimagenet.download),
}
assert {"digits", *SOURCES} == set(DATASETS)


def data_folder() -> Path:
    """CERTTOOL_DATA, else the user's cache."""
    if os.environ.get("CERTTOOL_DATA"):
        return Path(os.environ["CERTTOOL_DATA"])
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "certtool" / "data"


def missing_files(name: str, split: str, root: Path | None = None) -> list[Path]:
    """Files of a data set that are not there; none for the embedded one."""
    if name not in SOURCES:
        return []
    return [file for file in SOURCES[name].files(root or data_folder(), split) if not file.exists()]


def load_split(name: str, split: str, root: Path | None = None, *, download: bool = False) -> Split:
    """One split of a data set in memory. Missing files: one error that says where it looked and how to get them."""
    if name == "digits":
        return digits(split)
    if name not in SOURCES:
        raise InputError(f"there is no data set `{plain(name)}`", "one of " + ", ".join(DATASETS))
    folder = root or data_folder()
    if missing_files(name, split, folder) and download:
        _download(name, folder)
    missing = missing_files(name, split, folder)
    if missing:
        raise OutsideError(
            f"{DATASETS[name].title} is not in `{folder}`: `{missing[0].relative_to(folder)}` is missing",
            "add `--download` to fetch it, or point CERTTOOL_DATA (or `--data`) to the folder that holds "
            f"`{DATASETS[name].official_name}`",
        )
    return SOURCES[name].read(folder, split)


def _download(name: str, folder: Path) -> None:
    try:
        SOURCES[name].download(folder)
    except Exception as error:  # torchvision, urllib and zipfile raise a dozen kinds; each means the same here
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OutsideError(
            f"could not download {DATASETS[name].title}: {reason}",
            f"check the network, or copy `{DATASETS[name].official_name}` into `{folder}` by hand",
        ) from error
