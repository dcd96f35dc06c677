"""The layers of a record's network, from its recipe: no file is needed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from certtool import recipe as recipes
from certtool.catalog import DATASETS
from certtool.errors import CertToolError
from certtool.models import skeleton
from certtool.zoo.records import Record


@dataclass(frozen=True)
class Layer:
    name: str
    kind: str
    shape: str
    parameters: int


def layers(record: Record) -> list[Layer]:
    """None where the recipe is not bundled, or the data set is the user's own."""
    if record.data.dataset not in DATASETS:
        return []
    try:
        chosen = recipes.load(f"recipe:{record.recipe.name}", record.recipe.set)
    except CertToolError:
        return []
    network = skeleton(chosen.model, DATASETS[record.data.dataset])
    return [_layer(name, module) for name, module in network.named_modules() if _has_own_weights(module)]


def _has_own_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _layer(name: str, module: nn.Module) -> Layer:
    weight = module.get_parameter("weight")
    count = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return Layer(name, type(module).__name__, " x ".join(map(str, weight.shape)), count)
