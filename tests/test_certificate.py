"""Certificates: what they say, that they hold, and that no tampering survives a recheck."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import Cli

import certtool
from certtool.attack import AttackSettings
from certtool.data import load_split
from certtool.epsilon import Epsilon
from certtool.errors import InputError
from certtool.verification import LadderSettings, read_certificate, verify, write_certificate
from certtool.verification.certificate import digest
from certtool.verification.recheck import recheck

IMAGES = 60
WORDS = ("image", "sha256", "count", "name", "split", "columns", "indices", "claim")
RADII = ("0.05", "0.1")


@pytest.fixture(scope="module")
def proof(robust_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate with every kind of verdict, by intervals and by CROWN-IBP, at two radii."""
    settings = LadderSettings(method="crown-ibp", attack=AttackSettings(10, 1))
    report = verify(
        certtool.load(robust_run), load_split("digits", "test"), [Epsilon.parse(text) for text in RADII], count=IMAGES,
        settings=settings,
    )  # fmt: skip
    file = tmp_path_factory.mktemp("proof") / "proof.json"
    write_certificate(report, file)
    found = {image.verdict for result in report.results for image in result.images}
    assert found == {"certified", "falsified", "unknown", "misclassified"}
    return file


def check(robust_run: Path, file: Path, **more: Any) -> tuple[str, ...]:
    return recheck(certtool.load(robust_run), load_split("digits", "test"), file, seed=0, **more).differences


def test_it_says_what_it_should(robust_run: Path, proof: Path) -> None:
    document = json.loads(proof.read_text())
    assert document["schema"] == "certtool.certificate/1"
    assert document["model"]["sha256"] == hashlib.sha256((robust_run / "model.safetensors").read_bytes()).hexdigest()
    assert document["dataset"]["sha256"] == load_split("digits", "test").sha256
    assert [result["eps"] for result in document["results"]] == list(RADII)
    assert set(document["results"][0]["columns"]) == {"index", "label", "verdict", "rung", "grade", "margin", "reason"}
    assert "Winograd" in document["outside_the_claim"][0]
    assert str(robust_run) not in proof.read_text()
    witnesses = proof.with_name(document["witnesses"]["file"])
    assert hashlib.sha256(witnesses.read_bytes()).hexdigest() == document["witnesses"]["sha256"]


def test_an_honest_certificate_holds(robust_run: Path, proof: Path) -> None:
    outcome = recheck(certtool.load(robust_run), load_split("digits", "test"), proof)
    assert outcome.differences == ()
    assert outcome.not_looked_at == 0
    assert outcome.witnesses > 0
    assert outcome.proofs["ibp, by the independent NumPy checker"] > 60
    assert outcome.proofs["crown-ibp, by the independent NumPy checker"] > 0
    sampled = recheck(certtool.load(robust_run), load_split("digits", "test"), proof, sample=5)
    assert sampled.differences == ()
    assert sampled.not_looked_at == 2 * (IMAGES - 5)


def _columns(document: Any, place: int = 1) -> Any:
    return document["results"][place]["columns"]


def _change_verdict(old: str, new: str) -> Callable[[Any], None]:
    """One image's verdict, with counts and the other columns made to fit."""

    def change(document: Any) -> None:
        result = document["results"][1]
        columns = result["columns"]
        row = columns["verdict"].index(old)
        columns["verdict"][row] = new
        result["counts"][old] -= 1
        result["counts"][new] += 1
        fitting = {
            "certified": ("ibp", "rigorous", 0.5, None), "unknown": (None, None, columns["margin"][row], "bound"),
            "falsified": ("attack", None, None, None), "misclassified": ("clean", None, None, None),
        }[new]  # fmt: skip
        for name, value in zip(("rung", "grade", "margin", "reason"), fitting, strict=True):
            columns[name][row] = value

    return change


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        *parents, last = path.split(".")
        node = document
        for part in parents:
            node = node[int(part)] if part.isdigit() else node[part]
        node[last] = value(node[last]) if callable(value) else value

    return change


def _margin_of(verdict: str, rung: str | None) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for place in (0, 1):
            columns = _columns(document, place)
            for row, found in enumerate(zip(columns["verdict"], columns["rung"], strict=True)):
                if found == (verdict, rung):
                    columns["margin"][row] = columns["margin"][row] + 0.01
                    return
        raise AssertionError("no such image")

    return change


def _swap_radii(document: Any) -> None:
    document["results"][1]["eps"] = "0.09"


TAMPERING = {
    "unknown to certified": _change_verdict("unknown", "certified"),
    "falsified to certified": _change_verdict("falsified", "certified"),
    "falsified to unknown": _change_verdict("falsified", "unknown"),
    "certified to unknown": _change_verdict("certified", "unknown"),
    "certified to misclassified": _change_verdict("certified", "misclassified"),
    "misclassified to certified": _change_verdict("misclassified", "certified"),
    "misclassified to unknown": _change_verdict("misclassified", "unknown"),
    "unknown to falsified": _change_verdict("unknown", "falsified"),
    "a count": _set("results.0.counts.certified", lambda n: n + 1),
    "the model's hash": _set("model.sha256", "0" * 64),
    "the data's hash": _set("dataset.sha256", "0" * 64),
    "the model's name": _set("model.name", "better"),
    "the split": _set("dataset.split", "train"),
    "a larger eps": _set("results.1.eps", "0.11"),
    "a smaller eps": _swap_radii,
    "an interval margin": _margin_of("certified", "ibp"),
    "a CROWN-IBP margin": _margin_of("certified", "crown-ibp"),
    "an unknown image's margin": _margin_of("unknown", None),
    "a label": _set("results.0.columns.label", lambda labels: [labels[0] ^ 1, *labels[1:]]),
    "an index": _set("results.0.columns.index", lambda indices: [indices[1], indices[0], *indices[2:]]),
    "an image twice": _set("results.0.columns.index", lambda indices: [indices[1], *indices[1:]]),
    "a column cut short": _set("results.0.columns.margin", lambda margins: margins[:-1]),
    "the number of images": _set("dataset.images", 59),
    "another arithmetic": _set("results.1.arithmetic", "float32"),
    "the claim": _set("claim", "Holds for TF32, bf16 and Winograd, at every eps."),
    "what is outside the claim": _set("outside_the_claim", []),
    "a better grade": _set("results.1.columns.grade", lambda grades: ["rigorous" if g is None else g for g in grades]),
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERING)
def test_tampering_is_refused(name: str, robust_run: Path, proof: Path, tmp_path: Path) -> None:
    shutil.copytree(proof.parent, tmp_path / "copy")
    file = tmp_path / "copy" / proof.name
    document = json.loads(file.read_text())
    TAMPERING[name](document)
    document["sha256"] = digest(document)
    file.write_text(json.dumps(document))
    differences = check(robust_run, file)
    assert differences, name
    if "eps" not in name:
        assert any(
            word in differences[0]
            for word in ("image", "sha256", "count", "name", "split", "columns", "indices", "claim")
        )


def test_another_model_is_refused(robust_run: Path, proof: Path, tmp_path: Path) -> None:
    shutil.copytree(robust_run, tmp_path / "other")
    from certtool import safefile

    content = safefile.read(robust_run / "model.safetensors")
    content.tensors["classifier.bias"][0] += 1e-3
    (tmp_path / "other" / "model.safetensors").write_bytes(safefile.encode(content.tensors, content.header))
    assert "model sha256" in check(tmp_path / "other", proof)[0]


def _rewrite_witnesses(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], *, fit_hash: bool) -> Path:
    file = folder / "proof.json"
    document = json.loads(file.read_text())
    witnesses = folder / document["witnesses"]["file"]
    tensors = safetensors.torch.load(witnesses.read_bytes())
    change(tensors)
    content = safetensors.torch.save(tensors)
    witnesses.write_bytes(content)
    if fit_hash:
        document["witnesses"]["sha256"] = hashlib.sha256(content).hexdigest()
        document["sha256"] = digest(document)
        file.write_text(json.dumps(document))
    return file


def _outside(tensors: dict[str, torch.Tensor]) -> None:
    tensors[next(iter(tensors))].fill_(0.5)


def _missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(iter(tensors))]


@pytest.mark.parametrize(("change", "words"), [(_outside, "outside the box"), (_missing, "without a witness")])
def test_witnesses_are_replayed(change, words: str, robust_run: Path, proof: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    shutil.copytree(proof.parent, tmp_path / "copy")
    file = _rewrite_witnesses(tmp_path / "copy", change, fit_hash=True)
    assert any(words in difference for difference in check(robust_run, file))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema": 1, "schema": 2}', "twice"),
        ("{}", "not a certificate"),
        ("hello", "not JSON"),
        ('{"schema": "certtool.certificate/2"}', "not a certificate"),
    ],
)
def test_what_is_no_certificate(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(InputError, match=message):
        read_certificate(tmp_path / "x.json")


def test_damage_is_found_by_the_hash(proof: Path, tmp_path: Path) -> None:
    shutil.copytree(proof.parent, tmp_path / "copy")
    file = tmp_path / "copy" / proof.name
    file.write_text(file.read_text().replace('"ibp"', '"crown"', 1))
    with pytest.raises(InputError, match="damaged"):
        read_certificate(file)
    shutil.copytree(proof.parent, tmp_path / "again")
    with pytest.raises(InputError, match="does not have the sha256"):
        read_certificate(_rewrite_witnesses(tmp_path / "again", _outside, fit_hash=False))


def test_on_the_command_line(robust_run: Path, cli: Cli, tmp_path: Path) -> None:
    made = cli("verify", robust_run, "--method", "ibp", "--images", "40", "--eps", "0.1", "--certificate", "p.json",
               "--attack-steps", "5", "--restarts", "1")  # fmt: skip
    assert made.returncode == 0
    assert "--recheck p.json" in made.stderr
    good = cli("verify", robust_run, "--recheck", "p.json")
    assert good.returncode == 0
    assert "the certificate holds" in good.stdout
    document = json.loads((tmp_path / "p.json").read_text())
    document["results"][0]["columns"]["margin"][0] = 9.0
    document["sha256"] = digest(document)
    (tmp_path / "p.json").write_text(json.dumps(document))
    bad = cli("verify", robust_run, "--recheck", "p.json", "--json")
    assert bad.returncode == 1
    assert "image 0 at eps 0.1" in json.loads(bad.stdout)["differences"][0]
