"""Names and argument schemas of architectures, data sets and initialisations.

Nothing here imports torch, so a recipe is checked in milliseconds; the tests keep the registries that build the real
things equal to these tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

BatchNormMode = Literal["full", "conv", "none", "center", "scale"]
Initialisation = Literal["ibp", "xavier-uniform", "xavier-normal", "kaiming-uniform", "kaiming-normal", "orthogonal"]
INITIALISATIONS: tuple[str, ...] = get_args(Initialisation)

Size = Annotated[int, Field(ge=1, le=4096)]
Count = Annotated[int, Field(ge=1, le=64)]
Blocks = Annotated[list[Count], Field(min_length=3, max_length=3)]  # of each of the three stages


class Arguments(BaseModel):
    """Typed, strict, immutable: an unknown or a wrongly typed key is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


class Cnn7(Arguments):
    """Five 3x3 convolutions, two linear layers (paper, section 4.1 and appendix on implementation)."""

    arch: Literal["cnn7"]
    width: Size = 64  # filters of the first two convolutions; the other three have twice as many
    hidden: Size = 512
    downsample: Annotated[int, Field(ge=1, le=2)] = 1  # stride 2 at the third convolution; 2: at the last one too
    batch_norm: BatchNormMode = "full"


class WideResnet(Arguments):
    """Three stages of basic residual blocks, no pooling (paper, appendix on implementation)."""

    arch: Literal["wide_resnet"]
    width: Size = 16  # filters of the first convolution
    widen: Size = 8  # a stage has width * widen * (1, 2, 4) filters
    blocks: Blocks = Field(default=[1, 1, 1])
    hidden: Size = 512
    batch_norm: BatchNormMode = "full"


class Resnext(Arguments):
    """Three stages of bottleneck blocks with grouped convolutions, no pooling (paper, appendix on implementation)."""

    arch: Literal["resnext"]
    width: Size = 64  # filters of the first convolution
    cardinality: Count = 2  # groups of a block's 3x3 convolution
    bottleneck: Size = 32  # filters of such a group in the first stage; (1, 2, 4) times as many in the three
    blocks: Blocks = Field(default=[1, 1, 1])
    hidden: Size = 512
    batch_norm: BatchNormMode = "full"


Architecture = Annotated[Cnn7 | WideResnet | Resnext, Field(discriminator="arch")]
ARCHITECTURES: dict[str, type[Arguments]] = {"cnn7": Cnn7, "wide_resnet": WideResnet, "resnext": Resnext}


@dataclass(frozen=True)
class Augmentation:
    """What a training image may undergo: a mirror image, a crop of the image padded by repeating its edge."""

    flip: bool
    padding: int


NO_AUGMENTATION = Augmentation(flip=False, padding=0)


@dataclass(frozen=True)
class Reading:
    """How a folder of the user's pictures becomes images; kept in the checkpoint, so that `verify` reads them alike."""

    size: int | None = None  # resized to so many pixels a side; None: they all have one size
    test_fraction: float | None = None  # the share of each class that is test; None: there is a test folder
    names_sha256: str | None = None  # with test_fraction: of the file names that were shared out


@dataclass(frozen=True)
class DatasetFacts:
    """What a network and its verifier need to know of a data set.

    A pixel is the integer k, its value k / scale; or, where the source has floats, a float32 with scale 1.
    """

    name: str
    title: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    scale: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentation: Augmentation
    official_name: str = ""  # the folder of the official distribution, below the data folder
    reading: Reading | None = None  # of the user's own pictures


_DIGITS = tuple("0123456789")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

DATASETS: dict[str, DatasetFacts] = {
    facts.name: facts
    for facts in (
        DatasetFacts(
            "digits",
            "UCI optical digits, 8x8, embedded",
            _DIGITS,
            (1, 8, 8),
            16,
            (0.0,),
            (1.0,),
            NO_AUGMENTATION,
        ),
        DatasetFacts("mnist", "MNIST", _DIGITS, (1, 28, 28), 255, (0.0,), (1.0,), NO_AUGMENTATION, "MNIST/raw"),
        DatasetFacts(
            "cifar10",
            "CIFAR-10",
            _CIFAR10,
            (3, 32, 32),
            255,
            (0.4914, 0.4822, 0.4465),
            (0.2023, 0.1994, 0.2010),
            Augmentation(flip=True, padding=2),
            "cifar-10-batches-py",
        ),
        DatasetFacts(
            "tinyimagenet",
            "TinyImageNet-200",
            tuple(f"class {index}" for index in range(200)),  # the files name them; see data/tinyimagenet.py
            (3, 64, 64),
            255,
            (0.4802, 0.4481, 0.3975),
            (0.2302, 0.2265, 0.2262),
            Augmentation(flip=True, padding=4),
            "tiny-imagenet-200",
        ),
    )
}

# The user's own images: what they are is known once they are read.
OWN_DATASETS: dict[str, str] = {"folder": "own pictures, a folder for each class", "npz": "own images in an .npz file"}
