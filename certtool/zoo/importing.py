"""A local PyTorch state dict, also one of the method's published ones, as one certtool file. Nothing is executed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from certtool import checkpoint, recipe, toml_text
from certtool.catalog import DATASETS, Architecture
from certtool.checkpoint import Checkpoint
from certtool.errors import InputError
from certtool.models import skeleton
from certtool.models.published import converted
from certtool.plain_text import plain
from certtool.version import __version__

# What a checkpoint file may wrap its state dict in.
WRAPPERS = ("state_dict", "model_state_dict", "model")
USUAL_EPS = {"digits": "0.1", "mnist": "0.4", "cifar10": "8/255", "tinyimagenet": "1/255"}
UNKNOWN = "0" * 64  # of the images it was trained on: nobody can say


@dataclass(frozen=True)
class Description:
    """What the weights are, as the user says: a state dict does not tell."""

    name: str
    arch: Architecture
    dataset: str
    eps: str


def describe(name: str, arch: str, dataset: str, eps: str | None, overrides: Sequence[str]) -> Description:
    """The paper's form of the network for this data set, changed by `--set model.width=8` and the like."""
    if dataset not in USUAL_EPS:
        hint = recipe.did_you_mean(dataset, USUAL_EPS)
        raise InputError(f"--dataset {dataset}: there is no such data set to import for", hint)
    usual = f"{dataset}_{arch}"
    radius = eps or USUAL_EPS[dataset]
    if usual in recipe.bundled():
        chosen = recipe.load(f"recipe:{usual}", [*overrides, f'threat.eps="{radius}"'])
    else:
        base = {
            "schema": 1, "name": name, "data": {"dataset": dataset}, "model": {"arch": arch}, "threat": {"eps": radius},
            "train": {"method": "natural", "epochs": 1},
        }  # fmt: skip
        chosen = recipe.from_values(base, overrides)
    return Description(name, chosen.model, chosen.data.dataset, radius)


def read_state(file: Path) -> dict[str, Tensor]:
    """Tensors only: `weights_only` refuses everything a pickle could do besides."""
    if file.exists() and not file.is_file() and not file.is_dir():  # a pipe would never end
        raise InputError(f"`{file}` is not a file")
    try:
        with warnings.catch_warnings(action="ignore"):  # torch has remarks on how old a file is
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError(f"there is no file `{file}`") from None
    except OSError as error:
        raise InputError(f"cannot read `{file}`: {(error.strerror or str(error)).lower()}") from None
    except Exception as error:  # torch raises half a dozen kinds; each means that it is no plain state dict
        reason = plain(f"{type(error).__name__} " + re.sub(r"\s+", " ", str(error)).split(". ")[0].strip()).strip()
        raise InputError(
            f"`{file}` is not a state dict of tensors: {reason}", "save it with `torch.save(model.state_dict(), FILE)`"
        ) from None
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not content:
        raise InputError(f"`{file}` holds {type(content).__name__}, not a state dict")
    return dict(content)


def import_weights(file: Path, description: Description, out: Path) -> Checkpoint:
    """Convert, check every name and shape, write, and load again strictly."""
    facts = DATASETS[description.dataset]
    tensors = converted(read_state(file), description.arch, facts)
    model = skeleton(description.arch, facts)
    checkpoint.fill(model, tensors, file)
    checkpoint.save(out, model, _header(description))
    return checkpoint.load(out)


def _header(description: Description) -> dict[str, Any]:
    facts = DATASETS[description.dataset]
    values = {
        "schema": 1,
        "name": description.name,
        "summary": "imported weights: how they were trained is not known",
        "data": {"dataset": description.dataset},
        "model": description.arch.model_dump(),
        "threat": {"norm": "linf", "eps": description.eps},
    }
    return {
        "schema": "certtool.model/1",
        "name": description.name,
        "arch": description.arch.model_dump(),
        "dataset": checkpoint.dataset_header(facts, UNKNOWN),
        "norm": "linf",
        "eps": description.eps,
        "train_eps": description.eps,
        "method": "imported",
        "seed": 0,
        "epochs": 0,
        "recipe": toml_text.document(values),
        "versions": {"certtool": __version__, "torch": str(torch.__version__)},
    }
