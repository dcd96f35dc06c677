"""What a user may name a model by: a file or run folder, a zoo name, a repository on the Hub. Parsed once, here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from certtool.errors import InputError

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
COMMIT = re.compile(r"^[0-9a-f]{40}$")
PINNED = re.compile(r"^hf://[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}@[0-9a-f]{40}$")
CERTIFICATE = re.compile(r"^certificates/[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.json$")
_PART = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")
_REVISION = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,99}$")
_SPELLINGS = "a .safetensors file, a run folder, `zoo:NAME` or `hf://user/repo[@revision]`"


@dataclass(frozen=True)
class LocalRef:
    path: Path


@dataclass(frozen=True)
class ZooRef:
    name: str


@dataclass(frozen=True)
class HubRef:
    """A repository on the Hub at a revision: a branch or tag, which may move, or a commit, which cannot."""

    repo: str
    revision: str = "main"

    @property
    def commit(self) -> str | None:
        return self.revision if COMMIT.fullmatch(self.revision) else None

    def __str__(self) -> str:
        return f"hf://{self.repo}@{self.revision}"


ModelRef = LocalRef | ZooRef | HubRef


def parse_repo(text: str) -> str:
    """`user/name` as the Hub allows it."""
    parts = text.split("/")
    if len(parts) != 2 or not all(_PART.fullmatch(part) and ".." not in part and "--" not in part for part in parts):
        raise InputError(f"`{text}` is not a repository of the Hub", "write it as `user/name`")
    return text


def parse_hub(text: str) -> HubRef:
    repo, _, revision = text.removeprefix("hf://").partition("@")
    if "@" in text and (not _REVISION.fullmatch(revision) or ".." in revision or "//" in revision):
        raise InputError(f"`{text}` has no revision the Hub could know", "as in `hf://user/repo@v1`")
    return HubRef(parse_repo(repo), revision or "main")


def parse_reference(text: str, known: list[str]) -> ModelRef:
    """`known` are the names of the zoo. A name that is also a path here is refused: nobody should have to guess."""
    if text.startswith("hf://"):
        return parse_hub(text)
    if text.startswith("zoo:"):
        return ZooRef(text.removeprefix("zoo:"))
    path = Path(text)
    if text in known and path.exists():
        raise InputError(f"`{text}` is a model of the zoo and a path here", f"write `zoo:{text}` or `./{text}`")
    if text in known:
        return ZooRef(text)
    if path.exists() or path.suffix or "/" in text:
        return LocalRef(path)
    return _neither(text, known)


def _neither(text: str, known: list[str]) -> ModelRef:
    from certtool.recipe import bundled
    from certtool.recipe.diagnose import did_you_mean

    if text in bundled():
        raise InputError(
            f"`{text}` is a recipe, not a model", f"train it with `certtool train {text}`, then give its run folder"
        )
    raise InputError(f"there is no model `{text}`", did_you_mean(text, known) or f"give {_SPELLINGS}")
