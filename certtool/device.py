"""Which device does the arithmetic."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

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


def fits(split: HasImages, device: torch.device) -> bool:
    """Whether a data set can stay on the device beside the network: half of what is free there. Else batches travel."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return split.images.numel() * split.images.element_size() < free / 2


def in_layout(model: nn.Module, layout: torch.memory_format) -> nn.Module:
    """The same network, its kernels in another order of memory."""
    return model.to(memory_format=layout)  # type: ignore[call-overload, no-any-return]  # torch's stubs forget it


class HasImages(Protocol):
    @property
    def images(self) -> torch.Tensor: ...
