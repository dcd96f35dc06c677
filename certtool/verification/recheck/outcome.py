"""What a recheck found: as it is gathered, and as it is told."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Recheck:
    """What was looked at, how, and every disagreement in a sentence."""

    images: int
    proofs: dict[str, int]  # how many were recomputed by which means
    not_looked_at: int
    witnesses: int
    attacked: int
    differences: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"schema": "certtool.recheck/1", "ok": not self.differences} | self.__dict__ | {
            "differences": list(self.differences)
        }  # fmt: skip


def merged(outcomes: dict[str, Recheck]) -> Recheck:
    """Several certificates of one model, by the names of their files."""
    if len(outcomes) == 1:
        return next(iter(outcomes.values()))
    every = outcomes.values()
    return Recheck(
        sum(outcome.images for outcome in every),
        dict(sum((Counter(outcome.proofs) for outcome in every), Counter())),
        sum(outcome.not_looked_at for outcome in every),
        sum(outcome.witnesses for outcome in every),
        sum(outcome.attacked for outcome in every),
        tuple(f"{file}: {text}" for file, outcome in outcomes.items() for text in outcome.differences),
    )


@dataclass
class Findings:
    """The notebook that the parts of a recheck write into."""

    differences: list[str] = field(default_factory=list)
    proofs: Counter[str] = field(default_factory=Counter)
    not_looked_at: int = 0
    witnesses: int = 0
    attacked: int = 0

    def differ(self, text: str) -> None:
        self.differences.append(text)

    def outcome(self, images: int) -> Recheck:
        return Recheck(
            images, dict(self.proofs), self.not_looked_at, self.witnesses, self.attacked, tuple(self.differences)
        )
