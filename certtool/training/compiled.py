"""A pass through torch.compile: its sums as exact as torch's own, its failures said kindly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import fx
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.runtime.cache_dir_utils import cache_dir

from certtool.errors import OutsideError

P = ParamSpec("P")
T = TypeVar("T")
SUM, SUM_OF_ALL = torch.ops.aten.sum.dim_IntList, torch.ops.aten.sum.default


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """The function as one compiled graph, for arguments of one shape.

    What was compiled before in this process is forgotten: torch counts the variants of a function over all networks,
    and stops at eight.
    """
    torch.compiler.reset()
    exact: dict[str, Any] = {"post_grad_custom_pre_pass": AxisByAxis()}
    fast: Callable[P, T] = torch.compile(function, dynamic=False, fullgraph=True, options=exact)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return fast(*args, **kwargs)
        except TorchDynamoException as error:
            raise OutsideError(
                f"torch.compile failed: {said(error)}",
                f"files of a compilation that was killed do that: delete the folder {cache_dir()};"
                ' or set `train.compile = "off"`',
            ) from error

    return call


def said(error: Exception) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("backend=")]
    return lines[0] if lines else type(error).__name__


class AxisByAxis(CustomGraphPass):
    """Makes every sum over several axes of a graph, forward or backward, one sum after another.

    torch adds in pairs of pairs. The loops that torch.compile writes add up to 8,192 numbers one after the other, and
    where those are nearly equal, as the radii of a layer are, every rounding goes the same way: a tightness term was
    4e-5 off, the gradient of a BatchNorm's weight 3e-3. Now no chain is longer than an axis.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for target in (SUM, SUM_OF_ALL):
            for node in graph.find_nodes(op="call_function", target=target):
                dims, keep = _axes(node)
                if len(dims) > 1:
                    with graph.inserting_before(node):
                        node.replace_all_uses_with(_summed(graph, node, dims, keep))
                    graph.erase_node(node)

    def uuid(self) -> Any:
        """Part of the key under which torch keeps compiled code."""
        return get_hash_for_files((__file__,))


def _axes(node: fx.Node) -> tuple[list[int], bool]:
    """The axes of a sum, the last one first, and whether they stay."""
    rank = node.all_input_nodes[0].meta["val"].dim()
    dims: Any = node.args[1] if node.args[1:] and node.args[1] else range(rank)
    return sorted((dim % rank for dim in dims), reverse=True), bool(node.args[2:] and node.args[2])


def _summed(graph: fx.Graph, node: fx.Node, dims: list[int], keep: bool) -> fx.Node:
    """The same sum; `meta` holds what torch knows of a node's shape."""
    (value,) = node.all_input_nodes
    for dim in dims:
        whole = value
        value = graph.call_function(SUM, (whole, [dim], keep), dict(node.kwargs))
        value.meta["val"] = SUM(whole.meta["val"], [dim], keep, **node.kwargs)
    return value
