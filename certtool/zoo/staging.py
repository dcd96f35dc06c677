"""The files a shared model consists of, made from a checkpoint and its certificates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from certtool import checkpoint as checkpoints
from certtool.checkpoint import Checkpoint
from certtool.errors import InputError
from certtool.files import disk_errors, read_regular_file, write_atomically
from certtool.safefile import SIZE_LIMIT
from certtool.verification.certificate import Certificate, read_certificate
from certtool.zoo.layout import (
    CONFIG,
    MANIFEST,
    METRICS,
    MODEL,
    RECIPE,
    WITNESSES,
    check_name,
    digest,
    manifest_of,
    size_limit,
)
from certtool.zoo.reference import CERTIFICATE

CERTIFICATES = "certificates"


@dataclass(frozen=True)
class Staged:
    """Every file by its name: nothing that is not named here is ever published."""

    files: dict[str, bytes]

    def __post_init__(self) -> None:
        strange = [name for name in self.files if not check_name(name)]
        if strange:
            raise AssertionError(f"{strange[0]} is not part of a shared model")
        for name, content in self.files.items():  # nobody could fetch it again
            if not 0 < len(content) <= size_limit(name):
                raise InputError(f"`{name}` cannot be shared: it has {len(content):,} bytes")

    def sha256(self, name: str) -> str:
        return digest(self.files[name])

    def with_files(self, more: dict[str, bytes]) -> Staged:
        """And a manifest over all of them."""
        files = {name: content for name, content in (self.files | more).items() if name != MANIFEST}
        return Staged(files | {MANIFEST: manifest_of(files)})

    def write(self, folder: Path) -> None:
        for name, content in self.files.items():
            with disk_errors(folder / name, "create"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, content)


def stage(checkpoint: Checkpoint, certificates: list[Path]) -> Staged:
    """Model, header, recipe, certificates with their witnesses, and the run's metrics where they lie beside it."""
    content = read_regular_file(checkpoint.path, SIZE_LIMIT)
    if digest(content) != checkpoint.sha256:
        raise InputError(f"`{checkpoint.path}` changed while it was read")
    header = checkpoint.header
    files = {
        MODEL: content,
        CONFIG: (json.dumps(header.model_dump(by_alias=True), indent=1) + "\n").encode(),
        RECIPE: header.recipe.encode(),
    }
    for path in certificates:
        for name, content in _certificate(path).items():
            if files.setdefault(name, content) != content:
                raise InputError(f"two certificates bring a file called `{name}`", "rename one: verify it again")
    metrics = checkpoint.path.with_name(METRICS)
    if checkpoint.path.name == checkpoints.MODEL_FILE and metrics.is_file():
        if metrics.is_symlink():  # in a folder from elsewhere it could lead to anything of the user's
            raise InputError(f"`{metrics}` is a link, and what it leads to would be published", "remove it")
        if lines := metrics.read_bytes():
            files[METRICS] = lines
    return Staged({}).with_files(files)


def _certificate(path: Path) -> dict[str, bytes]:
    """Under its own name: a certificate names its file of witnesses, and its sha256 covers that name."""
    name = f"{CERTIFICATES}/{path.name}"
    if not CERTIFICATE.fullmatch(name):
        raise InputError(f"`{path.name}` is no name for a certificate", "letters, digits, `.`, `_` and `-`, then .json")
    files = {name: path.read_bytes()}
    witnesses = read_certificate(path).certificate.witnesses
    if witnesses is not None:
        if not WITNESSES.fullmatch(f"{CERTIFICATES}/{witnesses.file}"):
            raise InputError(f"`{witnesses.file}` is no name for witnesses", "verify again: `--certificate` names them")
        files[f"{CERTIFICATES}/{witnesses.file}"] = path.with_name(witnesses.file).read_bytes()
    return files


def certificate_of(path: Path) -> Certificate:
    return read_certificate(path).certificate
