"""The one door to torchvision, with the cure for a build whose compiled operators do not match torch."""

from __future__ import annotations

import importlib
from typing import Any

import torch

_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def torchvision_datasets() -> Any:
    """`torchvision.datasets`.

    A torchvision built for CUDA beside a CPU-only torch cannot load its compiled operators and then fails at import
    because they are not even declared. Nothing here calls them, so declaring them is enough; where the import works
    as it is, nothing is touched.
    """
    try:
        return importlib.import_module("torchvision.datasets")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", _SIGNATURE)
    return importlib.import_module("torchvision.datasets")
