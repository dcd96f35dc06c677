"""What may be shared and what makes a record: whatever is wrong is a sentence, before anything leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from test_plain_text import PROOF, altered

from certtool import checkpoint
from certtool.errors import InputError
from certtool.verification.certificate import digest
from certtool.zoo import Record, Result, zoo_folder
from certtool.zoo.describe import Cost, record_of
from certtool.zoo.staging import certificate_of, stage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(zoo_folder() / "tiny_cnn7", tmp_path / "model")


def changed(file: Path, out: Path, **parts: Any) -> Path:
    document = json.loads(file.read_text()) | parts
    out.write_text(json.dumps(document | {"sha256": digest(document)}))
    return out


def test_two_certificates_of_one_name(folder: Path, tmp_path: Path) -> None:
    proof = folder / PROOF
    other = changed(proof, tmp_path / proof.name, witnesses=None)
    with pytest.raises(InputError, match="two certificates bring a file called"):
        stage(checkpoint.load(folder), [proof, other])
    assert PROOF in stage(checkpoint.load(folder), [proof, proof]).files


def test_witnesses_of_one_name(folder: Path, tmp_path: Path) -> None:
    """Each certificate is whole beside its own; in one folder the second would replace the first's."""
    import safetensors.torch

    from certtool.zoo.layout import file_digest

    proof = folder / PROOF
    part = json.loads(proof.read_text())["witnesses"]
    tensors = safetensors.torch.load_file(proof.with_name(part["file"]))
    safetensors.torch.save_file(dict(list(tensors.items())[1:]), tmp_path / part["file"])
    sha256 = file_digest(tmp_path / part["file"])
    other = changed(proof, tmp_path / "other.json", witnesses={"file": part["file"], "sha256": sha256})
    with pytest.raises(InputError, match="two certificates bring a file called"):
        stage(checkpoint.load(folder), [proof, other])


def test_witnesses_under_a_foreign_name(folder: Path) -> None:
    proof = folder / PROOF
    part = json.loads(proof.read_text())["witnesses"]
    shutil.copy(proof.with_name(part["file"]), proof.with_name("notes.txt"))
    other = changed(proof, proof.with_name("other.json"), witnesses=part | {"file": "notes.txt"})
    with pytest.raises(InputError, match="no name for witnesses"):
        stage(checkpoint.load(folder), [other])


def test_metrics_that_are_a_link_or_empty(folder: Path, tmp_path: Path) -> None:
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(b"")
    assert "metrics.jsonl" not in stage(checkpoint.load(folder), [folder / PROOF]).files
    (tmp_path / "secret").write_text("hf_secret")
    metrics.unlink()
    metrics.symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="is a link"):
        stage(checkpoint.load(folder), [folder / PROOF])


def test_what_nobody_could_fetch_is_not_staged(tmp_path: Path) -> None:
    for name, content in altered(lambda header: header.update(recipe="")).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=r"`recipe\.toml` cannot be shared"):
        stage(checkpoint.load(tmp_path), [tmp_path / PROOF])


def record(tmp_path: Path, files: dict[str, bytes]) -> Record:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    file = tmp_path / PROOF
    certificate = certificate_of(file)
    loaded = checkpoint.load(tmp_path)
    return record_of(loaded, certificate, file, name="x", licence="mit", sources=["zoo"], cost=Cost())


def results(edit: Callable[[list[dict[str, Any]]], Any]) -> dict[str, bytes]:
    return altered(certificate=lambda document: edit(document["results"]))


CASES: dict[str, Callable[[], dict[str, bytes]]] = {
    "a seed below zero": lambda: altered(lambda header: header.update(seed=-1)),
    "too many versions": lambda: altered(
        certificate=lambda d: d.update(versions={f"v{i}": "1" * 90 for i in range(9)})
    ),
    "no images": lambda: results(lambda r: r[0].update(columns={name: [] for name in r[0]["columns"]})),
    "a column too short": lambda: results(lambda r: r[0]["columns"]["grade"].pop()),
    "chosen images": lambda: results(lambda r: r[0]["columns"]["index"].reverse()),
    "a radius twice": lambda: results(lambda r: r.append(r[0] | {"eps": r[0]["eps"] + "0"})),
}


@pytest.mark.parametrize("case", CASES)
def test_what_makes_no_record(tmp_path: Path, case: str) -> None:
    with pytest.raises(InputError):
        record(tmp_path, CASES[case]())


@pytest.mark.parametrize("recipe", ["= =", "x = 1", "summary = 5"])
def test_a_recipe_without_a_summary(tmp_path: Path, recipe: str) -> None:
    assert record(tmp_path, altered(lambda header: header.update(recipe=recipe))).summary == "tiny_cnn7"


def test_rounded_grades_may_add_up_to_more() -> None:
    """4 and 1 of 6 images: 0.666667 + 0.166667 is more than 0.833333."""
    shares = [round(count / 6, 6) for count in (5, 5, 4, 1)]
    Result(eps="0.1", clean=shares[0], attacked=shares[1], certified_rigorous=shares[2], certified_float32=shares[3])


@pytest.mark.parametrize(
    "command",
    [
        ("fetch", "tiny_cnn7", "--sample", "0"),
        ("fetch", "tiny_cnn7", "--sample", "-1"),
        ("fetch", "tiny_cnn7", "--out", "."),
        ("check", "tiny_cnn7", "--sample", "-1"),
        ("publish", "zoo:tiny_cnn7", "--repo", "ada/x", "--certificate", "x.json", "--sample", "0", "--dry-run"),
    ],
    ids=" ".join,
)
def test_a_sample_of_nothing_is_refused(cli: Cli, command: tuple[str, ...]) -> None:
    done = cli("zoo", *command)
    assert done.returncode == 2, done.stderr + done.stdout


def test_every_certificate_of_a_folder_is_rechecked() -> None:
    from certtool.verification.recheck import Recheck, merged

    good, bad = Recheck(5, {"ibp": 2}, 3, 0, 1, ()), Recheck(7, {"ibp": 1}, 6, 1, 0, ("x",))
    both = merged({"a.json": good, "z.json": bad})
    assert both == Recheck(12, {"ibp": 3}, 9, 1, 1, ("z.json: x",))
    assert merged({"a.json": good}) is good
