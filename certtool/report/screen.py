"""Results to stdout, everything else to stderr; one object decides how, so that commands only say what.

rich is imported where something is drawn: a command that prints a line of text answers without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any

from certtool.errors import CertToolError, Exit, Problem

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def _console(stream: IO[str]) -> Console:
    """80 columns where nobody says otherwise, so that a pipe and a terminal read alike."""
    from rich.console import Console

    plain = not stream.isatty()
    width = 80 if plain and "COLUMNS" not in os.environ else None
    return Console(file=stream, width=width, highlight=False, soft_wrap=False, emoji=False, markup=False)


@dataclass(frozen=True)
class Screen:
    """Where a command's words go."""

    json: bool = False
    quiet: bool = False

    @cached_property
    def out(self) -> Console:
        return _console(sys.stdout)

    @cached_property
    def err(self) -> Console:
        return _console(sys.stderr)

    def document(self, value: dict[str, Any]) -> None:
        """One JSON document, on a line of its own."""
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    def text(self, text: str) -> None:
        """Plain text as it is: no markup, no wrapping."""
        shown = _steerless(text)
        sys.stdout.write(shown if shown.endswith("\n") else shown + "\n")

    def note(self, text: str) -> None:
        """A remark beside the result."""
        if not self.quiet and not self.json:
            self.err.print(_steerless(text), soft_wrap=True)

    def table(self, table: Table) -> None:
        self.out.print(table)

    @contextlib.contextmanager
    def progress(self, title: str) -> Iterator[Callable[[int, int], None]]:
        """A bar on a terminal; silence elsewhere."""
        if not self.shows_bars:
            yield lambda done, total: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.err, transient=True) as bar:
            task = bar.add_task(title, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)

    @property
    def shows_bars(self) -> bool:
        return not self.json and not self.quiet and self.err.is_terminal

    def confirm(self, question: str) -> bool:
        """Only a person at a terminal is asked; nobody else says yes by accident."""
        if self.json or not sys.stdin.isatty() or not self.err.is_terminal:
            return False
        self.err.print(f"{question} [y/N] ", end="")
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    @contextlib.contextmanager
    def download(self) -> Iterator[Callable[[int, int], None]]:
        """A bar of bytes on a terminal; silence elsewhere."""
        if not self.shows_bars:
            yield lambda done, total: None
            return
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.err, transient=True) as bar:
            task = bar.add_task("fetch", total=None, visible=False)
            yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)

    @contextlib.contextmanager
    def rungs(self) -> Iterator[Callable[[str, int, int], None]]:
        """A bar for each rung of the ladder, as it is reached; silence where nobody looks."""
        if not self.shows_bars:
            yield lambda rung, done, total: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.err, transient=True) as bar:
            tasks: dict[str, Any] = {}

            def tell(rung: str, done: int, total: int) -> None:
                if rung not in tasks:
                    tasks[rung] = bar.add_task(rung, total=total)
                bar.update(tasks[rung], completed=done, total=total)

            yield tell

    def error(self, error: CertToolError) -> None:
        """A sentence, the place, a hint; or the same as one JSON document."""
        if self.json:
            self.document({"schema": "certtool.error/1", "errors": [_as_json(p) for p in error.problems],
                           "exit": int(error.exit_code)})  # fmt: skip
            return
        word = "interrupted" if error.exit_code == Exit.INTERRUPTED else "error"
        for problem in error.problems:
            self.err.print(_problem(problem, word), soft_wrap=True)


def _steerless(text: str) -> str:
    """The last line of defence: nothing that came from a file or a server moves the cursor or colours the screen."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def _as_json(problem: Problem) -> dict[str, Any]:
    return {
        "message": problem.message,
        "hint": problem.hint,
        "file": problem.file,
        "line": problem.line,
        "column": problem.column,
    }


def _problem(problem: Problem, word: str) -> Text:
    from rich.text import Text

    text = Text.assemble((f"{word}: ", "bold red" if word == "error" else "bold yellow"), _steerless(problem.message))
    if problem.file is not None:
        option = problem.file.startswith("--")
        where = problem.file if option or problem.line is None else f"{problem.file}:{problem.line}:{problem.column}"
        text.append(f"\n  --> {_steerless(where)}", "cyan")
        if problem.source is not None and problem.line is not None and problem.column is not None and not option:
            margin = " " * len(str(problem.line))
            caret = " " * (problem.column - 1) + "^" * problem.length
            text.append(f"\n {margin} |\n {problem.line} | {_steerless(problem.source)}\n {margin} | ")
            text.append(caret, "bold red")
    if problem.hint is not None:
        text.append("\nhint: ", "bold green").append(_steerless(problem.hint))
    return text


def plain_table(*headers: str, left: int = 1) -> Table:
    """A table that reads in ASCII, without colour: no lines, `left` columns flush left, numbers flush right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index < left else "right", no_wrap=index > 0)
    return table


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.2f}%"


def duration(seconds: float) -> str:
    """1:05, 2:03:04; short enough for a column."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
