"""Data sets by name: where they lie, how to get them, and their images in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from certtool.catalog import DATASETS, NO_AUGMENTATION, OWN_DATASETS, Augmentation, DatasetFacts
from certtool.data import cifar10, mnist, tinyimagenet
from certtool.data.augment import EpochPlan, augment, plan_epoch
from certtool.data.dataset import Split, hold_out
from certtool.data.digits import digits
from certtool.data.folder import read_folder, read_folder_split
from certtool.data.npz import read_npz, read_npz_split
from certtool.errors import InputError, OutsideError
from certtool.plain_text import plain
from certtool.recipe.schema import Data

__all__ = ["NO_AUGMENTATION", "Augmentation", "EpochPlan", "Split", "absolute_path", "augment", "data_folder"]
__all__ += ["hold_out", "load_both", "load_known", "load_split", "load_test", "missing_files", "plan_epoch"]


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


@dataclass(frozen=True)
class OwnSource:
    """How the user's own images are read: both splits, their facts found; or one, for a model that knows them."""

    both: Callable[[Path, Data], tuple[Split, Split]]
    known: Callable[[Path, DatasetFacts, str], Split]


OWN_SOURCES: dict[str, OwnSource] = {
    "folder": OwnSource(lambda path, data: read_folder(path, data.size, data.test_fraction), read_folder_split),
    "npz": OwnSource(lambda path, data: read_npz(path), read_npz_split),
}
assert set(OWN_SOURCES) == set(OWN_DATASETS)


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
        raise InputError(f"there is no data set `{plain(name)}`", f"there are {', '.join(DATASETS)}")
    place = root or data_folder()
    if missing_files(name, split, place) and download:
        _download(name, place)
    missing = missing_files(name, split, place)
    if missing:
        raise OutsideError(
            f"{DATASETS[name].title} is not in `{place}`: `{missing[0].relative_to(place)}` is missing",
            "add `--download` to fetch it, or point CERTTOOL_DATA (or `--data`) to the folder that holds "
            f"`{DATASETS[name].official_name}`",
        )
    return SOURCES[name].read(place, split)


def load_both(data: Data, root: Path | None = None, *, download: bool = False) -> tuple[Split, Split]:
    """Training and test images of a recipe. Of own images `root` is the place itself, and goes before the recipe's."""
    if data.dataset in OWN_SOURCES:
        return OWN_SOURCES[data.dataset].both(_own_path(data, root), data)
    train, test = (load_split(data.dataset, name, root, download=download) for name in ("train", "test"))
    return train, test


def load_test(data: Data, root: Path | None = None, *, download: bool = False) -> Split:
    """The test images of a recipe; only of own ones the others are read too, because mean and std come from them."""
    if data.dataset in OWN_SOURCES:
        return load_both(data, root)[1]
    return load_split(data.dataset, "test", root, download=download)


def load_known(facts: DatasetFacts, split: str, root: Path | None = None, *, download: bool = False) -> Split:
    """One split for a model: its data set by name, or own images read as its header says."""
    if facts.name not in OWN_SOURCES:
        return load_split(facts.name, split, root, download=download)
    if root is None:
        raise InputError("the model was trained on images of your own; where do they lie?", "say it with `--data PATH`")
    return OWN_SOURCES[facts.name].known(root, facts, split)


def absolute_path(data: Data, root: Path | None) -> str | None:
    """Where own images lie, from the top of the file system on: a run's folder keeps it for every later command."""
    return str(_own_path(data, root).absolute()) if data.dataset in OWN_SOURCES else None


def _own_path(data: Data, root: Path | None) -> Path:
    """Like every path a user types, it starts in the folder where the command is given."""
    if root is not None:
        return root
    if data.path is None:
        raise InputError(
            f'where are the images of `dataset = "{data.dataset}"`?',
            "set `data.path` in the recipe, or give `--data PATH`",
        )
    return Path(data.path).expanduser()


def _download(name: str, folder: Path) -> None:
    try:
        SOURCES[name].download(folder)
    except Exception as error:  # torchvision, urllib and zipfile raise a dozen kinds; each means the same here
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OutsideError(
            f"could not download {DATASETS[name].title}: {reason}",
            f"check the network, or copy `{DATASETS[name].official_name}` into `{folder}` by hand",
        ) from error
