"""The Hub through huggingface_hub: whom to ask, with which token, what it may answer, what went wrong in a sentence.

An endpoint is trusted with nothing: commits must be 40 hex digits, names must be ours, sizes sane, and text that
reaches a terminal is stripped of control characters.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urljoin, urlsplit

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
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

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
LONGEST = 16 << 20  # bytes of an answer in JSON: two hundred models with all their files are a tenth of it
PATIENCE = 120.0  # seconds for such an answer
MOST_FILES = 200
MOST_REDIRECTIONS = 5
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
        token = os.environ.get("HF_TOKEN", "").strip() or (get_token() if self.url == PUBLIC else None)
        if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
            # Said here, where it is not repeated: the client would quote what it could not send.
            raise OutsideError("the token is none: it has spaces, line breaks or letters no token has", LOGIN)
        return token

    def api(self, token: str | None) -> HfApi:
        # Off huggingface.co there is no xet storage, and the client would not fall back.
        constants.HF_HUB_DISABLE_XET = constants.HF_HUB_DISABLE_XET or self.url != PUBLIC
        return HfApi(endpoint=self.url, token=token or False, library_name="certtool", library_version=__version__)


def check_url(url: str) -> None:
    """Also asked of every redirection: a token or a model never travels in the clear."""
    try:
        parts = urlsplit(url)
        possible = bool(parts.hostname) and not parts.username and (parts.port is None or parts.port > 0)
        safe = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)
    except ValueError:  # a port or an address that is none
        possible = safe = False
    if not safe or not possible:
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


@contextlib.contextmanager
def get(url: str, endpoint: Endpoint, token: str | None, headers: dict[str, str]) -> Iterator[httpx2.Response]:
    """The answer, to be streamed. Every redirection is looked at, and the token goes to its own endpoint only."""
    plainly = {"Accept-Encoding": "identity"}  # what is small on its way stays small here
    for _ in range(MOST_REDIRECTIONS):
        check_url(url)
        known = token is not None and same_origin(url, endpoint.url)
        all_headers = headers | plainly | ({"Authorization": f"Bearer {token}"} if known else {})
        with get_session().stream("GET", url, headers=all_headers, follow_redirects=False, timeout=TIMEOUT) as response:
            if not response.has_redirect_location:
                _raise_for_status(response)
                yield response
                return
            url = _joined(url, response.headers["Location"])
    raise OutsideError("the Hub sends us in circles")


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise OutsideError(f"the Hub sends us to `{plain(location)}`, which is no address") from None


def _raise_for_status(response: httpx2.Response) -> None:
    """The client reads the whole of a refusal, however long: it gets a short copy."""
    if response.is_success:
        return
    if not response.is_error:
        raise OutsideError(f"the Hub answers with status {response.status_code}, which says nothing")
    said = ("x-error-code", "x-error-message", "retry-after")
    headers = {name: response.headers[name] for name in said if name in response.headers}
    hf_raise_for_status(httpx2.Response(response.status_code, headers=headers, request=response.request))


def ask(path: str, endpoint: Endpoint, token: str | None, parameters: Mapping[str, str | list[str]]) -> Any:
    """One answer of the Hub's API. The client itself would read, follow and page for as long as a server likes."""
    headers = build_hf_headers(token=False, library_name="certtool", library_version=__version__)
    url = f"{endpoint.url}/api/{path}?{urlencode(parameters, doseq=True)}"
    content, end = bytearray(), time.monotonic() + PATIENCE
    with get(url, endpoint, token, headers) as response:
        for chunk in response.iter_raw():
            content += chunk
            if len(content) > LONGEST:
                raise OutsideError("the Hub's answer has no end", "is HF_ENDPOINT a Hub?")
            if time.monotonic() > end:
                raise httpx2.ReadTimeout("the answer takes too long")
    return understood(lambda: json.loads(content))


def patiently(call: Callable[[], T]) -> T:
    """Again, after a pause, what a busy server refused; a server that cannot be reached at all is told at once."""
    for pause in PAUSES:
        try:
            return understood(call)
        except HfHubHTTPError as error:
            if status(error) not in RETRIED:
                raise
            time.sleep(wait_for(error, pause))
    return understood(call)


def understood(call: Callable[[], T]) -> T:
    """The client trusts what it reads: a page instead of JSON, or JSON of another shape, fails deep inside it."""
    try:
        return call()
    except (HFValidationError, HfHubHTTPError):  # some of these are ValueErrors too
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise OutsideError(
            f"the server does not answer as a Hub does ({type(error).__name__})", "is HF_ENDPOINT a Hub?"
        ) from error


def wait_for(error: HfHubHTTPError, pause: float) -> float:
    """The server's own wish where it has one, within reason."""
    wish = error.response.headers.get("Retry-After", "") if error.response is not None else ""
    return min(max(float(wish), pause), 30.0) if wish.isdecimal() else pause


def status(error: HfHubHTTPError) -> int:
    return error.response.status_code if error.response is not None else 0


class _Plainly(logging.Filter):
    """The client logs the header X-HF-Warning and failures as they come, straight to the terminal."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = plain(record.getMessage(), 500), ()
        return True


for _handler in logging.getLogger("huggingface_hub").handlers:
    _handler.addFilter(_Plainly())


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
