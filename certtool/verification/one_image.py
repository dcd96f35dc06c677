"""One picture of the user's, as a split of one image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from certtool.checkpoint import Checkpoint
from certtool.data import Split
from certtool.errors import InputError, OutsideError


def read_image(file: Path, checkpoint: Checkpoint, label: str | None) -> Split:
    """The picture in the network's shape, 8 bits a channel; the label named or numbered, else what the model says."""
    facts = checkpoint.dataset
    channels, height, width = facts.shape
    try:
        with Image.open(file) as picture:
            if picture.size != (width, height):
                raise InputError(
                    f"`{file}` is {picture.size[0]}x{picture.size[1]} pixels, the network takes {width}x{height}",
                    "resize it first: scaling would make a picture of its own, and prove something about that",
                )
            pixels = np.asarray(picture.convert("L" if channels == 1 else "RGB"))
    except FileNotFoundError:
        raise OutsideError(f"there is no file `{file}`") from None
    except (OSError, UnidentifiedImageError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"`{file}` is not a picture that can be read: {error}") from None
    images = torch.from_numpy(pixels.copy()).view(height, width, channels).permute(2, 0, 1).unsqueeze(0).contiguous()
    split = Split(replace(facts, scale=255), file.name, images, torch.zeros(1, dtype=torch.long))
    with torch.no_grad():
        predicted = int(checkpoint.model(split.pixels(images)).argmax())
    return replace(split, labels=torch.tensor([predicted if label is None else _label(label, facts.classes)]))


def _label(text: str, classes: tuple[str, ...]) -> int:
    if text in classes:
        return classes.index(text)
    if text.isdigit() and int(text) < len(classes):
        return int(text)
    known = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
    raise InputError(f"there is no class `{text}`", f"a name ({known}) or a number from 0 to {len(classes) - 1}")
