"""Where each key of a TOML text stands, so that an error can point at it. `tomllib` reads values but forgets lines."""

from __future__ import annotations

import re
from dataclasses import dataclass

Path = tuple[str, ...]

_BARE_OR_QUOTED = r"""[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*'"""
_DOTTED = rf"(?:{_BARE_OR_QUOTED})(?:\s*\.\s*(?:{_BARE_OR_QUOTED}))*"
_TABLE = re.compile(rf"\s*\[\[?\s*({_DOTTED})\s*\]\]?")
_PAIR = re.compile(rf"\s*({_DOTTED})\s*=\s*")


@dataclass(frozen=True)
class Position:
    """A key's line and column, both counted from 1, and the length of what is underlined."""

    line: int
    column: int
    length: int
    source: str


def positions(text: str) -> dict[Path, Position]:
    """The place of every table and key. A key inside an inline table or an array is found by its parent's place."""
    places: dict[Path, Position] = {}
    table: Path = ()
    open_quote, depth = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if not open_quote and depth == 0:
            if match := _TABLE.match(line):
                table = _split(match[1])
                places[table] = Position(number, match.start(1) + 1, len(match[1]), line)
                continue
            if match := _PAIR.match(line):
                places[table + _split(match[1])] = Position(number, match.start(1) + 1, len(match[1]), line)
        open_quote, depth = _carry(line, open_quote, depth)
    return places


def locate(places: dict[Path, Position], path: Path) -> Position | None:
    """The place of a key or of the nearest enclosing one that has a place."""
    while path:
        if path in places:
            return places[path]
        path = path[:-1]
    return None


def _split(dotted: str) -> Path:
    return tuple(part.strip("\"'") for part in re.findall(_BARE_OR_QUOTED, dotted))


def _carry(line: str, open_quote: str, depth: int) -> tuple[str, int]:
    """What a line leaves open for the next: a multi-line string, or the brackets of a multi-line array."""
    for token in re.findall(r'"""|\'\'\'|"(?:\\.|[^"\\])*"|\'[^\']*\'|#.*|[\[\]{}]', line):
        if open_quote:
            open_quote = "" if token == open_quote else open_quote
        elif token in ('"""', "'''"):
            open_quote = token
        elif token.startswith("#"):
            break
        elif token in "[{":
            depth += 1
        elif token in "]}":
            depth = max(depth - 1, 0)
    return open_quote, depth
