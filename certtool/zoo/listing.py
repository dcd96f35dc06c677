"""What a repository holds: its commit must be 40 hex digits, the names of its files ours, their sizes sane."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from huggingface_hub.errors import HfHubHTTPError

from certtool.errors import OutsideError
from certtool.plain_text import plain
from certtool.zoo.endpoint import Endpoint
from certtool.zoo.hub import ask, patiently
from certtool.zoo.layout import check_name, size_limit
from certtool.zoo.reference import COMMIT, HubRef
from certtool.zoo.refusals import sentences, status, understood

MOST_FILES = 200


@dataclass(frozen=True)
class RemoteFile:
    name: str
    size: int
    sha256: str | None  # known for large files only


@dataclass(frozen=True)
class Listing:
    """What a repository holds at one commit, and the token it took to see it."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]
    token: str | None

    @property
    def ref(self) -> HubRef:
        return HubRef(self.repo, self.commit)


def listing(ref: HubRef, endpoint: Endpoint) -> Listing:
    """The commit of a revision and our files there: asked for anonymously first, with the token if that is refused."""
    with sentences(ref.repo, endpoint):
        try:
            return _listing(ref, endpoint, None)
        except HfHubHTTPError as error:
            token = endpoint.token()
            if status(error) not in (401, 403, 404) or token is None:
                raise
            return _listing(ref, endpoint, token)


def _listing(ref: HubRef, endpoint: Endpoint, token: str | None) -> Listing:
    path = f"models/{ref.repo}/revision/{quote(ref.revision, safe='')}"
    info = patiently(lambda: ask(path, endpoint, token, {"blobs": "true"}))
    return understood(lambda: _listed(ref, info, token))


def _listed(ref: HubRef, info: Any, token: str | None) -> Listing:
    commit = checked_commit(info["sha"])
    if ref.commit not in (None, commit):
        raise OutsideError(f"asked for commit {ref.commit} of {ref.repo}, the Hub answered with {commit}")
    siblings = info["siblings"]
    if len(siblings) > MOST_FILES:
        raise OutsideError(f"{ref.repo} holds {len(siblings)} files; a certified model has about ten")
    files = [_file(ref, s["rfilename"], s.get("size"), (s.get("lfs") or {}).get("sha256")) for s in siblings]
    return Listing(ref.repo, commit, tuple(file for file in files if file is not None), token)


def _file(ref: HubRef, name: Any, size: Any, sha256: Any) -> RemoteFile | None:
    """None for what a repository may hold but a model does not need."""
    if name in (".gitattributes", ".gitignore"):
        return None
    if not check_name(name):
        raise OutsideError(f"{ref.repo} holds a file that is not part of a certtool model: `{plain(name)}`")
    if not isinstance(size, int) or not 0 < size <= size_limit(name):
        raise OutsideError(f"{ref.repo}: `{name}` cannot have the size {plain(str(size))}")
    if sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise OutsideError(f"{ref.repo}: `{name}` has no sha256 but `{plain(sha256)}`")
    return RemoteFile(name, size, sha256)


def checked_commit(commit: object) -> str:
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise OutsideError(f"the Hub names a commit that is none: `{plain(str(commit))}`")
    return commit
