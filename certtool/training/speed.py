"""How a run's arithmetic is done: compiled or not, and in which memory layout. Decided once, at its start."""

from __future__ import annotations

import math

import torch
from torch import nn

from certtool.catalog import DatasetFacts
from certtool.distributed import World
from certtool.errors import InputError, OutsideError
from certtool.models import build
from certtool.recipe import Recipe

# A run of fewer steps does not earn back what compiling its passes costs: half a minute to two minutes.
ENOUGH_STEPS = 5000


def settled(recipe: Recipe, images: int, data: DatasetFacts, device: torch.device, world: World) -> Recipe:
    """The recipe with `compile` decided, so that a resumed run does the same arithmetic as its first part."""
    train = recipe.train
    if train.compile == "off":
        return recipe
    with torch.device("meta"):
        model = build(recipe.model, data)
    if train.compile == "auto":
        steps = train.epochs * math.ceil(images / recipe.data.batch_size)
        wanted = train.method == "ibp" and world.alone and steps >= ENOUGH_STEPS and not breaks_onednn(model)
        choice = "on" if wanted and why_not(device) is None else "off"
    else:
        _check_possible(model, device, world)
        choice = "on"
    return recipe.model_copy(update={"train": train.model_copy(update={"compile": choice})})


def _check_possible(model: nn.Module, device: torch.device, world: World) -> None:
    if not world.alone:
        raise InputError(
            'compile = "on" is for a run in one process', 'set `train.compile = "off"` to share it among ranks'
        )
    if breaks_onednn(model):
        raise InputError(
            'compile = "on" cannot be had with a strided 1x1 convolution of fewer than 8 channels: oneDNN fails on it',
            'a `model.width` of 8 or more, or `train.compile = "off"`',
        )
    reason = why_not(device)
    if reason is not None:
        raise OutsideError(
            f"torch.compile does not work here: {reason}",
            'it needs a C++ compiler (on Debian: `apt-get install g++`); or set `train.compile = "off"`',
        )


def why_not(device: torch.device) -> str | None:
    """Whether torch.compile works on this machine, found by compiling something; if not, its own words."""
    from certtool.training.compiled import said  # the compiler takes two seconds to import

    try:
        torch.compile(lambda x: (x * 2).relu().sum(), dynamic=False)(torch.ones(64, device=device))
    except Exception as error:  # it may fail in many ways: no compiler, no headers, no room for its cache
        return said(error)
    return None


def breaks_onednn(model: nn.Module) -> bool:
    """The gradient of a strided 1x1 convolution with fewer than 8 input channels, in channels_last, writes past its
    memory (oneDNN of torch 2.13 on AVX2: "corrupted double-linked list"). torch.compile chooses that layout by itself.
    """
    return any(
        isinstance(layer, nn.Conv2d)
        and layer.kernel_size == (1, 1)
        and layer.stride != (1, 1)
        and layer.in_channels // layer.groups < 8
        for layer in model.modules()
    )


def layout_for(recipe: Recipe, model: nn.Module) -> torch.memory_format:
    """channels_last for a compiled pass and for plain training: convolutions and BatchNorm then reorder nothing."""
    wanted = recipe.train.compile == "on" or recipe.train.method == "natural"
    return torch.channels_last if wanted and not breaks_onednn(model) else torch.contiguous_format
