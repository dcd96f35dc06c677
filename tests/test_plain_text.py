"""A model from elsewhere speaks through its names and keys: none of them steers a terminal, a page or a picture."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from hub import Hub

from certtool import safefile
from certtool.errors import CertToolError, InputError, OutsideError
from certtool.verification.certificate import digest
from certtool.zoo import HubRef, zoo_folder
from certtool.zoo.fetch import fetch
from certtool.zoo.layout import manifest_of

HOSTILE = "\x1b[2J\nerror: fake"
PROOF = "certificates/test.json"


def nothing(document: dict[str, Any]) -> None:
    pass


def altered(
    header: Callable[[dict[str, Any]], Any] = nothing, certificate: Callable[[dict[str, Any]], Any] = nothing
) -> dict[str, bytes]:
    """The bundled model with another header and certificate, every sha256 computed again."""
    folder = zoo_folder() / "tiny_cnn7"
    files = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    model = safefile.read(folder / "model.safetensors")
    changed = copy.deepcopy(model.header)
    header(changed)
    files["model.safetensors"] = safefile.encode(model.tensors, changed)
    document = json.loads(files[PROOF])
    document["model"] |= {
        "sha256": hashlib.sha256(files["model.safetensors"]).hexdigest(),
        "name": changed["name"],
    }
    certificate(document)
    files[PROOF] = json.dumps(document | {"sha256": digest(document)}).encode()
    del files["manifest.json"]
    return files | {"manifest.json": manifest_of(files)}


def foreign_type(files: dict[str, bytes]) -> dict[str, bytes]:
    content = files["model.safetensors"]
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    entries["conv1.bias"]["dtype"] = HOSTILE
    head = json.dumps(entries).encode()
    files = files | {"model.safetensors": len(head).to_bytes(8, "little") + head + content[8 + length :]}
    del files["manifest.json"]
    return files | {"manifest.json": manifest_of(files)}


def foreign_name(files: dict[str, bytes]) -> dict[str, bytes]:
    entry = {"schema": "certtool.manifest/1", "files": {HOSTILE: {"bytes": 0, "sha256": "x"}}}
    return files | {"manifest.json": json.dumps(entry).encode()}


HOSTILE_FILES: dict[str, Callable[[], dict[str, bytes]]] = {
    "a name": lambda: altered(lambda header: header.update(name=HOSTILE)),
    "a class": lambda: altered(lambda header: header["dataset"]["classes"].__setitem__(0, HOSTILE)),
    "an eps": lambda: altered(lambda header: header.update(eps=HOSTILE)),
    "a key of the header": lambda: altered(lambda header: header.update({HOSTILE: 1})),
    "a key of the certificate": lambda: altered(certificate=lambda document: document.update({HOSTILE: 1})),
    "a split": lambda: altered(certificate=lambda document: document["dataset"].update(split=HOSTILE)),
    "a version": lambda: altered(certificate=lambda document: document["versions"].update({HOSTILE: "1"})),
    "a type of a tensor": lambda: foreign_type(altered()),
    "a name in the manifest": lambda: foreign_name(altered()),
}


@pytest.mark.parametrize("case", HOSTILE_FILES)
def test_hostile_text_is_refused_without_being_shown(hub: Hub, case: str) -> None:
    hub.add_repo("ada/net", HOSTILE_FILES[case]())
    with pytest.raises(OutsideError) as caught:
        fetch(HubRef("ada/net"))
    assert str(caught.value).isprintable()


def test_a_certificate_s_own_claim_is_told_in_one_line(hub: Hub, process: Cli, tmp_path: Path) -> None:
    hub.add_repo("ada/net", altered(certificate=lambda d: d.update(claim=f"{HOSTILE}\nthe certificate holds")))
    environment = hub.environment(tmp_path / "home") | {"CERTTOOL_CACHE": str(tmp_path / "cache")}
    done = process("zoo", "fetch", "hf://ada/net", "--sample", "1", **environment)
    assert done.returncode == 1, done.stderr
    assert "\x1b" not in done.stdout
    assert "the certificate holds" not in done.stdout.splitlines()


@pytest.mark.parametrize("name", ["$x^$", "\\1", '"><a href="http://evil">x</a>'])
def test_any_name_can_be_drawn(cli: Cli, tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(altered(lambda header: header.update(name=name))["model.safetensors"])
    done = cli("inspect", "model.safetensors", "--images", "5", "--html", "page.html")
    assert done.returncode == 0, done.stderr
    assert '<a href="http://evil"' not in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("metrics", [b'5\n"x"\n', b"\xff\xfe\n", b"[" * 100_000, b'{"epoch": "x", "layers": 5}\n'])
def test_metrics_that_are_none(cli: Cli, tmp_path: Path, metrics: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(altered()["model.safetensors"])
    (tmp_path / "metrics.jsonl").write_bytes(metrics)
    done = cli("inspect", "model.safetensors", "--images", "5", "--html", "page.html")
    assert done.returncode in (0, 2), done.stderr


def test_a_data_set_nobody_knows(tmp_path: Path) -> None:
    from certtool.data import load_split

    with pytest.raises(InputError, match="there is no data set `nope`"):
        load_split("nope", "test")


def test_the_screen_has_the_last_word(capsys: pytest.CaptureFixture[str]) -> None:
    from certtool.report.screen import Screen

    screen = Screen()
    screen.text(HOSTILE)
    screen.note(f"[bold]{HOSTILE}[/nothing]")
    screen.error(CertToolError(HOSTILE, HOSTILE))
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert "[bold]" in shown.err
