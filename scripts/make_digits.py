"""Make certtool/data/digits.npz: the 8x8 optical digits as scikit-learn distributes them, with a fixed split.

    .venv/bin/python scripts/make_digits.py

The split was drawn once, before any training, and is part of the file: 20 % of each class are test images. Run again,
this script writes the same bytes.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

SEED = 20211
TEST_SHARE = 0.2
TARGET = Path(__file__).parents[1] / "certtool" / "data" / "digits.npz"


def stratified_test_mask(labels: np.ndarray) -> np.ndarray:
    """True for the test images: the same share of every class."""
    random = np.random.default_rng(SEED)
    mask = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        mask[random.permutation(members)[: round(TEST_SHARE * len(members))]] = True
    return mask


def main() -> None:
    digits = load_digits()
    images = digits.images.astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = digits.target.astype(np.uint8)
    assert images.max() == 16
    assert len(images) == 1797
    np.savez_compressed(TARGET, images=images, labels=labels, is_test=stratified_test_mask(labels))


if __name__ == "__main__":
    main()
