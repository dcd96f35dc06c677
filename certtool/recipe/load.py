"""Find a recipe, read it over its bases, lay `--set` values on top, validate the whole."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from certtool import toml_text
from certtool.errors import InputError, Problem, RecipeError
from certtool.recipe.diagnose import Source, diagnose, did_you_mean
from certtool.recipe.positions import Path, Position, positions
from certtool.recipe.schema import Recipe, SpelledFloat

_PREFIX = "recipe:"
# Keys that leave the experiment what it is; after any other `--set` the paper's figures are no longer about it.
_NEUTRAL = {("seed",), ("name",), ("summary",), ("train", "eval_every")}


def bundled_folder() -> FilePath:
    """The recipes that come along: inside the package of a wheel, at the top of a checkout."""
    package = FilePath(__file__).parents[1]
    inside = package / "bundled" / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def bundled() -> dict[str, FilePath]:
    """Name and file of every bundled recipe."""
    files = {file.stem: file for file in bundled_folder().glob("*.toml")}
    return {name: files[name] for name in sorted(files)}


def find(reference: str, beside: FilePath | None = None) -> FilePath:
    """A path, `recipe:NAME` or the name of a bundled recipe; `beside` is the folder of the recipe that asks."""
    name = reference.removeprefix(_PREFIX)
    if not reference.startswith(_PREFIX):
        if beside is not None and (beside / f"{reference}.toml").is_file():
            return beside / f"{reference}.toml"
        if FilePath(reference).is_file():
            return FilePath(reference)
        if reference.endswith(".toml") or "/" in reference:
            name = FilePath(reference).stem
            hint = did_you_mean(name, bundled()) if name not in bundled() else f"bundled under that name: `{name}`"
            raise InputError(f"there is no recipe file `{reference}`", hint)
    file = bundled_folder() / f"{name}.toml"  # not `bundled()`: that would look at every file for each base
    if file.parent == bundled_folder() and file.is_file():
        return file
    hint = did_you_mean(name, bundled()) or "`certtool recipe list` shows the bundled ones"
    raise InputError(f"there is no recipe called `{name}`", hint)


def load(reference: str, overrides: Sequence[str] = ()) -> Recipe:
    """The validated recipe. Raises RecipeError with every problem at once."""
    file = find(reference)
    values, origin = _read_with_base(file, seen=())
    problems: list[Problem] = []
    for override in overrides:
        try:
            _apply(values, origin, override)
        except InputError as error:
            problems.extend(error.problems)
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(problems + diagnose(error, origin, _source_of(file))) from None
    if problems:
        raise RecipeError(problems)
    return recipe


def from_values(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """A recipe that no file holds; only what `--set` changes in it can be wrong."""
    changed: dict[str, Any] = copy.deepcopy(dict(values))
    origin: dict[Path, Source] = {}
    for override in overrides:
        _apply(changed, origin, override)
    try:
        return Recipe.model_validate(changed)
    except ValidationError as error:
        raise RecipeError(diagnose(error, origin, Source("--set", {}))) from None


def overrides_from(values: Mapping[str, Any]) -> list[str]:
    """`{"train.epochs": 5}` as the strings `--set` takes, for the Python API."""
    return [f"{key}={toml_text.literal(value)}" for key, value in values.items()]


def render(recipe: Recipe) -> str:
    """The resolved recipe as TOML: every key, also those left at their defaults."""
    values = recipe.model_dump(by_alias=True, exclude_none=True)
    return toml_text.document(values)


def without_paper(text: str) -> str:
    """A recipe's text without its [paper] section."""
    return re.sub(r"\n*^\[paper\]\n(?:(?!\[).*\n?)*", "\n", text, flags=re.MULTILINE)


def _source_of(file: FilePath) -> Source:
    return Source(_shown(file), positions(_text(file)))


def _shown(file: FilePath) -> str:
    """The path as a user would type it here."""
    here = FilePath.cwd()
    return str(file.relative_to(here) if file.is_absolute() and file.is_relative_to(here) else file)


def _text(file: FilePath) -> str:
    try:
        if file.stat().st_size > 1_000_000:
            raise InputError(f"`{file}` is too large to be a recipe")
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"`{file}` is not a text file", "a recipe is TOML in UTF-8") from None
    except OSError as error:
        raise InputError(f"cannot read `{file}`: {error.strerror}") from None


def _parse(file: FilePath) -> dict[str, Any]:
    text = _text(file)
    try:
        return tomllib.loads(text, parse_float=SpelledFloat)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(_syntax_problem(str(error), _shown(file), text)) from None


def _syntax_problem(message: str, file: str, text: str) -> Problem:
    match = re.search(r"^(.*) \(at line (\d+), column (\d+)\)$", message)
    if match is None:
        return Problem(f"not TOML: {message}", file=file)
    line, column = int(match[2]), int(match[3])
    source = text.splitlines()[line - 1] if line <= len(text.splitlines()) else None
    hint = "strings need quotes" if "Invalid value" in match[1] else None
    return Problem(f"not TOML: {match[1][0].lower()}{match[1][1:]}", hint, file, line, column, 1, source)


def _read_with_base(file: FilePath, seen: tuple[FilePath, ...]) -> tuple[dict[str, Any], dict[Path, Source]]:
    values, source = _parse(file), _source_of(file)
    base = values.pop("base", None)
    merged: dict[str, Any] = {}
    origin: dict[Path, Source] = {}
    if base is not None:
        if not isinstance(base, str):
            raise RecipeError(source.problem(("base",), "base: must name one recipe", 'as in `base = "tiny_cnn7"`'))
        try:
            parent = find(base, beside=file.parent)
        except InputError as error:
            raise RecipeError(source.problem(("base",), f"base: {error}", error.problems[0].hint)) from None
        if parent.resolve() in (*seen, file.resolve()):
            raise RecipeError(source.problem(("base",), f"base: `{base}` leads back to itself", None))
        merged, origin = _read_with_base(parent, (*seen, file.resolve()))
        merged.pop("paper", None)  # the figures of another experiment
        _start_anew_with_another_network(merged, values)
    _merge(merged, values, origin, source, ())
    return merged, origin


def _start_anew_with_another_network(merged: dict[str, Any], values: dict[str, Any]) -> None:
    """The arguments of a base's network are none of another architecture's."""
    ours, theirs = values.get("model"), merged.get("model")
    if (
        isinstance(ours, dict)
        and isinstance(theirs, dict)
        and ours.get("arch", theirs.get("arch")) != theirs.get("arch")
    ):
        merged["model"] = {}


def _merge(
    into: dict[str, Any], values: dict[str, Any], origin: dict[Path, Source], source: Source, path: Path
) -> None:
    for key, value in values.items():
        origin[(*path, key)] = source
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value, origin, source, (*path, key))
        elif isinstance(value, dict):
            into[key] = {}
            _merge(into[key], value, origin, source, (*path, key))
        else:
            into[key] = value


def _apply(values: dict[str, Any], origin: dict[Path, Source], override: str) -> None:
    """One `--set a.b=value`. The value is a TOML literal; a bare word that is none counts as a string."""
    option = f"--set {override}"
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(re.fullmatch(r"[A-Za-z0-9_-]+", part) for part in path):
        raise InputError(Problem(f"`{option}` is not of the form key=value", "as in `--set train.epochs=5`", option))
    place = Position(1, len("--set ") + 1, len(key), option)
    source = Source(option, {path: place})
    node = values
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise InputError(source.problem(path, f"{key}: `{part}` is a value, not a section", None))
    if path == ("base",):
        raise InputError(source.problem(path, "base: cannot be set from the command line", None))
    value = _value(text.strip())
    if path not in _NEUTRAL and path[0] != "paper" and node.get(path[-1]) != value:
        values.pop("paper", None)
    node[path[-1]] = value
    origin[path] = source


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}", parse_float=SpelledFloat)
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if set(parsed) == {"value"} else text
