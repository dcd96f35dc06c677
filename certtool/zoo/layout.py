"""What the folder of a shared model may hold, by name and size, and the manifest that says it does."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from certtool.errors import InputError
from certtool.files import read_regular_file, reading
from certtool.json_text import parsed
from certtool.zoo.reference import CERTIFICATE

MODEL, CONFIG, RECIPE, CARD, MANIFEST = "model.safetensors", "config.json", "recipe.toml", "README.md", "manifest.json"
METRICS, PICTURE = "metrics.jsonl", "certified.png"
NEEDED = (MODEL, CONFIG, RECIPE, MANIFEST)
WITNESSES = re.compile(r"^certificates/[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.witnesses\.safetensors$")
_LIMITS = {MODEL: 16 << 30, METRICS: 100 << 20, CONFIG: 10 << 20, PICTURE: 10 << 20}
_SMALL, _LARGE = 1 << 20, 200_000_000


def check_name(name: str) -> bool:
    """Whether a file of this name belongs to a shared model."""
    fixed = (MODEL, CONFIG, RECIPE, CARD, MANIFEST, METRICS, PICTURE)
    return name in fixed or bool(CERTIFICATE.fullmatch(name) or WITNESSES.fullmatch(name))


def size_limit(name: str) -> int:
    return _LIMITS.get(name, _LARGE if name.startswith("certificates/") else _SMALL)


class Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    bytes: Annotated[int, Field(ge=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """The sha256 and size of every other file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    schema_: Literal["certtool.manifest/1"] = Field(alias="schema")
    files: dict[str, Entry]


@dataclass(frozen=True)
class ModelFolder:
    """A folder that is what its manifest says."""

    path: Path
    manifest: Manifest

    @property
    def model(self) -> Path:
        return self.path / MODEL

    @property
    def certificates(self) -> list[Path]:
        return [self.path / name for name in sorted(self.manifest.files) if CERTIFICATE.fullmatch(name)]


def manifest_of(files: dict[str, bytes]) -> bytes:
    entries = {name: {"bytes": len(content), "sha256": digest(content)} for name, content in sorted(files.items())}
    return (json.dumps({"schema": "certtool.manifest/1", "files": entries}, indent=1) + "\n").encode()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(path: Path) -> Manifest:
    with reading(path, InputError):  # a folder without it is not what the user, or the Hub, says it is
        content = read_regular_file(path, _SMALL)
    _, manifest = parsed(content, Manifest, path.name, "a manifest")
    strange = [name for name in manifest.files if not check_name(name) or name == MANIFEST]
    if strange:
        raise InputError(f"the manifest names {ascii(strange[0])[:80]}, which is not part of a certtool model")
    return manifest


def check_folder(path: Path) -> ModelFolder:
    """Every file the manifest names, with its size and sha256; none that it does not name."""
    manifest = read_manifest(path / MANIFEST)
    present = {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()} - {MANIFEST}
    for name in sorted(set(NEEDED) - {MANIFEST} - manifest.files.keys()):
        raise InputError(f"the manifest does not name `{name}`", "it is not a whole certtool model")
    if not any(CERTIFICATE.fullmatch(name) for name in manifest.files):
        raise InputError("the manifest names no certificate", "a model without its proof is not part of a zoo")
    for name in sorted(present ^ manifest.files.keys()):
        raise InputError(f"`{name}` is " + ("not in the manifest" if name in present else "missing"))
    for name, entry in manifest.files.items():
        file = path / name
        if file.is_symlink() or file.stat().st_size != entry.bytes or file_digest(file) != entry.sha256:
            raise InputError(f"`{name}` does not have the sha256 that the manifest names")
    return ModelFolder(path, manifest)
