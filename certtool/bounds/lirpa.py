"""The one door to auto_LiRPA, and the repairs that its release on the registry needs on a current torch and numpy.

auto_LiRPA 0.3 (2022) pins torch<1.13 but runs on today's once four things it relied on are put back. They are
process-wide, so nothing but `BoundedModel` applies them, and only when that release is the one installed. A newer
auto_LiRPA, installed from its source, is used as it is.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import sys
import types
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from certtool.bounds.interval import Interval
from certtool.bounds.rules import rule_for
from certtool.errors import OutsideError

INSTALL = "pip install 'certtool[lirpa]' && pip install --no-deps auto_LiRPA==0.3"


@dataclass(frozen=True)
class Engine:
    """Which auto_LiRPA is in use, and whether it had to be repaired."""

    version: str
    repaired: bool

    def __str__(self) -> str:
        return f"auto_LiRPA {self.version}{' (repaired)' if self.repaired else ''}"


def installed() -> Engine | None:
    """What is there, without importing it."""
    try:
        version = importlib.metadata.version("auto_LiRPA")
    except importlib.metadata.PackageNotFoundError:
        return None
    return Engine(version, _needs_repairs(version))


def auto_lirpa() -> Any:
    """The auto_LiRPA module, repaired where it must be. Patches this process: see the module's note."""
    engine = installed()
    if engine is None:
        raise OutsideError("auto_LiRPA is not installed", f"`{INSTALL}`")
    if not engine.repaired:
        return importlib.import_module("auto_LiRPA")
    if "auto_LiRPA" not in sys.modules:
        _repair_numpy()
        _repair_onnx()
    module = importlib.import_module("auto_LiRPA")
    _repair_named_members(module.BoundedModule)
    return module


def _needs_repairs(version: str) -> bool:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < (0, 4)


def _repair_numpy() -> None:
    """numpy 2 has no `numpy.lib.arraysetops`; auto_LiRPA takes `isin` from it."""
    if "numpy.lib.arraysetops" not in sys.modules:
        module = types.ModuleType("numpy.lib.arraysetops")
        module.isin = np.isin  # type: ignore[attr-defined]
        sys.modules["numpy.lib.arraysetops"] = module


def _repair_onnx() -> None:
    """torch moved the exporter's opset switch, and its graph nodes no longer answer to `node["attribute"]`."""
    exporter = "torch.onnx._internal.torchscript_exporter"
    options = importlib.import_module(f"{exporter}._globals").GLOBALS
    node_get = importlib.import_module(f"{exporter}.symbolic_helper")._node_get
    helper: Any = importlib.import_module("torch.onnx.symbolic_helper")

    def set_opset_version(version: int) -> None:
        options.export_onnx_opset_version = version
        options.autograd_inlining = False

    helper._set_opset_version = set_opset_version
    node: Any = torch._C.Node
    node.__getitem__ = lambda self, key: node_get(self, key)


def _repair_named_members(bounded_module: Any) -> None:
    """nn.Module passes `remove_duplicate` nowadays."""
    original = bounded_module._named_members
    if getattr(original, "repaired", False):
        return

    def named_members(self: Any, get_members_fn: Any, prefix: str = "", recurse: bool = True, **_: Any) -> Any:
        return original(self, get_members_fn, prefix=prefix, recurse=recurse)

    named_members.repaired = True  # type: ignore[attr-defined]
    bounded_module._named_members = named_members


class BoundedModel:
    """A network in evaluation mode, bounded by auto_LiRPA.

    `preprocessing` names the network's first layer where that is elementwise arithmetic on the image: auto_LiRPA's
    backward bounds stumble over it, and our own rule takes the box through it exactly.
    """

    def __init__(self, model: nn.Module, example: Tensor, preprocessing: str | None = None) -> None:
        self._lirpa = auto_lirpa()
        self._first: nn.Module = nn.Identity()
        if preprocessing is not None:
            model = copy.deepcopy(model)
            self._first = model.get_submodule(preprocessing)
            model.set_submodule(preprocessing, nn.Identity())
        options = {"conv_mode": "patches"}
        with warnings.catch_warnings():  # of the exporter it goes through, about how old it is
            warnings.simplefilter("ignore")
            self._bounded = self._lirpa.BoundedModule(model.eval(), torch.zeros_like(example), bound_opts=options)
        self._bounded.eval()

    def lower_margins(self, box: Interval, labels: Tensor, classes: int, method: str = "IBP") -> Tensor:
        """Image by class, the least z_y - z_j by `IBP`, `CROWN-IBP` or `CROWN`; the label's own column is 0."""
        box = self._through_first(box)
        perturbation = self._lirpa.PerturbationLpNorm(norm=float("inf"), x_L=box.lower, x_U=box.upper)
        x = self._lirpa.BoundedTensor(box.center, perturbation)
        eye = torch.eye(classes, dtype=box.center.dtype)
        specification = eye[labels].unsqueeze(1) - eye
        with torch.no_grad():
            lower, _ = self._bounded.compute_bounds(x=(x,), C=specification, method=method, bound_upper=False)
        result: Tensor = lower.scatter(1, labels.unsqueeze(1), 0.0)
        return result

    def _through_first(self, box: Interval) -> Interval:
        rule = rule_for(type(self._first))
        assert rule is not None
        with torch.no_grad():
            return rule(self._first, box)
