"""Own images in one .npz file: `x_train`, `y_train`, `x_test`, `y_test`, and `classes` where they have names."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from certtool.catalog import DatasetFacts
from certtool.data.dataset import Split
from certtool.data.own import bad, check_classes, find_facts
from certtool.errors import OutsideError
from certtool.recipe.diagnose import did_you_mean

REQUIRED = ("x_train", "y_train", "x_test", "y_test")
KEYS = (*REQUIRED, "classes")
CHANNELS = (1, 3)
KEYS_HINT = "it needs x_train, y_train, x_test and y_test, and may have classes"


def read_npz(path: Path) -> tuple[Split, Split]:
    """Training and test images, as bytes or as floats in [0, 1]."""
    arrays = _read(path, KEYS)
    images, labels = _images(arrays, "train", path), _labels(arrays, "train", path)
    classes = _classes(arrays, labels, path)
    _no_gaps(labels, classes, path)
    if images.dtype == np.uint8 and images.max() <= 1:
        raise bad("`x_train` are bytes from 0 to 1, and bytes mean 0 to 255", "save them as float32", path)
    facts = find_facts("npz", classes, images, path)
    return _split(facts, "train", images, labels, path), _test(arrays, facts, path)


def read_npz_split(path: Path, facts: DatasetFacts, name: str) -> Split:
    """One split for a model that knows its classes and its shape."""
    arrays = _read(path, (f"x_{name}", f"y_{name}", "classes"))
    if "classes" in arrays and _names(arrays["classes"], path) != facts.classes:
        raise bad("`classes` are not those of the model", f"the model has {', '.join(facts.classes[:8])}", path)
    return _split(facts, name, _images(arrays, name, path), _labels(arrays, name, path), path)


def _test(arrays: dict[str, np.ndarray], facts: DatasetFacts, path: Path) -> Split:
    images = _images(arrays, "test", path)
    if (images.dtype == np.uint8) != (arrays["x_train"].dtype == np.uint8):
        raise bad("of `x_train` and `x_test` one is bytes, the other floats", "save both alike", path)
    return _split(facts, "test", images, _labels(arrays, "test", path), path)


def _split(facts: DatasetFacts, name: str, images: np.ndarray, labels: np.ndarray, path: Path) -> Split:
    if images.shape[1:] != facts.shape:
        raise bad(
            f"`x_{name}` are images of shape {images.shape[1:]}, expected {facts.shape}",
            "(channels, height, width)",
            path,
        )
    beyond = np.flatnonzero(labels >= len(facts.classes))
    if beyond.size:
        what = f"`y_{name}`[{beyond[0]}] is {labels[beyond[0]]}, and there are {len(facts.classes)} classes"
        raise bad(what, f"labels run from 0 to {len(facts.classes) - 1}", path)
    scale = 255 if images.dtype == np.uint8 else 1
    tensors = torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels)
    return Split(replace(facts, scale=scale), name, *tensors)


def _read(path: Path, wanted: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The arrays, without unpickling anything. Unknown and missing names are told."""
    if path.is_dir():
        raise bad(
            f"`{path}` is a folder, not an .npz file", 'for a folder of pictures write `dataset = "folder"`', path
        )
    if not path.is_file():
        raise OutsideError(f"there is no file `{path}`", "set `data.path`, or give `--data`")
    try:
        with path.open("rb") as opened:
            if not zipfile.is_zipfile(opened):
                raise bad(f"`{path}` is not an .npz file, or it is cut short", "`numpy.savez` writes one", path)
            opened.seek(0)
            with np.load(opened, allow_pickle=False) as file:
                _check_keys(file.files, path)
                return {key: _array(file, key, path) for key in wanted if key in file.files}
    except (EOFError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise bad(f"`{path}` is damaged: {error}", "make it again with `numpy.savez`", path) from None


def _check_keys(keys: list[str], path: Path) -> None:
    unknown = [key for key in keys if key not in KEYS]
    if unknown:
        raise bad(f"unknown array `{unknown[0]}`", did_you_mean(unknown[0], KEYS) or KEYS_HINT, path)
    missing = [key for key in REQUIRED if key not in keys]
    if missing:
        raise bad(f"the array `{missing[0]}` is missing", KEYS_HINT, path)


def _array(file: np.lib.npyio.NpzFile, key: str, path: Path) -> np.ndarray:
    try:
        array: np.ndarray = file[key]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        hint = "images must all have one size" if key.startswith("x_") else "labels must be whole numbers"
        raise bad(f"`{key}` is an array of Python objects", hint, path) from None
    return array


def _images(arrays: dict[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    """(N, C, H, W), bytes or float32 in [0, 1]. Of float64 the float32 nearest to it is the image."""
    key = f"x_{name}"
    images = _channels_first(arrays[key], key, path)
    if images.dtype == np.uint8:
        return images
    if images.dtype.kind != "f":
        raise bad(f"`{key}` is of type {images.dtype}", "images are uint8, or floats in [0, 1]", path)
    outside = ~((images >= 0) & (images <= 1)).reshape(len(images), -1).all(axis=1)
    if outside.any():
        number = int(outside.argmax())
        what = (
            "has NaN"
            if np.isnan(images[number]).any()
            else f"goes from {images[number].min()} to {images[number].max()}"
        )
        raise bad(f"`{key}`[{number}] {what}", "floats must lie in [0, 1]; the network normalises by itself", path)
    return images.astype(np.float32, copy=False)


def _channels_first(images: np.ndarray, key: str, path: Path) -> np.ndarray:
    """(N, H, W) is grey. Of four axes the second or the last has 1 or 3 entries, the channels; not both."""
    shape = images.shape
    if images.ndim not in (3, 4) or 0 in shape:
        raise bad(f"`{key}` has the shape {shape}", "images are (N, H, W), (N, H, W, C) or (N, C, H, W)", path)
    if images.ndim == 3:
        return images[:, None]
    first, last = shape[1] in CHANNELS, shape[3] in CHANNELS
    if first == last:
        what = "could be (N, C, H, W) or (N, H, W, C)" if first else "has no axis of 1 or 3 channels"
        raise bad(f"`{key}` of shape {shape} {what}", "channels stand second or last: 1 (grey) or 3 (colour)", path)
    return images if first else images.transpose(0, 3, 1, 2)


def _labels(arrays: dict[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    key, labels, count = f"y_{name}", arrays[f"y_{name}"], len(arrays[f"x_{name}"])
    if labels.dtype.kind not in "iu":
        raise bad(f"`{key}` is of type {labels.dtype}", "labels are whole numbers, from 0", path)
    if labels.shape != (count,):
        raise bad(f"`{key}` has the shape {labels.shape}, for {count} images", "one label for each image", path)
    negative = np.flatnonzero(labels.astype(np.int64) < 0)
    if negative.size:
        raise bad(f"`{key}`[{negative[0]}] is {labels[negative[0]]}", "labels are whole numbers, from 0", path)
    return labels.astype(np.int64)


def _classes(arrays: dict[str, np.ndarray], labels: np.ndarray, path: Path) -> tuple[str, ...]:
    if "classes" in arrays:
        names = _names(arrays["classes"], path)
    else:
        names = tuple(str(number) for number in range(min(int(labels.max(initial=0)), 100_000) + 1))
    check_classes(names, path)
    return names


def _names(array: np.ndarray, path: Path) -> tuple[str, ...]:
    if array.dtype.kind != "U" or array.ndim != 1:
        raise bad(f"`classes` is of type {array.dtype} and shape {array.shape}", "a list of strings", path)
    return tuple(str(name) for name in array)


def _no_gaps(labels: np.ndarray, classes: tuple[str, ...], path: Path) -> None:
    seen = np.unique(labels)
    absent = next((number for number in range(len(classes)) if number not in seen), None)
    if absent is not None:
        raise bad(
            f"`y_train` has no image of class {absent}", "labels run from 0 to the last class, without gaps", path
        )
