"""One record per certified model: what it is, what is proven of it, and where its file lies. Typed and strict."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from certtool import toml_text
from certtool.epsilon import Epsilon
from certtool.errors import InputError
from certtool.plain_text import ONE_LINE, first_problem
from certtool.zoo.reference import CERTIFICATE, NAME, PINNED

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Line = Annotated[str, Field(max_length=300), ONE_LINE]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
DIGITS = 6  # of an accuracy in a record: enough to tell one image of a million
ROUNDING = 1.5 * 10**-DIGITS  # two rounded grades may add up to more than their rounded sum


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelPart(Strict):
    arch: Line
    parameters: Count
    sha256: Sha256
    bytes: Count


class RecipePart(Strict):
    """`certtool train NAME --set ...` trains the model again."""

    name: Line
    seed: Annotated[int, Field(ge=0)]
    set: list[Line] = Field(default_factory=list)


class DataPart(Strict):
    dataset: Line
    split: Line
    images: Count


class Result(Strict):
    """Accuracies at one radius, as fractions of the images. A certified image has one grade or the other."""

    eps: Line
    clean: Share
    attacked: Share | None = None
    certified_rigorous: Share
    certified_float32: Share

    @property
    def certified(self) -> float:
        return round(self.certified_rigorous + self.certified_float32, DIGITS)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        Epsilon.parse(self.eps)
        upper = self.clean if self.attacked is None else self.attacked
        if not self.certified - ROUNDING <= upper <= self.clean:
            raise ValueError(f"eps {self.eps}: not certified <= attacked <= clean")
        return self


class CertificatePart(Strict):
    file: Annotated[str, Field(pattern=CERTIFICATE.pattern)]
    sha256: Sha256
    verifier: Line


class TrainingPart(Strict):
    """What the training cost, where that is known."""

    epochs: Count
    seconds: Annotated[float, Field(ge=0)] | None = None
    machine: Line | None = None


class Record(Strict):
    schema_: Literal[1] = Field(alias="schema")
    name: Annotated[str, Field(pattern=NAME.pattern)]
    summary: Line
    licence: Line
    norm: Literal["linf"]
    eps: Line  # the radius the model was trained for: its result is the headline
    sources: Annotated[list[Line], Field(min_length=1)]  # in the order to try
    model: ModelPart
    recipe: RecipePart
    data: DataPart
    certificate: CertificatePart
    training: TrainingPart
    results: Annotated[list[Result], Field(min_length=1)]

    @property
    def headline(self) -> Result:
        wanted = Epsilon.parse(self.eps).value
        return next(result for result in self.results if Epsilon.parse(result.eps).value == wanted)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ordered = sorted(self.results, key=lambda result: Epsilon.parse(result.eps).value)
        radii = [Epsilon.parse(result.eps).value for result in ordered]
        if len(set(radii)) < len(radii):
            raise ValueError("results: a radius stands there twice")
        if Epsilon.parse(self.eps).value not in radii:
            raise ValueError(f"results: none at the model's own eps {self.eps}")
        for below, above in itertools.pairwise(ordered):
            attacked = None not in (above.attacked, below.attacked) and above.attacked > below.attacked  # type: ignore[operator]
            if above.certified > below.certified + ROUNDING or attacked:
                raise ValueError(f"results: more at eps {above.eps} than at the smaller {below.eps}")
        for source in self.sources:
            if source != "zoo" and not PINNED.fullmatch(source):
                raise ValueError(f"sources: `{source}` is neither `zoo` nor hf://user/repo@<40 hex digits>")
        return self


def zoo_folder() -> Path:
    """The records that come along: inside the package of a wheel, at the top of a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "bundled" / "zoo"
    return inside if inside.is_dir() else package.parent / "zoo"


def records(folder: Path | None = None) -> dict[str, Record]:
    """Every record by its name, in order of names."""
    files = sorted((folder or zoo_folder()).glob("*.toml"))
    return {file.stem: read_record(file) for file in files}


def read_record(file: Path) -> Record:
    try:
        record = Record.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise InputError(f"the record `{file}` does not validate: {first_problem(error)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"the record `{file}` is not TOML: {error}") from None
    except OSError as error:
        raise InputError(f"cannot read the record `{file}`: {(error.strerror or str(error)).lower()}") from None
    if record.name != file.stem:
        raise InputError(f"the record `{file}` calls itself `{record.name}`", "file and name must agree")
    return record


def find_record(name: str, folder: Path | None = None) -> Record:
    known = (folder or zoo_folder()) / f"{name}.toml"
    if NAME.fullmatch(name) and known.is_file():
        return read_record(known)
    from certtool.recipe import did_you_mean  # a list that is right answers without the recipes' schema

    names = [file.stem for file in (folder or zoo_folder()).glob("*.toml")]
    hint = did_you_mean(name, names) or "`certtool zoo list` shows what there is"
    raise InputError(f"the zoo has no model called `{name}`", hint)


def render(record: Record) -> str:
    """The record as its file."""
    values: dict[str, Any] = record.model_dump(by_alias=True, exclude_none=True)
    return f"# certtool zoo show {record.name}\n# certtool verify {record.name}\n" + toml_text.document(values)
