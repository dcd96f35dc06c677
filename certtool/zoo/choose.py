"""Pick and order records by what a user asked for. No torch, no network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from certtool.epsilon import Epsilon
from certtool.errors import InputError
from certtool.zoo.records import Record, Result, records


@dataclass(frozen=True)
class Wish:
    dataset: str | None = None
    eps: Epsilon | None = None
    min_certified: float | None = None
    sort: str = "name"


@dataclass(frozen=True)
class Row:
    """A record, and the result that was asked for: at the given radius, else at the model's own."""

    record: Record
    result: Result


_ORDERS: dict[str, Callable[[Row], Any]] = {
    "name": lambda row: row.record.name,
    "dataset": lambda row: (row.record.data.dataset, row.record.name),
    "eps": lambda row: (Epsilon.parse(row.result.eps).value, row.record.name),
    "clean": lambda row: (-row.result.clean, row.record.name),
    "certified": lambda row: (-row.result.certified, row.record.name),
    "parameters": lambda row: (row.record.model.parameters, row.record.name),
}


def choose(wish: Wish) -> list[Row]:
    known = records()
    datasets = {record.data.dataset for record in known.values()}
    if wish.dataset is not None and wish.dataset not in datasets:
        from certtool.recipe import did_you_mean

        raise InputError(f"the zoo has no model of `{wish.dataset}`", did_you_mean(wish.dataset, datasets))
    rows = [Row(record, result) for record in known.values() if (result := _result(record, wish.eps)) is not None]
    fitting = [
        row
        for row in rows
        if wish.dataset in (None, row.record.data.dataset) and row.result.certified >= (wish.min_certified or 0)
    ]
    return sorted(fitting, key=_ORDERS[wish.sort])


def _result(record: Record, eps: Epsilon | None) -> Result | None:
    if eps is None:
        return record.headline
    return next((result for result in record.results if Epsilon.parse(result.eps).value == eps.value), None)
