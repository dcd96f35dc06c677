"""The record of a model from its checkpoint and certificate: no figure is typed by hand."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from certtool import recipe as recipes
from certtool import toml_text
from certtool.attack import AttackSettings
from certtool.checkpoint import Checkpoint, parameter_count
from certtool.epsilon import Epsilon
from certtool.errors import CertToolError, InputError
from certtool.plain_text import first_problem
from certtool.verification.certificate import Certificate, ResultPart
from certtool.zoo.layout import file_digest
from certtool.zoo.records import (
    DIGITS,
    CertificatePart,
    DataPart,
    ModelPart,
    RecipePart,
    Record,
    Result,
    TrainingPart,
)


@dataclass(frozen=True)
class Cost:
    """What the training took, where the run is at hand."""

    seconds: float | None = None
    machine: str | None = None


def record_of(
    checkpoint: Checkpoint,
    certificate: Certificate,
    file: Path,
    *,
    name: str,
    licence: str,
    sources: list[str],
    cost: Cost,
) -> Record:
    """Refused where a certificate or header from elsewhere says what no record can."""
    header = checkpoint.header
    try:
        results = _results(certificate, header.eps)
        return Record(
            schema=1,
            name=name,
            summary=_summary(header.recipe, header.name),
            licence=licence,
            norm=header.norm,
            eps=header.eps,
            sources=sources,
            model=ModelPart(
                arch=header.arch.arch,
                parameters=parameter_count(checkpoint.model),
                sha256=checkpoint.sha256,
                bytes=checkpoint.path.stat().st_size,
            ),
            recipe=RecipePart(name=header.name, seed=header.seed, set=_overrides(checkpoint)),
            data=DataPart(
                dataset=certificate.dataset.name, split=certificate.dataset.split, images=certificate.dataset.images
            ),
            certificate=CertificatePart(
                file=f"certificates/{file.name}", sha256=file_digest(file), verifier=verifier(certificate)
            ),
            training=TrainingPart(
                epochs=max(header.epochs, 1),
                seconds=None if cost.seconds is None else round(cost.seconds, 1),
                machine=cost.machine,
            ),
            results=results,
        )
    except ValidationError as error:
        raise InputError(f"`{file}` and its model make no record: {first_problem(error)}") from None


def _results(certificate: Certificate, eps: str) -> list[Result]:
    """In order of radius; the model's own must be among them."""
    results = [result_of(part) for part in certificate.results]
    own = Epsilon.parse(eps).value
    if all(Epsilon.parse(result.eps).value != own for result in results):
        raise InputError(
            f"the certificate says nothing of eps {eps}, the radius the model was trained for",
            f"`certtool verify MODEL --eps {eps} --certificate FILE`",
        )
    return sorted(results, key=lambda result: Epsilon.parse(result.eps).value)


def result_of(part: ResultPart) -> Result:
    """Counts of the certificate as fractions."""
    count = len(part.columns.index)
    if {len(column) for column in part.columns.__dict__.values()} != {count} or not count:
        raise InputError(f"the certificate has columns of different lengths, or none, at eps {part.eps}")
    if part.columns.index != list(range(count)):  # accuracy on images somebody chose is no accuracy
        raise InputError(
            f"the certificate is of chosen images, not of the first {count:,}", "verify without `--indices`"
        )
    grades = [g for v, g in zip(part.columns.verdict, part.columns.grade, strict=True) if v == "certified"]
    wrong, falsified = part.columns.verdict.count("misclassified"), part.columns.verdict.count("falsified")
    return Result(
        eps=part.eps,
        clean=round((count - wrong) / count, DIGITS),
        attacked=None if part.attack is None else round((count - wrong - falsified) / count, DIGITS),
        certified_rigorous=round(grades.count("rigorous") / count, DIGITS),
        certified_float32=round(grades.count("float32") / count, DIGITS),
    )


def verifier(certificate: Certificate) -> str:
    """Who proved it and how, in a line."""
    first = certificate.results[0]
    tools = ", ".join(f"{name} {version}" for name, version in sorted(certificate.versions.items()) if name != "torch")
    attack = None if first.attack is None else AttackSettings(**first.attack.__dict__)
    tried = "no attack" if attack is None else f"PGD {attack.steps} steps x {attack.restarts}"
    return f"{first.method}, {first.arithmetic} intervals, {tried}; {tools}"


def _summary(text: str, fallback: str) -> str:
    try:
        summary = tomllib.loads(text).get("summary")
    except (tomllib.TOMLDecodeError, RecursionError):
        return fallback
    return summary if isinstance(summary, str) and summary else fallback


def _overrides(checkpoint: Checkpoint) -> list[str]:
    """Where the model's recipe differs from the bundled one of its name: what `--set` has to say."""
    try:
        bundled = recipes.load(f"recipe:{checkpoint.header.name}")
        ours = _flat(tomllib.loads(checkpoint.header.recipe), ())
    except (CertToolError, tomllib.TOMLDecodeError, RecursionError):
        return []
    theirs = _flat(tomllib.loads(recipes.render(bundled)), ())
    return [
        f"{key}={toml_text.literal(value)}"
        for key, value in ours.items()
        if key != "seed" and theirs.get(key, value) != value
    ]


def _flat(values: dict[str, object], path: tuple[str, ...]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, (*path, key))
        else:
            flat[".".join((*path, key))] = value
    return flat
