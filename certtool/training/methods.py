"""From a recipe's method to its objective, and to the engine it needs."""

from __future__ import annotations

import math

import torch
from torch import nn

from certtool.bounds import lirpa
from certtool.catalog import DatasetFacts
from certtool.errors import OutsideError
from certtool.recipe import Recipe
from certtool.training.crown_ibp import CrownObjective
from certtool.training.objective import Objective


def check_engine(recipe: Recipe) -> None:
    """Before anything is written: is there what the method needs?"""
    if recipe.train.method == "crown-ibp" and lirpa.installed() is None:
        raise OutsideError(
            'method = "crown-ibp" needs auto_LiRPA, which is not installed',
            f'`{lirpa.INSTALL}`, or train with `method = "ibp"`',
        )


def objective_for(recipe: Recipe, model: nn.Module, data: DatasetFacts) -> Objective:
    """The loss of the recipe's method, for a network that is already on its device."""
    regularizers = recipe.train.regularizers
    if recipe.train.method != "crown-ibp":
        objective = Objective(model, regularizers.terms, regularizers.tolerance, recipe.train.precision)
        if recipe.train.compile == "on":
            objective.compile(math.ceil(recipe.data.batch_size / recipe.train.accumulate))
        return objective
    return CrownObjective(
        model,
        regularizers.terms,
        regularizers.tolerance,
        example=torch.zeros(1, *data.shape, device=next(model.parameters()).device),
        target=float(recipe.threat.target),
        fused=bool(recipe.train.loss_fusion),
    )
