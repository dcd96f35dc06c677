"""Pictures decoded once: their pixels in one file, beside the digest of the raw files they came from.

The raw files are read and hashed in full every time. For 20,000 files that takes 0.5 s from the page cache and 5 s from
a cold disk, against 13 s to decode them; a list of sizes and dates would be quicker, but no proof.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from PIL import features

from certtool.errors import CertToolError, OutsideError
from certtool.files import whole_file

SCHEMA = "certtool.decoded/1"


def decoder() -> str:
    """Who turns JPEG files into pixels. Two versions may round differently."""
    turbo = features.version_feature("libjpeg_turbo")
    library = f"libjpeg-turbo {turbo}" if turbo else f"libjpeg {features.version_codec('jpg')}"
    return f"pillow {PIL.__version__}, {library}"


def raw_digest(files: Iterable[tuple[str, Path]]) -> str:
    """Over names and bytes of the files, in their order. A file that cannot be read is named."""
    digest = hashlib.sha256()
    for name, file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise OutsideError(f"cannot read `{file}`: {reason}", "put back a good copy of this file") from None
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def cache_places(folder: Path, data: str, split: str) -> list[Path]:
    """Beside the data; where that cannot be written, in the user's cache under a name that tells the folder."""
    cache = os.environ.get("XDG_CACHE_HOME")
    user = (Path(cache) if cache else Path.home() / ".cache") / "certtool" / "decoded"
    tag = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    return [folder / f"certtool-{split}.npz", user / f"{data}-{split}-{tag}.npz"]


def through_cache(places: Sequence[Path], raw: str, decode: Callable[[], np.ndarray]) -> np.ndarray:
    """The pixels of raw files with this digest: as an earlier call left them, else decoded now and left for later.

    Equal files must give equal pixels. A damaged cache, or another decoder that gives other pixels, is an error: a
    model trained on the one would be verified on the other.
    """
    for place in places:
        found = _read(place, raw)
        if found is None:
            continue
        pixels, made_by = found
        if made_by == decoder():
            return pixels
        again = decode()
        if not np.array_equal(pixels, again):
            raise OutsideError(
                f"`{place}` was decoded by {made_by}; {decoder()} makes other pixels of the same files",
                "install those versions again, or remove that file to go on with the new pixels",
            )
        _write(places, raw, again)  # so that this check is made once for each new version
        return again
    pixels = decode()
    _write(places, raw, pixels)
    return pixels


def _read(place: Path, raw: str) -> tuple[np.ndarray, str] | None:
    """Pixels and their decoder; None where there are none, or only those of other raw files."""
    if not place.is_file():
        return None
    facts: dict[str, Any] = {}
    try:
        # Opened here: np.load forgets to close what turns out to be no archive.
        with place.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            facts = json.loads(str(file["facts"]))
            if facts["schema"] != SCHEMA or facts["raw_sha256"] != raw:
                return None
            pixels: np.ndarray = file["pixels"]
            if _digest(pixels) != facts["pixels_sha256"]:
                raise ValueError("its pixels do not have the sha256 that it names")
            return pixels, str(facts["decoder"])
    except (ValueError, KeyError, TypeError, EOFError, OSError, zipfile.BadZipFile) as error:
        made_by = facts.get("decoder", "an unknown decoder")
        raise OutsideError(
            f"`{place}` is damaged: {error} (decoded by {made_by}; here is {decoder()})",
            "remove that file: it is made again from the pictures",
        ) from None


def _write(places: Sequence[Path], raw: str, pixels: np.ndarray) -> None:
    """In the first place that takes it. Where none does, the next call decodes again: slower, not wrong."""
    facts = {"schema": SCHEMA, "raw_sha256": raw, "pixels_sha256": _digest(pixels), "decoder": decoder()}
    for number, place in enumerate(places):
        try:
            if number > 0:
                place.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(place) as file:
                np.savez(file, facts=json.dumps(facts), pixels=pixels)  # piecewise: no second copy in memory
        except (CertToolError, OSError):
            continue
        return


def _digest(pixels: np.ndarray) -> str:
    digest = hashlib.sha256(f"{pixels.shape} {pixels.dtype}".encode())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()
