"""What can go wrong, said so that a user knows what to type next."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every command."""

    DONE = 0
    ANSWER_IS_NO = 1  # a check failed, a figure stayed under its limit
    YOUR_INPUT = 2  # a file, an option or a value that cannot be right
    OUTSIDE_WORLD = 3  # network, disk, a missing engine or data set
    OUR_BUG = 70
    INTERRUPTED = 130


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, where it stands, and what would help."""

    message: str
    hint: str | None = None
    file: str | None = None  # or the option that carried the value, `--set a.b=1`
    line: int | None = None
    column: int | None = None
    length: int = 1  # how many characters the caret underlines
    source: str | None = None  # the text of that line


class CertToolError(Exception):
    """An error with a sentence, a hint and an exit code; the CLI prints it without a traceback."""

    exit_code: Exit = Exit.YOUR_INPUT

    def __init__(self, message: str | Problem | list[Problem], hint: str | None = None) -> None:
        if isinstance(message, str):
            message = Problem(message, hint)
        self.problems = tuple(message) if isinstance(message, list) else (message,)
        super().__init__("; ".join(problem.message for problem in self.problems))


class InputError(CertToolError):
    """The user's input cannot be right."""


class RecipeError(InputError):
    """A recipe that does not validate; all its problems at once."""


class OutsideError(CertToolError):
    """The world outside did not play along: network, disk, a data set or an engine that is not there."""

    exit_code = Exit.OUTSIDE_WORLD


class OurBug(CertToolError):
    """Something that should not have happened."""

    exit_code = Exit.OUR_BUG


class Interrupted(CertToolError):
    """The user stopped a run, or the system asked it to end."""

    exit_code = Exit.INTERRUPTED


def translated(error: Exception) -> CertToolError:
    """Any exception as one of ours: the system's refusals are the outside world, all else is our bug."""
    if isinstance(error, CertToolError):
        return error
    if isinstance(error, OSError):
        where = f" `{error.filename}`" if error.filename else ""
        ours: CertToolError = OutsideError(f"the system refused{where}: {(error.strerror or str(error)).lower()}")
    else:
        ours = OurBug(
            f"certtool failed in a way it should not: {type(error).__name__}: {error}",
            "run again with CERTTOOL_DEBUG=1 for the traceback, and please report it",
        )
    ours.__cause__ = error
    return ours
