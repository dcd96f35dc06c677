"""Commands that are imported once they are chosen: the help of the whole needs their names and one line of each."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

PACKAGE = "certtool.cli"


class LazyGroup(TyperGroup):
    """A group of stand-ins; the module of the same name, and its options, take the place of the one that is chosen."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)  # a name that is not there is refused in here
        return name, None if name is None else command(name), rest


def command(name: str) -> Any:
    """The command or the group that the module of this name has as its `app`."""
    return get_command(importlib.import_module(f"{PACKAGE}.{name}").app)


def add_lazily(app: typer.Typer, name: str, line: str) -> None:
    """Register a command by its name and its help, which a test holds equal to the help in its module."""
    app.command(name, help=line)(_stand_in)


def _stand_in() -> None:
    """Never called: `resolve_command` gives the real command."""
