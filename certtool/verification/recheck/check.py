"""One recheck from beginning to end: what it speaks of, then of every radius the witnesses, the proofs, an attack."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from certtool.checkpoint import Checkpoint
from certtool.data import Split
from certtool.epsilon import Epsilon
from certtool.verification.certificate import Certificate, ResultPart, read_certificate
from certtool.verification.ladder import RELAXATIONS, LadderSettings
from certtool.verification.recheck import structure
from certtool.verification.recheck.counterexamples import attack_certified, replay_witnesses
from certtool.verification.recheck.outcome import Findings, Recheck
from certtool.verification.recheck.proofs import Proofs
from certtool.verification.recheck.rows import Row, rows_of

ATTACKED = 100  # certified images that a full recheck attacks


def recheck(
    checkpoint: Checkpoint,
    split: Split,
    file: Path,
    *,
    sample: int | None = None,
    settings: LadderSettings | None = None,
    seed: int | None = None,
    progress: Callable[[str, int, int], None] = lambda rung, done, total: None,
) -> Recheck:
    """All proofs, or `sample` random ones of each radius; every witness; an attack on as many certified images."""
    loaded, findings, draw = read_certificate(file), Findings(), random.Random(seed)
    certificate = loaded.certificate
    proofs = Proofs(checkpoint, split, settings or LadderSettings(), progress, findings)
    if structure.same_things(certificate, checkpoint, split, findings) and structure.well_formed(
        certificate, split, findings
    ):
        for place, result in enumerate(certificate.results):
            rows = rows_of(result)
            witnesses = {index: witness for (where, index), witness in loaded.witnesses.items() if where == place}
            replay_witnesses(checkpoint, split, result, rows, witnesses, findings)
            chosen = _drawn(rows, sample, draw)
            findings.not_looked_at += len(rows) - len(chosen)
            _recompute(proofs, certificate, result, chosen)
            certified = [row for row in rows if row.verdict == "certified"]
            attacked = _drawn(certified, ATTACKED if sample is None else sample, draw)
            attack_certified(checkpoint, split, result, attacked, draw, findings)
        structure.nesting(certificate, findings)
    return findings.outcome(certificate.dataset.images)


def _drawn(rows: list[Row], count: int | None, draw: random.Random) -> list[Row]:
    return rows if count is None else draw.sample(rows, min(count, len(rows)))


def _recompute(proofs: Proofs, certificate: Certificate, result: ResultPart, rows: list[Row]) -> None:
    proofs.intervals(result, rows)
    for rung in RELAXATIONS:
        chosen = [row for row in rows if row.rung == rung and not _carried(row, result, certificate)]
        proofs.relaxation(rung, result, chosen)


def _carried(row: Row, result: ResultPart, certificate: Certificate) -> bool:
    """The very same proof, with the same margin, stands at a larger radius, where it is checked."""
    radius = Epsilon.parse(result.eps).value
    larger = [other for other in certificate.results if Epsilon.parse(other.eps).value > radius]
    return any(row in rows_of(other) for other in larger)
