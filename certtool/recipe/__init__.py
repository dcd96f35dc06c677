"""Recipes: one TOML file per experiment, typed and strict."""

from certtool.recipe.diagnose import did_you_mean
from certtool.recipe.differences import differences
from certtool.recipe.load import bundled, find, from_values, load, overrides_from, render, without_paper
from certtool.recipe.schema import Paper, Recipe

__all__ = ["Paper", "Recipe", "bundled", "did_you_mean", "differences", "find", "from_values", "load"]
__all__ += ["overrides_from", "render", "without_paper"]
