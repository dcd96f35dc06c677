"""From what a user typed to a model file on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from certtool.errors import CertToolError, InputError, OutsideError
from certtool.zoo.fetch import Progress, fetch, silent
from certtool.zoo.layout import ModelFolder, check_folder, file_digest
from certtool.zoo.records import Record, find_record, zoo_folder
from certtool.zoo.reference import HubRef, LocalRef, ZooRef, parse_hub, parse_reference

Note = Callable[[str], None]


def quiet(text: str) -> None:
    pass


class Mismatch(OutsideError):
    """A source was reached, and what it holds is not what the record says."""


@dataclass(frozen=True)
class Found:
    """The model folder of a record, and the source that had it."""

    folder: ModelFolder
    source: str


def resolve(reference: str, progress: Progress = silent, note: Note = quiet) -> Path:
    """A REF to the path of its model: a file, a run folder, a zoo model or a repository of the Hub."""
    ref = parse_reference(reference, [file.stem for file in zoo_folder().glob("*.toml")])
    if isinstance(ref, LocalRef):
        return ref.path
    if isinstance(ref, ZooRef):
        return obtain(find_record(ref.name), progress, note).folder.model
    return _from_hub(ref, progress, note).model


def obtain(record: Record, progress: Progress = silent, note: Note = quiet) -> Found:
    """The first source of a record that can be reached, with the sha256 the record names."""
    errors: dict[str, CertToolError] = {}
    for source in record.sources:
        try:
            return Found(_from(source, record, progress, note), source)
        except CertToolError as error:
            errors[source] = error
    reasons = "; ".join(f"{source}: {error}" for source, error in errors.items())
    hint = f"train it again: `{reproduce(record)}`"
    if all(isinstance(error, OutsideError) for error in errors.values()):
        raise OutsideError(f"none of the sources of `{record.name}` can be reached: {reasons}", hint)
    raise Mismatch(f"no source of `{record.name}` has what its record says: {reasons}", hint)


def reproduce(record: Record) -> str:
    """The command that trains the model again."""
    overrides = [f"seed={record.recipe.seed}", *record.recipe.set]
    return f"certtool train {record.recipe.name} " + " ".join(f"--set {text}" for text in overrides)


def _from(source: str, record: Record, progress: Progress, note: Note) -> ModelFolder:
    if source == "zoo":
        path = zoo_folder() / record.name
        if not path.is_dir():
            raise OutsideError("the folder is not part of this installation")
        folder = check_folder(path)
    else:
        folder = _from_hub(parse_hub(source), progress, note)
    for file, expected in ((folder.model, record.model.sha256), (folder.path / record.certificate.file,
                                                                 record.certificate.sha256)):  # fmt: skip
        if not file.is_file() or file_digest(file) != expected:
            raise InputError(f"`{file.name}` does not have the sha256 of the record")
    return folder


def _from_hub(ref: HubRef, progress: Progress, note: Note) -> ModelFolder:
    fetched = fetch(ref, progress)
    if fetched.note is not None:
        note(fetched.note)
    return fetched.folder
