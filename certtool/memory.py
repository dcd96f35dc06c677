"""Amounts of memory: as a user writes them, and what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from certtool.errors import InputError

if TYPE_CHECKING:
    import torch

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
OWN_GROWTH = 1 << 30  # by how much attack and interval bounds may make the main process grow
SHARE = 0.5  # of what is free, where the user does not say


def parse_memory(text: str) -> int:
    """`4GB`, `500MB` or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise InputError(f"`{text}` is not an amount of memory", "write it as `4GB` or `500MB`")
    return int(float(match[1]) * _UNITS[match[2]])


def free_memory() -> int:
    """Bytes the system could still give out; 4 GB where it does not say."""
    return _field(Path("/proc/meminfo"), "MemAvailable") or 4 << 30


def own_memory() -> int:
    """Bytes this process has resident."""
    return _field(Path("/proc/self/status"), "VmRSS") or 0


def peak_memory(device: torch.device) -> int:
    """The most bytes this process has had, on an accelerator those of its tensors there."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _field(Path("/proc/self/status"), "VmHWM") or 0


def _field(file: Path, name: str) -> int | None:
    try:
        match = re.search(rf"^{name}:\s+(\d+) kB", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if match is None else int(match[1]) * 1024
