"""Data sets: what they are, how they are found, and what happens when they are not."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Cli, require_data
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits

from certtool.catalog import DATASETS, Augmentation
from certtool.data import SOURCES, augment, data_folder, hold_out, load_split, plan_epoch, tinyimagenet
from certtool.data.digits import FILE
from certtool.errors import OutsideError

ROOT = Path(__file__).parents[1]


def test_embedded_digits_are_scikit_learns() -> None:
    source = load_digits()
    train, test = load_split("digits", "train"), load_split("digits", "test")
    assert (len(train), len(test)) == (1438, 359)
    ours = torch.cat([train.images, test.images]).flatten(1).numpy()
    labels = torch.cat([train.labels, test.labels]).numpy()
    order, expected = np.lexsort(ours.T), np.lexsort(source.data.astype(np.uint8).T)
    assert np.array_equal(ours[order], source.data[expected])
    assert np.array_equal(labels[order], source.target[expected])
    assert train.images.max() == 16 == DATASETS["digits"].scale


def test_split_is_stratified_and_made_by_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = torch.bincount(load_split("digits", "test").labels)
    assert counts.min() >= 35
    assert counts.max() <= 37
    import runpy

    script = runpy.run_path(str(ROOT / "scripts" / "make_digits.py"))
    script["main"].__globals__["TARGET"] = tmp_path / "digits.npz"
    script["main"]()
    with np.load(tmp_path / "digits.npz") as made, np.load(FILE) as embedded:
        for key in ("images", "labels", "is_test"):
            assert np.array_equal(made[key], embedded[key])


def test_pixels_are_correctly_rounded_fractions() -> None:
    split = load_split("digits", "test")
    values = split.pixels(torch.arange(17, dtype=torch.uint8))
    assert values.tolist() == [k / 16 for k in range(17)]


def test_fingerprint_sees_pixels_labels_and_order() -> None:
    split = load_split("digits", "test")
    again = load_split("digits", "test")
    assert split.sha256 == again.sha256
    assert len(split.sha256) == 64
    reversed_order = split.take(torch.arange(len(split)).flip(0))
    other_label = split.take(torch.arange(len(split)))
    other_label.labels[0] += 1
    assert len({split.sha256, reversed_order.sha256, other_label.sha256}) == 3


@given(st.integers(0, 1000), st.integers(1, 100))
def test_epoch_is_a_function_of_seed_and_number(seed: int, epoch: int) -> None:
    one, again = (plan_epoch(50, Augmentation(flip=True, padding=2), seed, epoch) for _ in "ab")
    other, next_epoch = (plan_epoch(50, Augmentation(True, 2), *key) for key in ((seed + 1, epoch), (seed, epoch + 1)))
    assert torch.equal(one.order, again.order)
    assert sorted(one.order.tolist()) == list(range(50))
    assert not torch.equal(one.order, other.order)
    assert not torch.equal(one.order, next_epoch.order)
    assert one.rows.abs().max() <= 2


def test_augmentation_is_a_shift_with_repeated_edge_and_a_mirror() -> None:
    images = torch.randint(0, 256, (64, 3, 8, 8), dtype=torch.uint8)
    plan = plan_epoch(64, Augmentation(flip=True, padding=2), 0, 1)
    result = augment(images, plan, torch.arange(64))
    padded = torch.nn.functional.pad(images.float(), (2, 2, 2, 2), mode="replicate")
    for index in range(64):
        row, column = 2 + int(plan.rows[index]), 2 + int(plan.columns[index])
        expected = padded[index, :, row : row + 8, column : column + 8]
        if plan.mirrored[index]:
            expected = expected.flip(-1)
        assert torch.equal(result[index].float(), expected), index
    assert plan.mirrored.any()
    assert not plan.mirrored.all()


def test_no_augmentation_leaves_images_alone() -> None:
    images = torch.randint(0, 256, (16, 1, 8, 8), dtype=torch.uint8)
    assert torch.equal(augment(images, plan_epoch(16, Augmentation(False, 0), 0, 1), torch.arange(16)), images)


def test_held_out_images_are_the_same_for_every_seed_and_apart() -> None:
    train = load_split("digits", "train")
    rest, held = hold_out(train, 0.1)
    assert (len(rest), len(held)) == (1294, 144)
    assert torch.equal(hold_out(train, 0.1)[1].images, held.images)
    total = rest.images.sum() + held.images.sum()
    assert total == train.images.sum()


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_missing_data_is_one_error_with_both_ways_out(name: str, tmp_path: Path) -> None:
    with pytest.raises(OutsideError) as caught:
        load_split(name, "train", tmp_path)
    problem = caught.value.problems[0]
    assert str(tmp_path) in problem.message
    assert "--download" in str(problem.hint)
    assert "CERTTOOL_DATA" in str(problem.hint)


def test_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CERTTOOL_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    monkeypatch.delenv("CERTTOOL_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder() == tmp_path / "cache" / "certtool" / "data"


def test_command_line_without_data(cli: Cli, tmp_path: Path) -> None:
    result = cli("train", "mnist_cnn7", CERTTOOL_DATA=str(tmp_path / "nowhere"))
    assert result.returncode == 3
    assert "MNIST is not in" in result.stderr
    assert "hint: add `--download`" in result.stderr
    assert not (tmp_path / "runs").exists()


def write_idx(file: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(header + array.tobytes()) if file.suffix == ".gz" else header + array.tobytes())


def fake_mnist(root: Path, suffix: str) -> Path:
    folder = root / "MNIST" / "raw"
    for prefix, count in (("train", 20), ("t10k", 10)):
        images = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        write_idx(folder / f"{prefix}-images-idx3-ubyte{suffix}", images)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte{suffix}", (np.arange(count) % 10).astype(np.uint8))
    return folder


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_files_packed_and_unpacked(suffix: str, tmp_path: Path) -> None:
    fake_mnist(tmp_path, suffix)
    split = load_split("mnist", "test", tmp_path)
    assert split.images.shape == (10, 1, 28, 28)
    assert split.labels.tolist() == list(range(10))


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "swapped"])
def test_a_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    file = fake_mnist(tmp_path, ".gz") / "t10k-images-idx3-ubyte.gz"
    content = file.read_bytes()
    good = {
        "cut": content[: len(content) // 2],
        "garbage": b"x" * 1000,
        "empty": b"",
        "swapped": gzip.compress(b"hello"),
    }
    file.write_bytes(good[damage])
    with pytest.raises(OutsideError, match=r"t10k-images-idx3-ubyte.gz` is damaged"):
        load_split("mnist", "test", tmp_path)


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "counts", "total"),
    [("mnist", (60000, 10000), 10), ("cifar10", (50000, 10000), 10), ("tinyimagenet", (None, 10000), 200)],
)
def test_real_data_sets(name: str, counts: tuple[int | None, int], total: int) -> None:
    require_data(name)
    for split_name, count in zip(("train", "test"), counts, strict=True):
        split = load_split(name, split_name)
        assert count in (None, len(split))
        assert split.images.dtype == torch.uint8
        assert torch.bincount(split.labels).shape == (total,)
        assert len(torch.bincount(split.labels).unique()) <= 10
    facts = DATASETS[name]
    if name == "cifar10":
        mean = load_split(name, "train").images.double().mean((0, 2, 3)) / 255
        assert torch.allclose(mean, torch.tensor(facts.mean).double(), atol=1e-3)


@pytest.mark.realdata
def test_a_damaged_cifar_file_is_refused(tmp_path: Path) -> None:
    require_data("cifar10", "train")
    shutil.copytree(data_folder() / "cifar-10-batches-py", tmp_path / "cifar-10-batches-py")
    file = tmp_path / "cifar-10-batches-py" / "test_batch"
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    with pytest.raises(OutsideError, match="damaged"):
        load_split("cifar10", "test", tmp_path)


@pytest.mark.realdata
def test_a_damaged_jpeg_is_named(tmp_path: Path) -> None:
    require_data("tinyimagenet")
    source = data_folder() / "tiny-imagenet-200"
    (tmp_path / "tiny-imagenet-200" / "val" / "images").mkdir(parents=True)
    target = tmp_path / "tiny-imagenet-200"
    shutil.copy(source / "wnids.txt", target)
    lines = (source / "val" / "val_annotations.txt").read_text().splitlines()[:3]
    (target / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    names = [line.split("\t")[0] for line in lines]
    for name in names:
        shutil.copy(source / "val" / "images" / name, target / "val" / "images")
    assert load_split("tinyimagenet", "test", tmp_path).images.shape == (3, 3, 64, 64)
    (target / "val" / "images" / names[1]).write_bytes(b"not a picture")
    with pytest.raises(OutsideError, match=names[1]):
        load_split("tinyimagenet", "test", tmp_path)


def test_digits_file_is_the_committed_one() -> None:
    assert FILE.stat().st_size < 60_000
    assert hashlib.sha256(FILE.read_bytes()).hexdigest().startswith("653fea18d77e")


# --- TinyImageNet, made up -------------------------------------------------------------------------------------------


def fake_tinyimagenet(root: Path) -> Path:
    """Its official layout: 200 classes, one training and one validation picture each; every tenth one is grey."""
    folder = root / "tiny-imagenet-200"
    wnids = [f"n{number:08d}" for number in range(200)]
    draw = np.random.default_rng(0)
    lines = []
    for number, wnid in enumerate(wnids):
        (folder / "train" / wnid / "images").mkdir(parents=True)
        (folder / "val" / "images").mkdir(parents=True, exist_ok=True)
        for file in (folder / "train" / wnid / "images" / f"{wnid}_0.JPEG", folder / f"val/images/val_{number}.JPEG"):
            grid = draw.integers(0, 256, (8, 8) if number % 10 == 0 else (8, 8, 3), dtype=np.uint8)
            Image.fromarray(grid).resize((64, 64)).save(file, "JPEG")
        lines.append(f"val_{number}.JPEG\t{wnids[199 - number]}\t0\t0\t63\t63\n")
    (folder / "wnids.txt").write_text("\n".join(reversed(wnids)) + "\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    return folder


def test_tinyimagenet_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fake_tinyimagenet(tmp_path)
    train, test = (load_split("tinyimagenet", name, tmp_path) for name in ("train", "test"))
    assert train.images.shape == test.images.shape == (200, 3, 64, 64)
    assert train.labels.tolist() == list(range(200))
    assert test.labels.tolist() == list(reversed(range(200)))
    assert torch.equal(train.images[10, 0], train.images[10, 1])  # a grey one
    assert not torch.equal(train.images[11, 0], train.images[11, 1])
    assert {file.name for file in folder.glob("*.npz")} == {"certtool-train.npz", "certtool-test.npz"}
    monkeypatch.setattr("certtool.data.tinyimagenet._decode", None)  # nothing is decoded a second time
    assert load_split("tinyimagenet", "train", tmp_path).sha256 == train.sha256
    assert load_split("tinyimagenet", "test", tmp_path).sha256 == test.sha256


def test_a_changed_picture_makes_the_cache_stale(tmp_path: Path) -> None:
    folder = fake_tinyimagenet(tmp_path)
    before = load_split("tinyimagenet", "train", tmp_path)
    file = folder / "train" / "n00000007" / "images" / "n00000007_0.JPEG"
    status, size = file.stat(), file.stat().st_size
    Image.new("RGB", (64, 64), "red").save(file, "JPEG")
    file.write_bytes(file.read_bytes().ljust(size, b"\0"))  # the same length and date: only the bytes tell
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == size
    after = load_split("tinyimagenet", "train", tmp_path)
    assert after.images[7, 0].min() > 250
    changed = (before.images != after.images).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [7]
    shutil.copy(file, file.with_name("n00000007_1.JPEG"))
    assert len(load_split("tinyimagenet", "train", tmp_path)) == 201


@pytest.mark.parametrize("damage", ["bit", "cut", "garbage", "digest"])
def test_a_damaged_cache_is_an_error_that_names_it_and_the_decoder(damage: str, tmp_path: Path) -> None:
    folder = fake_tinyimagenet(tmp_path)
    split = load_split("tinyimagenet", "test", tmp_path)
    file = folder / "certtool-test.npz"
    content = bytearray(file.read_bytes())
    if damage == "bit":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "garbage":
        file.write_bytes(b"x" * 1000)
    else:  # a sound file with other pixels than it says
        with np.load(file) as arrays:
            facts, pixels = arrays["facts"], arrays["pixels"]
        pixels[3, 0, 0, 0] ^= 1
        np.savez(file, facts=facts, pixels=pixels)
    with pytest.raises(OutsideError, match=r"certtool-test.npz` is damaged.*pillow .*libjpeg") as caught:
        load_split("tinyimagenet", "test", tmp_path)
    assert "remove that file" in str(caught.value.problems[0].hint)
    file.unlink()
    assert load_split("tinyimagenet", "test", tmp_path).sha256 == split.sha256


def test_another_decoder_must_give_the_same_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tinyimagenet(tmp_path)
    split = load_split("tinyimagenet", "test", tmp_path)
    monkeypatch.setattr("certtool.data.decoded.decoder", lambda: "pillow 99, libjpeg-turbo 99")
    assert load_split("tinyimagenet", "test", tmp_path).sha256 == split.sha256
    monkeypatch.setattr("certtool.data.decoded.decoder", lambda: "pillow 100, libjpeg-turbo 99")
    decode = tinyimagenet._decode
    monkeypatch.setattr("certtool.data.tinyimagenet._decode", lambda file: decode(file) ^ 1)
    with pytest.raises(OutsideError, match="pillow 99, libjpeg-turbo 99; pillow 100, libjpeg-turbo 99 makes other"):
        load_split("tinyimagenet", "test", tmp_path)


def test_a_folder_that_cannot_be_written_leaves_the_cache_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fake_tinyimagenet(tmp_path / "data")
    (folder / "certtool-test.npz").mkdir()  # root may write into any folder, but not replace this by a file
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    split = load_split("tinyimagenet", "test", tmp_path / "data")
    (file,) = (tmp_path / "cache" / "certtool" / "decoded").iterdir()
    assert file.name.startswith("tinyimagenet-test-")
    monkeypatch.setattr("certtool.data.tinyimagenet._decode", None)
    assert load_split("tinyimagenet", "test", tmp_path / "data").sha256 == split.sha256
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert load_split("tinyimagenet", "test", tmp_path / "data").sha256 == split.sha256  # nowhere: decoded again
    assert not [place for place in folder.iterdir() if place.name.startswith(".")]


@pytest.mark.parametrize(
    ("harm", "split", "message"),
    [
        ("broken", "train", "n00000003_0.JPEG"),
        ("small", "train", "n00000003_0.JPEG` is 32x32, not 64x64"),
        ("class", "train", "n00000003/images` is missing or holds no images"),
        ("line", "test", "val_annotations.txt` has no line for `val_3.JPEG`"),
        ("picture", "test", "line 4: .*val_3.JPEG` is missing"),
        ("twice", "test", "line 201: .*val_3.JPEG` is missing, or named before"),
        ("unknown", "test", "line 4: unknown class `n99999999`"),
        ("wnids", "test", "wnids.txt` names 199 classes, not 200"),
    ],
)
def test_what_is_wrong_in_tinyimagenet_is_named(harm: str, split: str, message: str, tmp_path: Path) -> None:
    folder = fake_tinyimagenet(tmp_path)
    picture, notes = folder / "train/n00000003/images/n00000003_0.JPEG", folder / "val/val_annotations.txt"
    lines = notes.read_text().splitlines(keepends=True)
    changes: dict[str, Callable[[], object]] = {
        "broken": lambda: picture.write_bytes(picture.read_bytes()[:300]),
        "small": lambda: Image.new("RGB", (32, 32)).save(picture, "JPEG"),
        "class": lambda: shutil.rmtree(picture.parents[1]),
        "line": lambda: notes.write_text("".join(lines[:3] + lines[4:])),
        "picture": lambda: (folder / "val/images/val_3.JPEG").unlink(),
        "twice": lambda: notes.write_text("".join([*lines, lines[3]])),
        "unknown": lambda: notes.write_text("".join(lines[:3]) + "val_3.JPEG\tn99999999\n" + "".join(lines[4:])),
        "wnids": lambda: (folder / "wnids.txt").write_text("\n".join(f"n{n:08d}" for n in range(199))),
    }
    changes[harm]()
    with pytest.raises(OutsideError, match=message):
        load_split("tinyimagenet", split, tmp_path)
