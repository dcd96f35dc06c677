"""The certificate: what is claimed of which file on which images, image by image, so that anyone can check it again.

Columns, not objects; witnesses in a safetensors file beside it. Its own sha256 finds damage, not forgery: whoever wants
to know recomputes (recheck/).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from certtool.errors import InputError
from certtool.files import read_regular_file, reading, write_atomically
from certtool.json_text import parsed
from certtool.plain_text import ONE_LINE, plain
from certtool.verification.verdicts import VERDICTS, EpsResult, Grade, Reason, Rung, Verdict
from certtool.verification.verify import VerifyReport, versions

SCHEMA = "certtool.certificate/1"
CLAIM = (
    "Every evaluation of the model in IEEE binary32, round to nearest, in which each dot product is multiplications "
    "(or FMAs) and additions in any order, and BatchNorm is computed as written, as scale and shift, or folded, gives "
    "the label of each image that is certified with grade rigorous, for every float32 input within eps of it. Grade "
    "float32 assumes exact arithmetic."
)
OUTSIDE = (
    "Winograd or FFT convolution",
    "TF32 and bf16 matmul modes",
    "autocast",
    "a convolution that accumulates on top of its residual shortcut",
)
LIMIT = 200_000_000
Line = Annotated[str, Field(max_length=500), ONE_LINE]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelPart(Strict):
    name: Line
    sha256: Sha256
    arch: Line


class DataPart(Strict):
    name: Line
    split: Line
    sha256: Sha256
    images: Annotated[int, Field(ge=1)]


class Columns(Strict):
    index: list[int]
    label: list[int]
    verdict: list[Verdict]
    rung: list[Rung | None]
    grade: list[Grade | None]
    margin: list[float | None]
    reason: list[Reason | None]


class AttackPart(Strict):
    steps: Annotated[int, Field(ge=1)]
    restarts: Annotated[int, Field(ge=1)]
    seed: int


class ResultPart(Strict):
    eps: Annotated[str, Field(max_length=100), ONE_LINE]
    method: Literal["auto", "ibp", "crown-ibp", "crown", "alpha-crown"]
    arithmetic: Grade
    attack: AttackPart | None
    counts: dict[Verdict, int]
    columns: Columns


class WitnessPart(Strict):
    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
    sha256: Sha256


class Certificate(Strict):
    schema_: Literal["certtool.certificate/1"] = Field(alias="schema")
    claim: str
    outside_the_claim: list[str]
    model: ModelPart
    dataset: DataPart
    norm: Literal["linf"]
    results: Annotated[list[ResultPart], Field(min_length=1)]
    witnesses: WitnessPart | None
    versions: dict[Line, Line]
    sha256: Sha256


@dataclass(frozen=True)
class Loaded:
    """A certificate and its witnesses, by (position of the result, image)."""

    certificate: Certificate
    witnesses: dict[tuple[int, int], Tensor]


def write_certificate(report: VerifyReport, path: Path) -> None:
    """The certificate, and beside it the witnesses where there are any."""
    if report.model.sha256 is None or report.data.sha256 is None:
        raise InputError("only a model from a file, on a data set, can have a certificate")
    tensors = {
        f"{place}:{index}": witness.contiguous()
        for place, result in enumerate(report.results)
        for index, witness in result.witnesses.items()
    }
    witnesses = None
    if tensors:
        content = safetensors.torch.save(dict(sorted(tensors.items())))
        file = path.with_name(f"{path.stem}.witnesses.safetensors")
        witnesses = {"file": file.name, "sha256": hashlib.sha256(content).hexdigest()}
        write_atomically(file, content)
    document = {
        "schema": SCHEMA,
        "claim": CLAIM,
        "outside_the_claim": list(OUTSIDE),
        "model": dict(report.model.__dict__),
        "dataset": dict(report.data.__dict__),
        "norm": "linf",
        "results": [_result(result) for result in report.results],
        "witnesses": witnesses,
        "versions": versions(report.engine),
    }
    document["sha256"] = digest(document)
    write_atomically(path, (json.dumps(document) + "\n").encode())


def digest(document: dict[str, Any]) -> str:
    """Of everything but the digest itself, in one fixed spelling."""
    rest = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _result(result: EpsResult) -> dict[str, Any]:
    names = ("index", "label", "verdict", "rung", "grade", "margin", "reason")
    return {
        "eps": str(result.eps),
        "method": result.method,
        "arithmetic": result.arithmetic,
        "attack": None if result.attack is None else dict(result.attack.__dict__),
        "counts": {verdict: result.count(verdict) for verdict in VERDICTS},
        "columns": {name: [getattr(image, name) for image in result.images] for name in names},
    }


def read_certificate(path: Path) -> Loaded:
    """Well-formed and undamaged, or an InputError that says where it is not."""
    with reading(path):
        content = read_regular_file(path, LIMIT)
    hint = "give a file that `--certificate` wrote"
    document, certificate = parsed(content, Certificate, path, "a certificate", hint)
    if certificate.sha256 != digest(document):
        raise InputError(f"`{path}` is damaged: it does not have the sha256 it names")
    return Loaded(certificate, _witnesses(certificate, path))


def _witnesses(certificate: Certificate, path: Path) -> dict[tuple[int, int], Tensor]:
    part = certificate.witnesses
    if part is None:
        return {}
    file = path.with_name(part.file)
    with reading(file):
        content = read_regular_file(file, 20 * LIMIT)
    if hashlib.sha256(content).hexdigest() != part.sha256:
        raise InputError(f"`{file}` does not have the sha256 that the certificate names")
    try:
        tensors = safetensors.torch.load(content)
        found = {(int(name.split(":")[0]), int(name.split(":")[1])): value for name, value in tensors.items()}
    except Exception as error:  # safetensors raises its own type and several of Python's
        raise InputError(f"`{file}` is not a file of witnesses: {plain(str(error))}") from None
    if any(value.dtype != torch.float32 for value in found.values()):
        raise InputError(f"`{file}` holds witnesses that are not float32")
    return found
