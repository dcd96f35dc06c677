"""The whole of a run between two steps, as one file: weights, optimiser, the epoch's sums, the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from certtool import safefile
from certtool.checkpoint import weights
from certtool.errors import InputError
from certtool.recipe import Recipe, render
from certtool.training.meter import Meter

SCHEMA = "certtool.state/1"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Standing:
    """Where a run stands: steps done, seconds spent in the epoch so far and in all, the best validation figure."""

    step: int = 0
    epoch_seconds: float = 0.0
    seconds: float = 0.0
    best: float = -1.0


def encode(
    model: nn.Module, optimizer: torch.optim.Adam, meter: Meter, recipe: Recipe, images: str, standing: Standing
) -> bytes:
    """`images` is the sha256 of the training images."""
    tensors = {f"model:{name}": value for name, value in weights(model).items()}
    for name, parameter in model.named_parameters():
        for moment in _MOMENTS:
            if parameter in optimizer.state:
                tensors[f"{moment}:{name}"] = optimizer.state[parameter][moment]
    tensors |= {f"meter:{name}": value for name, value in meter.state().items()}
    header = {"schema": SCHEMA, "recipe": render(recipe), "images": images, "counts": meter.counts, **standing.__dict__}
    return safefile.encode(tensors, header)


def restore(
    file: safefile.SafeFile,
    where: str,
    model: nn.Module,
    optimizer: torch.optim.Adam,
    meter: Meter,
    recipe: Recipe,
    images: str,
) -> Standing:
    """Put a saved state back; a file of another run, or of something else, is refused."""
    header, tensors = file.header, file.tensors
    if header.get("schema") != SCHEMA:
        raise InputError(
            f"`{where}` is not the saved state of a run", "it should be a file that `certtool train` wrote"
        )
    if header["recipe"] != render(recipe):
        raise InputError(
            f"`{where}` belongs to another recipe than the one beside it", "resume an untouched run folder"
        )
    if header.get("images") != images:
        raise InputError(
            "the training images are not those the run was started with",
            "put them back as they were, or start a new run",
        )
    try:
        model.load_state_dict({**model.state_dict(), **_part(tensors, "model")}, strict=True)
        step = int(header["step"])
        if step > 0:
            _restore_adam(model, optimizer, tensors, step)
        meter.restore(_part(tensors, "meter"), header["counts"])
        return Standing(step, header["epoch_seconds"], header["seconds"], header["best"])
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"`{where}` does not fit its recipe: {str(error).splitlines()[0]}") from error


def _part(tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {name.partition(":")[2]: value for name, value in tensors.items() if name.startswith(f"{kind}:")}


def _restore_adam(model: nn.Module, optimizer: torch.optim.Adam, tensors: dict[str, Tensor], step: int) -> None:
    for name, parameter in model.named_parameters():
        state: dict[str, Any] = {moment: _like(tensors[f"{moment}:{name}"], parameter) for moment in _MOMENTS}
        device = parameter.device if optimizer.defaults["fused"] else "cpu"
        optimizer.state[parameter] = {"step": torch.tensor(float(step), device=device), **state}


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """On the parameter's device and in its memory layout, so that a resumed step is the same arithmetic."""
    return torch.empty_like(parameter, requires_grad=False).copy_(value)
