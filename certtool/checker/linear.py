"""Linear algebra of the checker: its own convolution and the transpose of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from certtool.checker.network import Affine, Array

_COLUMNS = 2**22  # numbers in one block of im2col columns: 32 MB


def apply(step: Affine, weight: Array, x: Array) -> Array:
    """The layer's linear part with this weight (its own, or the absolute one)."""
    if weight.ndim == 2:
        return np.asarray(x @ weight.T)
    height, breadth = ((size + 2 * step.padding - weight.shape[2]) // step.stride + 1 for size in x.shape[2:])
    matrices, positions = _by_group(step, weight), height * breadth
    result = np.empty((len(x), len(weight), height, breadth))
    for block in batches(len(x), _COLUMNS // (step.groups * matrices.shape[2] * positions)):
        columns = _columns(x[block], weight.shape[2], step.stride, step.padding)
        columns = columns.reshape(-1, step.groups, matrices.shape[2], positions)
        result[block] = (matrices @ columns).reshape(-1, *result.shape[1:])
    return result


def _by_group(step: Affine, weight: Array) -> Array:
    """(groups, filters of a group, fan-in): one matrix a group, which multiplies that group's share of the columns."""
    return weight.reshape(step.groups, len(weight) // step.groups, -1)


def _columns(x: Array, kernel: int, stride: int, padding: int) -> Array:
    """im2col: (N, C k k, H' W'), each column what one output position sees."""
    padded = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), axis=(2, 3))
    seen = windows[:, :, ::stride, ::stride].transpose(0, 1, 4, 5, 2, 3)
    return seen.reshape(len(x), -1, seen.shape[4] * seen.shape[5])


def transposed(step: Affine, rows: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of `apply`, from its outputs back to inputs of this shape."""
    if step.weight.ndim == 2:
        return np.asarray(rows @ step.weight)
    matrices, positions = _by_group(step, step.weight).transpose(0, 2, 1), rows[0, 0].size
    result = np.empty((len(rows), *shape))
    for block in batches(len(rows), _COLUMNS // (step.groups * matrices.shape[1] * positions)):
        columns = matrices @ rows[block].reshape(-1, step.groups, matrices.shape[2], positions)
        columns = columns.reshape(-1, shape[0], *step.weight.shape[2:], *rows.shape[2:])
        result[block] = _scattered(step, columns, shape)
    return result


def _scattered(step: Affine, columns: Array, shape: tuple[int, ...]) -> Array:
    """col2im: every kernel position adds its share where `_columns` read it; what falls on the padding is dropped."""
    pad, stride, (height, breadth) = step.padding, step.stride, columns.shape[4:]
    padded = np.zeros((len(columns), shape[0], shape[1] + 2 * pad, shape[2] + 2 * pad))
    for i in range(columns.shape[2]):
        for j in range(columns.shape[3]):
            down, across = slice(i, i + stride * height, stride), slice(j, j + stride * breadth, stride)
            padded[:, :, down, across] += columns[:, :, i, j]
    return padded[:, :, pad : pad + shape[1], pad : pad + shape[2]]


def per_channel(values: Array, like: Array) -> Array:
    return values.reshape(1, -1, *[1] * (like.ndim - 2))


def scale(factor: Array, x: Array, shift: Array) -> Array:
    return per_channel(factor, x) * x + per_channel(shift, x)


def batches(count: int, size: int) -> Iterator[slice]:
    size = max(size, 1)
    return (slice(start, start + size) for start in range(0, count, size))


def total(values: Array) -> Array:
    return np.asarray(values.reshape(len(values), -1).sum(axis=1))
