"""zoo/README.md, written from the records: nobody keeps a table by hand."""

from __future__ import annotations

from collections.abc import Iterable

from certtool.zoo.records import Record

_HEAD = """# The zoo

One record per certified model, and the small models themselves. This file is written by `scripts/make_zoo.py` from the
records beside it; change those.

| model | data | network | eps | clean | attacked | certified, rigorous | certified | images | weights |
|---|---|---|---|---|---|---|---|---|---|
"""
_TAIL = """
Clean, attacked and certified accuracy are on the test set, at the radius the model was trained for. *Rigorous* is
proven for the float32 network as it runs, rounding included; *certified* adds images whose proof takes the verifier's
arithmetic as exact. *Attacked* is an upper bound.

```sh
certtool zoo show NAME                # everything that is known of it
certtool verify NAME                  # prove it again from the beginning
certtool zoo check NAME --sample 50   # recompute 50 of its proofs independently
```
"""


def readme(records: Iterable[Record]) -> str:
    return _HEAD + "".join(_row(record) for record in records) + _TAIL


def _row(record: Record) -> str:
    best = record.headline
    attacked = "-" if best.attacked is None else _percent(best.attacked)
    cells = (
        f"[{record.name}]({record.name}.toml)",
        record.data.dataset,
        f"{record.model.arch}, {record.model.parameters:,} parameters",
        best.eps,
        _percent(best.clean),
        attacked,
        _percent(best.certified_rigorous),
        _percent(best.certified),
        f"{record.data.images:,}",
        "here" if "zoo" in record.sources else record.sources[0],
    )
    return f"| {' | '.join(cells)} |\n"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
