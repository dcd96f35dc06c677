"""One verification on several processes: each proves its images, and one tells of all of them."""

from __future__ import annotations

from dataclasses import replace

from certtool.data import Split
from certtool.distributed import World
from certtool.errors import InputError
from certtool.verification.verdicts import EpsResult
from certtool.verification.verify import VerifyReport


def share_of(world: World, split: Split, count: int | None, indices: list[int] | None) -> list[int]:
    """Every so-manyth image, so that hard ones are spread."""
    whole = list(range(len(split) if count is None else min(count, len(split)))) if indices is None else indices[:count]
    mine = whole[world.rank :: world.size]
    if len(whole) < world.size:
        raise InputError(f"{len(whole)} images for {world.size} processes", "start fewer, or verify more images")
    return mine


def merged(world: World, report: VerifyReport) -> VerifyReport:
    """All shares as one report, images in their order."""
    reports = world.gather(report)
    results = tuple(_merge([one.results[place] for one in reports]) for place in range(len(report.results)))
    warnings = tuple(text for one in reports for text in one.warnings)
    data = replace(report.data, images=sum(one.data.images for one in reports))
    return replace(report, data=data, results=results, warnings=warnings)


def _merge(parts: list[EpsResult]) -> EpsResult:
    images = sorted((image for part in parts for image in part.images), key=lambda image: image.index)
    witnesses = {index: witness for part in parts for index, witness in part.witnesses.items()}
    return replace(parts[0], images=tuple(images), witnesses=witnesses, seconds=max(part.seconds for part in parts))
