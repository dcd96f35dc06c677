"""A model from what the user typed, with a bar while it is fetched."""

from __future__ import annotations

from certtool.checkpoint import Checkpoint, load
from certtool.report.screen import Screen
from certtool.zoo.resolve import resolve


def load_model(screen: Screen, reference: str) -> Checkpoint:
    with screen.download() as progress:
        path = resolve(reference, progress, screen.note)
    return load(path)
