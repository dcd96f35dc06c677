"""The Hub through huggingface_hub: whom to ask, with which token, what it may answer, what went wrong in a sentence.

An endpoint is trusted with nothing: commits must be 40 hex digits, names must be ours, sizes sane, and text that
reaches a terminal is stripped of control characters.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from json import JSONDecodeError
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import HfApi, constants, get_session, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from certtool.errors import InputError, OutsideError
from certtool.plain_text import plain
from certtool.version import __version__
from certtool.zoo.layout import check_name, size_limit
from certtool.zoo.reference import COMMIT, HubRef

PUBLIC = "https://huggingface.co"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between attempts; a server that restarts is back within them
RETRIED = (408, 429, 500, 502, 503, 504)
TIMEOUT = 30.0
MOST_FILES = 200
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
T = TypeVar("T")


@dataclass(frozen=True)
class Endpoint:
    """A Hub we are willing to talk to: https, or this very machine."""

    url: str

    @classmethod
    def from_environment(cls) -> Endpoint:
        url = os.environ.get("HF_ENDPOINT", "").rstrip("/") or PUBLIC
        check_url(url)
        return cls(url)

    @property
    def host(self) -> str:
        """As the name of a folder."""
        parts = urlsplit(self.url)
        return f"{parts.hostname}-{parts.port}" if parts.port else str(parts.hostname)

    def token(self) -> str | None:
        """HF_TOKEN goes where the same environment points; the stored login only where it was made for."""
        given = os.environ.get("HF_TOKEN", "").strip()
        if given:
            return given
        return get_token() if self.url == PUBLIC else None

    def api(self, token: str | None) -> HfApi:
        # Off huggingface.co there is no xet storage, and the client would not fall back.
        constants.HF_HUB_DISABLE_XET = constants.HF_HUB_DISABLE_XET or self.url != PUBLIC
        return HfApi(endpoint=self.url, token=token or False, library_name="certtool", library_version=__version__)


def check_url(url: str) -> None:
    """Also asked of every redirection: a token or a model never travels in the clear."""
    parts = urlsplit(url)
    try:
        port_is_a_number = parts.port is None or parts.port > 0
    except ValueError:
        port_is_a_number = False
    safe = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)
    if not safe or not port_is_a_number or parts.username or not parts.hostname:
        raise OutsideError(f"`{plain(url)}` is not a Hub to trust", "an endpoint is https, or http on this machine")


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
    api = endpoint.api(token)
    info = patiently(lambda: api.model_info(ref.repo, revision=ref.revision, files_metadata=True, timeout=TIMEOUT))
    commit = checked_commit(info.sha)
    if ref.commit not in (None, commit):
        raise OutsideError(f"asked for commit {ref.commit} of {ref.repo}, the Hub answered with {commit}")
    siblings = info.siblings or []
    if len(siblings) > MOST_FILES:
        raise OutsideError(f"{ref.repo} holds {len(siblings)} files; a certified model has about ten")
    files = [_file(ref, s.rfilename, s.size, None if s.lfs is None else s.lfs.sha256) for s in siblings]
    return Listing(ref.repo, commit, tuple(file for file in files if file is not None), token)


def _file(ref: HubRef, name: str, size: int | None, sha256: str | None) -> RemoteFile | None:
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


def patiently(call: Callable[[], T]) -> T:
    """Again, after a pause, what a busy server refused; a server that cannot be reached at all is told at once."""
    for pause in PAUSES:
        try:
            return _understood(call)
        except HfHubHTTPError as error:
            if status(error) not in RETRIED:
                raise
            time.sleep(wait_for(error, pause))
    return _understood(call)


def _understood(call: Callable[[], T]) -> T:
    """The client trusts what it reads: a page instead of JSON, or JSON of another shape, fails deep inside it."""
    try:
        return call()
    except (JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise OutsideError(
            f"the server does not answer as a Hub does ({type(error).__name__})", "is HF_ENDPOINT a Hub?"
        ) from error


def wait_for(error: HfHubHTTPError, pause: float) -> float:
    """The server's own wish where it has one, within reason."""
    wish = error.response.headers.get("Retry-After", "") if error.response is not None else ""
    return min(max(float(wish), pause), 30.0) if wish.isdecimal() else pause


def status(error: HfHubHTTPError) -> int:
    return error.response.status_code if error.response is not None else 0


@contextlib.contextmanager
def token_stays_home(endpoint: Endpoint) -> Iterator[None]:
    """While we publish: a server may name any address for its LFS answers, and the client would send the token."""

    def strip(request: httpx2.Request) -> None:
        if not same_origin(str(request.url), endpoint.url):
            request.headers.pop("Authorization", None)

    session = get_session()
    hooks = session.event_hooks
    session.event_hooks = hooks | {"request": [*hooks.get("request", []), strip]}
    try:
        yield
    finally:
        session.event_hooks = hooks


def same_origin(one: str, other: str) -> bool:
    return urlsplit(one)[:2] == urlsplit(other)[:2]


@contextlib.contextmanager
def sentences(repo: str, endpoint: Endpoint) -> Iterator[None]:
    """What the client raises, as what happened and what to do. Exit 3, except where the name itself is wrong."""
    try:
        yield
    except HFValidationError as error:
        raise InputError(f"`{repo}` is not a repository of the Hub: {plain(str(error))}") from None
    except OfflineModeIsEnabled:
        raise Unreachable("HF_HUB_OFFLINE is set, and this needs the Hub", "unset it") from None
    except (HfHubHTTPError, EntryNotFoundError) as error:
        raise _refusal(error, repo, endpoint) from None
    except RuntimeError as error:  # how the client reports a failed upload of a large file
        if not isinstance(error.__cause__, HfHubHTTPError | httpx2.HTTPError):
            raise
        raise _failure(error.__cause__, repo, endpoint) from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise _failure(error, repo, endpoint) from None


class Unreachable(OutsideError):
    """No answer at all: what is in the cache has to do."""


def _failure(error: Exception, repo: str, endpoint: Endpoint) -> OutsideError:
    if isinstance(error, HfHubHTTPError):
        return _refusal(error, repo, endpoint)
    reason = plain(str(error)) or type(error).__name__
    return Unreachable(f"cannot reach {endpoint.url}: {reason}", "check the network and HF_ENDPOINT")


def _refusal(error: Exception, repo: str, endpoint: Endpoint) -> OutsideError:
    code = status(error) if isinstance(error, HfHubHTTPError) else 0
    if isinstance(error, GatedRepoError):
        return OutsideError(f"{repo} is gated", f"ask for access at {endpoint.url}/{repo}, then {LOGIN}")
    if isinstance(error, RepositoryNotFoundError):
        return OutsideError(f"there is no repository `{repo}` on {endpoint.url}, or it is private", LOGIN)
    if isinstance(error, RevisionNotFoundError):
        return OutsideError(f"{repo} has no such revision", f"its branches and tags: {endpoint.url}/{repo}")
    if isinstance(error, EntryNotFoundError):
        return OutsideError(f"{repo} lacks a file that it listed", "try again; somebody may be changing it")
    meanings = {
        401: ("the Hub does not accept the token", LOGIN),
        403: (f"the token may not do this to {repo}", "it needs the role `write` for that user or organisation"),
        404: (f"{endpoint.url} knows nothing of this about {repo}", "is HF_ENDPOINT a Hub?"),
        409: (f"{repo} already has that", "choose another name or tag"),
        412: (f"{repo} was changed by somebody else in the meantime", "look at it, then run the command again"),
        429: ("the Hub was asked too often", f"wait a few minutes; with a token more is allowed: {LOGIN}"),
    }
    if code in meanings:
        return OutsideError(*meanings[code])
    if code >= 500:
        return OutsideError(f"the Hub has trouble of its own (status {code})", "try again later")
    return OutsideError(f"the Hub refused (status {code}): {plain(str(error).strip().splitlines()[0])}")
