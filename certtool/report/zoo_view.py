"""The zoo on screen. Names and tags from a Hub are drawn as text, never as markup."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from certtool.report.screen import Screen, duration, percent, plain_table

if TYPE_CHECKING:
    from certtool.verification.recheck import Recheck
    from certtool.zoo import Record, Result
    from certtool.zoo.check import Outcome
    from certtool.zoo.choose import Row
    from certtool.zoo.publish import Plan, Published
    from certtool.zoo.remote import Remote


def show_records(screen: Screen, rows: list[Row]) -> None:
    if screen.json:
        screen.document({"schema": "certtool.zoo/1", "models": [_record_json(row.record) for row in rows]})
        return
    if not rows:
        screen.note("no model of the zoo fits; `certtool zoo list` shows all, `--remote` asks the Hub")
        return
    table = plain_table("model", "data", "eps", "clean", "attacked", "certified", "rigorous", "parameters", left=2)
    for row in rows:
        result = row.result
        figures = (result.clean, result.attacked, result.certified, result.certified_rigorous)
        table.add_row(row.record.name, row.record.data.dataset, result.eps, *map(percent, figures),
                      f"{row.record.model.parameters:,}")  # fmt: skip
    screen.table(table)


def show_remote(screen: Screen, models: list[Remote]) -> None:
    if screen.json:
        screen.document({"schema": "certtool.remote/1", "models": [model.as_json() for model in models]})
        return
    if not models:
        screen.note("the Hub has no model with these tags")
        return
    from rich.text import Text

    table = plain_table("repository", "data", "eps", "downloads", "commit", left=3)
    for model in models:
        texts = (f"hf://{model.repo}", model.dataset or "-", ", ".join(model.eps) or "-", str(model.downloads),
                 (model.commit or "-")[:12])  # fmt: skip
        table.add_row(*map(Text, texts))
    screen.table(table)
    screen.note("these are claims: `certtool zoo fetch hf://user/repo --sample 50` checks them")


def show_record(screen: Screen, record: Record) -> None:
    from certtool.zoo.layers import layers
    from certtool.zoo.resolve import reproduce

    found = layers(record)
    if screen.json:
        document = _record_json(record) | {
            "layers": [layer.__dict__ for layer in found],
            "reproduce": reproduce(record),
        }
        screen.document({"schema": "certtool.zoo/1", "models": [document]})
        return
    screen.text(f"{record.name}: {record.summary}")
    cost = (
        "" if record.training.seconds is None else f", {duration(record.training.seconds)} on {record.training.machine}"
    )
    for word, value in (
        ("network", f"{record.model.arch}, {record.model.parameters:,} parameters, {record.model.bytes:,} bytes"),
        ("data", f"{record.data.images:,} {record.data.split} images of {record.data.dataset}"),
        ("training", f"recipe {record.recipe.name}, seed {record.recipe.seed}, {record.training.epochs} epochs{cost}"),
        ("verifier", record.certificate.verifier),
        ("licence", record.licence),
        ("sha256", record.model.sha256),
        ("sources", ", ".join(record.sources)),
    ):
        screen.text(f"  {word:<9} {value}")
    screen.text("")
    table = plain_table("eps", "clean", "attacked", "certified", "rigorous")
    for result in record.results:
        table.add_row(result.eps, *map(percent, _figures(result)))
    screen.table(table)
    screen.text("")
    if found:
        shapes = plain_table("layer", "kind", "weights", "parameters", left=3)
        for layer in found:
            shapes.add_row(layer.name, layer.kind, layer.shape, f"{layer.parameters:,}")
        screen.table(shapes)
        screen.text("")
    screen.text("train it again, prove it again, check its proof:")
    screen.text(f"  {reproduce(record)}")
    screen.text(f"  certtool verify {record.name}")
    screen.text(f"  certtool zoo check {record.name} --sample 50")


def _figures(result: Result) -> tuple[float | None, ...]:
    return result.clean, result.attacked, result.certified, result.certified_rigorous


def _record_json(record: Record) -> dict[str, Any]:
    document = record.model_dump(by_alias=True)
    for entry, result in zip(document["results"], record.results, strict=True):
        entry["certified"] = result.certified
    return document


def show_fetched(screen: Screen, path: Path, source: str, record: Record | None, rechecked: Recheck | None) -> None:
    if screen.json:
        screen.document({
            "schema": "certtool.fetch/1", "path": str(path), "source": source,
            "record": None if record is None else record.name,
            "recheck": None if rechecked is None else rechecked.as_json(),
        })  # fmt: skip
        return
    screen.text(str(path))
    screen.note(f"from {source}: every sha256 as promised, the model loads")
    if rechecked is not None:
        from certtool.report.tables import show_recheck

        show_recheck(screen, rechecked)
    screen.note(f"  certtool verify {path / 'model.safetensors'}")


def show_plan(screen: Screen, plan: Plan, *, dry_run: bool) -> None:
    if screen.json:
        if dry_run:
            screen.document(plan.as_json())
        return
    private = ", private if it is new" if plan.private else ""
    tag = f", tag {plan.tag}" if plan.tag else ""
    proofs = sum(sum(outcome.proofs.values()) for outcome in plan.rechecked)
    left = sum(outcome.not_looked_at for outcome in plan.rechecked)
    screen.text(f"to publish: {plan.repo}{private}{tag}")
    screen.text(f"certificate holds: {proofs} proofs recomputed" + (f", {left} images not looked at" if left else ""))
    screen.text("")
    table = plain_table("file", "bytes", "sha256")
    for name, content in sorted(plan.staged.files.items()):
        table.add_row(name, f"{len(content):,}", plan.staged.sha256(name)[:16])
    screen.table(table)
    if dry_run:
        screen.note("dry run: nothing has left this machine")


def show_published(screen: Screen, published: Published) -> None:
    if screen.json:
        screen.document({"schema": "certtool.published/1", "ref": str(published.ref), "url": published.url,
                         "record": published.record_text})  # fmt: skip
        return
    screen.note(f"published {published.ref}, read back and compared: {published.url}")
    screen.note("the record, to add to zoo/:")
    screen.text(published.record_text)


def show_check(screen: Screen, outcomes: list[Outcome]) -> None:
    if screen.json:
        ok = all(outcome.state == "holds" for outcome in outcomes)
        screen.document({"schema": "certtool.zoo-check/1", "ok": ok, "models": [o.as_json() for o in outcomes]})
        return
    for outcome in outcomes:
        proofs = f", {outcome.proofs or 'no'} proofs recomputed"  # hashes alone find damage, not forgery
        where = f" (from {outcome.source}{proofs})" if outcome.source else ""
        screen.text(f"{outcome.name}: {outcome.state}{where}")
        for reason in outcome.reasons:
            screen.text(f"  {reason}")
