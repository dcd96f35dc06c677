"""Runs compared over seeds: a table for 80 columns, or Markdown for a document."""

from __future__ import annotations

from certtool.report.screen import Screen, plain_table
from certtool.training import Comparison, Group, RunSummary, Spread

ABOUT = (
    "test set, errors in per cent, mean +- sample standard deviation over n seeds;",
    "verified by interval bounds in float32",
)


def show_comparison(screen: Screen, comparison: Comparison) -> None:
    """Each recipe in a row, and the paper's row below it where there is one."""
    if comparison.groups:
        for line in ABOUT:
            screen.text(line)
        screen.text("")
        table = plain_table("recipe", "eps", "n", "clean", "verified")
        for label, group in labelled(comparison):
            figures = (error_of(group.clean_error), error_of(group.verified_error))
            table.add_row(label, str(group.recipe.threat.eps), str(len(group.runs)), *figures)
            if group.paper is not None:
                table.add_row("  the paper", "", _repeats(group), *paper_errors(group))
        screen.table(table)
    remarks = _remarks(comparison)
    if comparison.groups and remarks:
        screen.text("")
    for remark in remarks:
        screen.text(remark)


def markdown(comparison: Comparison) -> str:
    lines = [
        "| recipe | eps | n | clean error | verified error | paper: n | clean error | verified error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, group in labelled(comparison):
        paper = (_repeats(group), *paper_errors(group)) if group.paper is not None else ("", "", "")
        ours = (str(len(group.runs)), error_of(group.clean_error), error_of(group.verified_error))
        lines.append(f"| {' | '.join((f'`{label}`', str(group.recipe.threat.eps), *ours, *paper))} |")
    about = f"{' '.join(ABOUT)}."
    lines += ["", about[0].upper() + about[1:]]
    lines += [f"- {remark}" for remark in ["", *_remarks(comparison)] if remark]
    return "\n".join(lines) + "\n"


def labelled(comparison: Comparison) -> list[tuple[str, Group]]:
    """The recipe's name; the second of the same name with other settings is `name [2]`."""
    seen: dict[str, int] = {}
    result = []
    for group in comparison.groups:
        count = seen[group.recipe.name] = seen.get(group.recipe.name, 0) + 1
        result.append((group.recipe.name if count == 1 else f"{group.recipe.name} [{count}]", group))
    return result


def error_of(spread: Spread) -> str:
    return _spread(100 * spread.mean, None if spread.deviation is None else 100 * spread.deviation)


def paper_errors(group: Group) -> tuple[str, str]:
    paper = group.paper
    assert paper is not None
    clean = "-" if paper.clean_error is None else _spread(paper.clean_error, paper.clean_deviation)
    return clean, _spread(paper.verified_error, paper.verified_deviation)


def _repeats(group: Group) -> str:
    return "-" if group.paper is None or group.paper.repeats is None else str(group.paper.repeats)


def _spread(mean: float, deviation: float | None) -> str:
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} +- {deviation:.2f}"


def _remarks(comparison: Comparison) -> list[str]:
    remarks = []
    for label, group in labelled(comparison):
        if group.differs:
            settings = ", ".join(f"{key} = {value}" for key, value in group.differs.items())
            remarks.append(f"{label}: other settings than {group.recipe.name}: {settings}")
    remarks += [f"not finished, not counted: {_place(run)}" for run in comparison.unfinished]
    remarks += [f"the same recipe and seed again, not counted: {run.path}" for run in comparison.repeated]
    return remarks


def _place(run: RunSummary) -> str:
    return f"{run.path} ({run.name}, seed {run.seed}, epoch {run.epochs_done} of {run.epochs})"
