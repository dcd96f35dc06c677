"""TinyImageNet-200 from its official folder; its validation images serve as test: its test images have no labels."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path
from urllib.request import urlretrieve

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from certtool.catalog import DATASETS
from certtool.data.dataset import Split
from certtool.errors import OutsideError

URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"


def files(root: Path, split: str) -> list[Path]:
    folder = root / DATASETS["tinyimagenet"].official_name
    return [
        folder / "wnids.txt",
        folder / "train" if split == "train" else folder / "val" / "val_annotations.txt",
    ]


def tinyimagenet(root: Path, split: str) -> Split:
    folder = root / DATASETS["tinyimagenet"].official_name
    wnids = sorted((folder / "wnids.txt").read_text().split())
    label = {wnid: index for index, wnid in enumerate(wnids)}
    if len(label) != 200:
        raise OutsideError(f"`{folder / 'wnids.txt'}` names {len(label)} classes, not 200", "unpack the archive again")
    pairs = list(_train_files(folder, label) if split == "train" else _validation_files(folder, label))
    images = np.stack([_decode(file) for file, _ in pairs])
    labels = torch.tensor([index for _, index in pairs])
    return Split(DATASETS["tinyimagenet"], split, torch.from_numpy(images), labels)


def _train_files(folder: Path, label: dict[str, int]) -> Iterable[tuple[Path, int]]:
    for wnid, index in label.items():
        images = sorted((folder / "train" / wnid / "images").glob("*.JPEG"))
        if not images:
            raise OutsideError(f"`{folder / 'train' / wnid / 'images'}` holds no images", "unpack the archive again")
        yield from ((file, index) for file in images)


def _validation_files(folder: Path, label: dict[str, int]) -> Iterable[tuple[Path, int]]:
    notes = folder / "val" / "val_annotations.txt"
    for number, line in enumerate(notes.read_text().splitlines(), start=1):
        name, wnid, *_ = [*line.split("\t"), "", ""]
        if wnid not in label or "/" in name:
            raise OutsideError(f"`{notes}`, line {number}: unknown class `{wnid}`", "unpack the archive again")
        yield folder / "val" / "images" / name, label[wnid]


def _decode(file: Path) -> np.ndarray:
    """Channels first; grey images (a few hundred) become three equal channels."""
    try:
        with Image.open(file, formats=["JPEG"]) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, UnidentifiedImageError, SyntaxError) as error:
        raise OutsideError(f"cannot read `{file}`: {error}", "put back a good copy of this file") from None
    if pixels.shape != (64, 64, 3):
        raise OutsideError(f"`{file}` is {pixels.shape[1]}x{pixels.shape[0]}, not 64x64")
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def download(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    archive = root / "tiny-imagenet-200.zip"
    urlretrieve(URL, archive)
    with zipfile.ZipFile(archive) as file:
        file.extractall(root)  # zipfile keeps members below the folder it is given
    archive.unlink()
