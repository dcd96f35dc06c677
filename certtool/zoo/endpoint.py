"""The Hub to ask: its address, which must be one to trust, and the token, which goes nowhere else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import HfApi, constants, get_session, get_token

from certtool.errors import OutsideError
from certtool.plain_text import plain
from certtool.version import __version__

PUBLIC = "https://huggingface.co"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


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


def same_origin(one: str, other: str) -> bool:
    return urlsplit(one)[:2] == urlsplit(other)[:2]


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
