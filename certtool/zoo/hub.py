"""Asking the Hub, which is trusted with nothing: how often, how long, how much it may answer, where it may send us."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlencode, urljoin

import httpx2
from huggingface_hub import get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from certtool.errors import OutsideError
from certtool.plain_text import plain
from certtool.version import __version__
from certtool.zoo.endpoint import Endpoint, check_url, same_origin
from certtool.zoo.refusals import status, understood

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between attempts; a server that restarts is back within them
RETRIED = (408, 429, 500, 502, 503, 504)
TIMEOUT = 30.0
LONGEST = 16 << 20  # bytes of an answer in JSON: two hundred models with all their files are a tenth of it
PATIENCE = 120.0  # seconds for such an answer
MOST_REDIRECTIONS = 5
T = TypeVar("T")


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


def wait_for(error: HfHubHTTPError, pause: float) -> float:
    """The server's own wish where it has one, within reason."""
    wish = error.response.headers.get("Retry-After", "") if error.response is not None else ""
    return min(max(float(wish), pause), 30.0) if wish.isdecimal() else pause
