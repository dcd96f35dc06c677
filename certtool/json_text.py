"""JSON from elsewhere: of the shape it should have, and no name in it twice."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from certtool.errors import InputError
from certtool.plain_text import first_problem

T = TypeVar("T", bound=BaseModel)


def parsed(content: bytes, schema: type[T], file: object, what: str, hint: str | None = None) -> tuple[Any, T]:
    """The document as it stands there, and as `schema` reads it; or why `file` is not `what` it should be."""
    try:
        document = json.loads(content, object_pairs_hook=no_duplicates)
        return document, schema.model_validate(document)
    except ValidationError as error:
        raise InputError(f"`{file}` is not {what}: {first_problem(error)}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"`{file}` is not JSON: {error}", hint) from None


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError("a name stands in it twice")
    return dict(pairs)
