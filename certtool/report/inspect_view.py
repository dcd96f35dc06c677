"""Inspections on screen, as a picture, and as a page."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from certtool.diagnosis import Finding
from certtool.errors import InputError
from certtool.files import disk_errors, write_atomically
from certtool.inspection import Inspection, Layer
from certtool.report.figures import as_svg, figure, relu_states, training_history, widths_of
from certtool.report.screen import Screen, plain_table

HEADERS = ("layer", "kind", "fan-in", "gain", "closed", "growth", "width", "log", "act.", "unst.", "dead")
SHORT = {"conv": "conv", "linear": "lin", "sum": "sum"}


def show_inspections(screen: Screen, found: list[Inspection], words: list[Finding]) -> None:
    first = found[0]
    screen.text(f"{first.images} images, eps {first.eps}, BatchNorm with {first.statistics} statistics")
    for inspection in found:
        screen.text("")
        screen.text(inspection.title)
        table = plain_table(*HEADERS, left=2)
        table.padding = (0, 1, 0, 0)
        for layer in inspection.layers:
            table.add_row(*cells(layer))
        screen.table(table)
        screen.text(
            _terms("tightness", inspection.tightness, [(layer.name, layer.tightness) for layer in inspection.layers])
        )
        screen.text(_terms("ReLU balance", inspection.relu, [(layer.name, layer.relu) for layer in inspection.layers]))
    screen.text("")
    screen.text("gain: n/2 mean|W|; closed: what the initialisation predicts; growth: width over")
    screen.text("that at the ReLU before; log: ln(width over input width); dead: never active")
    if words:
        screen.text("")
    for word in words:
        sentence = f"- {word.text}" + (f" ({word.hint})" if word.hint else "")
        screen.text(textwrap.fill(sentence, 80, subsequent_indent="  ", break_long_words=False))


def _terms(name: str, mean: float, terms: list[tuple[str, float | None]]) -> str:
    """A regulariser and each layer's share of it."""
    shares = ", ".join(f"{layer} {value:.2f}" for layer, value in terms if value is not None)
    return textwrap.fill(f"{name} {mean:.4f}: {shares}", 80, subsequent_indent="  ", break_long_words=False)


def cells(layer: Layer) -> list[str]:
    def number(value: float | None, form: str = ".3g") -> str:
        return "-" if value is None else format(value, form)

    def share(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.0f}%"

    return [
        layer.name,
        SHORT[layer.kind],
        "-" if layer.fan_in is None else str(layer.fan_in),
        number(layer.difference_gain),
        number(layer.expected_gain),
        number(layer.growth),
        number(layer.mean_width),
        number(layer.log_width_ratio, ".2f"),
        share(layer.active),
        share(layer.unstable),
        share(layer.inactive),
    ]


def _all_cells(layer: Layer) -> list[str]:
    """A page has room for the regularisers' terms too."""
    terms = ("-" if value is None else f"{value:.3f}" for value in (layer.tightness, layer.relu))
    return [*cells(layer), *terms]


def write_plot(found: list[Inspection], file: Path) -> None:
    """Widths over layers: the paper's figure of exploding bounds."""
    with figure() as (drawn, axes):
        widths_of(axes, found)
        with disk_errors(file):
            drawn.savefig(file, dpi=160)


def _history(runs: list[tuple[str, list[dict[str, Any]]]]) -> list[tuple[str, str]]:
    """The metrics beside a fetched model are anybody's: what cannot be drawn is not ours."""
    try:
        return training_history(runs)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise InputError(
            "the `metrics.jsonl` beside the model was not written by `certtool train`", "leave out `--html`"
        ) from None


def write_page(
    found: list[Inspection], words: list[Finding], history: list[tuple[str, list[dict[str, Any]]]], file: Path
) -> None:
    from certtool.report.html import render

    with figure() as (drawn, axes):
        widths_of(axes, found)
        widths = as_svg(drawn, "log width over layers")
    page = render(
        "inspect.html",
        title=f"{found[0].title}: bounds and ReLU states",
        found=found,
        words=words,
        widths=widths,
        states=[(inspection.title, relu_states(inspection)) for inspection in found],
        tables=[(inspection.title, [_all_cells(layer) for layer in inspection.layers]) for inspection in found],
        headers=(*HEADERS, "tightness", "balance"),
        history=_history(history) if history else None,
    )
    write_atomically(file, page.encode())
