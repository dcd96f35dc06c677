"""The soundness campaign: random small networks whose exact answer a mixed-integer program knows, against every rung.

    python tests/campaign.py --pairs 2000 --seed 7

A rung may fail to prove what is true. It may never prove what is false: for each image and class the least margin over
the box is computed exactly (scipy's HiGHS), and no rung's lower bound may exceed it. Prints a JSON summary.
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor, nn

warnings.simplefilter("ignore")  # of auto_LiRPA's age

from certtool.bounds import affine_weights, evaluation_weights, graph_of, margin_bounds  # noqa: E402
from certtool.bounds.box import outer_edges_of_floats  # noqa: E402
from certtool.bounds.lirpa import BoundedModel, installed  # noqa: E402
from certtool.bounds.rounding import rounded_margins  # noqa: E402
from certtool.verification.ladder import to_float32  # noqa: E402

CLASSES, IMAGES = 3, 10
SLACK = 1e-5  # what HiGHS and float32 may be off by


def network(seed: int) -> tuple[nn.Module, tuple[int, ...]]:
    """One or two hidden layers, linear or convolutional (also in groups), with and without BatchNorm."""
    torch.manual_seed(seed)
    norm = seed % 2 == 0
    if seed % 3 == 0:
        groups = 1 + seed // 6 % 2
        hidden = [nn.Conv2d(groups, 2, 2, groups=groups), *([nn.BatchNorm2d(2)] if norm else []), nn.ReLU()]
        layers = [*hidden, nn.Flatten(), nn.Linear(8, 3)]
        shape: tuple[int, ...] = (groups, 3, 3)
    else:
        layers = [nn.Flatten(), nn.Linear(4, 5), *([nn.BatchNorm1d(5)] if norm else []), nn.ReLU()]
        layers += [nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)] if seed % 3 == 1 else [nn.Linear(5, 3)]
        shape = (1, 2, 2)
    model = nn.Sequential(*layers).eval()
    for module in model:
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.2, 2.0)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model, shape


def affine_parts(model: nn.Module, shape: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The network as matrices between ReLUs, read off its values: A e_i = f(e_i) - f(0)."""
    parts, segment, size = [], [], int(np.prod(shape))
    for layer in [*copy.deepcopy(model).double(), None]:
        if isinstance(layer, nn.ReLU) or layer is None:
            run = nn.Sequential(*segment)
            zero = run(torch.zeros(1, *shape, dtype=torch.float64)).flatten()
            units = torch.eye(size, dtype=torch.float64).view(size, *shape)
            parts.append(((run(units).flatten(1) - zero).T.detach().numpy(), zero.detach().numpy()))
            shape = tuple(run(torch.zeros(1, *shape, dtype=torch.float64)).shape[1:])
            segment, size = [], int(np.prod(shape))
        else:
            segment.append(layer)
    return parts


def exact_margin(parts: list[Any], low: np.ndarray, high: np.ndarray, label: int, other: int) -> float:
    """The least z_y - z_j over the box: ReLUs by binary variables and big M from interval bounds."""
    rows, lower_rows, upper_rows = [], [], []
    names, lows, highs, binary = len(low), [*low], [*high], [0] * len(low)
    previous = np.arange(len(low))
    center, radius = (low + high) / 2, (high - low) / 2

    def constrain(entries: dict[int, float], least: float, most: float) -> None:
        rows.append(entries)
        lower_rows.append(least)
        upper_rows.append(most)

    for matrix, bias in parts[:-1]:
        mid, spread = matrix @ center + bias, np.abs(matrix) @ radius
        outputs = []
        for unit in range(len(bias)):
            down, up = mid[unit] - spread[unit] - 1e-3, mid[unit] + spread[unit] + 1e-3
            value, switch = names, names + 1
            names += 2
            lows += [0.0, 0.0]
            highs += [max(up, 0.0), 1.0]
            binary += [0, 1]
            pre = {int(v): -float(w) for v, w in zip(previous, matrix[unit], strict=True)}
            constrain({value: 1.0, **pre}, bias[unit], np.inf)  # value >= pre-activation
            constrain({value: 1.0, switch: -min(down, 0.0), **pre}, -np.inf, bias[unit] - min(down, 0.0))
            constrain({value: 1.0, switch: -max(up, 0.0)}, -np.inf, 0.0)
            outputs.append(value)
        center, radius = (np.maximum(mid - spread, 0) + np.maximum(mid + spread, 0)) / 2, spread
        previous = np.array(outputs)
    matrix, bias = parts[-1]
    cost = np.zeros(names)
    cost[previous] = matrix[label] - matrix[other]
    table = np.zeros((len(rows), names))
    for number, entries in enumerate(rows):
        for column, weight in entries.items():
            table[number, column] += weight
    constraint = [LinearConstraint(table, lower_rows, upper_rows)] if rows else []
    solution = milp(cost, integrality=binary, bounds=Bounds(lows, highs), constraints=constraint)
    assert solution.status == 0, solution.message
    return float(solution.fun + bias[label] - bias[other])


def rungs(model: nn.Module, x: Tensor, labels: Tensor, eps: Fraction) -> dict[str, Tensor]:
    """Every rung's lower margins, image by class."""
    box = outer_edges_of_floats(x, eps).interval()
    narrow = to_float32(box, torch.device("cpu"))
    exact, plain = graph_of(copy.deepcopy(model).double()), graph_of(model)
    with torch.no_grad():
        found = {
            "ibp rigorous": rounded_margins(exact, box, labels, affine_weights(exact)),
            "ibp float32": margin_bounds(plain, narrow, labels, evaluation_weights(plain)),
        }
    if installed() is not None:
        bounded = BoundedModel(copy.deepcopy(model), x[:1])
        for method in ("CROWN-IBP", "CROWN", "alpha-CROWN"):
            found[method] = bounded.lower_margins(narrow, labels, CLASSES, method)
    return found


def campaign(pairs: int, seed: int) -> dict[str, Any]:
    violations: list[str] = []
    certified: dict[str, int] = {}
    truly_robust = checked = 0
    while checked < pairs:
        number = seed + checked // IMAGES
        model, shape = network(number)
        x, eps = torch.rand(IMAGES, *shape), Fraction(1 + number % 8, 10)
        with torch.no_grad():
            labels = model(x).argmax(1)
        parts = affine_parts(model, shape)
        edges = outer_edges_of_floats(x, eps)
        found = rungs(model, x, labels, eps)
        for image in range(IMAGES):
            low, high = edges.lower[image].flatten().numpy(), edges.upper[image].flatten().numpy()
            others = [j for j in range(CLASSES) if j != int(labels[image])]
            exact = {j: exact_margin(parts, low, high, int(labels[image]), j) for j in others}
            truly_robust += min(exact.values()) > 0
            for rung, margins in found.items():
                certified[rung] = certified.get(rung, 0) + all(float(margins[image, j]) > 0 for j in others)
                for j in others:
                    if float(margins[image, j]) > exact[j] + SLACK:
                        violations.append(
                            f"net {number}, image {image}, class {j}: {rung} {margins[image, j]} > {exact[j]}"
                        )
        checked += IMAGES
    return {"pairs": checked, "truly_robust": truly_robust, "certified": certified, "violations": violations}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(campaign(options.pairs, options.seed)))
