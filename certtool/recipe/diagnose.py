"""From pydantic's list of errors to problems a user can act on: where, what, and what was probably meant."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from certtool.catalog import ARCHITECTURES
from certtool.errors import Problem
from certtool.recipe.positions import Path, Position, locate
from certtool.recipe.schema import Recipe


@dataclass(frozen=True)
class Source:
    """A text that contributed keys: a recipe file, or one `--set` option."""

    file: str
    places: Mapping[Path, Position]

    def problem(self, path: Path, message: str, hint: str | None) -> Problem:
        place = locate(dict(self.places), path)
        if place is None:
            return Problem(message, hint, self.file)
        return Problem(message, hint, self.file, place.line, place.column, place.length, place.source)


def diagnose(error: ValidationError, origin: Mapping[Path, Source], whole: Source) -> list[Problem]:
    """Every problem at once, each attributed to the file or option that set its key."""
    return [_problem(detail, origin, whole) for detail in error.errors(include_url=False)]


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The closest known word as a hint, or the list of them when it is short."""
    choices = sorted(known)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if close:
        return f"did you mean `{close[0]}`?"
    return "one of " + ", ".join(f"`{choice}`" for choice in choices) if 0 < len(choices) <= 8 else None


def _problem(detail: ErrorDetails, origin: Mapping[Path, Source], whole: Source) -> Problem:
    context = detail.get("ctx", {})
    path = _path(detail["type"], detail["loc"]) + tuple(
        (context.get("key") or "").split(".") if context.get("key") else ()
    )
    message, hint = _explain(detail, path)
    dotted = ".".join(path)
    message = f"{dotted}: {message}" if dotted else message
    return _source(path, origin, whole).problem(path, message, hint)


def _path(kind: str, location: tuple[int | str, ...]) -> Path:
    # The discriminated union of architectures puts the tag (`cnn7`) between `model` and the key.
    words = [str(part) for part in location if isinstance(part, str)]
    if kind == "union_tag_invalid":
        words.append("arch")
    if len(words) > 1 and words[0] == "model" and words[1] in ARCHITECTURES:
        del words[1]
    return tuple(words)


def _source(path: Path, origin: Mapping[Path, Source], whole: Source) -> Source:
    while path:
        if path in origin:
            return origin[path]
        path = path[:-1]
    return whole


def _explain(detail: ErrorDetails, path: Path) -> tuple[str, str | None]:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    where = f"[{'.'.join(path[:-1])}]" if len(path) > 1 else "the recipe"
    if kind == "certtool":
        return context["message"], context["hint"]
    if kind == "extra_forbidden":
        return f"unknown key `{path[-1]}` in {where}", did_you_mean(path[-1], _keys(path[:-1], detail["loc"]))
    if kind == "missing":
        return f"missing key `{path[-1]}` in {where}", _example(path)
    if kind in ("literal_error", "union_tag_invalid"):
        known = _choices(context)
        tag = value.get("arch") if isinstance(value, dict) else value
        return f"{_show(tag)} is not one of {', '.join(known)}", did_you_mean(str(tag), known)
    if kind == "union_tag_not_found":
        return "missing key `arch` in [model]", 'add `arch = "cnn7"`'
    if kind.endswith("_type"):
        return f"{_show(value)} is not {_NOUN.get(kind, kind.removesuffix('_type'))}", _type_hint(kind, value)
    return f"{_show(value)}: {detail['msg'][0].lower()}{detail['msg'][1:]}", None


_NOUN = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "model_type": "a section",
    "model_attributes_type": "a section",
}


def _type_hint(kind: str, value: Any) -> str | None:
    if kind in ("int_type", "float_type") and isinstance(value, str):
        return "numbers are written without quotes"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"did you mean `{int(value)}`?"
    if kind == "string_type":
        return f'did you mean `"{value}"`, in quotes?'
    if kind == "list_type":
        return f"did you mean `[{json.dumps(value, default=str)}]`?"
    return None


def _show(value: Any) -> str:
    return f"`{json.dumps(value, default=str)}`" if not isinstance(value, float) else f"`{value}`"


def _choices(context: Mapping[str, Any]) -> list[str]:
    expected = str(context.get("expected") or context.get("expected_tags"))
    return [word.strip(" '") for word in expected.replace(" or ", ",").split(",") if word.strip(" '")]


def _example(path: Path) -> str | None:
    examples = {
        ("schema",): "add `schema = 1` at the top",
        ("name",): 'add `name = "my_recipe"`',
        ("threat", "eps"): 'add `eps = "8/255"`',
        ("data", "dataset"): 'add `dataset = "digits"`',
        ("train", "epochs"): "add `epochs = 100`",
    }
    return examples.get(path) or (f"add a `[{path[0]}]` section" if len(path) == 1 else None)


def _keys(path: Path, location: tuple[int | str, ...]) -> list[str]:
    """The keys a section knows, walking the schema along a path."""
    model: type[BaseModel] = Recipe
    for word in path:
        if word == "model":
            tag = location[1] if len(location) > 1 else ""
            model = ARCHITECTURES.get(str(tag), model)
            continue
        annotation = model.model_fields[word].annotation
        candidates = (annotation, *get_args(annotation))
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    keys = [field.alias or name for name, field in model.model_fields.items()]
    return [*keys, "base"] if model is Recipe else keys
