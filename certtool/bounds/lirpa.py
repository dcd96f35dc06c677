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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certtool.bounds.interval import Interval
from certtool.bounds.rules import rule_for
from certtool.errors import OutsideError

ALPHA_ITERATIONS, ALPHA_RATE = 20, 0.5
DEEPEST = 10_000  # frames of Python that a stack of 8 MB holds
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
    if engine.repaired and "auto_LiRPA" not in sys.modules:
        _repair_numpy()
        _repair_onnx()
    with warnings.catch_warnings(record=True):  # its import sets a filter of its own, and then warns
        module = importlib.import_module("auto_LiRPA")
    # Its import allows a million frames: a file of "[[[[..." would then end this process, not in a RecursionError.
    sys.setrecursionlimit(min(sys.getrecursionlimit(), DEEPEST))
    if engine.repaired:
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


def without_groups(model: nn.Module) -> nn.Module:
    """The same function with every grouped convolution as an ordinary one, zeros where groups do not meet.

    auto_LiRPA forgets the groups where it pulls patches back: CROWN then fails on shapes, or, with one channel a group,
    gives bounds of another network.
    """
    grouped = {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if path and isinstance(module, nn.Conv2d) and module.groups > 1
    }
    if grouped:
        model = copy.deepcopy(model)
    for path, module in grouped.items():
        model.set_submodule(path, _dense(module))
    return model


def dense_kernel(weight: Tensor, groups: int) -> Tensor:
    """The kernel of a grouped convolution with the zeros that its groups stand for."""
    channels = weight.shape[1]
    padded = (
        F.pad(part, (0, 0, 0, 0, group * channels, (groups - 1 - group) * channels))
        for group, part in enumerate(weight.chunk(groups))
    )
    return weight if groups == 1 else torch.cat(list(padded))


@torch.no_grad()
def _dense(grouped: nn.Conv2d) -> nn.Conv2d:
    dense = nn.Conv2d(
        grouped.in_channels,
        grouped.out_channels,
        grouped.kernel_size,  # type: ignore[arg-type]
        grouped.stride,  # type: ignore[arg-type]
        grouped.padding,  # type: ignore[arg-type]
        grouped.dilation,  # type: ignore[arg-type]
        bias=grouped.bias is not None,
        padding_mode=grouped.padding_mode,
        device=grouped.weight.device,
        dtype=grouped.weight.dtype,
    )
    dense.weight.copy_(dense_kernel(grouped.weight, grouped.groups))
    if dense.bias is not None and grouped.bias is not None:
        dense.bias.copy_(grouped.bias)
    return dense.train(grouped.training)


def margin_rows(labels: Tensor, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Where a class is not the label (image by class), and z_y - z_j for those as rows over the logits."""
    eye = torch.eye(classes, dtype=dtype, device=labels.device)
    others = torch.arange(classes, device=labels.device) != labels.unsqueeze(1)
    return others, (eye[labels].unsqueeze(1) - eye)[others].view(len(labels), classes - 1, classes)


def _converted(lirpa: Any, model: nn.Module, example: Tensor, options: dict[str, Any]) -> Any:
    with warnings.catch_warnings():  # of the exporter it goes through, about how old it is
        warnings.simplefilter("ignore")
        return lirpa.BoundedModule(model.eval(), torch.zeros_like(example), bound_opts=options)


def _perturbed(lirpa: Any, box: Interval) -> Any:
    perturbation = lirpa.PerturbationLpNorm(norm=float("inf"), x_L=box.lower, x_U=box.upper)
    return lirpa.BoundedTensor(box.center, perturbation)


class GivenWeights:
    """A network of affine layers, ReLUs and sums whose weights are given anew with every call: what training needs.

    The weights may be functions of others, such as a convolution with this batch's BatchNorm folded into it; the bounds
    have their gradient.
    """

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        self._lirpa = auto_lirpa()
        self._bounded = _converted(self._lirpa, model, example, {"conv_mode": "patches"})
        self._bounded.train()  # in evaluation mode it would cut the weights off from what they are functions of
        self._weights: dict[str, Any] = {}
        for node in self._bounded._modules.values():
            if type(node).__name__ == "BoundParams":
                del node._parameters["param"]  # no longer a leaf of its own
                self._weights[node.ori_name] = node

    def lower(self, box: Interval, rows: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """CROWN-IBP's lower bounds of `rows` (image, row, output) times the output; weights by their names."""
        for name, node in self._weights.items():
            node.param = weights[name]
        lower, _ = self._bounded.compute_bounds(
            x=(_perturbed(self._lirpa, box),), C=rows, method="CROWN-IBP", bound_upper=False
        )
        result: Tensor = lower
        return result


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
        model = without_groups(model)
        # Sparse slopes of convolutions trip over shapes in 0.3; with given intermediate bounds dense ones fit.
        options = {"conv_mode": "patches", "sparse_features_alpha": False}
        self._bounded = _converted(self._lirpa, model, example, options)
        self._bounded.eval()

    def lower_margins(self, box: Interval, labels: Tensor, classes: int, method: str = "IBP") -> Tensor:
        """Image by class, the least z_y - z_j; the label's own column is 0.

        `method` is auto_LiRPA's word (`IBP`, `CROWN-IBP`, `CROWN`), or `alpha-CROWN`: slopes optimised for the margins
        alone, with interval bounds for all layers in between, since optimising those too outgrows any memory.
        """
        box = self._through_first(box)
        x = _perturbed(self._lirpa, box)
        others, rows = margin_rows(labels, classes, box.center.dtype)
        lower = self._optimised(x, rows) if method == "alpha-CROWN" else self._bounds(x, rows, method)
        result = torch.zeros(len(labels), classes, dtype=lower.dtype)
        return result.masked_scatter(others, lower)

    def _bounds(self, x: Any, rows: Tensor, method: str, **more: Any) -> Tensor:
        with torch.no_grad():
            lower, _ = self._bounded.compute_bounds(x=(x,), C=rows, method=method, bound_upper=False, **more)
        result: Tensor = lower.detach()
        return result

    def _optimised(self, x: Any, rows: Tensor) -> Tensor:
        self._bounds(x, rows, "CROWN-IBP")
        relus = [node for node in self._bounded._modules.values() if type(node).__name__ == "BoundRelu"]
        given = {node.inputs[0].name: [node.inputs[0].lower.clone(), node.inputs[0].upper.clone()] for node in relus}
        old = installed() is not None and _needs_repairs(importlib.metadata.version("auto_LiRPA"))
        fixed = "fix_intermediate_layer_bounds" if old else "fix_interm_bounds"
        options = {"iteration": ALPHA_ITERATIONS, "lr_alpha": ALPHA_RATE, "keep_best": True, fixed: True}
        self._bounded.set_bound_opts({"optimize_bound_args": options})
        intermediate = {"intermediate_layer_bounds" if old else "interm_bounds": given}
        with torch.enable_grad():
            lower, _ = self._bounded.compute_bounds(
                x=(x,), C=rows, method="CROWN-Optimized", bound_upper=False, **intermediate
            )
        result: Tensor = lower.detach()
        return result

    def _through_first(self, box: Interval) -> Interval:
        rule = rule_for(type(self._first))
        assert rule is not None
        with torch.no_grad():
            return rule(self._first, box)
