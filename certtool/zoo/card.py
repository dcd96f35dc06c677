"""The model card: what is proven, exactly, how to fetch it, and how to check it again."""

from __future__ import annotations

from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from certtool.zoo.layout import PICTURE
from certtool.zoo.records import Record, Result

TAGS = ("certtool", "certified-robustness")
PLACEHOLDER = "COMMIT"  # a card cannot name the commit it is part of


def tags(record: Record) -> list[str]:
    return [*TAGS, f"dataset:{record.data.dataset}", *(f"eps:{result.eps}" for result in record.results)]


def card(record: Record, repo: str) -> str:
    clean = _row(record, "accuracy", "Clean accuracy", record.headline.clean, {"n": record.data.images})
    data = ModelCardData(
        model_name=record.name,
        library_name="certtool",
        license=record.licence.lower(),
        tags=tags(record),
        pipeline_tag="image-classification",
        eval_results=[clean, *(row for result in record.results for row in _rows(record, result))],
    )
    return f"---\n{data.to_yaml()}\n---\n\n{_text(record, repo)}"


def _rows(record: Record, result: Result) -> list[EvalResult]:
    """The Hub's `model-index`: attacked and certified accuracy at one radius, with and without the lesser grade."""
    common = {"norm": record.norm, "eps": result.eps, "n": record.data.images}
    proof = common | {"verifier": record.certificate.verifier, "certificate": record.certificate.file}
    at = f"accuracy at eps {result.eps}"
    rows = []
    if result.attacked is not None:
        rows.append(_row(record, "attacked_accuracy", f"Attacked {at}", result.attacked, common))
    shares = (("rigorous", result.certified_rigorous), ("rigorous or float32", result.certified))
    rows += [
        _row(record, "certified_accuracy", f"Certified {at}, {grade}", share, proof | {"grade": grade})
        for grade, share in shares
    ]
    return rows


def _row(record: Record, kind: str, name: str, value: float, args: dict[str, Any]) -> EvalResult:
    return EvalResult(
        task_type="image-classification",
        dataset_type=record.data.dataset,
        dataset_name=record.data.dataset,
        dataset_split=record.data.split,
        metric_type=kind,
        metric_name=name,
        metric_value=value,
        metric_args=args,
    )


def _text(record: Record, repo: str) -> str:
    best = record.headline
    lines = [
        f"# {record.name}",
        "",
        f"{record.summary}. A {record.model.arch} with {record.model.parameters:,} parameters, trained with certtool.",
        "",
        f"**{percent(best.certified_rigorous)} of the {record.data.images:,} {record.data.split} images of "
        f"{record.data.dataset} provably keep their label** under every l-infinity perturbation up to "
        f"eps = {best.eps} (pixels in [0, 1]), rounding of float32 arithmetic included.",
        "",
        "| eps | clean | attacked | certified, rigorous | certified, float32 | certified |",
        "|---|---|---|---|---|---|",
        *(_line(result) for result in record.results),
        "",
        "`rigorous` is proven for the float32 network as it runs; `float32` adds images that are proven if the",
        "verifier's own arithmetic is taken as exact. `attacked` is what an attack could not break: an upper bound.",
        "",
        f"Verifier: {record.certificate.verifier}. The certificate, image by image: `{record.certificate.file}`.",
        "",
        f"![certified accuracy over eps]({PICTURE})",
        "",
        "## Fetch it, and check the proof again",
        "",
        "```sh",
        f"certtool zoo fetch hf://{repo}@{PLACEHOLDER} --sample 50     # 50 proofs recomputed, independently",
        f"certtool verify hf://{repo}@{PLACEHOLDER} --eps {best.eps}",
        "```",
        "",
        f"`{PLACEHOLDER}` is the commit you want, 40 hex digits; a branch may move. Pixels go in as they are, in",
        "[0, 1]: normalisation is the first layer. The file is safetensors; nothing is executed or unpickled.",
        "",
        "## Train it again",
        "",
        "```sh",
        "certtool train recipe.toml",
        "```",
        "",
    ]
    return "\n".join(lines)


def _line(result: Result) -> str:
    attacked = "-" if result.attacked is None else percent(result.attacked)
    figures = (result.certified_rigorous, result.certified_float32, result.certified)
    return f"| {result.eps} | {percent(result.clean)} | {attacked} | {' | '.join(map(percent, figures))} |"


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"
