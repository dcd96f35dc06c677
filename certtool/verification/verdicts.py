"""What is known of each image at one radius, and the counts that follow from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from certtool.attack import AttackSettings
from certtool.epsilon import Epsilon

Verdict = Literal["certified", "falsified", "unknown", "misclassified"]
Rung = Literal["clean", "ibp", "attack", "crown-ibp", "crown", "alpha-crown"]
Grade = Literal["rigorous", "float32"]
Reason = Literal["bound", "memory", "time", "engine"]
VERDICTS: tuple[Verdict, ...] = ("certified", "falsified", "unknown", "misclassified")
RUNGS: tuple[Rung, ...] = ("ibp", "crown-ibp", "crown", "alpha-crown")


@dataclass(frozen=True)
class ImageVerdict:
    """One image: the verdict, the rung that decided, how sure a proof is, and the least margin it leaves.

    A certified image's margin is the one its rung proved; an unknown one's is the interval bound that was not enough.
    """

    index: int
    label: int
    verdict: Verdict
    rung: Rung | None = None
    grade: Grade | None = None
    margin: float | None = None
    reason: Reason | None = None


@dataclass(frozen=True)
class EpsResult:
    """All images at one radius. Witnesses are by the image's index: perturbed images that change the label."""

    eps: Epsilon
    method: str
    arithmetic: Grade
    attack: AttackSettings | None
    images: tuple[ImageVerdict, ...]
    witnesses: dict[int, Tensor]
    seconds: float

    def count(self, verdict: Verdict, *, grade: Grade | None = None, rung: Rung | None = None) -> int:
        return sum(
            image.verdict == verdict and grade in (None, image.grade) and rung in (None, image.rung)
            for image in self.images
        )

    @property
    def clean_accuracy(self) -> float:
        return 1 - self.count("misclassified") / len(self.images)

    @property
    def attacked_accuracy(self) -> float | None:
        if self.attack is None:
            return None
        return 1 - (self.count("misclassified") + self.count("falsified")) / len(self.images)

    @property
    def certified_accuracy(self) -> float:
        return self.count("certified") / len(self.images)

    @property
    def certified_rigorous(self) -> float:
        return self.count("certified", grade="rigorous") / len(self.images)

    def as_json(self) -> dict[str, Any]:
        reasons = Counter(image.reason for image in self.images if image.reason is not None)
        return {
            "eps": str(self.eps),
            "method": self.method,
            "arithmetic": self.arithmetic,
            "clean_accuracy": self.clean_accuracy,
            "attacked_accuracy": self.attacked_accuracy,
            "certified_accuracy": self.certified_accuracy,
            "certified_rigorous": self.certified_rigorous,
            "counts": {verdict: self.count(verdict) for verdict in VERDICTS},
            "certified_by": {rung: n for rung in RUNGS if (n := self.count("certified", rung=rung))},
            "unknown_reasons": dict(sorted(reasons.items())),
            "attack": None if self.attack is None else dict(self.attack.__dict__),
            "seconds": self.seconds,
        }
