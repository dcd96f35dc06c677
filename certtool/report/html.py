"""Reports as one self-contained page: figures and pictures inline, tables beneath them, nothing fetched."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image
from torch import Tensor

from certtool.data import Split
from certtool.report.figures import accuracy_curve, margin_histogram
from certtool.report.screen import percent
from certtool.verification import EpsResult, ImageVerdict, VerifyReport
from certtool.verification.certificate import CLAIM, OUTSIDE
from certtool.version import __version__

SHOWN = 6  # pictures of each kind
BINS = 24


@dataclass(frozen=True)
class Picture:
    source: str
    alt: str


@dataclass(frozen=True)
class Item:
    pictures: list[Picture]
    caption: str


@cache
def _templates() -> Environment:
    loader = PackageLoader("certtool.report", "templates")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def render(template: str, **values: Any) -> str:
    return _templates().get_template(template).render(footer=f"certtool {__version__}", **values)


def verify_page(report: VerifyReport, split: Split, predict: Any) -> str:
    """The page of a verification; `predict` gives the label of one image, for the captions of witnesses."""
    largest = max(report.results, key=lambda result: result.eps.value)
    certified, unknown = _margins(largest)
    edges = _edges(certified + unknown)
    certified, unknown = (np.clip(values, edges[0], edges[-1]).tolist() for values in (certified, unknown))
    points = [_point(result) for result in report.results]
    headline = f"{percent(largest.certified_accuracy)} certified at eps {largest.eps}"
    return render(
        "verify.html",
        title=f"{report.model.name}: {headline}",
        headline=headline,
        report=report,
        method=largest.method,
        arithmetic=largest.arithmetic,
        curve=accuracy_curve(points),
        rows=[_row(result) for result in report.results],
        largest=largest.eps,
        margins=margin_histogram(certified, unknown, edges),
        bins=_bins(certified, unknown, edges),
        gallery=[section for section in _gallery(largest, split, predict) if section["items"]],
        claim=CLAIM,
        outside=", ".join(OUTSIDE),
    )  # fmt: skip


def _point(result: EpsResult) -> dict[str, float | None]:
    return {
        "eps": float(result.eps),
        "clean": result.clean_accuracy,
        "attacked": result.attacked_accuracy,
        "certified": result.certified_accuracy,
        "rigorous": result.certified_rigorous,
    }


def _row(result: EpsResult) -> list[str]:
    shares = (result.clean_accuracy, result.attacked_accuracy, result.certified_accuracy, result.certified_rigorous)
    verdicts = ("certified", "falsified", "unknown", "misclassified")
    return [str(result.eps), *map(percent, shares), *(str(result.count(verdict)) for verdict in verdicts)]  # type: ignore[arg-type]


def _margins(result: EpsResult) -> tuple[list[float], list[float]]:
    chosen = {
        verdict: [image.margin for image in result.images if image.verdict == verdict and image.margin is not None]
        for verdict in ("certified", "unknown")
    }
    return chosen["certified"], chosen["unknown"]


def _edges(values: list[float]) -> list[float]:
    """Equal bins around the bulk; zero is an edge, and outliers fall into the outermost bins."""
    if not values:
        return [-1.0, 0.0, 1.0]
    low, high = np.quantile(values, [0.01, 0.99])
    width = max((max(high, 0) - min(low, 0)) / BINS, 1e-9)
    first, last = int(np.floor(min(low, 0) / width)), int(np.ceil(max(high, 0) / width))
    return [number * width for number in range(first, max(last, first + 1) + 1)]


def _bins(certified: list[float], unknown: list[float], edges: list[float]) -> list[list[str]]:
    counts = [np.histogram(values, edges)[0] for values in (certified, unknown)]
    pairs = zip(edges, edges[1:], *counts, strict=False)
    return [[f"{a:.3g}", f"{b:.3g}", str(c), str(u)] for a, b, c, u in pairs if c or u]


def _gallery(result: EpsResult, split: Split, predict: Any) -> list[dict[str, Any]]:
    def chosen(verdict: str) -> list[ImageVerdict]:
        return [image for image in result.images if image.verdict == verdict][:SHOWN]

    classes = split.facts.classes
    certified = [
        Item([_original(split, image.index)], f"{classes[image.label]}, margin {image.margin:.2f}")
        for image in chosen("certified")
    ]
    unknown = [
        Item([_original(split, image.index)], f"{classes[image.label]}, unknown: {image.reason}")
        for image in chosen("unknown")
    ]
    falsified = [_falsified(image, result.witnesses[image.index], split, predict) for image in chosen("falsified")]
    return [
        {"title": "Certified", "text": "No perturbation of this size changes the label.", "items": certified},
        {
            "title": "Falsified",
            "text": "Left the perturbed image, right the perturbation, ten times enlarged around grey.",
            "items": falsified,
        },
        {"title": "Unknown", "text": "Neither proven nor broken.", "items": unknown},
    ]


def _falsified(image: ImageVerdict, witness: Tensor, split: Split, predict: Any) -> Item:
    change = witness - split.pixels(split.images[image.index])
    pictures = [
        _picture(witness, f"image {image.index}, perturbed"),
        _picture((0.5 + 10 * change).clamp(0, 1), "its perturbation, ten times"),
    ]
    classes = split.facts.classes
    return Item(pictures, f"{classes[image.label]} becomes {classes[predict(witness)]}")


def _original(split: Split, index: int) -> Picture:
    return _picture(split.pixels(split.images[index]), f"image {index}")


def _picture(pixels: Tensor, alt: str) -> Picture:
    """A PNG inside the page."""
    array = (pixels.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(array.squeeze(2) if array.shape[2] == 1 else array).save(buffer, "PNG")
    return Picture(f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}", alt)
