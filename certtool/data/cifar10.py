"""CIFAR-10 through torchvision, which checks the official files' md5 before it opens them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from certtool.catalog import DATASETS
from certtool.data.dataset import Split
from certtool.data.vision import torchvision_datasets
from certtool.errors import OutsideError


def files(root: Path, split: str) -> list[Path]:
    folder = root / DATASETS["cifar10"].official_name
    names = ["test_batch"] if split == "test" else [f"data_batch_{number}" for number in range(1, 6)]
    return [folder / name for name in (*names, "batches.meta")]


def cifar10(root: Path, split: str) -> Split:
    try:
        source = torchvision_datasets().CIFAR10(root, train=split == "train")
    except RuntimeError as error:
        raise OutsideError(
            f"a CIFAR-10 file in `{files(root, split)[0].parent}` is damaged: {str(error).split('.')[0].lower()}",
            "delete that folder and run again with `--download`, or put back a good copy",
        ) from None
    images = torch.from_numpy(np.ascontiguousarray(source.data.transpose(0, 3, 1, 2)))
    return Split(DATASETS["cifar10"], split, images, torch.tensor(source.targets))


def download(root: Path) -> None:
    torchvision_datasets().CIFAR10(root, download=True)
