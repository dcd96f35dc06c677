"""The same words as the command line, from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from certtool import inspection, recipe, verification
from certtool.attack import AttackSettings
from certtool.checkpoint import Checkpoint, load_images
from certtool.checkpoint import load as load_checkpoint
from certtool.device import device_for
from certtool.epsilon import Epsilon
from certtool.errors import InputError
from certtool.inspection import Inspection, Statistics
from certtool.training import Event, Finished, new_run, stop_on_signal
from certtool.verification import Grade, LadderSettings, Method, VerifyReport
from certtool.zoo.resolve import resolve

EpsLike = str | float | Epsilon
DEFAULT_ATTACK = AttackSettings()


def load(reference: str | Path) -> Checkpoint:
    """A model from its .safetensors file, run folder, zoo name or `hf://user/repo[@revision]`, in evaluation mode."""
    path = reference if isinstance(reference, Path) else resolve(reference)
    return load_checkpoint(path)


def train(
    reference: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    data: str | Path | None = None,
    download: bool = False,
    device: str = "auto",
    on_event: Callable[[Event], None] = lambda event: None,
) -> Checkpoint:
    """Train a recipe (a path or a bundled name) and return the model. `overrides` are `{"train.epochs": 5}`.

    `on_event` hears what the command line shows. Ctrl-C saves the run and raises `certtool.errors.Interrupted`, whose
    hint says how to go on.
    """
    chosen = recipe.load(reference, recipe.overrides_from(overrides or {}))
    trainer = new_run(
        chosen, _path(out), overwrite=overwrite, data=_path(data), download=download, device=device_for(device)
    )
    with stop_on_signal() as stopped:
        for event in trainer.run(stopped):
            on_event(event)
            if isinstance(event, Finished):
                return load_checkpoint(event.model)
    raise AssertionError("a run ends with Finished or an exception")


def verify(
    model: Checkpoint | str | Path | nn.Module,
    eps: EpsLike | Sequence[EpsLike] | None = None,
    *,
    data: tuple[Tensor, Tensor] | str | Path | None = None,
    images: int | None = None,
    method: Method = "auto",
    arithmetic: Grade = "rigorous",
    attack: AttackSettings | None = DEFAULT_ATTACK,
    time_limit: float | None = None,
    device: str = "auto",
) -> VerifyReport:
    """Prove how many images keep their label under every perturbation of size eps (default: the model's).

    A checkpoint, or the path of one, is verified on its own test set; `data` may say where that lies. Your own
    `nn.Module`, in evaluation mode, comes with `data=(x, y)`: images in [0, 1] and labels.
    """
    settings = LadderSettings(method=method, arithmetic=arithmetic, attack=attack, time_limit=time_limit)
    if isinstance(model, nn.Module):
        if not isinstance(data, tuple) or eps is None:
            raise InputError(
                "your own network needs images and a radius", 'as in `verify(model, eps="8/255", data=(x, y))`'
            )
        x, labels = data
        return verification.verify_network(model, x[:images], labels[:images], _radii(eps), settings=settings)
    checkpoint = model if isinstance(model, Checkpoint) else load(model)
    radii = [checkpoint.eps] if eps is None else _radii(eps)
    if isinstance(data, tuple):
        x, labels = data
        return verification.verify_network(checkpoint.model, x[:images], labels[:images], radii, settings=settings)
    split = load_images(checkpoint, "test", _path(data))
    place = device_for(device)
    return verification.verify(checkpoint, split, radii, count=images, settings=settings, device=place)


def _radii(eps: EpsLike | Sequence[EpsLike]) -> list[Epsilon]:
    return [epsilon(value) for value in ([eps] if isinstance(eps, EpsLike) else eps)]


def inspect(
    model: nn.Module | Checkpoint, x: Tensor, eps: EpsLike, *, statistics: Statistics = "running"
) -> Inspection:
    """Per-layer widths, growth, difference gain and ReLU states over a batch of images in [0, 1]."""
    network = model.model if isinstance(model, Checkpoint) else model
    title = model.header.name if isinstance(model, Checkpoint) else type(model).__name__
    return inspection.inspect(network, x, epsilon(eps), statistics=statistics, title=title)


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


def epsilon(value: EpsLike) -> Epsilon:
    """`"8/255"`, a float (its shortest spelling counts), or a ready Epsilon."""
    return value if isinstance(value, Epsilon) else Epsilon.parse(str(value))
