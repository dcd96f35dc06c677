"""`certtool verify` as a user types it: curves, one image, radii, pages, limits, and kind refusals."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import Cli, small_settings
from PIL import Image

import certtool
from certtool.data import load_split

QUICK = ("--method", "ibp", "--attack-steps", "5", "--restarts", "1")


def test_the_report_reads_in_a_pipe(robust_run: Path, process: Cli) -> None:
    result = process("verify", robust_run, "--eps", "0.05", "--eps", "1/100", "--images", "40", *QUICK)
    assert result.returncode == 0
    assert result.stdout.isascii()
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    assert "method ibp, arithmetic rigorous, attack PGD 5 steps x 1" in result.stdout
    assert "1/100" in result.stdout


def test_json_has_the_public_shape(robust_run: Path, cli: Cli) -> None:
    document = json.loads(cli("verify", robust_run, "--images", "30", "--json", *QUICK).stdout)
    assert document.keys() >= {"schema", "model", "dataset", "split", "images", "norm", "results", "versions"}
    (result,) = document["results"]
    assert result.keys() == {
        "eps", "method", "arithmetic", "clean_accuracy", "attacked_accuracy", "certified_accuracy",
        "certified_rigorous", "counts", "certified_by", "unknown_reasons", "attack", "seconds",
    }  # fmt: skip
    assert result["attack"] == {"steps": 5, "restarts": 1, "seed": 0}
    assert sum(result["counts"].values()) == 30
    without = json.loads(cli("verify", robust_run, "--images", "5", "--json", "--method", "ibp", "--no-attack").stdout)
    assert without["results"][0]["attack"] is None
    assert without["results"][0]["attacked_accuracy"] is None


@pytest.mark.slow
def test_resnext_from_training_to_a_recheck(cli: Cli) -> None:
    """Groups and identity shortcuts through intervals and relaxations, and back from the certificate."""
    chosen = {"arch": "resnext", "bottleneck": 2, "blocks": "[1,2,1]"}
    network = [word for key, value in chosen.items() for word in ("--set", f"model.{key}={value}")]
    natural = small_settings(
        train__method="natural", train__epochs=5, train__lr=0.01, train__lr_milestones=[4], data__batch_size=64
    )
    assert cli("train", "tiny_cnn7", "--quiet", "--out", "run", *natural, *network).returncode == 0
    radii = ("--eps", "0.01", "--eps", "1e-6")
    found = cli("verify", "run", "--images", "6", *radii, "--no-attack", "--certificate", "c.json", "--json")
    assert found.returncode == 0, found.stderr
    assert "auto_LiRPA failed" not in found.stderr
    larger, smaller = (result["certified_by"] for result in json.loads(found.stdout)["results"])
    assert larger.get("crown", 0) + larger.get("alpha-crown", 0) > 0
    assert smaller.get("ibp", 0) > 0
    rechecked = cli("verify", "run", "--recheck", "c.json")
    assert rechecked.returncode == 0, rechecked.stdout
    assert "by the independent NumPy checker" in rechecked.stdout


def test_fail_under(robust_run: Path, cli: Cli) -> None:
    common = ("verify", robust_run, "--images", "50", "--method", "ibp", "--no-attack", "--eps", "0.01")
    assert cli(*common, "--fail-under", "0.5").returncode == 0
    low = cli(*common, "--fail-under", "0.999")
    assert low.returncode == 1
    assert "below 0.999" in low.stderr


def picture(tmp_path: Path, index: int = 0, size: int = 8) -> Path:
    split = load_split("digits", "test")
    pixels = (split.images[index, 0].numpy().astype(float) * 255 / 16).round().astype(np.uint8)
    image = Image.fromarray(pixels)
    (image if size == 8 else image.resize((size, size))).save(tmp_path / "digit.png")
    return tmp_path / "digit.png"


def test_one_image_of_the_users(robust_run: Path, cli: Cli, tmp_path: Path) -> None:
    report = certtool.verify(robust_run, eps="0.05", images=40, method="ibp", attack=None)
    chosen = next(image for image in report.results[0].images if image.verdict == "certified")
    label = chosen.label
    picture(tmp_path, chosen.index)
    result = cli("verify", robust_run, "--image", "digit.png", "--label", str(label), "--eps", "0.001", *QUICK)
    assert result.returncode == 0
    assert f"certified: no perturbation up to 0.001 changes the label `{label}`" in result.stdout
    wrong = cli("verify", robust_run, "--image", "digit.png", "--label", str((label + 1) % 10), *QUICK)
    assert wrong.stdout.startswith("misclassified:")
    own_word = cli("verify", robust_run, "--image", "digit.png", "--eps", "0.001", *QUICK)
    assert own_word.stdout.startswith("certified:")


def test_radii(robust_run: Path, cli: Cli) -> None:
    document = json.loads(cli("verify", robust_run, "--radius", "--images", "40", "--json").stdout)
    assert document["schema"] == "certtool.radius/1"
    from fractions import Fraction

    radii = [Fraction(text) for text in document["radius"]]
    assert len(radii) == 40
    assert all((4096 * radius).denominator == 1 for radius in radii)
    for radius in ("1/32", "1/16"):
        report = certtool.verify(robust_run, eps=radius, images=40, method="ibp", attack=None)
        for image, largest in zip(report.results[0].images, radii, strict=True):
            assert (image.verdict == "certified") == (largest >= Fraction(radius)), image
    text = cli("verify", robust_run, "--radius", "--images", "40").stdout
    assert "median" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_the_page_is_self_contained(robust_run: Path, cli: Cli, tmp_path: Path) -> None:
    result = cli("verify", robust_run, "--html", "page.html", "--images", "60", "--eps", "0.05", "--eps", "0.1", *QUICK)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 2
    for kind in ("Certified", "Falsified", "Unknown"):
        assert f"<h2>{kind}</h2>" in page
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "http://" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page).replace("http://www.w3.org", "")
    assert "becomes" in page


@pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed")
def test_the_page_opens_in_a_browser_without_complaint(robust_run: Path, cli: Cli, tmp_path: Path) -> None:
    assert cli("verify", robust_run, "--html", "page.html", "--images", "30", *QUICK).returncode == 0
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--v=0",
             f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]  # fmt: skip
    result = subprocess.run(
        ["chromium", *flags, str(tmp_path / "page.html")], capture_output=True, text=True, timeout=120
    )
    assert "Accuracy over eps" in result.stdout
    assert "CONSOLE" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--eps", "8"], 2, "did you mean `8/255`?"),
        (["--method", "magic"], 2, "there is no such choice"),
        (["--arithmetic", "float16"], 2, "rigorous, float32"),
        (["--split", "validation"], 2, "test, train"),
        (["--images", "0"], 2, "no images to verify"),
        (["--indices", "5,x"], 2, "cannot be read"),
        (["--indices", "100000"], 2, "no image 100000"),
        (["--images", "3", "--indices", "1"], 2, "exclude each other"),
        (["--memory", "lots"], 2, "write it as `4GB`"),
        (["--memory", "1MB"], 2, "leaves nothing to work with"),
        (["--fail-under", "85"], 2, "not a fraction"),
        (["--attack-steps", "0"], 2, "at least one step"),
        (["--batch-size", "0"], 2, "at least 1"),
        (["--recheck", "nothing.json"], 3, "cannot read `nothing.json`"),
        (["--image", "nothing.png"], 3, "there is no file"),
        (["--image", "small.png"], 2, "5x5 pixels, the network takes 8x8"),
        (["--image", "text.png"], 2, "not a picture"),
        (["--image", "digit.png", "--label", "cat"], 2, "there is no class `cat`"),
        (
            ["--certificate", "/proc/nowhere/p.json", "--images", "2", "--method", "ibp", "--no-attack"],
            3,
            "cannot write",
        ),
    ],
)
def test_bad_input(arguments: list[str], code: int, words: str, robust_run: Path, cli: Cli, tmp_path: Path) -> None:
    picture(tmp_path)
    Image.fromarray(np.zeros((5, 5), np.uint8)).save(tmp_path / "small.png")
    (tmp_path / "text.png").write_text("not a picture")
    result = cli("verify", robust_run, *arguments)
    assert result.returncode == code, result.stderr
    assert "error: " in result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_doctor(cli: Cli, process: Cli) -> None:
    document = json.loads(process("doctor", "--json").stdout)
    assert document["versions"].keys() >= {"certtool", "torch", "safetensors"}
    assert document["data sets"]["digits"] == "embedded"
    assert "auto_LiRPA" in document["engines"]["relaxations"] or document["missing"]
    assert "engines" in cli("doctor").stdout
