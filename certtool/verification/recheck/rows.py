"""A certificate holds columns; a recheck goes through it image by image."""

from __future__ import annotations

from dataclasses import dataclass

from certtool.verification.certificate import ResultPart


@dataclass(frozen=True)
class Row:
    index: int
    label: int
    verdict: str
    rung: str | None
    grade: str | None
    margin: float | None
    reason: str | None


def rows_of(result: ResultPart) -> list[Row]:
    return [Row(*values) for values in zip(*result.columns.__dict__.values(), strict=True)]
