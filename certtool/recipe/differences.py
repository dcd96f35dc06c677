"""In which keys two recipes differ: whether a folder holds the run that is asked for, which runs are repeats."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from certtool.recipe.schema import Recipe

WORDS = ("summary", "paper")  # decide nothing


def differences(one: Recipe, other: Recipe, ignore: Collection[str] = WORDS) -> dict[str, tuple[Any, Any]]:
    """Dotted keys and their two values. What `one` leaves to the run to decide ("auto") may be anything in `other`."""
    ours, theirs = (dict(_flat(recipe.model_dump(by_alias=True, exclude=set(ignore)), ())) for recipe in (one, other))
    keys = [*ours, *(key for key in theirs if key not in ours)]
    pairs = {key: (ours.get(key), theirs.get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1] and pair[0] != "auto"}


def _flat(values: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, (*path, key))
        else:
            yield ".".join((*path, key)), value
