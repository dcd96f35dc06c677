"""What goes wrong with the Hub, in a sentence. Nothing of its answers reaches a terminal but plain text."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import httpx2
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
from certtool.zoo.endpoint import LOGIN, Endpoint

T = TypeVar("T")


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


def status(error: HfHubHTTPError) -> int:
    return error.response.status_code if error.response is not None else 0


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


class _Plainly(logging.Filter):
    """The client logs the header X-HF-Warning and failures as they come, straight to the terminal."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = plain(record.getMessage(), 500), ()
        return True


for _handler in logging.getLogger("huggingface_hub").handlers:
    _handler.addFilter(_Plainly())
