"""MNIST from its four official files, compressed or not."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from certtool.catalog import DATASETS
from certtool.data.dataset import Split
from certtool.data.vision import torchvision_datasets
from certtool.errors import OutsideError

PREFIX = {"train": "train", "test": "t10k"}


def files(root: Path, split: str) -> list[Path]:
    """The two files of a split, as `.gz` or unpacked; the name without `.gz` where there is neither."""
    folder = root / DATASETS["mnist"].official_name
    names = [f"{PREFIX[split]}-images-idx3-ubyte", f"{PREFIX[split]}-labels-idx1-ubyte"]
    return [next((f for f in (folder / name, folder / f"{name}.gz") if f.is_file()), folder / name) for name in names]


def mnist(root: Path, split: str) -> Split:
    images, labels = (_read_idx(file) for file in files(root, split))
    return Split(DATASETS["mnist"], split, images.unsqueeze(1), labels.long())


def download(root: Path) -> None:
    torchvision_datasets().MNIST(root, download=True)


def _read_idx(file: Path) -> Tensor:
    """The IDX format: two zero bytes, the type (8 is uint8), the number of dimensions, each size, then the values."""
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        zeros, kind, dimensions = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{dimensions}I", content, 4)
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
        if zeros != 0 or kind != 8 or values.size != np.prod(shape, dtype=np.int64):
            raise ValueError("not an IDX file of bytes, or cut short")
    except (OSError, EOFError, ValueError, struct.error) as error:
        raise OutsideError(
            f"`{file}` is damaged: {error}",
            "delete it and run again with `--download`, or put back a good copy",
        ) from None
    return torch.from_numpy(values.reshape(shape).copy())
