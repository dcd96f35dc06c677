"""A run's folder: what it was asked, what it measured, where it stands, what came out. Nothing is ever half-written.

recipe.toml         the resolved recipe
metrics.jsonl       one line an epoch
last.safetensors    weights, optimiser and step: what `--resume` goes on from
model.safetensors   the trained model
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from certtool import safefile
from certtool.checkpoint import MODEL_FILE, RECIPE_FILE
from certtool.errors import InputError
from certtool.files import disk_errors, write_atomically
from certtool.recipe import Recipe, load, render

METRICS_FILE, LAST_FILE = "metrics.jsonl", "last.safetensors"
OUR_FILES = (RECIPE_FILE, METRICS_FILE, LAST_FILE, MODEL_FILE)
RUNS = Path("runs")


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def model(self) -> Path:
        return self.path / MODEL_FILE

    @property
    def last(self) -> Path:
        return self.path / LAST_FILE

    @classmethod
    def create(cls, recipe: Recipe, out: Path | None, *, overwrite: bool = False) -> RunFolder:
        """`out`, or runs/<name>/<stamp> with runs/<name>/latest pointing to it."""
        path = out if out is not None else RUNS / recipe.name / _stamp(RUNS / recipe.name)
        with disk_errors(path, "create"):
            path.mkdir(parents=True, exist_ok=True)
        present = [name for name in OUR_FILES if (path / name).exists()]
        if present and not overwrite:
            raise InputError(
                f"`{path}` already holds a run",
                f"go on with `certtool train --resume {path}`, or add `--overwrite`",
            )
        with disk_errors(path):
            for name in present:
                (path / name).unlink()
        folder = cls(path)
        folder.sweep()
        write_atomically(path / RECIPE_FILE, render(recipe).encode())
        if out is None:
            _point(path.parent / "latest", path)
        return folder

    @classmethod
    def open(cls, path: Path) -> tuple[RunFolder, Recipe]:
        """A folder to resume, and its recipe."""
        if not (path / RECIPE_FILE).is_file():
            raise InputError(
                f"`{path}` is not a run folder: it has no {RECIPE_FILE}",
                "`certtool runs list` shows the runs there are",
            )
        return cls(path), load(str(path / RECIPE_FILE))

    def sweep(self) -> None:
        """Remove what a killed writer left half-written. Only for who is about to write: see `write_atomically`."""
        with disk_errors(self.path):
            for name in OUR_FILES:
                for leftover in self.path.glob(f".{name}.*"):
                    leftover.unlink()

    def metrics(self) -> list[dict[str, Any]]:
        """The finished epochs; a torn last line (a kill while it was written) is left out."""
        file = self.path / METRICS_FILE
        if not file.exists():
            return []
        lines: list[dict[str, Any]] = []
        for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                break
            if not isinstance(line, dict):  # a fetched model's metrics are anybody's
                break
            lines.append(line)
        return lines

    def finished(self, recipe: Recipe) -> bool:
        """Whether the run came to its last epoch and left its model."""
        metrics = self.metrics()
        return self.model.exists() and bool(metrics) and metrics[-1].get("epoch") == recipe.train.epochs

    def append_metrics(self, line: dict[str, Any]) -> None:
        with (
            disk_errors(self.path / METRICS_FILE),
            open(self.path / METRICS_FILE, "a", encoding="utf-8") as file,
        ):
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def cut_metrics(self, step: int) -> None:
        """Forget epochs after a step: what a killed run measured beyond its last saved state."""
        kept = [line for line in self.metrics() if line["step"] <= step]
        write_atomically(self.path / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def read_last(self) -> safefile.SafeFile | None:
        """The saved state; None when the run was killed before it saved one."""
        return safefile.read(self.last) if self.last.exists() else None


def _stamp(parent: Path) -> str:
    """The moment, as a name; a second run within the same second gets a suffix."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    taken = [n for n in range(1, 100) if (parent / (stamp if n == 1 else f"{stamp}-{n}")).exists()]
    return stamp if not taken else f"{stamp}-{taken[-1] + 1}"


def _point(link: Path, target: Path) -> None:
    """A relative symbolic link, replaced in one step."""
    with disk_errors(link):
        temporary = link.with_name(f".{link.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target.name)
        os.replace(temporary, link)
