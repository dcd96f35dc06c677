"""Pictures by matplotlib: SVG that takes the page's own ink, so that it reads in light and in dark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

from certtool.epsilon import Epsilon
from certtool.inspection import Inspection
from certtool.zoo import Record

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
        "text.parse_math": False,  # a model may be called `$x`
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
    # A model's name is in it, and the page takes the picture as it is.
    text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    return re.sub(r'(width|height)="[\d.]+pt"', "", text, count=2)


def accuracy_curve(points: list[dict[str, float | None]]) -> str:
    """Clean, attacked, certified and rigorously certified accuracy over eps, in per cent."""
    with figure() as (drawn, axes):
        _accuracies(axes, points)
        return as_svg(drawn, "accuracy over eps")


def certified_curve(record: Record) -> bytes:
    """The same picture of a zoo record, as PNG for its model card. At eps 0 every accuracy is the clean one."""
    names = ("clean", "attacked", "certified", "rigorous")
    points: list[dict[str, float | None]] = [{"eps": 0.0, **dict.fromkeys(names, record.headline.clean)}]
    points += [
        {"eps": float(Epsilon.parse(result.eps)), "clean": result.clean, "attacked": result.attacked,
         "certified": result.certified, "rigorous": result.certified_rigorous}
        for result in record.results
    ]  # fmt: skip
    with figure() as (drawn, axes):
        _accuracies(axes, points)
        axes.set_title(f"{record.name}, {record.data.images:,} {record.data.split} images", fontsize=11)
        buffer = io.BytesIO()
        drawn.savefig(buffer, format="png", dpi=120, facecolor="white", metadata={"Software": None})
        return buffer.getvalue()


def _accuracies(axes: Any, points: list[dict[str, float | None]]) -> None:
    ordered = sorted(points, key=lambda point: point["eps"] or 0.0)
    series = (
        ("clean", "clean", BLUE, "o", "-"),
        ("attacked", "attacked (PGD)", ORANGE, "s", "--"),
        ("certified", "certified", GREEN, "^", "-"),
        ("rigorous", "of it rigorously", VERMILLION, "v", ":"),
    )
    for key, label, colour, marker, line in series:
        chosen = [(point["eps"], value) for point in ordered if (value := point[key]) is not None]
        if chosen:
            xs, ys = zip(*chosen, strict=True)
            axes.plot(xs, [100 * y for y in ys], color=colour, marker=marker, linestyle=line, label=label)
    least = min(100 * value for point in points for key, *_ in series if (value := point[key]) is not None)
    axes.set(xlabel="eps (pixel units)", ylabel="images, %", ylim=(max(0, least // 10 * 10 - 10), 102), xlim=(0, None))
    axes.legend(loc="lower left")


def margin_histogram(certified: list[float], unknown: list[float], edges: list[float]) -> str:
    with figure(height=3.0) as (drawn, axes):
        axes.hist([unknown, certified], bins=edges, stacked=True, color=[ORANGE, GREEN], label=["unknown", "certified"])
        axes.axvline(0, color=_INK, linewidth=1)
        axes.set(xlabel="guaranteed margin", ylabel="images")
        axes.legend(loc="upper right")
        return as_svg(drawn, "histogram of margins")


_SERIES = ((BLUE, "o", "-"), (VERMILLION, "s", "--"), (GREEN, "^", "-."), (ORANGE, "D", ":"), (PURPLE, "v", "-"))


def widths_of(axes: Any, found: list[Inspection]) -> None:
    """ln(width over input width), layer by layer, one line a network."""
    for number, inspection in enumerate(found):
        colour, marker, line = _SERIES[number % len(_SERIES)]
        layers = [layer for layer in inspection.layers if layer.active is not None]
        values = [0.0, *(layer.log_width_ratio for layer in layers)]
        axes.plot(range(len(values)), values, color=colour, marker=marker, linestyle=line, label=inspection.title)
    names = ["input", *(layer.name.removeprefix("sum before ") for layer in layers)]
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set(ylabel="ln(width / input width)")
    axes.axhline(0, color=_INK, linewidth=0.8)
    axes.legend()


def relu_states(inspection: Inspection) -> str:
    """Stacked shares of active, unstable and inactive ReLUs."""
    layers = [layer for layer in inspection.layers if layer.active is not None]
    names = [layer.name.removeprefix("sum before ") for layer in layers]
    with figure(height=3.0) as (drawn, axes):
        bottom = [0.0] * len(layers)
        for key, colour, hatch in (("active", GREEN, ""), ("unstable", ORANGE, "//"), ("inactive", BLUE, "..")):
            values = [100 * getattr(layer, key) for layer in layers]
            axes.bar(names, values, bottom=bottom, color=colour, hatch=hatch, label=key, edgecolor="white", linewidth=0)
            bottom = [low + value for low, value in zip(bottom, values, strict=True)]
        axes.set(ylabel="neurons, %", ylim=(0, 100))
        axes.tick_params(axis="x", rotation=30)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.18), ncols=3)
        return as_svg(drawn, f"ReLU states of {inspection.title}")


def training_history(runs: list[tuple[str, list[dict[str, Any]]]]) -> list[tuple[str, str]]:
    """The paper's curves: eps and accuracy, both regularisers, ReLU states, widths; the warmup is shaded."""
    panels = (
        ("Accuracy on the training images, at the eps of the epoch; the warmup is shaded.", "images, %",
         (("clean_accuracy", "clean", 100.0), ("certified_accuracy", "certified", 100.0))),
        ("The radius of the epoch.", "eps", (("eps", "eps", 1.0),)),
        ("Both regularisers, also where they are not optimised.", "regulariser",
         (("tightness", "tightness", 1.0), ("relu", "ReLU balance", 1.0))),
        ("Shares of ReLU states over all layers.", "neurons, %",
         (("active", "active", 100.0), ("unstable", "unstable", 100.0), ("inactive", "inactive", 100.0))),
    )  # fmt: skip
    pictures = [(caption, _panel(runs, label, keys)) for caption, label, keys in panels]
    return [*pictures, ("Mean width of the bounds at every ReLU, logarithmic.", _width_panel(runs))]


def _width_panel(runs: list[tuple[str, list[dict[str, Any]]]]) -> str:
    """Every layer of one run; the last layer of each where there are several."""
    with figure(height=2.8) as (drawn, axes):
        for number, (title, lines) in enumerate(runs):
            measured = [line for line in lines if line.get("layers")]
            chosen = range(len(measured[0]["layers"])) if measured and len(runs) == 1 else [-1] if measured else []
            for index in chosen:
                xs = [line["epoch"] for line in measured]
                ys = [line["layers"][index]["mean_width"] for line in measured]
                colour, _, style = _SERIES[(index if len(runs) == 1 else number) % len(_SERIES)]
                label = measured[0]["layers"][index]["name"]
                axes.plot(xs, ys, color=colour, linestyle=style, label=label if len(runs) == 1 else f"{label}, {title}")
        axes.set(xlabel="epoch", ylabel="mean width", yscale="log")
        _legend(axes)
        return as_svg(drawn, "widths over training")


def _legend(axes: Any) -> None:
    """Beside the lines, so that it hides none."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _panel(runs: list[tuple[str, list[dict[str, Any]]]], label: str, keys: tuple[tuple[str, str, float], ...]) -> str:
    with figure(height=2.8) as (drawn, axes):
        for number, (title, lines) in enumerate(runs):
            for (key, name, factor), (colour, _, _) in zip(keys, _SERIES, strict=False):
                points = [(line["epoch"], factor * line[key]) for line in lines if line.get(key) is not None]
                if points:
                    xs, ys = zip(*points, strict=True)
                    text = name if len(runs) == 1 else f"{name}, {title}"
                    axes.plot(xs, ys, color=colour, linestyle=_SERIES[number % len(_SERIES)][2], label=text)
        warm = [line["epoch"] for line in runs[0][1] if line.get("phase") == "warmup"]
        if warm:
            axes.axvspan(warm[0] - 1, warm[-1], color=PURPLE, alpha=0.12, linewidth=0)
        axes.set(xlabel="epoch", ylabel=label)
        _legend(axes)
        return as_svg(drawn, label)
