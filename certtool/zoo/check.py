"""Check records against what they speak of: hashes, counts, and proofs recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from certtool import checkpoint as checkpoints
from certtool.errors import CertToolError, OutsideError
from certtool.verification import LadderSettings
from certtool.verification.recheck import recheck
from certtool.zoo.describe import Cost, record_of
from certtool.zoo.fetch import Progress, silent
from certtool.zoo.records import Record
from certtool.zoo.resolve import Mismatch, obtain
from certtool.zoo.staging import certificate_of

State = Literal["holds", "fails", "unreachable"]
COMPARED = ("norm", "eps", "model", "data", "certificate", "results")


@dataclass(frozen=True)
class Outcome:
    """One record: whether it holds, and if not, why."""

    name: str
    state: State
    source: str | None
    proofs: int  # recomputed
    reasons: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return self.__dict__ | {"reasons": list(self.reasons)}


def check(
    record: Record,
    *,
    sample: int | None,
    data: Path | None = None,
    settings: LadderSettings | None = None,
    progress: Progress = silent,
) -> Outcome:
    """`sample` proofs of each radius are recomputed by the independent checker; none where it is 0."""
    try:
        found = obtain(record, progress)
    except OutsideError as error:
        state: State = "fails" if isinstance(error, Mismatch) else "unreachable"
        return Outcome(record.name, state, None, 0, (str(error),))
    try:
        reasons, proofs = _against(record, found.folder.path, sample, data, settings)
    except OutsideError as error:
        return Outcome(record.name, "unreachable", found.source, 0, (str(error),))
    except CertToolError as error:
        return Outcome(record.name, "fails", found.source, 0, (str(error),))
    return Outcome(record.name, "fails" if reasons else "holds", found.source, proofs, tuple(reasons))


def _against(
    record: Record, folder: Path, sample: int | None, data: Path | None, settings: LadderSettings | None
) -> tuple[list[str], int]:
    model = checkpoints.load(folder)
    file = folder / record.certificate.file
    certificate = certificate_of(file)
    derived = record_of(
        model, certificate, file, name=record.name, licence=record.licence, sources=record.sources, cost=Cost()
    )
    reasons = [
        f"{part}: the record says {_shown(record, part)}, the files say {_shown(derived, part)}"
        for part in COMPARED
        if getattr(record, part) != getattr(derived, part)
    ]
    if sample == 0:
        return reasons, 0
    split = checkpoints.load_images(model, certificate.dataset.split, data)
    outcome = recheck(model, split, file, sample=sample, settings=settings)
    return reasons + list(outcome.differences), sum(outcome.proofs.values())


def _shown(record: Record, part: str) -> str:
    return str(getattr(record, part))[:300]
