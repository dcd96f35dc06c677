"""One picture file as 8-bit pixels, upright, with nothing guessed: what would lose something is refused."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from certtool.data.own import bad
from certtool.errors import OutsideError

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # of Pillow's others some start programs
GREY_MODES = ("1", "L", "LA", "La")


def is_grey(file: Path) -> bool:
    """From the file's header alone, which is also checked for what cannot be read as one 8-bit picture."""
    with _opened(file) as picture:
        return picture.mode in GREY_MODES


def read_picture(file: Path, channels: int, size: int | None) -> np.ndarray:
    """(C, H, W). With `size` the middle square, resized: squeezing a picture would change its proportions."""
    with _opened(file) as picture:
        if channels == 1 and picture.mode not in GREY_MODES:
            raise bad(f"{_short(file)} is a colour picture among grey ones", "convert it to grey first", file)
        upright = _opaque(ImageOps.exif_transpose(picture)).convert("L" if channels == 1 else "RGB")
    if size is not None and upright.size != (size, size):
        upright = ImageOps.fit(upright, (size, size), Image.Resampling.BICUBIC)
    pixels = np.asarray(upright).reshape(upright.height, upright.width, channels)
    return pixels.transpose(2, 0, 1)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Image.Image]:
    """An open picture of one frame and 8 bits. Pillow decodes when pixels are asked for, so errors come here too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on odd metadata
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=FORMATS) as picture:
                _check(picture, file)
                yield picture
    except UnidentifiedImageError:
        raise bad(f"{_short(file)} is not a picture", f"one of {', '.join(FORMATS)}, or remove it", file) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise bad(f"{_short(file)} has too many pixels to be decoded", "make it smaller first", file) from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise OutsideError(f"cannot read `{file}`: {(error.strerror or str(error)).lower()}") from None
        raise bad(f"{_short(file)} is a damaged picture: {error}", "put back a good copy, or remove it", file) from None


def _check(picture: Image.Image, file: Path) -> None:
    # A phone's JPEG (MPO) has a preview behind the picture; an animation or a pile of pages has no one picture.
    frames = getattr(picture, "n_frames", 1)
    if frames > 1 and picture.format != "MPO":
        raise bad(f"{_short(file)} has {frames} frames, and a picture has one", "save one of them, or remove it", file)
    if picture.mode.startswith(("I", "F")) or any(_is_deep(tile) for tile in getattr(picture, "tile", ())):
        raise bad(f"{_short(file)} has more than 8 bits a channel", "save it with 8 bits a channel", file)


def _is_deep(tile: Any) -> bool:
    """Pillow cuts 16-bit colours down to 8 without a word; its decoder's arguments tell. BGR;16 is 5, 6 and 5 bits."""
    if tile.codec_name == "ppm":
        return bool(tile.args[1] > 255)
    return ";16" in str(tile.args) and "BGR" not in str(tile.args)


def _opaque(picture: Image.Image) -> Image.Image:
    """Transparent parts on white, as most programs show them: what lies under them is arbitrary."""
    if not picture.has_transparency_data:
        return picture
    colours = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours)


def _short(file: Path) -> str:
    return f"`{file.parent.name}/{file.name}`"
