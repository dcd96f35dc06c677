"""Bounds of a network's values over a box of inputs."""

from certtool.bounds.graph import Graph, Step
from certtool.bounds.ibp import Bounds, affine_weights, evaluation_weights, graph_of, propagate
from certtool.bounds.interval import Interval, ball
from certtool.bounds.margins import certified_mask, features_step, lower_margins, margin_bounds, upper_margins
from certtool.bounds.rules import rule
from certtool.bounds.statistics import ReluStatistics, relu_inputs, relu_statistics, statistics_need

__all__ = [
    "Bounds",
    "Graph",
    "Interval",
    "ReluStatistics",
    "Step",
    "affine_weights",
    "ball",
    "certified_mask",
    "evaluation_weights",
    "features_step",
    "graph_of",
    "lower_margins",
    "margin_bounds",
    "propagate",
    "relu_inputs",
    "relu_statistics",
    "rule",
    "statistics_need",
    "upper_margins",
]
