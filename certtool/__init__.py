"""certtool: train, verify, inspect and share certifiably robust image classifiers.

The public API is the list below. It is lazy: `import certtool` imports neither torch nor anything that patches.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from certtool.errors import CertToolError
from certtool.version import __version__

if TYPE_CHECKING:
    from certtool import bounds
    from certtool.api import inspect, load, train, verify
    from certtool.checkpoint import Checkpoint
    from certtool.epsilon import Epsilon
    from certtool.recipe import Recipe

_WHERE = {
    "Checkpoint": "certtool.checkpoint",
    "Epsilon": "certtool.epsilon",
    "Recipe": "certtool.recipe",
    "inspect": "certtool.api",
    "load": "certtool.api",
    "train": "certtool.api",
    "verify": "certtool.api",
}

__all__ = ["CertToolError", "Checkpoint", "Epsilon", "Recipe", "__version__", "bounds"]
__all__ += ["inspect", "load", "train", "verify"]


def __getattr__(name: str) -> Any:
    if name == "bounds":
        return importlib.import_module("certtool.bounds")
    if name not in _WHERE:
        raise AttributeError(f"module 'certtool' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
