"""One file is a model: its weights and a header that says what they are. No pickle, no path, no time of day."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from certtool import safefile
from certtool.catalog import NO_AUGMENTATION, OWN_DATASETS, Architecture, DatasetFacts, Reading
from certtool.data import Split, load_known
from certtool.epsilon import Epsilon
from certtool.errors import InputError
from certtool.files import write_atomically
from certtool.models import skeleton
from certtool.plain_text import ONE_LINE, first_problem
from certtool.recipe import Recipe, render
from certtool.recipe import load as load_recipe
from certtool.version import __version__

MODEL_FILE, RECIPE_FILE = "model.safetensors", "recipe.toml"
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Line = Annotated[str, Field(max_length=300), ONE_LINE]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ReadingHeader(Strict):
    """How own pictures were read; nothing of where they lie."""

    size: Annotated[int, Field(ge=1, le=10_000)] | None
    test_fraction: Annotated[float, Field(gt=0, lt=1)] | None
    names_sha256: Sha256 | None


class DatasetHeader(Strict):
    """What the network needs to know of its data, so that a model can be used without the data set's files."""

    name: Line
    title: Line
    classes: Annotated[list[Line], Field(min_length=2, max_length=100_000)]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=10_000)]], Field(min_length=3, max_length=3)]
    scale: Annotated[int, Field(ge=1)]
    mean: list[float]
    std: list[Annotated[float, Field(gt=0)]]
    train_sha256: Sha256
    reading: ReadingHeader | None = None

    def facts(self) -> DatasetFacts:
        channels, height, width = self.shape
        return DatasetFacts(
            self.name, self.title, tuple(self.classes), (channels, height, width), self.scale, tuple(self.mean),
            tuple(self.std), NO_AUGMENTATION, reading=None if self.reading is None else Reading(**dict(self.reading))
        )  # fmt: skip


class Header(Strict):
    """Everything a checkpoint says of itself; equal runs give equal headers."""

    schema_: Literal["certtool.model/1"] = Field(alias="schema")
    name: Line
    arch: Architecture
    dataset: DatasetHeader
    norm: Literal["linf"]
    eps: Annotated[str, Field(max_length=100), ONE_LINE]
    train_eps: Annotated[str, Field(max_length=100), ONE_LINE]
    method: Line
    seed: int
    epochs: int
    recipe: Annotated[str, Field(max_length=50_000)]
    versions: dict[Line, Line]


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model, in evaluation mode, with its header and the digest of the file it came from."""

    model: nn.Module
    header: Header
    sha256: str
    path: Path

    @property
    def eps(self) -> Epsilon:
        return Epsilon.parse(self.header.eps)

    @property
    def dataset(self) -> DatasetFacts:
        return self.header.dataset.facts()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """What a file keeps of a network: all but BatchNorm's count of batches, which nothing reads."""
    return {name: value for name, value in model.state_dict().items() if not name.endswith("num_batches_tracked")}


def dataset_header(facts: DatasetFacts, train_sha256: str) -> dict[str, Any]:
    return {
        "name": facts.name,
        "title": facts.title,
        "classes": list(facts.classes),
        "shape": list(facts.shape),
        "scale": facts.scale,
        "mean": list(facts.mean),
        "std": list(facts.std),
        "train_sha256": train_sha256,
        **({} if facts.reading is None else {"reading": asdict(facts.reading)}),
    }


def header_for(recipe: Recipe, train: Split, epochs: int) -> dict[str, Any]:
    return {
        "schema": "certtool.model/1",
        "name": recipe.name,
        "arch": recipe.model.model_dump(),
        "dataset": dataset_header(train.facts, train.sha256),
        "norm": recipe.threat.norm,
        "eps": str(recipe.threat.eps),
        "train_eps": str(recipe.threat.target),
        "method": recipe.train.method,
        "seed": recipe.seed,
        "epochs": epochs,
        "recipe": render(recipe.at(None)),
        "versions": {"certtool": __version__, "torch": str(torch.__version__)},
    }


def save(path: Path, model: nn.Module, header: dict[str, Any]) -> None:
    write_atomically(path, safefile.encode(weights(model), header))


def load(path: Path) -> Checkpoint:
    """A model from its file or its run folder, strictly: every tensor present, none to spare, shapes right."""
    file = model_file(path)
    content = safefile.read(file)
    try:
        header = Header.model_validate(content.header)
        Epsilon.parse(header.eps)
    except ValidationError as error:
        raise InputError(f"`{file}` has a header that does not validate: {first_problem(error)}") from None
    facts = header.dataset.facts()
    if len(facts.mean) != facts.shape[0] or len(facts.std) != facts.shape[0]:
        raise InputError(f"`{file}` has a header that does not validate: mean and std need one value a channel")
    constants = torch.tensor([facts.mean, facts.std])
    if not bool(torch.isfinite(constants).all()) or bool((constants[1] <= 0).any()):
        raise InputError(f"`{file}` has a header that does not validate: mean or std is no float32 that normalises")
    model = skeleton(header.arch, facts)
    fill(model, content.tensors, file)
    return Checkpoint(model.eval(), header, content.sha256, file)


def model_file(path: Path) -> Path:
    """The file itself, or the model of a run folder."""
    if not path.is_dir():
        return path
    file = path / MODEL_FILE
    if not file.exists() and (path / "last.safetensors").exists():
        raise InputError(f"the run in `{path}` has not finished", f"go on with `certtool train --resume {path}`")
    if not file.exists():
        raise InputError(f"`{path}` holds no {MODEL_FILE}", "give a .safetensors file or the folder of a finished run")
    return file


def load_images(checkpoint: Checkpoint, split: str, data: Path | None = None, *, download: bool = False) -> Split:
    """The images a model was made for. `data` is the folder of data sets, or of own images their place."""
    if data is None and checkpoint.dataset.name in OWN_DATASETS:
        data = _own_images_of_the_run(checkpoint)
    return load_known(checkpoint.dataset, split, data, download=download)


def _own_images_of_the_run(checkpoint: Checkpoint) -> Path | None:
    """A model says nothing of the machine it was trained on; the recipe beside it, in a run's folder, does."""
    try:
        recipe = load_recipe(str(checkpoint.path.parent / RECIPE_FILE))
    except InputError:
        return None
    same = (recipe.name, recipe.data.dataset) == (checkpoint.header.name, checkpoint.dataset.name)
    return Path(recipe.data.path) if same and recipe.data.path is not None else None


def fill(model: nn.Module, tensors: dict[str, Tensor], file: Path) -> None:
    """Give a skeleton its tensors; names and shapes must match exactly."""
    expected = weights(model)
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing:
        raise InputError(f"`{file}` lacks the tensor `{missing[0]}`{_more(missing)}", "it does not fit its own header")
    if extra:
        raise InputError(
            f"`{file}` has a tensor too many: `{extra[0]}`{_more(extra)}", "it does not fit its own header"
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape or tensor.dtype != torch.float32:
            raise InputError(
                f"`{file}`: `{name}` is {tuple(tensor.shape)} of {tensor.dtype}, "
                f"expected {tuple(expected[name].shape)} of torch.float32"
            )
        if name.endswith("running_var") and bool((tensor < 0).any()):
            raise InputError(f"`{file}`: `{name}` has negative entries, which no variance has")
    counters = {name: torch.zeros((), dtype=torch.int64) for name in model.state_dict().keys() - expected.keys()}
    model.load_state_dict({**tensors, **counters}, strict=True, assign=True)


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def parameter_count(model: nn.Module) -> int:
    return sum(math.prod(parameter.shape) for parameter in model.parameters())
