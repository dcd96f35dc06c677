"""What a recipe may say: typed, strict, immutable. Classes, shape, mean and std come with the data set."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator
from pydantic_core import PydanticCustomError

from certtool.catalog import DATASETS, OWN_DATASETS, Architecture, Initialisation
from certtool.epsilon import Epsilon
from certtool.errors import InputError

DatasetName = Literal["digits", "mnist", "cifar10", "tinyimagenet", "folder", "npz"]
assert set(DatasetName.__args__) == {*DATASETS, *OWN_DATASETS}  # type: ignore[attr-defined]  # a Literal cannot be computed


class SpelledFloat(float):
    """A TOML float that remembers its digits, so that `eps = 0.1` is the fraction 1/10."""

    def __new__(cls, text: str) -> SpelledFloat:
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str


def wrong(message: str, hint: str | None = None, key: str | None = None) -> PydanticCustomError:
    """An error of ours inside a validator: its hint, and the key it belongs to, travel along."""
    context = {"message": message, "hint": hint, "key": key}
    return PydanticCustomError("certtool", "{message}", context)


def _epsilon(value: Any) -> Epsilon:
    if isinstance(value, Epsilon):
        return value
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise wrong("eps must be a number", 'write it as `eps = "8/255"`')
    text = value.text if isinstance(value, SpelledFloat) else str(value)
    try:
        epsilon = Epsilon.parse(text)
    except InputError as error:
        raise wrong(error.problems[0].message, error.problems[0].hint) from None
    if epsilon.value == 0:
        raise wrong("eps is 0: there would be nothing to certify", 'for ordinary training use `method = "natural"`')
    return epsilon


Radius = Annotated[Epsilon, BeforeValidator(_epsilon), PlainSerializer(str)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Percent = Annotated[float, Field(ge=0, le=100)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True, defer_build=True)


class Data(Section):
    dataset: DatasetName
    path: Annotated[str, Field(min_length=1, max_length=4000)] | None = None  # of own images; `--data` goes before it
    size: Annotated[int, Field(ge=1, le=4096)] | None = None  # of a folder's pictures, resized
    test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None  # of a folder without `test`; 0.2 if not given
    batch_size: Count = 128
    augment: Literal["standard", "none"] = "standard"  # of own images "none" where the recipe does not say
    validation_fraction: Fraction = 0.0

    @model_validator(mode="before")
    @classmethod
    def _own_images_as_they_are(cls, values: Any) -> Any:
        """Whether a mirror image is still the same thing, only the owner of the images knows."""
        own = isinstance(values, dict) and values.get("dataset") in tuple(OWN_DATASETS)
        return {"augment": "none", **values} if own else values

    @model_validator(mode="after")
    def _keys_of_own_images(self) -> Self:
        keys = {"path": tuple(OWN_DATASETS), "size": ("folder",), "test_fraction": ("folder",)}
        for key, datasets in keys.items():
            if getattr(self, key) is not None and self.dataset not in datasets:
                names = " or ".join(f'`dataset = "{name}"`' for name in datasets)
                raise wrong(f'`dataset = "{self.dataset}"` has no `{key}`', f"it goes with {names}", key=key)
        return self


class Threat(Section):
    norm: Literal["linf"] = "linf"
    eps: Radius
    train_eps: Radius | None = None  # eps_t of the schedule where training uses another radius than the test

    @property
    def target(self) -> Epsilon:
        """eps_t: the radius that training warms up to."""
        return self.eps if self.train_eps is None else self.train_eps


class Warmup(Section):
    start: Count = 1  # first epoch with eps > 0, counted from 1
    epochs: Count


class Regularizers(Section):
    terms: list[Literal["tightness", "relu"]] = Field(default_factory=list)
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5  # lambda_0
    tolerance: Annotated[float, Field(gt=0, le=1)] = 0.5  # tau

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len(set(self.terms)) < len(self.terms):
            raise wrong("a regulariser is named twice", key="terms")
        return self


class Train(Section):
    method: Literal["ibp", "crown-ibp", "natural"] = "ibp"
    loss_fusion: bool | None = None  # crown-ibp, true unless set: bound the loss's sum as a whole, not its margins
    init: Initialisation = "ibp"
    epochs: Count
    lr: Positive = 5e-4
    lr_milestones: list[Count] = Field(default_factory=list)  # milestone m: epochs 1..m use the rate before it
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 0.2
    grad_clip: Positive = 10.0
    selection: Literal["last", "validation"] = "last"
    accumulate: Count = (
        1  # parts of a batch, one after the other: less memory, BatchNorm and regularisers see a part each
    )
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; a run decides `auto` at its start, for good
    precision: Literal["fp32", "bf16"] = "fp32"  # of the passes; statistics, margins, loss and optimiser stay float32
    eval_every: Annotated[int, Field(ge=0)] = 0  # test-set figures every so many epochs; 0: after the last one
    warmup: Warmup | None = None
    regularizers: Regularizers = Field(default_factory=Regularizers)

    @model_validator(mode="before")
    @classmethod
    def _fused_by_default(cls, values: Any) -> Any:
        """Only where it means something, so that other methods' recipes are written without it."""
        if isinstance(values, dict) and values.get("method") == "crown-ibp":
            return {"loss_fusion": True, **values}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.loss_fusion is not None and self.method != "crown-ibp":
            raise wrong(
                f'`loss_fusion` means nothing with method = "{self.method}"',
                'remove it, or set `method = "crown-ibp"`',
                key="loss_fusion",
            )
        self._check_engine_options()
        if self.method != "natural" and self.warmup is None:
            raise wrong(
                f'method = "{self.method}" needs a [train.warmup] section',
                "add `[train.warmup]` with `start = 1` and `epochs = ...`",
            )
        if self.warmup is not None:
            last = self.warmup.start + self.warmup.epochs - 1
            if last > self.epochs:
                raise wrong(
                    f"the warmup ends with epoch {last}, but training ends with epoch {self.epochs}",
                    f"set `warmup.epochs` to at most {max(self.epochs - self.warmup.start + 1, 1)}, "
                    f"or `train.epochs` to at least {last}",
                    key="warmup.epochs",
                )
        if any(a >= b for a, b in zip(self.lr_milestones, self.lr_milestones[1:], strict=False)):
            raise wrong("lr_milestones must increase", key="lr_milestones")
        return self

    def _check_engine_options(self) -> None:
        """Only the interval pass is compiled; auto_LiRPA does half of CROWN-IBP, and in one precision."""
        if self.compile == "on" and self.method != "ibp":
            raise wrong(f'compile = "on" means nothing with method = "{self.method}"', "remove it", key="compile")
        if self.precision != "fp32" and self.method == "crown-ibp":
            raise wrong(
                f'method = "crown-ibp" trains in fp32, not in {self.precision}',
                'set `precision = "fp32"`, or `method = "ibp"`',
                key="precision",
            )


class Paper(Section):
    """The row of the paper that a recipe repeats, and its figures as printed there: errors in per cent."""

    tables: list[Count] = Field(default_factory=list)  # that hold the row; none: its running text
    row: Annotated[str, Field(min_length=1, max_length=100)]
    clean_error: Percent | None = None
    clean_deviation: Percent | None = None
    verified_error: Percent
    verified_deviation: Percent | None = None
    repeats: Count | None = None  # where the paper says how many


class Recipe(Section):
    """One experiment, complete: everything that decides the trained weights except the machine."""

    schema_: Literal[1] = Field(alias="schema")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    summary: Annotated[str, Field(max_length=200)] = ""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    data: Data
    model: Architecture
    threat: Threat
    train: Train
    paper: Paper | None = None  # never inherited from a base, and gone once an option changes the experiment

    def at(self, path: str | None) -> Recipe:
        """The same experiment with its own images elsewhere; None: nowhere, as a published file should have it."""
        return self.model_copy(update={"data": self.data.model_copy(update={"path": path})})

    @model_validator(mode="after")
    def _selection_has_its_images(self) -> Self:
        if self.train.selection == "validation" and self.data.validation_fraction == 0:
            raise wrong(
                'selection = "validation" needs a held-out part of the training set',
                "set `data.validation_fraction`, for example to 0.1",
                key="train.selection",
            )
        return self
