"""`make bench`: every measurement, one after the other, to benchmarks/results.json and benchmarks/RESULTS.md.

    CERTTOOL_DATA=... python benchmarks/run_all.py                  about 13 minutes on two cores; leave them alone
    CERTTOOL_DATA=... python benchmarks/run_all.py verification     that part again

Without MNIST or CIFAR-10 the measurements that need them are left out, and the page says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import say

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
MEMORY = ("standard", "warmup, eager", "warmup, compiled", "auto_LiRPA, warmup")
Document = dict[str, Any]
INTERVALS = ("verification", "intervals")
# What is promised: name, where it is found, the limit, and whether it is an upper one.
PROMISES = [
    ("warmup step / auto_LiRPA's, width 16", ("step16", "ratios", "warmup / auto_LiRPA"), 0.80, True),
    ("warmup step / standard step, width 16", ("step16", "ratios", "warmup / standard"), 3.4, True),
    ("step after warmup / standard step, width 16", ("step16", "ratios", "after warmup / standard"), 3.2, True),
    ("warmup step / vanilla IBP's, width 16", ("step16", "ratios", "warmup / vanilla IBP"), 1.08, True),
    ("warmup step / auto_LiRPA's, width 64", ("step64", "ratios", "warmup / auto_LiRPA"), 1.0, True),
    ("bf16 warmup step / auto_LiRPA's, width 64", ("step64", "ratios", "bf16 / auto_LiRPA"), 0.72, True),
    ("share of an MNIST epoch spent in steps", ("epoch", "in_steps"), 0.95, False),
    ("interval verification / auto_LiRPA's, width 16", (*INTERVALS, 0, "float32 / auto_LiRPA"), 1.4, False),
    ("interval verification / auto_LiRPA's, width 64", (*INTERVALS, 1, "float32 / auto_LiRPA"), 1.0, False),
    ("rigorous rung / float32 rung, cost, width 16", (*INTERVALS, 0, "rigorous / float32"), 4.0, True),
    ("rigorous rung / float32 rung, cost, width 64", (*INTERVALS, 1, "rigorous / float32"), 4.0, True),
    ("certtool --help / import typer, rich", ("startup", "commands", "certtool --help", "ratio"), 3.0, True),
]  # fmt: skip


def run(script: str, *arguments: str) -> Document | None:
    say(f"{script} {' '.join(arguments)}")
    began = time.monotonic()
    result = subprocess.run([sys.executable, str(HERE / script), *arguments], stdout=subprocess.PIPE, text=True)
    say(f"  {time.monotonic() - began:.0f} s")
    if result.returncode != 0:
        say("  left out: it failed, see above")
        return None
    document: Document = json.loads(result.stdout.splitlines()[-1])
    return document


def look_up(results: Document, path: tuple[Any, ...]) -> float | None:
    value: Any = results
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return float(value)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def megabytes(value: float) -> str:
    return f"{value / 2**20:,.0f} MB"


def promises(results: Document) -> str:
    rows = []
    for name, path, limit, upper in PROMISES:
        value = look_up(results, path)
        bound = f"{'at most' if upper else 'at least'} {limit:g}"
        kept = "" if value is None else "yes" if (value <= limit if upper else value >= limit) else "**no**"
        rows.append([name, bound, "not measured here" if value is None else f"{value:.2f}", kept])
    return table(["ratio", "promised", "found", "kept"], rows)


def steps(document: Document) -> str:
    base = document["steps"]["standard"]
    rows = [
        [name, f"{t['cpu']:.3f}", f"{t['wall']:.3f}", f"{t['cpu'] / base['cpu']:.2f}"]
        for name, t in document["steps"].items()
    ]
    return table(["step", "cpu-s", "s", "x standard"], rows)


def page(results: Document) -> str:
    machine = results["startup"]["machine"]
    parts = [
        "# How fast\n",
        "Written by `make bench`. Every ratio compares medians of interleaved repeats in one run; seconds are this\n"
        "machine's and nobody else's.\n",
        ", ".join(f"{key} {value}" for key, value in machine.items()) + "\n",
        "## What is promised\n",
        promises(results),
    ]
    for name in ("step16", "step64"):
        if found := results.get(name):
            parts += [f"## A training step, width {found['width']}, batch {found['batch']}\n", steps(found)]
    if memory := results.get("memory"):
        parts += ["## Peak memory of a process that trains, width 16, batch 128\n",
                  table(["step", "memory"], [[name, megabytes(value)] for name, value in memory.items()])]  # fmt: skip
    if epoch := results.get("epoch"):
        parts += ["## An epoch of MNIST, width 8\n", _epoch(epoch)]
    if verification := results.get("verification"):
        parts += ["## Interval verification of CIFAR-10\n", _intervals(verification), _ladder(verification)]
    parts += ["## Start-up\n", _startup(results["startup"])]
    if scale := results.get("scale"):
        parts += ["## How the warmup step grows\n", _scale(scale)]
    return "\n".join(parts)


def _epoch(epoch: Document) -> str:
    rows = [
        [f"the last {epoch['steps']} steps, log and checkpoint", f"{epoch['epoch_seconds']:.1f} s"],
        ["of it in steps", f"{100 * epoch['in_steps']:.1f} %"],
        ["of it in their arithmetic, without choosing and augmenting images", f"{100 * epoch['in_arithmetic']:.1f} %"],
        ["evaluation on 10,000 images", f"{epoch['evaluation_seconds']:.1f} s"],
        ["peak memory", megabytes(epoch["peak_memory"])],
    ]
    return table(["", ""], rows)


def _intervals(verification: Document) -> str:
    names = list(verification["intervals"][0]["images_per_second"])
    rows = [
        [str(row["width"]), f"{row['images']:,}", *(f"{row['images_per_second'][name]:.0f}" for name in names)]
        for row in verification["intervals"]
    ]
    text = table(["width", "images", *(f"{name}, images/s" for name in names)], rows)
    return text + f"\nPeak memory {megabytes(verification['peak_memory'])}.\n"


def _ladder(verification: Document) -> str:
    found = verification["ladder"]
    rungs = ", ".join(f"{rung} {seconds:.1f} s" for rung, seconds in found["rungs"].items())
    return (
        f"The whole ladder on `{found['model']}` at eps {found['eps']}: {found['images']} images in "
        f"{found['seconds']:.1f} s ({rungs}), {found['certified']} certified.\n"
    )


def _startup(startup: Document) -> str:
    rows = [
        [f"`{name}`", f"{row['seconds']:.2f}", f"{row['ratio']:.2f}", megabytes(row["peak_memory"])]
        for name, row in startup["commands"].items()
    ]
    return table(["command", "s", "x", "memory"], rows)


def _scale(scale: Document) -> str:
    rows = [
        [row["of"], ", ".join(f"{size}: {s * 1000:.0f} ms" for size, s in row["cpu_seconds"].items()),
         f"{row['exponent']:.2f}"] for row in scale["rows"]
    ]  # fmt: skip
    return table(["with", "cost of a step", "exponent"], rows)


def memory() -> dict[str, int]:
    alone = {name: run("step.py", "--only", name) for name in MEMORY}
    return {name: found["peak_memory"] for name, found in alone.items() if found}


PARTS: dict[str, Callable[[], Document | None]] = {
    "memory": memory,
    "startup": lambda: run("startup.py"),
    "step16": lambda: run("step.py", "--width", "16", "--batch", "128"),
    "step64": lambda: run("step.py", "--width", "64", "--batch", "64", "--few"),
    "epoch": lambda: run("epoch.py"),
    "verification": lambda: run("verification.py"),
    "scale": lambda: run("scale.py"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="measure these again, keep the others")
    asked = parser.parse_args().parts
    kept = json.loads(RESULTS.read_text()) if asked else {}
    results: Document = kept | {name: part() for name, part in PARTS.items() if name in (asked or PARTS)}
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    (HERE / "RESULTS.md").write_text(page(results))
    say("see benchmarks/RESULTS.md")


if __name__ == "__main__":
    main()
