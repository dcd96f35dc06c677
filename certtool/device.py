"""Which device does the arithmetic."""

from __future__ import annotations

import torch

from certtool.errors import InputError, OutsideError

CHOICES = ("auto", "cpu", "cuda", "mps")


def device_for(name: str) -> torch.device:
    """`auto` takes the first accelerator there is."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, available in there.items() if available))
    if name not in there:
        raise InputError(f"`{name}` is not a device", f"one of {', '.join(CHOICES)}")
    if not there[name]:
        raise OutsideError(f"torch {torch.__version__} finds no {name} device here", "use `--device cpu`")
    return torch.device(name)
