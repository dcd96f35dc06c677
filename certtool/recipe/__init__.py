"""Recipes: one TOML file per experiment, typed and strict."""

from certtool.recipe.differences import differences
from certtool.recipe.load import bundled, find, load, overrides_from, render, without_paper
from certtool.recipe.schema import Paper, Recipe

__all__ = ["Paper", "Recipe", "bundled", "differences", "find", "load", "overrides_from", "render", "without_paper"]
