"""What an inspection means, in words: computed from measured growth and ReLU states, each with what to do about it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from certtool.inspection import Inspection, Layer

EXPLODES = 2.0  # growth from one ReLU to the next
EXPLODED = math.log(10)  # widths this much above the input's, in logarithm
DEAD = 0.9  # a share of inactive ReLUs beyond which a layer hardly computes
EQUAL = 0.01  # relative difference below which two networks are the same


@dataclass(frozen=True)
class Finding:
    kind: Literal["explosion", "dead", "regulariser", "batch-norm", "fine", "difference"]
    text: str
    hint: str | None = None


def diagnose(inspection: Inspection) -> list[Finding]:
    """The findings of one network, worst first; `fine` only where there is no other."""
    hidden = [layer for layer in inspection.layers if layer.active is not None]
    found = [*_explosion(hidden), *_dead(hidden), *_missing_batch_norm(inspection), *_regularisers(inspection)]
    if not any(finding.kind in ("explosion", "dead") for finding in found):
        widest = max((layer.log_width_ratio for layer in hidden), default=0.0)
        found.insert(
            0, Finding("fine", f"bounds are stable: at most {math.exp(widest):.1f} times as wide as the input")
        )
    return found


def _explosion(hidden: list[Layer]) -> list[Finding]:
    if not hidden or hidden[-1].log_width_ratio < EXPLODED:
        return []
    # The first layer has no ReLU before it to halve its bounds, so it grows by about twice its gain.
    gains = [hidden[0].growth / 2, *(layer.growth for layer in hidden[1:])]
    first = next((layer for layer, gain in zip(hidden, gains, strict=True) if gain >= EXPLODES), hidden[0])
    worst = max(hidden, key=lambda layer: layer.growth)
    total = hidden[-1].log_width_ratio
    text = (
        f"bounds explode from {first.name} on: by up to {worst.growth:.3g} times a layer ({worst.name}), "
        f"e^{total:.1f} times from the input to {hidden[-1].name}"
    )
    if all(layer.batch_norm for layer in hidden):
        return [
            Finding("explosion", text, "BatchNorm re-scales: let the warmup tighten bounds (tightness regulariser)")
        ]
    return [Finding("explosion", text, '`init = "ibp"` starts with a difference gain of 1')]


def _dead(hidden: list[Layer]) -> list[Finding]:
    dead = [layer for layer in hidden if layer.inactive is not None and layer.inactive >= DEAD]
    return [
        Finding(
            "dead",
            f"{100 * (layer.inactive or 0):.0f} % of {layer.name} is dead",
            "the ReLU-balance regulariser and full BatchNorm",
        )
        for layer in dead
    ]


def _missing_batch_norm(inspection: Inspection) -> list[Finding]:
    missing = [layer.name for layer in inspection.layers if layer.kind != "sum" and not layer.batch_norm][:-1]
    if not missing:
        return []
    return [Finding("batch-norm", f"BatchNorm is missing after {', '.join(missing)}", '`batch_norm = "full"`')]


def _regularisers(inspection: Inspection) -> list[Finding]:
    parts = {"tightness": inspection.tightness, "ReLU balance": inspection.relu}
    active = [f"{name} ({value:.3f})" for name, value in parts.items() if value > 0]
    if not active:
        return [Finding("regulariser", "neither regulariser would be active")]
    return [Finding("regulariser", f"the warmup would regularise {' and '.join(active)}")]


def compare(one: Inspection, other: Inspection, certified: tuple[float | None, float | None]) -> list[Finding]:
    """What differs between two networks: widths, dead neurons, certified accuracy. Swapping them swaps the words."""
    found = [
        *_pair(
            "the last hidden layer's bounds are",
            _last_width(one),
            _last_width(other),
            ("wider", "tighter"),
            one,
            other,
        ),
        *_pair("the share of dead ReLUs is", _dead_share(one), _dead_share(other), ("larger", "smaller"), one, other),
    ]
    if certified[0] is not None and certified[1] is not None:
        found += _pair("certified accuracy is", certified[0], certified[1], ("higher", "lower"), one, other)
    return found or [Finding("difference", "no difference in widths, dead ReLUs or certified accuracy")]


def _pair(
    what: str, first: float, second: float, words: tuple[str, str], one: Inspection, other: Inspection
) -> list[Finding]:
    if abs(first - second) <= EQUAL * max(abs(first), abs(second)):
        return []
    word = words[0] if first > second else words[1]
    return [Finding("difference", f"{what} {word} in {one.title} ({first:.3g}) than in {other.title} ({second:.3g})")]


def _last_width(inspection: Inspection) -> float:
    return [layer.mean_width for layer in inspection.layers if layer.active is not None][-1]


def _dead_share(inspection: Inspection) -> float:
    shares = [layer.inactive for layer in inspection.layers if layer.inactive is not None]
    return sum(shares) / max(len(shares), 1)
