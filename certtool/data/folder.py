"""Own pictures: a folder for each class, below `train` and `test` or all together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from certtool.catalog import DatasetFacts, Reading
from certtool.data.dataset import Split
from certtool.data.own import bad, check_classes, find_facts
from certtool.data.pictures import is_grey, read_picture
from certtool.errors import InputError, OutsideError

TEST_FRACTION = 0.2
LITTER = ("thumbs.db", "desktop.ini")  # what systems leave among pictures, beside names that start with a dot
LAYOUT = "a folder for each class, with its pictures in it, below `train` and `test` or all together"

Pictures = list[tuple[Path, int]]


@dataclass(frozen=True)
class Listing:
    """The pictures of a folder before any is opened."""

    classes: tuple[str, ...]
    train: Pictures
    test: Pictures
    test_fraction: float | None  # None: there is a test folder
    names_sha256: str | None


def read_folder(path: Path, size: int | None, test_fraction: float | None) -> tuple[Split, Split]:
    """Training and test images. Grey where every picture is grey, else all in colour."""
    listing = list_pictures(path, test_fraction)
    if listing.test_fraction is None and test_fraction is not None:
        raise bad(f"`{path}` has a `test` folder: there is nothing to share out", "leave `test_fraction` out", path)
    everything = [file for file, _ in (*listing.train, *listing.test)]
    grey = [is_grey(file) for file in everything]  # of all of them: this also finds what cannot be read, early
    channels = 1 if all(grey) else 3
    shape = (channels, size, size) if size else read_picture(everything[0], channels, None).shape
    resize = f"resize them all with `data.size`, as in `size = {min(shape[1:])}`"
    images = _decode(listing.train, shape, size, f"{_name(everything[0])} is", resize)
    reading = Reading(size, listing.test_fraction, listing.names_sha256)
    facts = find_facts("folder", listing.classes, images, path, reading)
    test = _decode(listing.test, shape, size, "the training pictures are", resize)
    return _split(facts, "train", images, listing.train), _split(facts, "test", test, listing.test)


def read_folder_split(path: Path, facts: DatasetFacts, name: str) -> Split:
    """One split as a model knows it: its classes, its size, its way to share pictures out."""
    reading = facts.reading or Reading()
    listing = list_pictures(path, reading.test_fraction)
    if listing.classes != facts.classes:
        raise _other_classes(path, listing.classes, facts.classes, "the model was trained on")
    if listing.names_sha256 is not None and listing.names_sha256 != reading.names_sha256:
        raise bad(
            f"`{path}` does not hold the pictures that training and test were chosen from",
            "some may have changed sides: put the test pictures into `test`, the others into `train`",
            path,
        )
    chosen = listing.test if name == "test" else listing.train
    images = _decode(chosen, facts.shape, reading.size, "the model takes", "resize it first")
    return _split(replace(facts, scale=255), name, images, chosen)


def list_pictures(path: Path, test_fraction: float | None) -> Listing:
    """`train` and `test` where there are both; else every class is shared out, with the fraction or 0.2."""
    if not path.exists():
        raise OutsideError(f"there is no folder `{path}`", "set `data.path`, or give `--data`")
    if not path.is_dir():
        raise bad(f"`{path}` is a file, not a folder of pictures", 'for an .npz file write `dataset = "npz"`', path)
    train, test = path / "train", path / "test"
    if train.is_dir() and test.is_dir():
        return _two_folders(train, test)
    half = next((part for part in (train, test) if part.is_dir() and _folders(part)), None)
    if half is not None:  # and not a class of that name, with pictures in it
        other = test if half == train else train
        raise bad(f"`{path}` has a folder `{half.name}`, but no `{other.name}`", f"it should hold {LAYOUT}", other)
    return _share_out(path, TEST_FRACTION if test_fraction is None else test_fraction)


def _two_folders(train: Path, test: Path) -> Listing:
    by_class, of_test = _by_class(train), _by_class(test)
    if list(by_class) != list(of_test):
        raise _other_classes(test, tuple(of_test), tuple(by_class), "`train` has")
    check_classes(tuple(by_class), train)
    return Listing(tuple(by_class), _numbered(by_class), _numbered(of_test), None, None)


def _share_out(path: Path, fraction: float) -> Listing:
    """The same share of every class, chosen by a hash of the names: alike for every seed, system and order on disk."""
    train, test = {}, {}
    for name, files in _by_class(path).items():
        count = min(max(round(fraction * len(files)), 1), len(files) - 1)
        if count < 1:
            raise bad(f"`{name}` has one picture: not enough for training and test", "add another one", path / name)
        drawn = sorted(files, key=lambda file: hashlib.sha256(_bytes(file)).digest())
        held = set(drawn[:count])
        test[name], train[name] = [f for f in files if f in held], [f for f in files if f not in held]
    check_classes(tuple(train), path)
    names = b"\n".join(_bytes(file) for file, _ in (*_numbered(train), *_numbered(test)))
    digest = hashlib.sha256(names).hexdigest()
    return Listing(tuple(train), _numbered(train), _numbered(test), fraction, digest)


def _by_class(path: Path) -> dict[str, list[Path]]:
    found = {place.name: _pictures(place) for place in _folders(path)}
    if not found:
        raise bad(f"`{path}` holds no class folders", f"it should hold {LAYOUT}", path)
    return found


def _folders(path: Path) -> list[Path]:
    places = (place for place in path.iterdir() if place.is_dir() and not place.name.startswith("."))
    return sorted(places, key=lambda place: place.name)


def _pictures(place: Path) -> list[Path]:
    files = sorted((file for file in place.iterdir() if not _is_litter(file)), key=lambda file: file.name)
    other = next((file for file in files if not file.is_file()), None)  # a pipe, say, would be waited for
    if other is not None:
        raise bad(
            f"{_name(other)} is not a file, and a class folder holds pictures only", f"it should be {LAYOUT}", other
        )
    if not files:
        raise bad(f"the class folder `{place.name}` is empty", "put pictures into it, or remove it", place)
    return files


def _name(file: Path) -> str:
    return f"`{file.parent.name}/{file.name}`"


def _bytes(file: Path) -> bytes:
    """Class and name, whatever the file system allows in them."""
    return f"{file.parent.name}/{file.name}".encode(errors="surrogateescape")


def _is_litter(file: Path) -> bool:
    return file.name.startswith(".") or file.name.lower() in LITTER


def _numbered(by_class: dict[str, list[Path]]) -> Pictures:
    return [(file, label) for label, files in enumerate(by_class.values()) for file in files]


def _decode(pictures: Pictures, shape: Sequence[int], size: int | None, whose: str, hint: str) -> np.ndarray:
    """Into one array: a list of pictures would take their memory twice."""
    images = np.empty((len(pictures), *shape), dtype=np.uint8)
    for number, (file, _) in enumerate(pictures):
        pixels = read_picture(file, shape[0], size)
        if pixels.shape != tuple(shape):
            raise bad(
                f"{_name(file)} is {pixels.shape[2]}x{pixels.shape[1]} pixels, {whose} {shape[2]}x{shape[1]}",
                hint,
                file,
            )
        images[number] = pixels
    return images


def _split(facts: DatasetFacts, name: str, images: np.ndarray, pictures: Pictures) -> Split:
    return Split(facts, name, torch.from_numpy(images), torch.tensor([label for _, label in pictures]))


def _other_classes(path: Path, found: tuple[str, ...], expected: tuple[str, ...], whose: str) -> InputError:
    missing, extra = [n for n in expected if n not in found], [n for n in found if n not in expected]
    what = f"lacks the class `{missing[0]}`" if missing else f"has a class `{extra[0]}`"
    known = ", ".join(expected[:8]) + (", ..." if len(expected) > 8 else "")
    return bad(f"`{path}` {what}; {whose} {known}", "the class folders must be the same", path)
