"""The embedded data set: 1,797 handwritten digits of 8x8 pixels, values 0 to 16.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49, under CC BY 4.0, as distributed with scikit-learn. `scripts/make_digits.py` made the
file and fixed its split.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from certtool.catalog import DATASETS
from certtool.data.dataset import Split

FILE = Path(__file__).with_name("digits.npz")


def digits(split: str) -> Split:
    with np.load(FILE, allow_pickle=False) as file:
        chosen = file["is_test"] == (split == "test")
        images = torch.from_numpy(file["images"][chosen])
        labels = torch.from_numpy(file["labels"][chosen].astype(np.int64))
    return Split(DATASETS["digits"], split, images, labels)
