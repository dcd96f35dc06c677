"""What a certificate says before anything is computed: of which files it speaks, and whether it agrees with itself."""

from __future__ import annotations

import itertools
from collections import Counter

from certtool.checkpoint import Checkpoint
from certtool.data import Split
from certtool.epsilon import Epsilon
from certtool.plain_text import plain
from certtool.verification.certificate import CLAIM, OUTSIDE, Certificate, ResultPart
from certtool.verification.ladder import RELAXATIONS
from certtool.verification.recheck.outcome import Findings
from certtool.verification.recheck.rows import Row, rows_of
from certtool.verification.verdicts import VERDICTS


def same_things(certificate: Certificate, checkpoint: Checkpoint, split: Split, findings: Findings) -> bool:
    """The certificate's model, data set and split are the ones at hand."""
    header = checkpoint.header
    pairs = (
        ("model sha256", certificate.model.sha256, checkpoint.sha256),
        ("model name", certificate.model.name, header.name),
        ("architecture", certificate.model.arch, header.arch.arch),
        ("data set", certificate.dataset.name, split.facts.name),
        ("split", certificate.dataset.split, split.name),
        ("data set sha256", certificate.dataset.sha256, split.sha256),
        ("claim", certificate.claim, CLAIM),
        ("list of what is outside the claim", tuple(certificate.outside_the_claim), OUTSIDE),
    )
    for what, said, found in pairs:
        if said != found:
            findings.differ(f"the {what} is {plain(str(found))}, the certificate says {plain(str(said))}")
    return not findings.differences


def well_formed(certificate: Certificate, split: Split, findings: Findings) -> bool:
    """Every result is looked at, so that all that is wrong is told at once."""
    sound = [_structure(result, certificate.dataset.images, split, findings) for result in certificate.results]
    return all(sound)


def _structure(result: ResultPart, images: int, split: Split, findings: Findings) -> bool:
    """Columns of one length, images of the split with their labels, counts that add up."""
    columns, before = result.columns, len(findings.differences)
    lengths = {len(column) for column in columns.__dict__.values()}
    if lengths != {images}:
        findings.differ(f"eps {result.eps}: columns of lengths {sorted(lengths)}, not one entry an image")
        return False
    if len(set(columns.index)) < len(columns.index) or not all(0 <= i < len(split) for i in columns.index):
        findings.differ(f"eps {result.eps}: the image indices are not distinct images of the split")
        return False
    for index, label in zip(columns.index, columns.label, strict=True):
        if int(split.labels[index]) != label:
            findings.differ(f"image {index}: its label is {int(split.labels[index])}, the certificate says {label}")
    found = Counter(columns.verdict)
    for verdict in VERDICTS:
        said = result.counts.get(verdict)
        if said != found[verdict]:
            findings.differ(f"eps {result.eps}: {found[verdict]} images are {verdict}, the count says {said}")
    for row in rows_of(result):
        if not _goes_together(row, result):
            where = f"image {row.index} at eps {result.eps}"
            findings.differ(f"{where}: `{row.verdict}` does not go with its rung, grade or reason")
    return len(findings.differences) == before


def _goes_together(row: Row, result: ResultPart) -> bool:
    """Only a proof has a grade, the one of its rung; only an unknown image has a reason."""
    fits = {
        "certified": row.rung in ("ibp", *RELAXATIONS) and row.grade is not None and row.reason is None,
        "falsified": row.rung == "attack" and row.grade is None and row.reason is None,
        "unknown": row.rung is None and row.grade is None and row.reason is not None,
        "misclassified": row.rung == "clean" and row.grade is None and row.reason is None,
    }[row.verdict]
    grade = {None: None, "ibp": result.arithmetic}.get(row.rung, "float32") if row.verdict == "certified" else None
    return fits and row.grade == grade


def nesting(certificate: Certificate, findings: Findings) -> None:
    """Certified at a radius means certified below it; falsified means falsified above."""
    ordered = sorted(certificate.results, key=lambda result: Epsilon.parse(result.eps).value)
    for smaller, larger in itertools.pairwise(ordered):
        below = dict(zip(smaller.columns.index, smaller.columns.verdict, strict=True))
        for index, verdict in zip(larger.columns.index, larger.columns.verdict, strict=True):
            if verdict == "certified" and below.get(index) != "certified":
                findings.differ(f"image {index} is certified at eps {larger.eps} but not at {smaller.eps}")
            if below.get(index) == "falsified" and verdict != "falsified":
                findings.differ(f"image {index} is falsified at eps {smaller.eps} but not at {larger.eps}")
