"""safetensors files read with suspicion and written deterministically.

The format itself accepts duplicate names, foreign types, control characters and headers of any size; a file that comes
from elsewhere is checked here before any tensor is made of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from certtool.errors import InputError
from certtool.files import read_regular_file, reading
from certtool.json_text import no_duplicates
from certtool.plain_text import plain

KEY = "certtool"  # one metadata key: with two or more the order of bytes is not fixed
HEADER_LIMIT = 1_000_000
SIZE_LIMIT = 16 << 30
_NAME = re.compile(r"[A-Za-z0-9_.:#-]{1,200}")
_HINT = "a certtool model is a .safetensors file written by `certtool train` or `certtool zoo`"


@dataclass(frozen=True)
class SafeFile:
    """A file's tensors, our JSON header, and the sha256 of its bytes."""

    header: dict[str, Any]
    tensors: dict[str, Tensor]
    sha256: str


def encode(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> bytes:
    """Equal content gives equal bytes."""
    ordered = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    return safetensors.torch.save(ordered, {KEY: json.dumps(header, sort_keys=True, separators=(",", ":"))})


def read(path: Path) -> SafeFile:
    """The file's content, or one sentence on why it cannot be what it should."""
    with reading(path):
        content = read_regular_file(path, SIZE_LIMIT)
    header = _header(content, path)
    try:
        tensors = safetensors.torch.load(content)
    except Exception as error:  # safetensors raises its own type and several of Python's
        raise InputError(f"`{path}` is damaged: {plain(str(error))}", _HINT) from None
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise InputError(
                f"`{path}`: the tensor `{name}` holds NaN or infinite values", "nothing can be proven with it"
            )
    return SafeFile(header, tensors, hashlib.sha256(content).hexdigest())


def _header(content: bytes, path: Path) -> dict[str, Any]:
    if content[:100].lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise InputError(f"`{path}` is a web page, not a model", "download the file itself, not the page that shows it")
    length = int.from_bytes(content[:8], "little") if len(content) >= 8 else 0
    if length < 2 or content[8:9] != b"{":
        raise InputError(f"`{path}` is not a safetensors file", _HINT)
    if length > HEADER_LIMIT:
        raise InputError(f"`{path}` has a header of {length:,} bytes; a certtool model has a few thousand", _HINT)
    if length + 8 > len(content):
        raise InputError(
            f"`{path}` is cut short: its header alone needs {length + 8:,} bytes", "fetch or copy it again"
        )
    try:
        entries = json.loads(content[8 : 8 + length], object_pairs_hook=no_duplicates)
        metadata = entries.pop("__metadata__", {})
        ours = json.loads(metadata[KEY], object_pairs_hook=no_duplicates)
    except KeyError:
        raise InputError(f"`{path}` was not written by certtool: it has no `{KEY}` header", _HINT) from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"`{path}` has a damaged header: {error}", _HINT) from None
    _check_entries(entries, path)
    if not isinstance(ours, dict):
        raise InputError(f"`{path}` has a damaged header: not an object", _HINT)
    return ours


def _check_entries(entries: Mapping[str, Any], path: Path) -> None:
    for name, entry in entries.items():
        if not _NAME.fullmatch(name):
            raise InputError(
                f"`{path}`: the tensor name {ascii(name)[:80]} has characters no tensor of ours has", _HINT
            )
        if not isinstance(entry, dict) or entry.get("dtype") not in ("F32", "F64", "I64"):
            kind = entry.get("dtype") if isinstance(entry, dict) else entry
            raise InputError(
                f"`{path}`: the tensor `{name}` is of type {plain(str(kind), 80)}, not float32",
                "convert it to float32 first",
            )
        if not isinstance(entry.get("shape"), list) or len(entry["shape"]) > 8:
            raise InputError(f"`{path}`: the tensor `{name}` has an impossible shape", _HINT)
