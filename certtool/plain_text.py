"""Text from elsewhere, before it is shown: one line, without the characters that steer a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import AfterValidator

if TYPE_CHECKING:
    from pydantic import ValidationError


def plain(text: str, limit: int = 200) -> str:
    shown = "".join(c if c.isprintable() else "?" for c in text[: limit + 1])
    return shown if len(text) <= limit else shown[:limit] + "..."


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has line breaks or control characters")
    return text


# For the fields of a file: a name that clears the screen, or adds a line of its own, is refused when it is read.
ONE_LINE = AfterValidator(_printable)


def first_problem(error: ValidationError) -> str:
    """What does not validate, and where. The place may be a key of the file's own, so it is not trusted."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return (f"{plain(where)}: " if where else "") + plain(first["msg"].lower())
