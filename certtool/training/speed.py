"""How a run's arithmetic is done: compiled or not, and in which memory layout. Decided once, at its start."""

from __future__ import annotations

import math

import torch

from certtool.distributed import World
from certtool.errors import InputError, OutsideError
from certtool.recipe import Recipe

# A run of fewer steps does not earn back what compiling its passes costs: half a minute to two minutes.
ENOUGH_STEPS = 5000


def settled(recipe: Recipe, images: int, device: torch.device, world: World) -> Recipe:
    """The recipe with `compile` decided, so that a resumed run does the same arithmetic as its first part."""
    train = recipe.train
    if train.compile == "off":
        return recipe
    steps = train.epochs * math.ceil(images / recipe.data.batch_size)
    if train.compile == "auto":
        wanted = train.method == "ibp" and world.alone and steps >= ENOUGH_STEPS
        choice = "on" if wanted and why_not(device) is None else "off"
    else:
        _check_possible(recipe, device, world)
        choice = "on"
    return recipe.model_copy(update={"train": train.model_copy(update={"compile": choice})})


def _check_possible(recipe: Recipe, device: torch.device, world: World) -> None:
    if not world.alone:
        raise InputError(
            'compile = "on" is for a run in one process', 'set `train.compile = "off"` to share it among ranks'
        )
    reason = why_not(device)
    if reason is not None:
        raise OutsideError(
            f"torch.compile does not work here: {reason}",
            'it needs a C++ compiler (on Debian: `apt-get install g++`); or set `train.compile = "off"`',
        )


def why_not(device: torch.device) -> str | None:
    """Whether torch.compile works on this machine, found by compiling something; if not, its own words."""
    try:
        torch.compile(lambda x: (x * 2).relu().sum(), dynamic=False)(torch.ones(64, device=device))
    except Exception as error:  # it may fail in many ways: no compiler, no headers, no room for its cache
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[0] if lines else type(error).__name__
    return None


def layout_for(recipe: Recipe) -> torch.memory_format:
    """channels_last for a compiled pass and for plain training: convolutions and BatchNorm then reorder nothing."""
    last = recipe.train.compile == "on" or recipe.train.method == "natural"
    return torch.channels_last if last else torch.contiguous_format
