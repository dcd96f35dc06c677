"""Plain values as TOML; the standard library only reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def document(values: Mapping[str, Any]) -> str:
    """Scalars first, then a section for each dict, and one for each entry of a list of dicts."""
    return "\n".join(_lines(values, ())).strip() + "\n"


def literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(float(value)) if isinstance(value, float) else str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(literal(item) for item in value)}]"
    escaped = "".join(_ESCAPES.get(c, c if c.isprintable() else f"\\U{ord(c):08x}") for c in str(value))
    return f'"{escaped}"'


def _lines(values: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    scalars = {key: value for key, value in values.items() if not isinstance(value, dict) and not _is_array(value)}
    lines = ["", f"[{'.'.join(path)}]"] if path and scalars else []
    lines += [f"{key} = {literal(value)}" for key, value in scalars.items()]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += _lines(value, (*path, key))
        elif _is_array(value):
            for entry in value:
                lines += ["", f"[[{'.'.join((*path, key))}]]"]
                lines += [f"{name} = {literal(item)}" for name, item in entry.items()]
    return lines


def _is_array(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], dict)
