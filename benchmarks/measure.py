"""Measuring side by side: every candidate takes a turn, again and again, and medians are compared as ratios."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import certtool
from certtool.bounds.lirpa import installed
from certtool.memory import peak_memory

REPEATS = 7


@dataclass(frozen=True)
class Timing:
    """Medians, in seconds: of the processor over all threads, and of the clock on the wall."""

    cpu: float
    wall: float


def interleaved(
    candidates: Mapping[str, Callable[[], Any]], repeats: int = REPEATS, warm: int = 2
) -> dict[str, Timing]:
    """One turn each, `repeats` times, after turns that compile and touch memory first."""
    for candidate in candidates.values():
        for _ in range(warm):
            candidate()
    taken: dict[str, list[Timing]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, candidate in candidates.items():
            cpu, wall = time.process_time(), time.perf_counter()
            candidate()
            taken[name].append(Timing(time.process_time() - cpu, time.perf_counter() - wall))
    return {name: _medians(rows) for name, rows in taken.items()}


def _medians(rows: list[Timing]) -> Timing:
    return Timing(statistics.median(row.cpu for row in rows), statistics.median(row.wall for row in rows))


def own_peak() -> int:
    """Bytes, the most this process has had."""
    return peak_memory(torch.device("cpu"))


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "bf16_arithmetic": bf16_arithmetic(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "auto_LiRPA": str(installed()),
        "certtool": certtool.__version__,
    }


def bf16_arithmetic() -> bool:
    """Whether this processor computes in bfloat16 itself."""
    flags = Path("/proc/cpuinfo").read_text()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
