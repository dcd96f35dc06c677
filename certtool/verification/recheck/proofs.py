"""The proofs of a certificate, computed again.

Interval proofs are recomputed by certtool.checker, which shares nothing with the engine that made them. A CROWN-IBP
proof is recomputed there too; CROWN and alpha-CROWN ones by auto_LiRPA again, and the outcome says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from certtool import checker
from certtool.checkpoint import Checkpoint
from certtool.data import Split
from certtool.epsilon import Epsilon
from certtool.verification.certificate import ResultPart
from certtool.verification.images import choose
from certtool.verification.ladder import RELAXATIONS, Ladder, LadderSettings, to_float32
from certtool.verification.recheck.outcome import Findings
from certtool.verification.recheck.rows import Row

TOLERANCE = 1e-6  # of a rigorous margin, between two float64 implementations of the same formula
LOOSE = 1e-3  # of a margin computed in float32
# An optimised bound stops where the images beside it let it stop: each value it finds is proven, no two need be equal.
OPTIMISED = 0.05


@dataclass(frozen=True)
class Proofs:
    """Recomputes margins and notes where they are not what the certificate says."""

    checkpoint: Checkpoint
    split: Split
    settings: LadderSettings
    progress: Callable[[str, int, int], None]
    findings: Findings

    def intervals(self, result: ResultPart, rows: list[Row]) -> None:
        """The clean prediction, and the interval margin, of every chosen image."""
        if not rows:
            return
        lower, upper, labels = self._box(rows, result.eps)
        network = checker.read_network(self.checkpoint.path.read_bytes())
        bound = checker.rigorous_margins if result.arithmetic == "rigorous" else checker.interval_margins
        margins = bound(network, lower, upper, labels)
        predicted = self._predictions(rows)
        self.findings.proofs["ibp, by the independent NumPy checker"] += sum(row.rung == "ibp" for row in rows)
        self.progress("ibp", len(rows), len(rows))
        tolerance = TOLERANCE if result.arithmetic == "rigorous" else LOOSE
        for row, margin, right in zip(rows, margins.tolist(), (predicted == labels).tolist(), strict=True):
            where = f"image {row.index} at eps {result.eps}"
            if right == (row.verdict == "misclassified"):
                word = "right" if right else "wrong"
                self._differ(f"{where}: the model's prediction is {word}, the certificate says {row.verdict}")
            elif row.rung == "ibp":
                self._compare(where, row, margin, tolerance)
            elif row.verdict == "unknown":
                if margin > tolerance:
                    self._differ(f"{where}: interval bounds prove it, the certificate says unknown")
                elif row.margin is not None and not _close(row.margin, margin, tolerance):
                    self._differ(f"{where}: the interval margin is {margin:.9g}, the certificate says {row.margin:.9g}")
            elif row.verdict in ("falsified", "misclassified") and row.margin is not None:
                self._differ(f"{where}: a {row.verdict} image has no margin, the certificate says {row.margin:.9g}")

    def relaxation(self, rung: str, result: ResultPart, rows: list[Row]) -> None:
        """The margin of every image that this linear relaxation certified."""
        if not rows:
            return
        if rung == "crown-ibp":
            lower, upper, labels = self._box(rows, result.eps)
            network = checker.read_network(self.checkpoint.path.read_bytes())
            margins = checker.crown_ibp_margins(network, lower, upper, labels).tolist()
            self.findings.proofs["crown-ibp, by the independent NumPy checker"] += len(rows)
        else:
            margins = self._same_engine(rung, result, rows)
            self.findings.proofs[f"{rung}, by auto_LiRPA again"] += len(rows)
        for row, margin in zip(rows, margins, strict=True):
            where = f"image {row.index} at eps {result.eps}"
            if rung != "alpha-crown":
                self._compare(where, row, margin, LOOSE)
            elif (
                not 0 < margin < float("inf")
                or row.margin is None
                or row.margin > margin + OPTIMISED * max(1.0, margin)
            ):
                self._differ(f"{where}: the margin by {rung} is {margin:.9g}, the certificate says {row.margin}")

    def _same_engine(self, rung: str, result: ResultPart, rows: list[Row]) -> list[float]:
        images = choose(self.split, None, [row.index for row in rows])
        settings = replace(self.settings, method=rung, attack=None)  # type: ignore[arg-type]
        ladder = Ladder(self.checkpoint.model, images, settings, preprocessing="normalize")
        assert ladder.worker is not None
        margins = []
        try:
            for number in range(len(rows)):
                one = torch.tensor([number])
                box = to_float32(images.outer(one, Epsilon.parse(result.eps).value).interval(), torch.device("cpu"))
                answer = ladder.worker.margins(RELAXATIONS[rung], box, images.labels[one])  # type: ignore[index]
                margins.append(float("nan") if isinstance(answer, str) else float(answer[0]))
                self.progress(rung, number + 1, len(rows))
        finally:
            ladder.worker.close()
        return margins

    def _box(self, rows: list[Row], eps: str) -> tuple[Any, Any, Any]:
        images = self.split.images[[row.index for row in rows]].numpy()
        lower, upper = checker.exact_box(images, self.split.facts.scale, Epsilon.parse(eps).value)
        return lower, upper, np.array([row.label for row in rows])

    def _predictions(self, rows: list[Row]) -> Any:
        images = self.split.images[[row.index for row in rows]]
        with torch.no_grad():
            logits = [self.checkpoint.model(self.split.pixels(part)) for part in torch.split(images, 256)]
        return torch.cat(logits).argmax(1).numpy()

    def _compare(self, where: str, row: Row, margin: float, tolerance: float) -> None:
        if not 0 < margin < float("inf"):
            self._differ(f"{where}: the proof by {row.rung} does not hold: its margin is {margin:.9g}")
        elif row.margin is None or not _close(row.margin, margin, tolerance):
            self._differ(f"{where}: the margin by {row.rung} is {margin:.9g}, the certificate says {row.margin}")

    def _differ(self, text: str) -> None:
        self.findings.differ(text)


def _close(said: float, found: float, tolerance: float) -> bool:
    return abs(said - found) <= tolerance * max(1.0, abs(found))
