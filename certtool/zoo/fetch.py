"""Fetch a model from the Hub: resolve, list, stream, compare, load strictly, and only then move it to where models are.

Nothing partial is ever where a model is looked for. What arrived before a kill is kept aside and gone on from.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

from certtool import checkpoint
from certtool.errors import CertToolError, InputError, OutsideError
from certtool.files import disk_errors
from certtool.verification import read_certificate
from certtool.zoo.cache import Cache, cache_folder
from certtool.zoo.download import download
from certtool.zoo.endpoint import Endpoint
from certtool.zoo.layout import MANIFEST, NEEDED, ModelFolder, check_folder, file_digest, read_manifest
from certtool.zoo.listing import Listing, RemoteFile, listing
from certtool.zoo.reference import HubRef
from certtool.zoo.refusals import Unreachable, sentences

Progress = Callable[[int, int], None]  # bytes done, bytes in all


def silent(done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Fetched:
    """A checked model folder, and the commit it is."""

    folder: ModelFolder
    ref: HubRef
    note: str | None = None  # what the user should know: that the network was not asked


def fetch(ref: HubRef, progress: Progress = silent) -> Fetched:
    """From the cache where the commit is known to be there; else from the Hub into the cache."""
    endpoint = Endpoint.from_environment()
    cache = Cache(cache_folder(), endpoint.host)
    if ref.commit is not None and cache.model(ref.repo, ref.commit).is_dir():
        return Fetched(_cached(cache, ref.repo, ref.commit), ref)
    try:
        found = listing(ref, endpoint)
    except Unreachable as error:
        known = cache.known_commit(ref)
        if known is None or not cache.model(ref.repo, known).is_dir():
            raise
        note = f"{error}; going on with commit {known[:12]} of {ref.repo}, fetched before"
        return Fetched(_cached(cache, ref.repo, known), HubRef(ref.repo, known), note)
    if not cache.model(ref.repo, found.commit).is_dir():
        _into_cache(found, endpoint, cache, progress)
    cache.remember(ref, found.commit)
    return Fetched(_cached(cache, ref.repo, found.commit), found.ref)


def _cached(cache: Cache, repo: str, commit: str) -> ModelFolder:
    path = cache.model(repo, commit)
    try:
        return check_folder(path)
    except InputError as error:
        raise OutsideError(f"the cached copy of {repo} is damaged: {error}", f"remove `{path}` and try again") from None


def _into_cache(found: Listing, endpoint: Endpoint, cache: Cache, progress: Progress) -> None:
    target, incoming = cache.model(found.repo, found.commit), cache.incoming(found.repo, found.commit)
    with disk_errors(incoming, "create"):
        incoming.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(incoming.with_name(f"{found.commit}.lock")):
        if target.is_dir():  # somebody else was quicker
            return
        retrieve(found, endpoint, incoming, progress)
        with disk_errors(target):
            os.replace(incoming, target)


def retrieve(found: Listing, endpoint: Endpoint, folder: Path, progress: Progress = silent) -> ModelFolder:
    """All files of a commit into `folder`, compared with the manifest, and the model loaded from them."""
    names = {file.name for file in found.files}
    for name in NEEDED:
        if name not in names:
            raise OutsideError(f"{found.repo} is not a certtool model: it has no `{name}`")
    with disk_errors(folder, "create"):
        folder.mkdir(parents=True, exist_ok=True)
    total = sum(file.size for file in found.files)
    done = sum(_arrived(folder, file) for file in found.files)
    _check_space(folder, total - done)
    progress(done, total)

    def arrived(count: int) -> None:
        nonlocal done
        done += count
        progress(min(done, total), total)

    with sentences(found.repo, endpoint):
        manifest_first = sorted(found.files, key=lambda file: (file.name != MANIFEST, file.size))
        for file in manifest_first:
            _retrieve_file(found, file, folder, endpoint, arrived)
    return _checked(found, folder)


def _retrieve_file(
    found: Listing, file: RemoteFile, folder: Path, endpoint: Endpoint, arrived: Callable[[int], None]
) -> None:
    """The sha256 decides. A part that was kept may be of something else: one more time from nothing, then no more."""
    expected = _expected(file, folder)
    target = folder / file.name
    with disk_errors(target, "create"):
        if target.parent != folder and target.parent.is_symlink():
            target.parent.unlink()
        target.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        with disk_errors(target, "replace"):
            if target.is_symlink() or (target.exists() and target.stat().st_size > file.size):
                target.unlink()  # what is written goes here, never to where a link leads
        download(found, file, target, endpoint, arrived)
        if expected is None or file_digest(target) == expected:
            return
        target.unlink()
    raise OutsideError(
        f"`{file.name}` of {found.repo} does not have the sha256 that was promised; nothing was kept",
        "the file is damaged on its way or on the Hub: try again later, and tell its owner",
    )


def _expected(file: RemoteFile, folder: Path) -> str | None:
    """What the manifest says; for the manifest itself, whatever the listing says."""
    if file.name == MANIFEST:
        return file.sha256
    try:
        entry = read_manifest(folder / MANIFEST).files.get(file.name)
    except InputError as error:
        (folder / MANIFEST).unlink(missing_ok=True)
        raise OutsideError(f"what the Hub sends is no certtool model: {error}") from None
    if entry is None:
        raise OutsideError(f"`{file.name}` is not in the manifest")
    if entry.bytes != file.size or file.sha256 not in (None, entry.sha256):
        raise OutsideError(f"manifest and Hub do not agree on `{file.name}`", "the manifest is wrong: tell its owner")
    return entry.sha256


def _checked(found: Listing, folder: Path) -> ModelFolder:
    """Whole, loadable, and proven of this very file; else nothing of it is kept."""
    try:
        checked = check_folder(folder)
        model = checkpoint.load(checked.model)
        for file in checked.certificates:
            said = read_certificate(file).certificate.model.sha256
            if said != model.sha256:
                raise InputError(f"the certificate `{file.name}` is of another model")
        return checked
    except CertToolError as error:
        shutil.rmtree(folder, ignore_errors=True)
        # The folder's own path would only confuse: it is gone.
        reason = str(error).replace(f"{folder}{os.sep}", "")
        raise OutsideError(f"what {found.repo} holds is no certtool model: {reason}; nothing was kept") from None


def _arrived(folder: Path, file: RemoteFile) -> int:
    path = folder / file.name
    return path.stat().st_size if path.is_file() else 0


def _check_space(folder: Path, total: int) -> None:
    free = shutil.disk_usage(folder).free
    if total > free:
        raise OutsideError(
            f"the model needs {total / 1e6:,.0f} MB, `{folder}` has {free / 1e6:,.0f} MB left",
            "free some space, or point CERTTOOL_CACHE elsewhere",
        )


def copy_to(folder: ModelFolder, out: Path) -> Path:
    """A copy of the whole model folder, whole or not at all."""
    if not out.name or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise InputError(f"`{out}` exists already", "choose a new folder")
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copytree(folder.path, temporary)
            os.replace(temporary, out)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return out
