"""Recipes: one TOML file per experiment, typed and strict."""

from certtool.recipe.load import bundled, find, load, overrides_from, render
from certtool.recipe.schema import Recipe

__all__ = ["Recipe", "bundled", "find", "load", "overrides_from", "render"]
