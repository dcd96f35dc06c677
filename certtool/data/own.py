"""What the user's own images have in common, wherever they come from: their facts are found, and errors name a file."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from certtool.catalog import OWN_DATASETS, Augmentation, DatasetFacts, Reading
from certtool.errors import InputError, Problem

DIGITS = 6  # of mean and std: beyond them a sum in another order may differ


def bad(message: str, hint: str, file: Path) -> InputError:
    """The file also apart from the sentence, for whoever reads errors as JSON."""
    return InputError(Problem(message, hint, str(file)))


def check_classes(classes: tuple[str, ...], file: Path) -> None:
    """Names that a model's header can carry and a table can show."""
    if len(classes) < 2:
        what = f"only one class, `{classes[0]}`" if classes else "no classes"
        raise bad(f"`{file}` has {what}: a classifier needs at least two", "add images of another class", file)
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if classes.count(name) > 1)
        raise bad(f"the class `{twice}` is named twice", "give each class a name of its own", file)
    for name in classes:
        if not name.isprintable() or not 0 < len(name) <= 300:
            raise bad(f"the class name {ascii(name)[:80]} cannot be shown", "choose a printable name", file)


def find_facts(
    name: str, classes: tuple[str, ...], images: np.ndarray, file: Path, reading: Reading | None = None
) -> DatasetFacts:
    """From the training images: shape, scale, mean and std of every channel."""
    _, channels, height, width = images.shape
    scale = 255 if images.dtype == np.uint8 else 1
    moments = [_mean_and_std(images[:, channel], scale) for channel in range(channels)]
    if all(std == 0 for _, std in moments):
        raise bad("all training images are of one and the same colour", "there is nothing to learn in them", file)
    return DatasetFacts(
        name,
        OWN_DATASETS[name],
        classes,
        (channels, height, width),
        scale,
        tuple(mean for mean, _ in moments),
        tuple(std if std > 0 else 1.0 for _, std in moments),  # a channel that never changes is only shifted
        Augmentation(flip=True, padding=min(height, width) // 16),
        reading=reading,
    )


def _mean_and_std(channel: np.ndarray, scale: int) -> tuple[float, float]:
    """Of bytes over the integers, exactly; of floats in float64."""
    if channel.dtype == np.uint8:
        parts = (channel[start : start + 1024] for start in range(0, len(channel), 1024))  # bincount needs 8 bytes each
        counts = sum(np.bincount(part.reshape(-1), minlength=256) for part in parts).tolist()  # type: ignore[union-attr]
        count = sum(counts)
        total, squares = (sum(k**power * n for k, n in enumerate(counts)) for power in (1, 2))
        mean, variance = total / count, (count * squares - total**2) / count**2
    else:
        mean = float(channel.mean(dtype=np.float64))
        variance = float(np.square(channel.astype(np.float64) - mean).mean())
    return round(mean / scale, DIGITS), round(math.sqrt(variance) / scale, DIGITS)
