"""The other side of a certificate: its witnesses must change the label, and no attack may change a certified one."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch
from torch import Tensor

from certtool.attack import AttackSettings, attack
from certtool.bounds.box import Edges, inner_edges
from certtool.checkpoint import Checkpoint
from certtool.data import Split
from certtool.epsilon import Epsilon
from certtool.verification.certificate import ResultPart
from certtool.verification.recheck.outcome import Findings
from certtool.verification.recheck.rows import Row


def replay_witnesses(
    checkpoint: Checkpoint,
    split: Split,
    result: ResultPart,
    rows: list[Row],
    witnesses: Mapping[int, Tensor],
    findings: Findings,
) -> None:
    """Every falsified image has a witness that lies in the exact box and changes the label; no other has one."""
    falsified = {row.index: row for row in rows if row.verdict == "falsified"}
    for index in sorted(falsified.keys() ^ witnesses.keys()):
        word = "falsified, but without a witness" if index in falsified else "not falsified, but with a witness"
        findings.differ(f"image {index} at eps {result.eps}: {word}")
    for index in sorted(falsified.keys() & witnesses.keys()):
        witness, row = witnesses[index], falsified[index]
        edges = _edges(split, [index], result.eps)
        if witness.shape != edges.lower[0].shape or not bool(edges.contains(witness.unsqueeze(0)).all()):
            findings.differ(f"image {index} at eps {result.eps}: its witness lies outside the box")
            continue
        with torch.no_grad():
            if int(checkpoint.model(witness.unsqueeze(0)).argmax()) == row.label:
                findings.differ(f"image {index} at eps {result.eps}: its witness does not change the label")
        findings.witnesses += 1


def attack_certified(
    checkpoint: Checkpoint, split: Split, result: ResultPart, rows: list[Row], draw: random.Random, findings: Findings
) -> None:
    """A short attack with starts of its own on certified images: none may fall."""
    if not rows:
        return
    indices = [row.index for row in rows]
    settings = AttackSettings(steps=20, restarts=2, seed=draw.randrange(2**31))
    x, labels = split.pixels(split.images[indices]), split.labels[indices]
    found = attack(checkpoint.model, x, labels, _edges(split, indices, result.eps), settings)
    findings.attacked += len(rows)
    for place in found.success.nonzero().flatten().tolist():
        findings.differ(f"image {indices[place]} at eps {result.eps}: certified, and yet an attack changes its label")


def _edges(split: Split, indices: list[int], eps: str) -> Edges:
    return inner_edges(split.images[indices], split.facts.scale, Epsilon.parse(eps).value)
