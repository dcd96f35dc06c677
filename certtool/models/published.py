"""Weights of the method's published code under our names: its state dict in, one of ours out.

The published networks have no layer for normalisation; ours has, with constants from the data set and no tensors. So
what is converted is all of the network, and nothing is added to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from certtool.catalog import Architecture, Cnn7, DatasetFacts, Resnext
from certtool.errors import InputError, Problem
from certtool.models import skeleton

LISTED = 100  # names in an error: any real network's; a foreign file may hold a million
_COUNTER = "num_batches_tracked"  # BatchNorm counts batches; nothing reads it
_PARALLEL = "module."  # what nn.DataParallel puts before every name
_WIDE_RESNET = {"linear": "dense", "bn2": "dense_bn", "classifier": "fc"}
_RESNEXT = {"linear": "linear1", "bn2": "bn_dense", "classifier": "linear2"}


def converted(state: Mapping[str, Tensor], arch: Architecture, facts: DatasetFacts) -> dict[str, Tensor]:
    """Every tensor of the network under our name, strictly: none missing, none to spare, shapes right, float32.

    `state` has the published names or ours, with or without `module.` before each.
    """
    model = skeleton(arch, facts)
    expected = {name: value for name, value in model.state_dict().items() if not name.endswith(_COUNTER)}
    given = {str(name): value for name, value in state.items() if not str(name).endswith(_COUNTER)}
    prefix = _PARALLEL if given and all(name.startswith(_PARALLEL) for name in given) else ""
    published = {own: prefix + published_name(own, model, arch) for own in expected}
    ours = {own: prefix + own for own in expected}
    names = max(published, ours, key=lambda layout: len(given.keys() & set(layout.values())))
    problems = list(_problems(expected, given, names))
    if problems:
        problems[-1] = Problem(problems[-1].message, _hint(arch, facts))
        raise InputError(problems)
    return {own: given[name].detach().clone(memory_format=torch.contiguous_format) for own, name in names.items()}


def published_name(own: str, model: nn.Module, arch: Architecture) -> str:
    """The published code's name of one of our tensors."""
    layer, _, tensor = own.rpartition(".")
    if isinstance(arch, Cnn7):  # a Sequential without names, and without our first layer
        return f"{[name for name, _ in model.named_children()].index(layer) - 1}.{tensor}"
    if not layer.startswith("blocks."):
        renamed = _RESNEXT if isinstance(arch, Resnext) else _WIDE_RESNET
        return f"{renamed.get(layer, layer)}.{tensor}"
    _, number, inside = layer.split(".", 2)
    stage, block = _place(int(number), arch.blocks)
    if not isinstance(arch, Resnext):
        inside = inside.replace("shortcut", "downsample")
    return f"layer{stage + 1}.{block}.{inside}.{tensor}"


def _place(number: int, blocks: list[int]) -> tuple[int, int]:
    """The stage of a block, and its number there."""
    return [(stage, block) for stage, count in enumerate(blocks) for block in range(count)][number]


def _problems(
    expected: Mapping[str, Tensor], given: Mapping[str, Tensor], names: Mapping[str, str]
) -> Iterator[Problem]:
    missing = [name for name in names.values() if name not in given]
    extra = sorted(given.keys() - set(names.values()))
    if missing:
        yield Problem(f"{_count(missing)} missing: {_listed(missing)}")
    if extra:
        yield Problem(f"{_count(extra)} too many: {_listed(extra)}")
    for own, name in names.items():
        if name in given and (fault := _fault(own, given[name], tuple(expected[own].shape))):
            yield Problem(f"`{name}` {fault}")


def _fault(own: str, value: object, shape: tuple[int, ...]) -> str | None:
    """What is wrong with a tensor that has the right name."""
    kind = value.layout if isinstance(value, Tensor) else type(value).__name__
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return f"is no dense tensor but {kind}"
    if value.is_meta:
        return "has a shape but no values"
    if tuple(value.shape) != shape:
        return f"is {tuple(value.shape)}, expected {shape}"
    if value.dtype != torch.float32:
        return f"is of {value.dtype}, not torch.float32"
    if not bool(torch.isfinite(value).all()):
        return "holds NaN or infinite values"
    if own.endswith("running_var") and bool((value < 0).any()):
        return "has negative entries, which no variance has"
    return None


def _count(names: list[str]) -> str:
    return "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"


def _listed(names: list[str]) -> str:
    """A foreign file's names may hold anything, so they are shown in ASCII."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(f"`{ascii(name)[1:-1][:200]}`" for name in names[:LISTED]) + more


def _hint(arch: Architecture, facts: DatasetFacts) -> str:
    arguments = ", ".join(f"{key} = {value}" for key, value in arch.model_dump(exclude={"arch"}).items())
    return f"expected is a {arch.arch} for {facts.name} with {arguments}; give the arguments it was trained with"
