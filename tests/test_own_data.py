"""Own images, as a folder of pictures or as an .npz file: read, trained on, verified; or refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Cli, certtool_in, once
from PIL import Image

import certtool
from certtool import checker, checkpoint, recipe
from certtool.bounds.box import inner_edges, outer_edges
from certtool.catalog import OWN_DATASETS
from certtool.cli.doctor import examine
from certtool.data import load_both, load_known
from certtool.data.folder import list_pictures, read_folder, read_folder_split
from certtool.data.npz import read_npz, read_npz_split
from certtool.data.pictures import read_picture
from certtool.device import device_for
from certtool.epsilon import Epsilon
from certtool.errors import InputError, Interrupted, OutsideError
from certtool.training import new_run, resumed_run
from certtool.verification import LadderSettings, largest_radii, verify
from certtool.verification.images import choose
from certtool.verification.ladder import Ladder

CLASSES = ("across", "down", "slanted")
RECIPE = """\
base = "tiny_cnn7"
name = "mine"
summary = "stripes"

[data]
dataset = "folder"
path = "photos"

[model]
width = 4
hidden = 16

[threat]
eps = "0.05"

[train]
epochs = 16
lr = 5e-3
lr_milestones = [12]

[train.warmup]
start = 2
epochs = 8
"""
QUICK = ("--method", "ibp", "--attack-steps", "5", "--restarts", "1")


def stripes(label: int, draw: np.random.Generator, size: int = 12) -> np.ndarray:
    """Light and dark stripes, three pixels wide, in one of three directions, with noise."""
    rows, columns = np.indices((size, size))
    pattern = (rows, columns, rows + columns)[label] // 3 % 2
    return (40 + 160 * pattern + draw.integers(0, 40, (size, size))).astype(np.uint8)


def make_folder(path: Path, count: int = 40, size: int = 12) -> Path:
    draw = np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        (path / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(stripes(label, draw, size)).save(path / name / f"{number}.png")
    return path


def arrays(kind: type = np.float64, count: int = 120) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    labels = np.arange(count) % 3
    images = np.stack([stripes(label, draw) for label in labels])
    images = images if kind is np.uint8 else (images / 255).astype(kind)
    cut = count * 3 // 4
    return {"x_train": images[:cut], "y_train": labels[:cut], "x_test": images[cut:], "y_test": labels[cut:]}


def make_npz(path: Path, **changes: Any) -> Path:
    np.savez(path, **{key: value for key, value in (arrays() | changes).items() if value is not None})
    return path


def train(place: Path, *settings: str) -> None:
    (place / "mine.toml").write_text(RECIPE)
    options = [word for setting in settings for word in ("--set", setting)]
    certtool_in(place, "train", "mine.toml", "--out", "run", *options)


@pytest.fixture(scope="module")
def folder_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures, and the run that was trained on them."""

    def build(place: Path) -> None:
        make_folder(place / "photos")
        train(place)

    return once(tmp_path_factory, "own_folder", build)


@pytest.fixture(scope="module")
def npz_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an .npz file of floats."""

    def build(place: Path) -> None:
        make_npz(place / "mine.npz", classes=np.array(CLASSES))
        train(place, "data.dataset=npz", "data.path=mine.npz")

    return once(tmp_path_factory, "own_npz", build)


# --- from the files to a certificate ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pytest.param("folder", marks=pytest.mark.slow), "npz"])
def test_train_verify_recheck_and_inspect(kind: str, request: pytest.FixtureRequest, cli: Cli, tmp_path: Path) -> None:
    """The commands that `train` prints work as they are, from any folder, because the run's folder knows the way."""
    place: Path = request.getfixturevalue(f"{kind}_place")
    run, proof = place / "run", tmp_path / "proof.json"
    radii, files = ("--eps", "0.3", "--eps", "0.02"), ("--certificate", proof, "--html", "page.html")
    verified = cli("verify", run, *radii, *files, "--json", *QUICK)
    assert verified.returncode == 0, verified.stderr
    report = json.loads(verified.stdout)
    assert (report["dataset"], report["images"]) == (kind, {"folder": 24, "npz": 30}[kind])
    large, small = report["results"]
    assert small["certified_rigorous"] > 0.2
    assert large["counts"]["falsified"] > 0
    rechecked = cli("verify", run, "--recheck", proof)
    assert rechecked.returncode == 0, rechecked.stdout + rechecked.stderr
    assert "by the independent NumPy checker" in rechecked.stdout
    assert "witnesses" in rechecked.stdout
    document = json.loads(proof.read_text())
    assert document["dataset"]["sha256"] == checkpoint.load_images(certtool.load(run), "test").sha256
    inspected = json.loads(cli("inspect", run, "--json").stdout)
    assert inspected["dataset"] == kind
    assert "slanted" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "npz"])
def test_a_model_alone_asks_where_the_images_lie(
    kind: str, request: pytest.FixtureRequest, cli: Cli, tmp_path: Path
) -> None:
    place: Path = request.getfixturevalue(f"{kind}_place")
    shutil.copy(place / "run" / "model.safetensors", tmp_path / "alone.safetensors")
    asked = cli("verify", "alone.safetensors")
    assert asked.returncode == 2
    assert "where do they lie?" in asked.stderr
    assert "`--data PATH`" in asked.stderr
    source = place / ("photos" if kind == "folder" else "mine.npz")
    assert cli("inspect", "alone.safetensors", "--data", source).returncode == 0
    report = certtool.verify(tmp_path / "alone.safetensors", data=source, images=3, method="ibp", attack=None)
    assert report.data.name == kind


@pytest.mark.parametrize("kind", ["folder", "npz"])
def test_the_header_tells_what_was_found_and_nothing_of_the_machine(kind: str, request: pytest.FixtureRequest) -> None:
    place: Path = request.getfixturevalue(f"{kind}_place")
    facts = certtool.load(place / "run").dataset
    assert facts.classes == CLASSES
    assert facts.shape == (1, 12, 12)
    assert facts.scale == {"folder": 255, "npz": 1}[kind]
    content = (place / "run" / "model.safetensors").read_bytes()
    assert str(place).encode() not in content
    assert b"photos" not in content
    assert b"mine.npz" not in content
    kept = recipe.load(str(place / "run" / "recipe.toml")).data
    assert kept.path == str(place / ("photos" if kind == "folder" else "mine.npz"))
    chosen = recipe.load(str(place / "mine.toml")).data
    train, _ = load_both(chosen.model_copy(update={"dataset": kind, "path": kept.path}))
    pixels = train.pixels(train.images).double()
    assert facts.mean == pytest.approx([float(pixels.mean())], abs=1e-6)
    assert facts.std == pytest.approx([float(pixels.std(correction=0))], abs=1e-6)


@pytest.mark.slow
def test_equal_pictures_elsewhere_give_equal_bytes(folder_place: Path, tmp_path: Path) -> None:
    shutil.copytree(folder_place / "photos", tmp_path / "somewhere" / "else")
    (tmp_path / "mine.toml").write_text(RECIPE.replace('path = "photos"\n', ""))
    mine, other = str(tmp_path / "mine.toml"), tmp_path / "other"
    with pytest.raises(InputError, match='where are the images of `dataset = "folder"`'):
        certtool.train(mine, out=other)
    assert not other.exists()
    certtool.train(mine, out=other, data=tmp_path / "somewhere" / "else")
    expected = (folder_place / "run" / "model.safetensors").read_bytes()
    assert (tmp_path / "other" / "model.safetensors").read_bytes() == expected


def test_a_run_is_resumed_on_the_same_images_only(folder_place: Path, tmp_path: Path) -> None:
    photos, run, device = tmp_path / "photos", tmp_path / "run", device_for("cpu")
    shutil.copytree(folder_place / "photos", photos)
    chosen = recipe.load(str(folder_place / "mine.toml")).at(str(photos))
    steps = iter(range(1000))
    with pytest.raises(Interrupted):
        for _ in new_run(chosen, run, device=device).run(lambda: next(steps) == 10):
            pass
    moved = photos.rename(tmp_path / "moved")
    with pytest.raises(OutsideError, match="there is no folder"):
        resumed_run(run, device=device)
    picture = moved / "down" / "3.png"
    original = picture.read_bytes()
    Image.open(picture).point(lambda value: value ^ 1).save(picture)
    with pytest.raises(InputError, match="not those the run was started with"):
        resumed_run(run, data=moved, device=device)
    picture.write_bytes(original)
    for _ in resumed_run(run, data=moved, device=device).run():
        pass
    expected = (folder_place / "run" / "model.safetensors").read_bytes()
    assert (run / "model.safetensors").read_bytes() == expected


def test_validation_and_augmentation(folder_place: Path, tmp_path: Path) -> None:
    settings = {"data.path": str(folder_place / "photos"), "data.validation_fraction": 0.25, "train.epochs": 9}
    settings |= {
        "data.augment": "standard",
        "train.selection": "validation",
        "train.lr_milestones": [],
        "data.size": 16,
    }
    model = certtool.train(str(folder_place / "mine.toml"), settings, out=tmp_path / "run")
    assert model.dataset.shape == (1, 16, 16)
    assert model.dataset.reading is not None
    assert model.dataset.reading.size == 16
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert "validation_certified_accuracy" in metrics[-1]
    train, _ = read_folder(folder_place / "photos", 16, None)
    assert train.facts.augmentation.flip
    assert train.facts.augmentation.padding == 1
    assert certtool.verify(model, images=2, method="ibp", attack=None).data.images == 2


def test_inspect_a_recipe_on_own_images(folder_place: Path, cli: Cli) -> None:
    options = ("--set", f"data.path={folder_place / 'photos'}", "--trials", "1", "--json")
    document = json.loads(cli("inspect", folder_place / "mine.toml", *options).stdout)
    assert document["dataset"] == "folder"
    assert document["results"][0]["layers"][0]["name"] == "conv1"


def test_doctor_knows_them() -> None:
    sets = examine()["data sets"]
    assert {name for name in sets if sets[name].startswith("yours")} == set(OWN_DATASETS)


def test_errors_as_json_name_the_file(folder_place: Path, cli: Cli, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    shutil.copytree(folder_place / "photos", photos)
    (photos / "down" / "7.png").write_bytes(b"not a picture")
    (tmp_path / "mine.toml").write_text(RECIPE)
    result = cli("train", "mine.toml", "--json")
    assert result.returncode == 2
    (problem,) = json.loads(result.stdout)["errors"]
    assert problem["file"] == "photos/down/7.png"
    assert problem["message"] == "`down/7.png` is not a picture"
    assert not (tmp_path / "runs").exists()


# --- folders ---------------------------------------------------------------------------------------------------------


def test_every_class_is_shared_out_alike_and_by_name(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "photos", 20)
    listing = list_pictures(path, None)
    assert listing.classes == CLASSES
    assert np.bincount([label for _, label in listing.test]).tolist() == [4, 4, 4]
    assert np.bincount([label for _, label in listing.train]).tolist() == [16, 16, 16]
    everything = [file for file, _ in (*listing.train, *listing.test)]
    assert sorted(everything) == sorted(path.glob("*/*.png"))
    names = sorted(path.joinpath("down").iterdir(), key=lambda f: hashlib.sha256(f"down/{f.name}".encode()).digest())
    assert {file for file, label in listing.test if label == 1} == set(names[:4])
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    assert list_pictures(copy, None).names_sha256 == listing.names_sha256
    assert len(list_pictures(path, 0.5).test) == 30
    assert len(list_pictures(path, 0.001).test) == 3  # at least one of each
    assert len(list_pictures(path, 0.999).train) == 3


def test_train_and_test_folders(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", 6)
    make_folder(tmp_path / "test", 3)
    make_folder(tmp_path / "val", 2)
    train, test = read_folder(tmp_path, None, None)
    assert (len(train), len(test)) == (18, 9)
    assert train.facts.reading is not None
    assert train.facts.reading.test_fraction is None
    assert torch.equal(read_folder_split(tmp_path, train.facts, "test").images, test.images)
    assert torch.equal(read_folder_split(tmp_path, train.facts, "train").images, train.images)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "photos", 5)
    (path / "down").rename(path / "train")
    assert list_pictures(path, None).classes == ("across", "slanted", "train")


def test_litter_is_passed_over(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "photos", 5)
    before = list_pictures(path, None)
    for name in (".DS_Store", "down/.DS_Store", "down/Thumbs.db", "down/desktop.ini", "readme.txt"):
        (path / name).write_bytes(b"x")
    (path / ".thumbnails").mkdir()
    assert list_pictures(path, None) == before


def test_a_model_keeps_to_the_pictures_that_were_shared_out(folder_place: Path, tmp_path: Path) -> None:
    """One picture more, and a training picture may have become a test picture."""
    photos = Path(shutil.copytree(folder_place / "photos", tmp_path / "photos"))
    shutil.copy(photos / "down" / "0.png", photos / "down" / "new.png")
    model = certtool.load(folder_place / "run")
    with pytest.raises(InputError, match="does not hold the pictures that training and test were chosen from"):
        checkpoint.load_images(model, "test", photos)
    shutil.rmtree(photos / "down")
    with pytest.raises(InputError, match="lacks the class `down`; the model was trained on across, down, slanted"):
        checkpoint.load_images(model, "test", photos)
    for part in ("train", "test"):
        shutil.copytree(folder_place / "photos", tmp_path / "two" / part)
    assert len(checkpoint.load_images(model, "test", tmp_path / "two")) == 120
    Image.new("L", (13, 12)).save(tmp_path / "two" / "test" / "down" / "5.png")
    with pytest.raises(InputError, match=r"`down/5.png` is 13x12 pixels, the model takes 12x12"):
        checkpoint.load_images(model, "test", tmp_path / "two")


def png16(colour_type: int, channels: int) -> bytes:
    """16 bits a channel, which Pillow does not write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = (b"\0" + b"\x12\x34" * 12 * channels) * 12
    head = struct.pack(">IIBBBBB", 12, 12, 16, colour_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def animation(file: Path) -> None:
    frames = [Image.new("L", (12, 12), shade) for shade in (0, 100, 200)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])


BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    # what is done to the folder, the message, the file that is named
    "garbage": (lambda p: (p / "down/1.png").write_bytes(b"x"), "`down/1.png` is not a picture", "down/1.png"),
    "cut": (lambda p: (p / "down/1.png").write_bytes((p / "down/1.png").read_bytes()[:90]), "`down/1.png` is a damaged",
            "down/1.png"),
    "text": (lambda p: (p / "down/a.txt").write_text("hello"), "`down/a.txt` is not a picture", "down/a.txt"),
    "script": (lambda p: (p / "down/a.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 12 12\n"),
               "`down/a.eps` is not a picture", "down/a.eps"),
    "size": (lambda p: Image.new("L", (12, 13)).save(p / "down/1.png"),
             "`down/1.png` is 12x13 pixels, `across/.*png` is 12x12", "down/1.png"),
    "grey16": (lambda p: (p / "down/1.png").write_bytes(png16(0, 1)), "1.png` has more than 8 bits", "down/1.png"),
    "colour16": (lambda p: (p / "down/1.png").write_bytes(png16(2, 3)), "more than 8 bits", "down/1.png"),
    "alpha16": (lambda p: (p / "down/1.png").write_bytes(png16(6, 4)), "more than 8 bits", "down/1.png"),
    "ppm16": (lambda p: (p / "down/1.png").write_bytes(b"P6 12 12 65535\n" + bytes(864)), "more than 8", "down/1.png"),
    "floats": (lambda p: Image.new("F", (12, 12)).save(p / "down/1.tiff"), "more than 8 bits", "down/1.tiff"),
    "animated": (lambda p: animation(p / "down/1.gif"), "`down/1.gif` has 3 frames", "down/1.gif"),
    "bomb": (lambda p: Image.new("1", (12_000, 12_000)).save(p / "down/1.png"), "too many pixels", "down/1.png"),
    "empty": (lambda p: [f.unlink() for f in (p / "down").iterdir()], "class folder `down` is empty", "down"),
    "nested": (lambda p: (p / "down/more").mkdir(), "`down/more` is not a file", "down/more"),
    "pipe": (lambda p: os.mkfifo(p / "down/pipe.png"), "`down/pipe.png` is not a file", "down/pipe.png"),
    "one class": (lambda p: [shutil.rmtree(p / name) for name in CLASSES[1:]], "only one class, `across`", ""),
    "no class": (lambda p: [shutil.rmtree(p / name) for name in CLASSES], "holds no class folders", ""),
    "one picture": (lambda p: [f.unlink() for f in sorted((p / "down").iterdir())[1:]], "has one picture", "down"),
    "no test": (lambda p: shutil.copytree(p, p.parent / "x") and shutil.move(p.parent / "x", p / "train"),
                "has a folder `train`, but no `test`", "test"),
    "name": (lambda p: (p / "down").rename(p / "do\nwn"), r"class name 'do\\nwn' cannot be shown", ""),
    "plain": (lambda p: [Image.new("L", (12, 12), 7).save(f) for f in p.glob("*/*.png")], "the same colour", ""),
}  # fmt: skip


@pytest.mark.parametrize("harm", BAD_FOLDERS)
def test_a_bad_folder_is_one_error_that_names_the_file(harm: str, tmp_path: Path) -> None:
    path = make_folder(tmp_path / "photos", 4)
    change, message, named = BAD_FOLDERS[harm]
    change(path)
    with pytest.raises(InputError, match=message) as caught:
        read_folder(path, None, None)
    (problem,) = caught.value.problems
    assert problem.file == str(path / named)
    assert problem.hint


def test_train_and_test_must_agree(tmp_path: Path) -> None:
    train, test = make_folder(tmp_path / "train", 3), make_folder(tmp_path / "test", 3)
    with pytest.raises(InputError, match="has a `test` folder: there is nothing to share out"):
        read_folder(tmp_path, None, 0.3)
    (test / "down").rename(test / "dwon")
    with pytest.raises(InputError, match="test` lacks the class `down`; `train` has across, down, slanted"):
        read_folder(tmp_path, None, None)
    shutil.rmtree(train / "down")
    (test / "dwon").rename(test / "down")
    with pytest.raises(InputError, match="test` has a class `down`; `train` has across, slanted"):
        read_folder(tmp_path, None, None)


def test_places_that_are_no_folder(tmp_path: Path) -> None:
    with pytest.raises(OutsideError, match="there is no folder `nowhere`"):
        read_folder(Path("nowhere"), None, None)
    with pytest.raises(InputError, match="is a file, not a folder"):
        read_folder(make_npz(tmp_path / "mine.npz"), None, None)


def test_all_grey_stays_grey_and_one_colour_picture_makes_colour(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "photos", 4)
    Image.open(path / "down/1.png").convert("1").save(path / "down/1.png")
    Image.open(path / "down/2.png").convert("LA").save(path / "down/2.png")
    grey, _ = read_folder(path, None, None)
    assert grey.facts.shape == (1, 12, 12)
    Image.open(path / "down/3.png").convert("RGB").save(path / "down/3.png")
    colour, _ = read_folder(path, None, None)
    assert colour.facts.shape == (3, 12, 12)
    assert torch.equal(colour.images[0, 0], colour.images[0, 2])
    assert torch.equal(colour.images[:, :1], grey.images)
    with pytest.raises(InputError, match=r"`down/3.png` is a colour picture among grey ones"):
        [read_folder_split(path, grey.facts, name) for name in ("train", "test")]


def test_every_kind_of_picture(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    colours = Image.fromarray(draw.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    expected = np.asarray(colours).transpose(2, 0, 1)

    def saved(name: str, picture: Image.Image, **options: Any) -> np.ndarray:
        picture.save(tmp_path / name, **options)
        return read_picture(tmp_path / name, 3, None)

    for name in ("a.png", "a.bmp", "a.tiff", "a.ppm"):
        assert np.array_equal(saved(name, colours), expected)
    assert np.array_equal(saved("a.webp", colours, lossless=True), expected)
    palette = colours.quantize(256)
    assert np.array_equal(saved("palette.png", palette), np.asarray(palette.convert("RGB")).transpose(2, 0, 1))
    assert np.array_equal(saved("palette.gif", palette), np.asarray(palette.convert("RGB")).transpose(2, 0, 1))
    assert saved("ink.jpg", colours.convert("CMYK")).shape == (3, 6, 8)
    clear = colours.copy()
    clear.putalpha(Image.fromarray(np.where(np.arange(8) < 4, 0, 255).astype(np.uint8)[None].repeat(6, 0)))
    seen = saved("clear.png", clear)
    assert (seen[:, :, :4] == 255).all()  # on white
    assert np.array_equal(seen[:, :, 4:], expected[:, :, 4:])
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    assert np.array_equal(saved("turned.png", colours, exif=exif), np.rot90(expected, -1, (1, 2)))
    grey = Image.fromarray(draw.integers(0, 256, (6, 8), dtype=np.uint8))
    grey.save(tmp_path / "grey.png")
    assert np.array_equal(read_picture(tmp_path / "grey.png", 1, None)[0], np.asarray(grey))


def test_resizing_keeps_proportions(tmp_path: Path) -> None:
    wide = np.zeros((40, 120, 3), dtype=np.uint8)
    wide[:, 40:80] = 200  # the middle square
    Image.fromarray(wide).save(tmp_path / "wide.png")
    pixels = read_picture(tmp_path / "wide.png", 3, 20)
    assert pixels.shape == (3, 20, 20)
    assert pixels.min() > 180  # squeezed, it would be black at both sides


# --- .npz files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHW", "NCHW", "NHWC", "colour first", "colour last"])
@pytest.mark.parametrize("kind", [np.uint8, np.float16, np.float32, np.float64])
def test_layouts_and_types(layout: str, kind: type, tmp_path: Path) -> None:
    given = arrays(kind)
    shown = {
        "NHW": lambda x: x,
        "NCHW": lambda x: x[:, None],
        "NHWC": lambda x: x[..., None],
        "colour first": lambda x: np.stack([x] * 3, 1),
        "colour last": lambda x: np.stack([x] * 3, -1),
    }[layout]
    changes = {key: shown(given[key]) for key in ("x_train", "x_test")}
    train, test = read_npz(make_npz(tmp_path / "mine.npz", **changes))
    channels = 3 if "colour" in layout else 1
    assert train.facts.shape == (channels, 12, 12)
    assert train.facts.classes == ("0", "1", "2")
    assert train.facts.scale == (255 if kind is np.uint8 else 1)
    assert train.images.dtype == (torch.uint8 if kind is np.uint8 else torch.float32)
    assert torch.equal(test.images[:, -1], torch.from_numpy(given["x_test"].astype(test.images.numpy().dtype)))
    assert torch.equal(train.pixels(train.images), train.images.float() / train.facts.scale)
    again = read_npz_split(tmp_path / "mine.npz", train.facts, "test")
    assert again.sha256 == test.sha256


def with_value(key: str, index: Any, value: Any, kind: type = np.float64) -> dict[str, Any]:
    array = arrays(kind)[key].copy()
    array[index] = value
    return {key: array}


def ragged() -> np.ndarray:
    result = np.empty(90, dtype=object)
    result[:] = [np.zeros((12 + number % 2, 12)) for number in range(90)]
    return result


BYTES = arrays(np.uint8)
BAD_ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "key": ({"x_train": None, "xtrain": arrays()["x_train"]}, "unknown array `xtrain`"),
    "missing": ({"y_test": None}, "the array `y_test` is missing"),
    "objects": ({"x_train": ragged()}, "`x_train` is an array of Python objects"),
    "label objects": ({"y_train": np.array(["a", 1] * 45, dtype=object)}, "`y_train` is an array of Python objects"),
    "nan": (with_value("x_train", (4, 1, 1), np.nan), r"`x_train`\[4\] has NaN"),
    "beyond": (with_value("x_test", (5, 1, 1), 1.5), r"`x_test`\[5\] goes from 0\.\d+ to 1.5"),
    "below": (with_value("x_train", (6, 1, 1), -0.001), r"`x_train`\[6\] goes from -0.001 to"),
    "bytes as floats": ({"x_train": BYTES["x_train"].astype(np.float32)}, r"`x_train`\[0\] goes from"),
    "integers": ({"x_train": BYTES["x_train"].astype(np.int32)}, "`x_train` is of type int32"),
    "bytes of bits": ({"x_train": BYTES["x_train"] // 128, "x_test": BYTES["x_test"] // 128}, "bytes from 0 to 1"),
    "two types": ({"x_train": BYTES["x_train"]}, "one is bytes, the other floats"),
    "float labels": ({"y_train": arrays()["y_train"].astype(float)}, "`y_train` is of type float64"),
    "one-hot": ({"y_train": np.eye(3, dtype=int)[arrays()["y_train"]]}, r"`y_train` has the shape \(90, 3\)"),
    "too few": ({"y_test": arrays()["y_test"][:-1]}, r"`y_test` has the shape \(29,\), for 30 images"),
    "negative": (with_value("y_train", 7, -1), r"`y_train`\[7\] is -1"),
    "gap": ({"y_train": arrays()["y_train"] * 2, "y_test": arrays()["y_test"] * 2}, "no image of class 1"),
    "huge": (with_value("y_train", 8, 10**9), "no image of class 3"),
    "test class": (with_value("y_test", 9, 3), r"`y_test`\[9\] is 3, and there are 3 classes"),
    "one class": ({"y_train": np.zeros(90, int), "y_test": np.zeros(30, int)}, "only one class"),
    "ambiguous": ({"x_train": np.zeros((90, 3, 12, 3))}, r"could be \(N, C, H, W\) or \(N, H, W, C\)"),
    "channels": ({"x_train": np.zeros((90, 12, 12, 2))}, "has no axis of 1 or 3 channels"),
    "flat": ({"x_train": np.zeros((90, 144))}, r"`x_train` has the shape \(90, 144\)"),
    "none": ({"x_test": np.zeros((0, 12, 12)), "y_test": np.zeros(0, int)}, r"`x_test` has the shape \(0, 12, 12\)"),
    "shapes": ({"x_test": np.zeros((30, 12, 13))}, r"images of shape \(1, 12, 13\), expected \(1, 12, 12\)"),
    "plain": ({"x_train": np.full((90, 12, 12), 0.5)}, "one and the same colour"),
    "name twice": ({"classes": np.array(["a", "b", "a"])}, "the class `a` is named twice"),
    "name": ({"classes": np.array(["a", "b", ""])}, "cannot be shown"),
    "names": ({"classes": np.arange(3)}, "`classes` is of type int64"),
    "too many names": ({"classes": np.array(["a", "b", "c", "d"])}, "no image of class 3"),
    "too few names": ({"classes": np.array(["a", "b"])}, r"`y_train`\[2\] is 2, and there are 2 classes"),
}  # fmt: skip


@pytest.mark.parametrize("harm", BAD_ARRAYS)
def test_a_bad_npz_is_one_error_that_names_the_file(harm: str, tmp_path: Path) -> None:
    changes, message = BAD_ARRAYS[harm]
    file = make_npz(tmp_path / "mine.npz", **changes)
    with pytest.raises(InputError, match=message) as caught:
        read_npz(file)
    (problem,) = caught.value.problems
    assert problem.file == str(file)
    assert problem.hint


def test_a_wrong_key_is_guessed(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_npz(make_npz(tmp_path / "mine.npz", x_tests=np.zeros(3)))
    assert caught.value.problems[0].hint == "did you mean `x_test`?"


@pytest.mark.parametrize("damage", ["cut", "bit", "text", "npy", "pickle"])
def test_files_that_are_no_npz(damage: str, tmp_path: Path) -> None:
    file = make_npz(tmp_path / "mine.npz")
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "bit":
        content[len(content) // 3] ^= 1
        file.write_bytes(content)
    elif damage == "text":
        file.write_text("hello")
    elif damage == "npy":
        with file.open("wb") as opened:
            np.save(opened, np.zeros(3))
    else:
        file.write_bytes(b"\x80\x04cos\nsystem\n(S'touch hacked'\ntR.")
    with pytest.raises(InputError, match=r"is damaged|not an .npz file"):
        read_npz(file)
    assert not os.path.exists("hacked")
    with pytest.raises(OutsideError, match="there is no file"):
        read_npz(tmp_path / "nowhere.npz")
    with pytest.raises(InputError, match=r"is a folder, not an .npz file"):
        read_npz(tmp_path)


def test_a_model_refuses_other_images(npz_place: Path, tmp_path: Path) -> None:
    model = certtool.load(npz_place / "run")

    def refusal(**changes: Any) -> str:
        with pytest.raises(InputError) as caught:
            checkpoint.load_images(model, "test", make_npz(tmp_path / "other.npz", **changes))
        return str(caught.value)

    assert "`classes` are not those of the model" in refusal(classes=np.array(["a", "b", "c"]))
    assert "`y_test`[3] is 7, and there are 3 classes" in refusal(**with_value("y_test", 3, 7))
    assert "`x_test` are images of shape (1, 12, 14)" in refusal(x_test=np.zeros((30, 12, 14)))
    bytes_ = load_known(model.dataset, "test", make_npz(tmp_path / "bytes.npz", **BYTES))
    assert bytes_.facts.scale == 255
    renamed = replace(bytes_, facts=replace(bytes_.facts, classes=("a", "b", "c")))
    with pytest.raises(InputError, match="classes of the npz images are not those the network was made for"):
        verify(model, renamed, [model.eps])


# --- floats in exact boxes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [Fraction(0), Fraction(1, 10**9), Fraction(8, 255), Fraction(1, 3), Fraction(1)])
def test_boxes_of_floats_hold_the_rational_box(eps: Fraction) -> None:
    draw = np.random.default_rng(0)
    awkward = [0.0, 1.0, 2.0**-149, 2.0**-30, 1 - 2.0**-24, float(np.float32(8 / 255)), 0.5, 1 / 3]
    values = np.concatenate([np.array(awkward), draw.random(200), draw.random(50) * 2.0**-20]).astype(np.float32)
    images = torch.from_numpy(values).view(1, 1, 1, -1)
    outer, inner = outer_edges(images, 1, eps), inner_edges(images, 1, eps)
    lower, upper = checker.exact_box(images.numpy(), 1, eps)
    for place, value in enumerate(values.tolist()):
        exact = max(Fraction(value) - eps, Fraction(0)), min(Fraction(value) + eps, Fraction(1))
        for low, high in (
            (float(outer.lower[..., place]), float(outer.upper[..., place])),
            (lower[0, 0, 0, place], upper[0, 0, 0, place]),
        ):
            assert Fraction(low) <= exact[0]
            assert exact[1] <= Fraction(high)
            assert exact[0] - Fraction(low) <= Fraction(1, 2**51)  # and no wider than rounding asks for
            assert Fraction(high) - exact[1] <= Fraction(1, 2**51)
        assert exact[0] <= Fraction(float(inner.lower[..., place])) <= Fraction(value)
        assert Fraction(value) <= Fraction(float(inner.upper[..., place])) <= exact[1]
    assert inner.lower.dtype == torch.float32


def test_the_largest_radius_of_float_images(npz_place: Path) -> None:
    model = certtool.load(npz_place / "run")
    images = choose(checkpoint.load_images(model, "test"), 6, None)
    ladder = Ladder(model.model, images, LadderSettings(method="ibp", attack=None))
    radii = largest_radii(ladder, images, lambda done, total: None)
    assert max(radii.values) > 0
    for row, radius in enumerate(radii.values):
        if radius > 0:
            found = ladder.climb([Epsilon.parse(str(radius)), Epsilon.parse(str(radius + Fraction(1, 4096)))])
            assert [result.images[row].verdict for result in found] == ["certified", "unknown"]


def test_the_checker_refuses_impossible_floats() -> None:
    for value, scale, eps in ((1.5, 1, 0), (-0.1, 1, 0), (np.nan, 1, 0), (0.5, 255, 0), (0.5, 1, -1)):
        with pytest.raises(InputError):
            checker.exact_box(np.full((1, 1, 2, 2), value, dtype=np.float32), scale, Fraction(eps))
    with pytest.raises(InputError):
        checker.exact_box(np.zeros((1, 1, 2, 2)), 1, Fraction(0))  # type: ignore[arg-type]
