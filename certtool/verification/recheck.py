"""Checks a certificate again: structure, hashes, counts, and the proofs themselves by a second implementation.

Interval proofs are recomputed by checker.py, which shares nothing with the engine that made them. A CROWN-IBP proof is
recomputed there too; CROWN and alpha-CROWN ones by auto_LiRPA again, and the outcome says so.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from certtool import checker
from certtool.attack import AttackSettings, attack
from certtool.bounds.box import Edges, inner_edges
from certtool.checkpoint import Checkpoint
from certtool.data import Split
from certtool.epsilon import Epsilon
from certtool.plain_text import plain
from certtool.verification.certificate import CLAIM, OUTSIDE, Loaded, ResultPart, read_certificate
from certtool.verification.images import choose
from certtool.verification.ladder import RELAXATIONS, Ladder, LadderSettings, to_float32
from certtool.verification.verdicts import VERDICTS

TOLERANCE = 1e-6  # of a rigorous margin, between two float64 implementations of the same formula
LOOSE = 1e-3  # of a margin computed in float32
# An optimised bound stops where the images beside it let it stop: each value it finds is proven, no two need be equal.
OPTIMISED = 0.05
ATTACKED = 100  # certified images that a full recheck attacks


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
    loaded = read_certificate(file)
    check = _Check(checkpoint, split, loaded, sample, settings or LadderSettings(), random.Random(seed), progress)
    return check.run()


class _Check:
    def __init__(
        self,
        checkpoint: Checkpoint,
        split: Split,
        loaded: Loaded,
        sample: int | None,
        settings: LadderSettings,
        draw: random.Random,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.checkpoint, self.split, self.loaded, self.sample = checkpoint, split, loaded, sample
        self.settings, self.draw, self.progress = settings, draw, progress
        self.differences: list[str] = []
        self.proofs: Counter[str] = Counter()
        self.not_looked_at = self.witnesses = self.attacked = 0

    def run(self) -> Recheck:
        certificate = self.loaded.certificate
        if self._same_things() and self._well_formed():
            for place, result in enumerate(certificate.results):
                self._result(place, result)
            self._nesting()
        return Recheck(
            certificate.dataset.images,
            dict(self.proofs),
            self.not_looked_at,
            self.witnesses,
            self.attacked,
            tuple(self.differences),
        )

    def differ(self, text: str) -> None:
        self.differences.append(text)

    # --- what it speaks of -------------------------------------------------------------------------------------------

    def _same_things(self) -> bool:
        """The certificate's model, data set and split are the ones at hand."""
        certificate, header = self.loaded.certificate, self.checkpoint.header
        pairs = (
            ("model sha256", certificate.model.sha256, self.checkpoint.sha256),
            ("model name", certificate.model.name, header.name),
            ("architecture", certificate.model.arch, header.arch.arch),
            ("data set", certificate.dataset.name, self.split.facts.name),
            ("split", certificate.dataset.split, self.split.name),
            ("data set sha256", certificate.dataset.sha256, self.split.sha256),
            ("claim", certificate.claim, CLAIM),
            ("list of what is outside the claim", tuple(certificate.outside_the_claim), OUTSIDE),
        )
        for what, said, found in pairs:
            if said != found:
                self.differ(f"the {what} is {plain(str(found))}, the certificate says {plain(str(said))}")
        return not self.differences

    def _well_formed(self) -> bool:
        """Every result is looked at, so that all that is wrong is told at once."""
        sound = [self._structure(result) for result in self.loaded.certificate.results]
        return all(sound)

    def _structure(self, result: ResultPart) -> bool:
        """Columns of one length, images of the split with their labels, counts that add up."""
        columns, before = result.columns, len(self.differences)
        lengths = {len(column) for column in columns.__dict__.values()}
        if lengths != {self.loaded.certificate.dataset.images}:
            self.differ(f"eps {result.eps}: columns of lengths {sorted(lengths)}, not one entry an image")
            return False
        if len(set(columns.index)) < len(columns.index) or not all(0 <= i < len(self.split) for i in columns.index):
            self.differ(f"eps {result.eps}: the image indices are not distinct images of the split")
            return False
        for index, label in zip(columns.index, columns.label, strict=True):
            if int(self.split.labels[index]) != label:
                self.differ(
                    f"image {index}: its label is {int(self.split.labels[index])}, the certificate says {label}"
                )
        found = Counter(columns.verdict)
        for verdict in VERDICTS:
            said = result.counts.get(verdict)
            if said != found[verdict]:
                self.differ(f"eps {result.eps}: {found[verdict]} images are {verdict}, the count says {said}")
        for row in _rows_of(result):
            self._row(result, row)
        return len(self.differences) == before

    def _row(self, result: ResultPart, row: _Row) -> None:
        """Only a proof has a grade, the one of its rung; only an unknown image has a reason."""
        fits = {
            "certified": row.rung in ("ibp", *RELAXATIONS) and row.grade is not None and row.reason is None,
            "falsified": row.rung == "attack" and row.grade is None and row.reason is None,
            "unknown": row.rung is None and row.grade is None and row.reason is not None,
            "misclassified": row.rung == "clean" and row.grade is None and row.reason is None,
        }[row.verdict]
        grade = {None: None, "ibp": result.arithmetic}.get(row.rung, "float32") if row.verdict == "certified" else None
        if not fits or row.grade != grade:
            where = f"image {row.index} at eps {result.eps}"
            self.differ(f"{where}: `{row.verdict}` does not go with its rung, grade or reason")

    def _nesting(self) -> None:
        """Certified at a radius means certified below it; falsified means falsified above."""
        ordered = sorted(self.loaded.certificate.results, key=lambda result: Epsilon.parse(result.eps).value)
        for smaller, larger in itertools.pairwise(ordered):
            below = dict(zip(smaller.columns.index, smaller.columns.verdict, strict=True))
            for index, verdict in zip(larger.columns.index, larger.columns.verdict, strict=True):
                if verdict == "certified" and below.get(index) != "certified":
                    self.differ(f"image {index} is certified at eps {larger.eps} but not at {smaller.eps}")
                if below.get(index) == "falsified" and verdict != "falsified":
                    self.differ(f"image {index} is falsified at eps {smaller.eps} but not at {larger.eps}")

    # --- the proofs --------------------------------------------------------------------------------------------------

    def _result(self, place: int, result: ResultPart) -> None:
        rows = _rows_of(result)
        self._replay_witnesses(place, result, rows)
        chosen = rows if self.sample is None else self.draw.sample(rows, min(self.sample, len(rows)))
        self.not_looked_at += len(rows) - len(chosen)
        self._intervals(result, chosen)
        for rung in RELAXATIONS:
            self._relaxation(
                rung, result, [row for row in chosen if row.rung == rung and not self._carried(row, result)]
            )
        certified = [row for row in rows if row.verdict == "certified"]
        count = min(ATTACKED if self.sample is None else self.sample, len(certified))
        self._attack(result, self.draw.sample(certified, count))

    def _carried(self, row: _Row, result: ResultPart) -> bool:
        """The very same proof, with the same margin, stands at a larger radius, where it is checked."""
        radius = Epsilon.parse(result.eps).value
        larger = [r for r in self.loaded.certificate.results if Epsilon.parse(r.eps).value > radius]
        return any(row in _rows_of(other) for other in larger)

    def _box(self, rows: list[_Row], eps: str) -> tuple[Any, Any, Any]:
        indices = [row.index for row in rows]
        images = self.split.images[torch.tensor(indices, dtype=torch.long)].numpy()
        lower, upper = checker.exact_box(images, self.split.facts.scale, Epsilon.parse(eps).value)
        return lower, upper, np.array([row.label for row in rows])

    def _intervals(self, result: ResultPart, rows: list[_Row]) -> None:
        """The clean prediction, and the interval margin, of every chosen image."""
        if not rows:
            return
        lower, upper, labels = self._box(rows, result.eps)
        network = checker.read_network(self.checkpoint.path.read_bytes())
        bound = checker.rigorous_margins if result.arithmetic == "rigorous" else checker.interval_margins
        margins = bound(network, lower, upper, labels)
        predicted = self._predictions(rows)
        self.proofs["ibp, by the independent NumPy checker"] += sum(row.rung == "ibp" for row in rows)
        self.progress("ibp", len(rows), len(rows))
        tolerance = TOLERANCE if result.arithmetic == "rigorous" else LOOSE
        for row, margin, right in zip(rows, margins.tolist(), (predicted == labels).tolist(), strict=True):
            where = f"image {row.index} at eps {result.eps}"
            if right == (row.verdict == "misclassified"):
                word = "right" if right else "wrong"
                self.differ(f"{where}: the model's prediction is {word}, the certificate says {row.verdict}")
            elif row.rung == "ibp":
                self._compare(where, row, margin, tolerance)
            elif row.verdict == "unknown":
                if margin > tolerance:
                    self.differ(f"{where}: interval bounds prove it, the certificate says unknown")
                elif row.margin is not None and not _close(row.margin, margin, tolerance):
                    self.differ(f"{where}: the interval margin is {margin:.9g}, the certificate says {row.margin:.9g}")
            elif row.verdict in ("falsified", "misclassified") and row.margin is not None:
                self.differ(f"{where}: a {row.verdict} image has no margin, the certificate says {row.margin:.9g}")

    def _predictions(self, rows: list[_Row]) -> Any:
        images = self.split.images[torch.tensor([row.index for row in rows])]
        with torch.no_grad():
            logits = [self.checkpoint.model(self.split.pixels(part)) for part in torch.split(images, 256)]
        return torch.cat(logits).argmax(1).numpy()

    def _compare(self, where: str, row: _Row, margin: float, tolerance: float) -> None:
        if not 0 < margin < float("inf"):
            self.differ(f"{where}: the proof by {row.rung} does not hold: its margin is {margin:.9g}")
        elif row.margin is None or not _close(row.margin, margin, tolerance):
            self.differ(f"{where}: the margin by {row.rung} is {margin:.9g}, the certificate says {row.margin}")

    def _relaxation(self, rung: str, result: ResultPart, rows: list[_Row]) -> None:
        if not rows:
            return
        if rung == "crown-ibp":
            lower, upper, labels = self._box(rows, result.eps)
            network = checker.read_network(self.checkpoint.path.read_bytes())
            margins = checker.crown_ibp_margins(network, lower, upper, labels).tolist()
            self.proofs["crown-ibp, by the independent NumPy checker"] += len(rows)
        else:
            margins = self._same_engine(rung, result, rows)
            self.proofs[f"{rung}, by auto_LiRPA again"] += len(rows)
        for row, margin in zip(rows, margins, strict=True):
            where = f"image {row.index} at eps {result.eps}"
            if rung != "alpha-crown":
                self._compare(where, row, margin, LOOSE)
            elif (
                not 0 < margin < float("inf")
                or row.margin is None
                or row.margin > margin + OPTIMISED * max(1.0, margin)
            ):
                self.differ(f"{where}: the margin by {rung} is {margin:.9g}, the certificate says {row.margin}")

    def _same_engine(self, rung: str, result: ResultPart, rows: list[_Row]) -> list[float]:
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

    # --- counterexamples ---------------------------------------------------------------------------------------------

    def _replay_witnesses(self, place: int, result: ResultPart, rows: list[_Row]) -> None:
        """Every falsified image has a witness that lies in the exact box and changes the label; no other has one."""
        falsified = {row.index: row for row in rows if row.verdict == "falsified"}
        kept = {index for where, index in self.loaded.witnesses if where == place}
        for index in sorted(falsified.keys() ^ kept):
            word = "falsified, but without a witness" if index in falsified else "not falsified, but with a witness"
            self.differ(f"image {index} at eps {result.eps}: {word}")
        for index in sorted(falsified.keys() & kept):
            witness, row = self.loaded.witnesses[place, index], falsified[index]
            edges = self._edges(row.index, result.eps, inner_edges)
            if witness.shape != edges.lower[0].shape or not bool(edges.contains(witness.unsqueeze(0)).all()):
                self.differ(f"image {index} at eps {result.eps}: its witness lies outside the box")
                continue
            with torch.no_grad():
                if int(self.checkpoint.model(witness.unsqueeze(0)).argmax()) == row.label:
                    self.differ(f"image {index} at eps {result.eps}: its witness does not change the label")
            self.witnesses += 1

    def _edges(self, index: int, eps: str, kind: Callable[..., Edges]) -> Edges:
        return kind(self.split.images[index : index + 1], self.split.facts.scale, Epsilon.parse(eps).value)

    def _attack(self, result: ResultPart, rows: list[_Row]) -> None:
        """A short attack with starts of its own on certified images: none may fall."""
        if not rows:
            return
        chosen = torch.tensor([row.index for row in rows])
        edges = inner_edges(self.split.images[chosen], self.split.facts.scale, Epsilon.parse(result.eps).value)
        settings = AttackSettings(steps=20, restarts=2, seed=self.draw.randrange(2**31))
        x, labels = self.split.pixels(self.split.images[chosen]), self.split.labels[chosen]
        found = attack(self.checkpoint.model, x, labels, edges, settings)
        self.attacked += len(rows)
        for place in found.success.nonzero().flatten().tolist():
            self.differ(
                f"image {rows[place].index} at eps {result.eps}: certified, and yet an attack changes its label"
            )


@dataclass(frozen=True)
class _Row:
    index: int
    label: int
    verdict: str
    rung: str | None
    grade: str | None
    margin: float | None
    reason: str | None


def _rows_of(result: ResultPart) -> list[_Row]:
    return [_Row(*values) for values in zip(*result.columns.__dict__.values(), strict=True)]


def _close(said: float, found: float, tolerance: float) -> bool:
    return abs(said - found) <= tolerance * max(1.0, abs(found))
