"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from certtool.errors import CertToolError, InputError, OutsideError


@contextlib.contextmanager
def disk_errors(path: Path, action: str = "write") -> Iterator[None]:
    """Full disks, read-only folders and the like as one sentence."""
    try:
        yield
    except OSError as error:
        raise OutsideError(
            f"cannot {action} `{path}`: {(error.strerror or str(error)).lower()}",
            "free some space or choose another folder",
        ) from error


@contextlib.contextmanager
def reading(path: Path, kind: type[CertToolError] = OutsideError) -> Iterator[None]:
    """A file that is not there or may not be read, as one sentence."""
    try:
        yield
    except OSError as error:
        raise kind(f"cannot read `{path}`: {(error.strerror or str(error)).lower()}") from None


def write_atomically(path: Path, content: bytes) -> None:
    """A reader, or a killed writer's successor, never sees half a file."""
    with whole_file(path) as file:
        file.write(content)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write into; it appears under its name when all is written. Temporary file, fsync, rename."""
    with disk_errors(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        _sync_folder(path.parent)


def read_regular_file(path: Path, limit: int) -> bytes:
    """The whole of a file; a device, a pipe or a giant would never end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"`{path}` is not a file" + (": it is a folder" if stat.S_ISDIR(status.st_mode) else ""))
    if status.st_size > limit:
        raise InputError(f"`{path}` is too large: {status.st_size:,} bytes")
    return path.read_bytes()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _sync_folder(folder: Path) -> None:
    """The rename itself survives a power cut only once the folder is on disk."""
    with contextlib.suppress(OSError):  # some file systems cannot
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
