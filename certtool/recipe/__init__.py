"""Recipes: one TOML file per experiment, typed and strict."""

from certtool.recipe.diagnose import did_you_mean
from certtool.recipe.load import bundled, find, from_values, load, overrides_from, render
from certtool.recipe.schema import Recipe

__all__ = ["Recipe", "bundled", "did_you_mean", "find", "from_values", "load", "overrides_from", "render"]
