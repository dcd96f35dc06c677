"""TinyImageNet-200 from its official folder; its validation images serve as test: its test images have no labels."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.request import urlretrieve

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from certtool.catalog import DATASETS
from certtool.data.dataset import Split
from certtool.data.decoded import cache_places, raw_digest, through_cache
from certtool.errors import OutsideError

URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
AGAIN = "unpack the archive again"


def files(root: Path, split: str) -> list[Path]:
    folder = root / DATASETS["tinyimagenet"].official_name
    return [
        folder / "wnids.txt",
        folder / "train" if split == "train" else folder / "val" / "val_annotations.txt",
    ]


def tinyimagenet(root: Path, split: str) -> Split:
    """Classes are numbered in the order of their names, as folder readers do it."""
    folder = root / DATASETS["tinyimagenet"].official_name
    wnids = sorted((folder / "wnids.txt").read_text().split())
    label = {wnid: index for index, wnid in enumerate(wnids)}
    if len(label) != 200:
        raise OutsideError(f"`{folder / 'wnids.txt'}` names {len(label)} classes, not 200", AGAIN)
    pairs = list(_train_files(folder, label) if split == "train" else _validation_files(folder, label))
    raw = raw_digest((f"{file.relative_to(folder).as_posix()} {index}", file) for file, index in pairs)
    places = cache_places(folder, "tinyimagenet", split)
    images = through_cache(places, raw, lambda: _decode_all([file for file, _ in pairs]))
    labels = torch.tensor([index for _, index in pairs])
    return Split(DATASETS["tinyimagenet"], split, torch.from_numpy(images), labels)


def _train_files(folder: Path, label: dict[str, int]) -> Iterable[tuple[Path, int]]:
    for wnid, index in label.items():
        images = sorted((folder / "train" / wnid / "images").glob("*.JPEG"))
        if not images:
            raise OutsideError(f"`{folder / 'train' / wnid / 'images'}` is missing or holds no images", AGAIN)
        yield from ((file, index) for file in images)


def _validation_files(folder: Path, label: dict[str, int]) -> Iterable[tuple[Path, int]]:
    """In the order of the annotations. Every picture has its line, every line its picture."""
    notes, images = folder / "val" / "val_annotations.txt", folder / "val" / "images"
    without_line = {file.name for file in images.glob("*.JPEG")}
    for number, line in enumerate(notes.read_text().splitlines(), start=1):
        name, wnid, *_ = [*line.split("\t"), "", ""]
        if wnid not in label:
            raise OutsideError(f"`{notes}`, line {number}: unknown class `{wnid}`", AGAIN)
        if name not in without_line:
            raise OutsideError(f"`{notes}`, line {number}: `{images / name}` is missing, or named before", AGAIN)
        without_line.remove(name)
        yield images / name, label[wnid]
    if without_line:
        raise OutsideError(f"`{notes}` has no line for `{min(without_line)}`", AGAIN)


def _decode_all(files: Sequence[Path]) -> np.ndarray:
    """Into one array: a list of 100,000 pictures would take their memory twice."""
    images = np.empty((len(files), *DATASETS["tinyimagenet"].shape), dtype=np.uint8)
    for number, file in enumerate(files):
        images[number] = _decode(file)
    return images


def _decode(file: Path) -> np.ndarray:
    """Channels first; grey images (a few hundred) become three equal channels."""
    try:
        with Image.open(file, formats=["JPEG"]) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, UnidentifiedImageError, SyntaxError) as error:
        raise OutsideError(f"cannot read `{file}`: {error}", "put back a good copy of this file") from None
    if pixels.shape != (64, 64, 3):
        raise OutsideError(f"`{file}` is {pixels.shape[1]}x{pixels.shape[0]}, not 64x64")
    return pixels.transpose(2, 0, 1)


def download(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    archive = root / "tiny-imagenet-200.zip"
    urlretrieve(URL, archive)
    with zipfile.ZipFile(archive) as file:
        file.extractall(root)  # zipfile keeps members below the folder it is given
    archive.unlink()
