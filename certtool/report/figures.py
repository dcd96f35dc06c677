"""Pictures by matplotlib: SVG that takes the page's own ink, so that it reads in light and in dark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Okabe and Ito's palette: distinct for every kind of colour vision, and in grey by its markers.
BLUE, ORANGE, GREEN, VERMILLION, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
_INK = "#010203"  # stands for the page's text colour until the SVG is written


@contextmanager
def figure(width: float = 7.2, height: float = 3.6) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, drawn without a display, closed in the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "certtool",
        "font.family": "sans-serif",
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "text.color": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "legend.frameon": False,
    }
    with plt.rc_context(style):
        drawn, axes = plt.subplots(figsize=(width, height), layout="constrained")
        try:
            yield drawn, axes
        finally:
            plt.close(drawn)


def as_svg(drawn: Any, title: str) -> str:
    """For inlining into a page: no declaration, no metadata, the page's colour, a title for screen readers."""
    buffer = io.StringIO()
    drawn.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<svg ", f'<svg role="img" aria-label="{title}" ', text, count=1)
    return re.sub(r'(width|height)="[\d.]+pt"', "", text, count=2)


def accuracy_curve(points: list[dict[str, float | None]]) -> str:
    """Clean, attacked, certified and rigorously certified accuracy over eps, in per cent."""
    ordered = sorted(points, key=lambda point: point["eps"] or 0.0)
    series = (
        ("clean", "clean", BLUE, "o", "-"),
        ("attacked", "attacked (PGD)", ORANGE, "s", "--"),
        ("certified", "certified", GREEN, "^", "-"),
        ("rigorous", "of it rigorously", VERMILLION, "v", ":"),
    )
    with figure() as (drawn, axes):
        for key, label, colour, marker, line in series:
            chosen = [(point["eps"], value) for point in ordered if (value := point[key]) is not None]
            if chosen:
                xs, ys = zip(*chosen, strict=True)
                axes.plot(xs, [100 * y for y in ys], color=colour, marker=marker, linestyle=line, label=label)
        least = min(100 * value for point in points for key, *_ in series if (value := point[key]) is not None)
        axes.set(
            xlabel="eps (pixel units)", ylabel="images, %", ylim=(max(0, least // 10 * 10 - 10), 102), xlim=(0, None)
        )
        axes.legend(loc="lower left")
        return as_svg(drawn, "accuracy over eps")


def margin_histogram(certified: list[float], unknown: list[float], edges: list[float]) -> str:
    with figure(height=3.0) as (drawn, axes):
        axes.hist([unknown, certified], bins=edges, stacked=True, color=[ORANGE, GREEN], label=["unknown", "certified"])
        axes.axvline(0, color=_INK, linewidth=1)
        axes.set(xlabel="guaranteed margin", ylabel="images")
        axes.legend(loc="upper right")
        return as_svg(drawn, "histogram of margins")
