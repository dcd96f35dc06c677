"""One file of the Hub into one file here: streamed, resumed where it broke off, never longer than it should be."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import httpx2
from huggingface_hub.errors import HfHubHTTPError

from certtool.errors import OutsideError
from certtool.files import disk_errors
from certtool.plain_text import plain
from certtool.zoo import hub
from certtool.zoo.endpoint import Endpoint
from certtool.zoo.listing import Listing, RemoteFile, checked_commit
from certtool.zoo.refusals import status

NOT_SATISFIABLE = 416
PROGRESS = 1 << 14  # bytes: a server that breaks off sooner, again and again, is not worth its pauses
WINDOW, SLOWEST = 60.0, 100  # seconds, and bytes a second: a line slower than this has stopped
_PLAIN_ETAG = re.compile(r'^(W/)?"?[A-Za-z0-9+=_.:-]{1,200}"?$')
Progress = Callable[[int], None]  # bytes that arrived


def download(listing: Listing, file: RemoteFile, target: Path, endpoint: Endpoint, progress: Progress) -> None:
    """What is missing of `target`. Each time more is here than ever before the patience starts anew."""
    url = f"{endpoint.url}/{listing.repo}/resolve/{listing.commit}/{quote(file.name)}"
    token, failures, most = listing.token, 0, _size(target)
    while _size(target) < file.size:
        try:
            _append(url, token, listing, file, target, endpoint, progress)
        except (httpx2.TransportError, HfHubHTTPError) as error:
            code = status(error) if isinstance(error, HfHubHTTPError) else None
            if code in (401, 403) and token is None and endpoint.token() is not None:
                token = endpoint.token()  # a gated repository is listed for everybody, its files are not
                continue
            if code == NOT_SATISFIABLE:  # what is here does not fit what is there: from the beginning
                target.unlink(missing_ok=True)
            elif code is not None and code not in hub.RETRIED:
                raise
            failures = 0 if _size(target) >= most + PROGRESS else failures + 1
            most = max(most, _size(target))
            if failures >= len(hub.PAUSES):
                raise
            pause = hub.PAUSES[failures]
            time.sleep(hub.wait_for(error, pause) if isinstance(error, HfHubHTTPError) else pause)


def _size(target: Path) -> int:
    return target.stat().st_size if target.exists() else 0


def _append(
    url: str,
    token: str | None,
    listing: Listing,
    file: RemoteFile,
    target: Path,
    endpoint: Endpoint,
    progress: Progress,
) -> None:
    """One request: from where the file ends."""
    have = _size(target)
    with hub.get(url, endpoint, token, {"Range": f"bytes={have}-"} if have else {}) as response:
        _check_headers(response, listing, file, have)
        _write(response, file, target, have if response.status_code == 206 else 0, progress)


def _check_headers(response: httpx2.Response, listing: Listing, file: RemoteFile, have: int) -> None:
    etag = response.headers.get("ETag")
    if etag is not None and not _PLAIN_ETAG.fullmatch(etag):
        raise OutsideError(f"the Hub answers for `{file.name}` with a strange ETag: `{plain(etag)}`")
    commit = response.headers.get("X-Repo-Commit")
    if commit is not None and checked_commit(commit) != listing.commit:
        raise OutsideError(f"asked for commit {listing.commit}, the Hub answered with {commit}")
    kind = response.headers.get("Content-Type", "")
    if kind.startswith("text/html"):
        raise OutsideError(f"the Hub answers for `{file.name}` with a web page", "is a login page in between?")
    if response.status_code == 206:
        start = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
        if start is None or int(start[1]) != have:
            raise OutsideError(f"the Hub sends another part of `{file.name}` than was asked for")


def _write(response: httpx2.Response, file: RemoteFile, target: Path, start: int, progress: Progress) -> None:
    # Unbuffered, in the pieces that arrive: what a broken connection delivered is kept.
    with disk_errors(target), target.open("ab", buffering=0) as out:
        out.truncate(start)
        since, there = time.monotonic(), start
        for chunk in response.iter_raw():
            start += len(chunk)
            if (now := time.monotonic()) > since + WINDOW:
                if start - there < SLOWEST * WINDOW and start < file.size:
                    raise httpx2.ReadTimeout(f"less than {SLOWEST} bytes a second arrive")
                since, there = now, start
            if start > file.size:
                raise OutsideError(f"the Hub sends more of `{file.name}` than the {file.size:,} bytes it listed")
            out.write(chunk)
            progress(len(chunk))
    if start < file.size:
        raise httpx2.RemoteProtocolError(f"the connection ended {file.size - start:,} bytes early")
