"""One file is a model: written the same twice, read with suspicion."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import Cli

import certtool
from certtool import checkpoint, safefile
from certtool.errors import InputError, OutsideError


def parts(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    content = safefile.read(file)
    return content.tensors, content.header


def test_round_trip(small_run: Path, tmp_path: Path) -> None:
    loaded = certtool.load(small_run)
    assert not loaded.model.training
    assert str(loaded.eps) == "0.1"
    assert loaded.dataset.classes == tuple("0123456789")
    assert loaded.header.method == "ibp"
    checkpoint.save(tmp_path / "again.safetensors", loaded.model, parts(small_run / "model.safetensors")[1])
    assert (tmp_path / "again.safetensors").read_bytes() == (small_run / "model.safetensors").read_bytes()


def test_the_header_has_no_machine_in_it(small_run: Path) -> None:
    _, header = parts(small_run / "model.safetensors")
    text = json.dumps(header)
    assert str(small_run) not in text
    assert "/" not in text.replace("certtool.model/1", "").replace("8/255", "")
    assert len(text) < 90_000


def test_loading_leaves_no_trace_in_the_file(small_run: Path) -> None:
    before = (small_run / "model.safetensors").read_bytes()
    loaded = certtool.load(small_run / "model.safetensors")
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.zero_()
    assert (small_run / "model.safetensors").read_bytes() == before


def rewritten(small_run: Path, tmp_path: Path, change) -> Path:  # type: ignore[no-untyped-def]
    tensors, header = parts(small_run / "model.safetensors")
    change(tensors, header)
    file = tmp_path / "changed.safetensors"
    file.write_bytes(safefile.encode(tensors, header))
    return file


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, h: t.pop("conv1.weight"), "lacks the tensor `conv1.weight`"),
        (lambda t, h: t.update(extra=torch.zeros(1)), "a tensor too many: `extra`"),
        (lambda t, h: t.update({"conv1.bias": torch.zeros(5)}), r"`conv1.bias` is \(5,\)"),
        (lambda t, h: t.update({"conv1.bias": torch.zeros(4).double()}), "float64"),
        (lambda t, h: t.update({"conv1.bias": torch.full((4,), torch.nan)}), "NaN or infinite"),
        (lambda t, h: t.update({"bn1.running_var": -torch.ones(4)}), "negative entries"),
        (lambda t, h: h.update(schema="certtool.model/2"), "schema"),
        (lambda t, h: h.update(arch={"arch": "cnn7", "width": 4096, "hidden": 4096}), "expected"),
        (lambda t, h: h.update(arch={"arch": "cnn9"}), "does not validate"),
        (lambda t, h: h.update(eps="8"), "larger than 1"),
        (lambda t, h: h.pop("dataset"), "dataset"),
        (lambda t, h: h["dataset"].update(std=[0.0]), "does not validate"),
        (lambda t, h: h["dataset"].update(mean=[0.0, 0.0]), "one value a channel"),
        (lambda t, h: h["dataset"].update(mean=[1e300]), "no float32 that normalises"),
        (lambda t, h: h["dataset"].update(std=[1e-300]), "no float32 that normalises"),
        (lambda t, h: h.update(surprise=1), "surprise"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(small_run: Path, tmp_path: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=message):
        certtool.load(rewritten(small_run, tmp_path, change))


def with_header(entries: bytes) -> bytes:
    return struct.pack("<Q", len(entries)) + entries


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file"),
        (b"hello world, this is text", "not a safetensors file"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (with_header(b"{" + b" " * 2_000_000 + b"}"), "header of 2,000,002 bytes"),
        (struct.pack("<Q", 5000) + b"{}", "cut short"),
        (with_header(b"{not json}"), "damaged header"),
        (with_header(b"{}"), "not written by certtool"),
        (with_header(b'{"__metadata__":{"certtool":"[]"}}'), "not an object"),
        (with_header(b'{"__metadata__":{"certtool":"{}"},"a\\u001b[31m":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}'),
         "characters no tensor of ours has"),
        (with_header(b'{"__metadata__":{"certtool":"{}"},"a":{"dtype":"F16","shape":[],"data_offsets":[0,2]}}'), "F16"),
        (with_header(b'{"__metadata__":{"certtool":"{}"},"a":1,"a":2}'), "twice"),
    ],
)  # fmt: skip
def test_foreign_files(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        certtool.load(file)


def test_a_truncated_model(small_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((small_run / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(InputError, match="damaged"):
        certtool.load(file)


def test_somebody_elses_safetensors(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="not written by certtool"):
        certtool.load(tmp_path / "a.safetensors")


def test_not_there(tmp_path: Path) -> None:
    with pytest.raises(OutsideError, match="no such file"):
        certtool.load(tmp_path / "nothing.safetensors")
    with pytest.raises(InputError, match=r"holds no model.safetensors"):
        certtool.load(tmp_path)


def test_a_device_is_not_read_to_its_end() -> None:
    with pytest.raises(InputError, match="not a file"):
        certtool.load("/dev/zero")


def test_errors_on_the_command_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "page.safetensors").write_text("<html></html>")
    result = cli("verify", "page.safetensors")
    assert result.returncode == 2
    assert result.stderr.startswith("error: `page.safetensors` is a web page")
    assert "hint:" in result.stderr
    assert "Traceback" not in result.stderr
