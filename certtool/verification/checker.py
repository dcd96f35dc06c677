"""The proofs a second time, in NumPy alone: what a third party runs to re-check a certificate.

Nothing is shared with the code that certifies: the file is parsed here, the convolution is written here, the bounds are
derived here. `rigorous_margins` bounds what binary32 arithmetic computes, `interval_margins` and `crown_ibp_margins`
what exact arithmetic would.

The claim of `rigorous_margins`: every evaluation in IEEE binary32, round to nearest (subnormals kept or flushed), whose
dot products are multiplications or FMAs and additions in any order, with BatchNorm as written, as scale and shift, or
folded into the weights, gives the label. Not in it: Winograd or FFT convolution, TF32 and bf16, a convolution that
accumulates on top of its residual shortcut.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from certtool.errors import InputError

Array: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.integer[Any]]

_HINT = "a certtool model is a .safetensors file written by `certtool train` or `certtool zoo`"
_HEADER_LIMIT = 1_000_000
_BATCH_NORM_EPS = 1e-5  # not in the file: both of certtool's BatchNorm layers use torch's default
_BATCH = 16  # images bounded together
_ROWS = 32  # classes pulled back together
_COLUMNS = 2**22  # numbers in one block of im2col columns: 32 MB


# --- the network -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BatchNorm:
    """y -> gamma (y - mean) / sqrt(var + eps) + beta; without `center` no mean, without `scale` no division."""

    gamma: Array
    beta: Array
    mean: Array
    var: Array
    eps: float
    center: bool
    scale: bool


@dataclass(frozen=True, eq=False)
class Affine:
    """A convolution (weight of four axes) or a linear layer (of two), and the BatchNorm behind it."""

    weight: Array
    bias: Array
    stride: int
    padding: int
    batch_norm: BatchNorm | None


@dataclass(frozen=True)
class Relu:
    pass


@dataclass(frozen=True)
class Flatten:
    pass


@dataclass(frozen=True, eq=False)
class Residual:
    """branch(x) + shortcut(x); no steps in the shortcut make it the identity."""

    branch: tuple[Step, ...]
    shortcut: tuple[Step, ...]


Step: TypeAlias = Affine | Relu | Flatten | Residual


@dataclass(frozen=True, eq=False)
class Network:
    """Parameters are float64 arrays that hold the float32 values of the file."""

    shape: tuple[int, int, int]
    mean: Array
    std: Array
    layers: tuple[Step, ...]
    classifier: Affine


# --- from the file to the network ------------------------------------------------------------------------------------


def read_network(content: bytes) -> Network:
    """The network a file describes; a file that is not exactly one of ours is an InputError."""
    header, stored = _parse(content)
    if header.get("schema") != "certtool.model/1":
        raise InputError(f"the file's schema is {header.get('schema')!r}, not 'certtool.model/1'", _HINT)
    arch, data = _object(header, "arch"), _object(header, "dataset")
    name = arch.get("arch")
    if not isinstance(name, str) or name not in _BUILDERS:
        raise InputError(f"the checker has no architecture {name!r}", f"it has {', '.join(_BUILDERS)}")
    shape, classes = _image_shape(data), data.get("classes")
    if not isinstance(classes, list) or len(classes) < 2:
        raise InputError("the file's header names fewer than two classes", _HINT)
    tensors = _Tensors(stored)
    layers, classifier = _BUILDERS[name](tensors, arch, shape, len(classes))
    tensors.finish()
    mean, std = (_constants(data, name, shape[0]) for name in ("mean", "std"))
    if not (std > 0).all():
        raise InputError("the file's header has a std that is not positive in float32", _HINT)
    return Network(shape, mean, std, layers, classifier)


def _parse(content: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """The container: 8 bytes of header length, little-endian; the header, JSON; the tensors' bytes."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 10 or not 2 <= length <= min(len(content) - 8, _HEADER_LIMIT):
        raise InputError("this is not a safetensors file, or it is cut short", _HINT)
    try:
        entries = json.loads(content[8 : 8 + length], object_pairs_hook=_no_duplicates)
        ours = json.loads(entries.pop("__metadata__")["certtool"], object_pairs_hook=_no_duplicates)
        tensors = _read_tensors(entries, memoryview(content)[8 + length :])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"the file has a damaged header: {type(error).__name__}: {error}", _HINT) from None
    if not isinstance(ours, dict):
        raise InputError("the file has a damaged header: not an object", _HINT)
    return ours, tensors


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError("a name stands in it twice")
    return dict(pairs)


def _read_tensors(entries: dict[str, Any], data: memoryview) -> dict[str, Array]:
    """Every tensor is float32 and finite, and they fill the file from end to end without gap or overlap."""
    tensors, position = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        if entry["dtype"] != "F32":
            raise InputError(f"the tensor `{name}` is of type {entry['dtype']}, not float32", _HINT)
        if start != position or end - start != 4 * math.prod(entry["shape"]) or end > len(data):
            raise InputError(f"the bytes of the tensor `{name}` do not fit its shape", _HINT)
        values = np.frombuffer(data[start:end], dtype="<f4").astype(np.float64).reshape(entry["shape"])
        if not np.isfinite(values).all():
            raise InputError(f"the tensor `{name}` holds NaN or infinite values", "nothing can be proven with it")
        tensors[name], position = values, end
    if position != len(data):
        raise InputError(f"the file has {len(data) - position} bytes that belong to no tensor", _HINT)
    return tensors


class _Tensors:
    """Each tensor is taken once, under the shape the architecture asks for; none may be left over."""

    def __init__(self, tensors: dict[str, Array]) -> None:
        self._left = dict(tensors)

    def take(self, name: str, *shape: int) -> Array:
        tensor = self._left.pop(name, None)
        if tensor is None:
            raise InputError(f"the file lacks the tensor `{name}`", "it does not fit its own header")
        if tensor.shape != shape:
            raise InputError(f"`{name}` is {tensor.shape}, expected {shape}", "it does not fit its own header")
        return tensor

    def finish(self) -> None:
        if self._left:
            raise InputError(f"the file has a tensor too many: `{min(self._left)}`", "it does not fit its own header")


def _cnn7(
    tensors: _Tensors, arch: dict[str, Any], shape: tuple[int, int, int], classes: int
) -> tuple[tuple[Step, ...], Affine]:
    """Five 3x3 convolutions, a linear layer, the classifier."""
    _only(arch, "width", "hidden", "downsample")
    width, hidden, mode = _whole(arch, "width"), _whole(arch, "hidden"), _mode(arch)
    last = _whole(arch, "downsample", 2)  # how often the image is halved: at the third convolution, at the fifth too
    channels, height, breadth = shape
    steps: list[Step] = []
    plan = [(width, 1), (width, 1), (2 * width, 2), (2 * width, 1), (2 * width, last)]
    for number, (out, stride) in enumerate(plan, start=1):
        steps += [_layer(tensors, f"conv{number}", f"bn{number}", (out, channels, 3, 3), stride, mode), Relu()]
        channels, height, breadth = out, -(-height // stride), -(-breadth // stride)
    flat = channels * height * breadth
    steps += [Flatten(), _layer(tensors, "linear6", "bn6", (hidden, flat), 1, mode), Relu()]
    return tuple(steps), _layer(tensors, "classifier", "", (classes, hidden), 1, "none")


def _wide_resnet(
    tensors: _Tensors, arch: dict[str, Any], shape: tuple[int, int, int], classes: int
) -> tuple[tuple[Step, ...], Affine]:
    """A convolution, three stages of residual blocks, a linear layer, the classifier."""
    _only(arch, "width", "widen", "blocks", "hidden")
    width, hidden, mode = _whole(arch, "width"), _whole(arch, "hidden"), _mode(arch)
    channels, height, breadth = shape
    steps: list[Step] = [_layer(tensors, "conv1", "bn1", (width, channels, 3, 3), 1, mode), Relu()]
    channels = width
    for index, (stage, first) in enumerate(_stages(arch)):
        out, stride = width * _whole(arch, "widen") * 2**stage, 2 if stage > 0 and first else 1
        steps += [_block(tensors, f"blocks.{index}", channels, out, stride, mode), Relu()]
        channels, height, breadth = out, -(-height // stride), -(-breadth // stride)
    flat = channels * height * breadth
    steps += [Flatten(), _layer(tensors, "linear", "bn2", (hidden, flat), 1, mode), Relu()]
    return tuple(steps), _layer(tensors, "classifier", "", (classes, hidden), 1, "none")


_BUILDERS = {"cnn7": _cnn7, "wide_resnet": _wide_resnet}


def _stages(arch: dict[str, Any]) -> Iterator[tuple[int, bool]]:
    """Of every block its stage, and whether it is the first one there."""
    counts = arch.get("blocks")
    if not isinstance(counts, list) or len(counts) != 3 or any(type(n) is not int or n < 1 for n in counts):
        raise InputError("the file's header has no three counts in arch.blocks", _HINT)
    return ((stage, index == 0) for stage, count in enumerate(counts) for index in range(count))


def _block(tensors: _Tensors, name: str, channels: int, out: int, stride: int, mode: str) -> Residual:
    """Two 3x3 convolutions beside a 1x1 one, or beside nothing where neither width nor stride changes."""
    first = _layer(tensors, f"{name}.conv1", f"{name}.bn1", (out, channels, 3, 3), stride, mode)
    second = _layer(tensors, f"{name}.conv2", f"{name}.bn2", (out, out, 3, 3), 1, mode)
    if stride == 1 and channels == out:
        return Residual((first, Relu(), second), ())
    shortcut = _layer(tensors, f"{name}.shortcut.0", f"{name}.shortcut.1", (out, channels, 1, 1), stride, mode)
    return Residual((first, Relu(), second), (shortcut,))


def _layer(tensors: _Tensors, name: str, norm: str, shape: tuple[int, ...], stride: int, mode: str) -> Affine:
    """3x3 kernels are padded by 1, 1x1 kernels and linear layers by nothing."""
    convolution, out = len(shape) == 4, shape[0]
    weight, bias = tensors.take(f"{name}.weight", *shape), tensors.take(f"{name}.bias", out)
    padding = shape[3] // 2 if convolution else 0
    if mode == "none" or (mode == "conv" and not convolution):
        return Affine(weight, bias, stride, padding, None)
    names = ("weight", "bias", "running_mean", "running_var")
    gamma, beta, mean, var = (tensors.take(f"{norm}.{part}", out) for part in names)
    if (var < 0).any():
        raise InputError(f"`{norm}.running_var` has negative entries, which no variance has")
    batch_norm = BatchNorm(gamma, beta, mean, var, _BATCH_NORM_EPS, center=mode != "scale", scale=mode != "center")
    return Affine(weight, bias, stride, padding, batch_norm)


def _object(header: dict[str, Any], key: str) -> dict[str, Any]:
    value = header.get(key)
    if not isinstance(value, dict):
        raise InputError(f"the file's header has no object `{key}`", _HINT)
    return value


def _only(arch: dict[str, Any], *keys: str) -> None:
    """An argument unknown here may change what the network computes, so it is refused."""
    unknown = sorted(arch.keys() - {"arch", "batch_norm", *keys})
    if unknown:
        raise InputError(f"the checker does not know `arch.{unknown[0]}` of the file's header", _HINT)


def _whole(arch: dict[str, Any], key: str, largest: int = 4096) -> int:
    value = arch.get(key)
    if type(value) is not int or not 1 <= value <= largest:
        raise InputError(f"the file's header has no `arch.{key}` between 1 and {largest}", _HINT)
    return value


def _mode(arch: dict[str, Any]) -> str:
    mode = arch.get("batch_norm")
    if mode not in ("full", "conv", "none", "center", "scale"):
        raise InputError(f"the checker does not know batch_norm = {mode!r} of the file's header", _HINT)
    return str(mode)


def _image_shape(data: dict[str, Any]) -> tuple[int, int, int]:
    shape = data.get("shape")
    if not isinstance(shape, list) or len(shape) != 3 or any(type(size) is not int or size < 1 for size in shape):
        raise InputError("the file's header has no image shape of three sizes", _HINT)
    return shape[0], shape[1], shape[2]


def _constants(data: dict[str, Any], name: str, channels: int) -> Array:
    """The network normalises with float32(mean) and float32(std), whatever decimals the header spells."""
    values = data.get(name)
    if not isinstance(values, list) or len(values) != channels:
        raise InputError(f"the file's header needs one {name} a channel", _HINT)
    if any(type(value) not in (int, float) or not abs(value) < 2.0**127 for value in values):
        raise InputError(f"the file's header has a {name} that float32 cannot hold", _HINT)
    return np.array(values, dtype=np.float64).astype(np.float32).astype(np.float64)


# --- the box ---------------------------------------------------------------------------------------------------------


def exact_box(images: npt.NDArray[np.uint8], scale: int, eps: Fraction) -> tuple[Array, Array]:
    """Edges of [k/s - eps, k/s + eps] within [0, 1] over the rationals, rounded outward to float64.

    Also inside: float32(k/s), the image the network is really given. It differs from k/s, so at eps = 0 (or below
    2^-25) the rational box alone would not contain it, and `certified` would not imply `clean`.
    """
    if images.dtype != np.uint8 or scale < 1 or eps < 0 or (images.size and int(images.max()) > scale):
        raise InputError(f"a box needs uint8 pixels from 0 to {scale}, a positive scale and a radius of at least 0")
    edges = np.array([_edges(k, scale, eps) for k in range(min(scale, 255) + 1)])
    return edges[images, 0], edges[images, 1]


def _edges(k: int, scale: int, eps: Fraction) -> tuple[float, float]:
    value = Fraction(k, scale)
    given = float(np.float32(k) / np.float32(scale))  # one IEEE division, as the data loader does it
    return (
        min(_round_down(max(value - eps, Fraction(0))), given),
        max(-_round_down(-min(value + eps, Fraction(1))), given),
    )


def _round_down(exact: Fraction) -> float:
    """The largest float64 that is not above: float(Fraction) rounds to nearest, so at most one step off."""
    nearest = float(exact)
    return nearest if Fraction(nearest) <= exact else math.nextafter(nearest, -math.inf)


# --- intervals, with and without rounding ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ball:
    """Every value within `radius` of `center`, per element."""

    center: Array
    radius: Array

    @property
    def reach(self) -> Array:
        return np.abs(self.center) + self.radius


@dataclass(frozen=True)
class Rounding:
    """What a bound allows for."""

    unit: float  # relative error of an operation
    tiny: float  # absolute error of one that underflows, many times over
    largest: float  # magnitude below which nothing overflows
    own: float  # relative error of our own float64 where edges are taken
    reserve: float  # share of its scale that a margin must exceed

    def gamma(self, count: int) -> float:
        """|(1 + d_1)^(+-1) ... (1 + d_k)^(+-1) - 1| <= k u / (1 - k u) for |d_i| <= u, if k u < 1 (Higham, 3.1)."""
        product = count * self.unit
        return product / (1 - product) if product < 1 else math.inf


# Exact arithmetic: every term of rounding vanishes.
EXACT = Rounding(unit=0.0, tiny=0.0, largest=math.inf, own=0.0, reserve=0.0)
# binary32. The factor 1 + 2^-20 pays for our own float64: a bound with k roundings of ours beside k of theirs is off by
# k 2^-53 of the same absolute sum, and gamma_k exceeds k 2^-24 of it by k 2^-44, 512 times as much.
# `tiny` is 64 times 2^-126, the most an operation loses to underflow when subnormals are flushed (kept: 2^-150).
# `largest`: values bounded by 2^120 are far from 2^128, where binary32 overflows and every error bound ends.
# `own`: c + r and (l + u)/2 take two or three roundings of 2^-53 each; four are paid.
# `reserve`: another order of our own float64 sums cannot turn a proof around.
BINARY32 = Rounding(unit=2.0**-24 * (1 + 2.0**-20), tiny=2.0**-120, largest=2.0**120, own=2.0**-51, reserve=1e-9)


def _ball(lower: Array, upper: Array, rounding: Rounding) -> Ball:
    """Any center will do if the radius, rounded up, reaches both edges."""
    center = (lower + upper) / 2
    return Ball(center, np.maximum(upper - center, center - lower) * (1 + rounding.own))


def _edges_of(ball: Ball, rounding: Rounding) -> tuple[Array, Array]:
    slack = rounding.own * ball.reach
    return ball.center - ball.radius - slack, ball.center + ball.radius + slack


def _relu(ball: Ball, rounding: Rounding) -> Ball:
    """Monotone, and exact in floating point: the edges' images are the image's edges."""
    lower, upper = _edges_of(ball, rounding)
    return _ball(np.maximum(lower, 0), np.maximum(upper, 0), rounding)


def _sum(one: Ball, other: Ball, rounding: Rounding) -> Ball:
    """fl(p + q) = (p + q)(1 + d), |d| <= u: an error of at most u |p + q|.

    More is paid, gamma_2 (|p| + |q|), what `p + alpha q` needs: a certificate's margin is defined with that term, and
    two implementations can only be compared digit by digit if they bound the same thing. A flushed operand or result
    costs 3 x 2^-126. No test for overflow: p comes out of an affine layer, which bounds it by 2^120, and q from one too
    or from a chain of such sums, whose value the next affine layer tests.
    """
    error = rounding.gamma(2) * (one.reach + other.reach) + rounding.tiny
    return Ball(one.center + other.center, one.radius + other.radius + error)


def _normalize(network: Network, ball: Ball, rounding: Rounding) -> Ball:
    """fl((x - m)/s), or fl(fl(x - m) fl(1/s)): (x - m)/s times two or three factors 1 + d, so gamma_3 |x - m|/s.

    |x - m| <= |c - m| + r. Flushing: x and x - m lose 2^-126/s each, 1/s loses 2^-126 |x - m|, the result 2^-126;
    together below 2^-120 (1 + |x - m|)(1 + 1/s), which also bounds every intermediate value.
    """
    mean, inverse = _per_channel(network.mean, ball.center), 1 / _per_channel(network.std, ball.center)
    shifted = Ball(ball.center - mean, ball.radius)
    magnitude = (1 + shifted.reach) * (1 + inverse)
    error = rounding.gamma(3) * shifted.reach * inverse + rounding.tiny * magnitude
    return Ball(shifted.center * inverse, _unless_overflow(magnitude, ball.radius * inverse + error, rounding))


@dataclass(frozen=True, eq=False)
class _Scaling:
    """BatchNorm as a (y - mean) + beta with a = gamma / sqrt(var + eps); without one, 1, 0 and 0."""

    factor: Array
    mean: Array
    beta: Array
    size: Array  # (1 + |gamma|)(1 + 1/sqrt(var + eps)): not below |a|, |gamma|, 1/sqrt(var + eps) and 1


def _scaling(step: Affine) -> _Scaling:
    norm, zero = step.batch_norm, np.zeros_like(step.bias)
    if norm is None:
        return _Scaling(zero + 1, zero, zero, zero + 1)
    inverse = 1 / np.sqrt(norm.var + norm.eps) if norm.scale else zero + 1
    mean = norm.mean if norm.center else zero
    return _Scaling(norm.gamma * inverse, mean, norm.beta, (1 + np.abs(norm.gamma)) * (1 + inverse))


def _affine(step: Affine, ball: Ball, rounding: Rounding) -> Ball:
    """An affine layer with its BatchNorm, bounded on the unfolded parameters.

    A computed output is  sum_i a w_i x_i (1 + t_i) + a b (1 + t_b) - a mu (1 + t_mu) + beta (1 + t_beta),  where each
    1 + t collects the roundings on the way. A dot product of n terms and a bias: 1 product, at most n additions. The
    inverse deviation: eps rounded and added to var, halved by the root, then root and reciprocal: 3. So for w_i x_i
        as written       n + 1, - mu 1, inverse 3, its product 1, gamma 1, + beta 1           = n + 8
        scale and shift  n + 1, scale 3 + 1, its product 1, + shift 1                         = n + 7
        folded           w a: 3 + 1 + 1, then n + 1 in the dot product                        = n + 6
    and b, mu and beta meet no more than n + 7. All |t| <= g = gamma_{n+12}. With x = c + e, |e| <= r, |x| <= |c| + r:
        |output - (a (W c + b - mu) + beta)|  <=  |a| |W| r + g (|a| |W| (|c| + r) + |a| (|b| + |mu|) + |beta|).
    """
    scaling, fan_in = _scaling(step), step.weight[0].size
    growth = rounding.gamma(fan_in + 12)
    steepness = np.abs(scaling.factor)
    constant = growth * (steepness * (np.abs(step.bias) + np.abs(scaling.mean)) + np.abs(scaling.beta))
    center = _apply(step, step.weight, ball.center)
    center = _scale(scaling.factor, center + _per_channel(step.bias - scaling.mean, center), scaling.beta)
    spread = _apply(step, np.abs(step.weight), (1 + growth) * ball.radius + growth * np.abs(ball.center))
    magnitude = _magnitude(step, scaling, ball)
    radius = _scale(steepness, spread, constant) + rounding.tiny * magnitude
    return Ball(center, _unless_overflow(magnitude, radius, rounding))


def _magnitude(step: Affine, scaling: _Scaling, ball: Ball) -> Array:
    """Per image, a bound M of every intermediate value, in whatever order; 2^-120 M also pays for underflow.

    An underflow costs at most 2^-126 times what it is multiplied with later. Flushed x_i or w_i: n max|W|, n max|x|
    times |a|; products and sums: 2 n |a|; gamma, or a itself when gamma is tiny: |W x + b - mu|, which is why |W| and
    |x| are multiplied here and b and mu stand in it; folded w a: n max|x|; the handful left: 1 or |a|. Below 12 M.
    """
    axes = tuple(range(1, ball.center.ndim))
    reach = ball.reach.max(axis=axes, keepdims=True)
    output = step.weight[0].size * (1 + reach) * (1 + np.abs(step.weight).max())
    output = output + np.abs(step.bias).max() + np.abs(scaling.mean).max()
    magnitude = np.asarray(scaling.size.max() * output + np.abs(scaling.beta).max())
    return magnitude.reshape(-1, *[1] * (step.weight.ndim - 1))


def _unless_overflow(magnitude: Array, radius: Array, rounding: Rounding) -> Array:
    """NaN and infinity count as overflow: one of them anywhere leaves the whole image unproven."""
    return np.where(magnitude < rounding.largest, radius, np.inf)


def _through(steps: tuple[Step, ...], ball: Ball, rounding: Rounding) -> Ball:
    for step in steps:
        match step:
            case Affine():
                ball = _affine(step, ball, rounding)
            case Relu():
                ball = _relu(ball, rounding)
            case Flatten():
                ball = Ball(ball.center.reshape(len(ball.center), -1), ball.radius.reshape(len(ball.radius), -1))
            case Residual():
                branch = _through(step.branch, ball, rounding)
                ball = _sum(branch, _through(step.shortcut, ball, rounding), rounding)
    return ball


def forward(network: Network, x: Array) -> Array:
    """Logits in float64: the centers of balls without radius."""
    logits = np.empty((len(x), len(network.classifier.bias)))
    with np.errstate(over="ignore", invalid="ignore"):
        for batch in _batches(len(x), _BATCH):
            start = _normalize(network, Ball(x[batch], np.zeros_like(x[batch])), EXACT)
            logits[batch] = _affine(network.classifier, _through(network.layers, start, EXACT), EXACT).center
    return logits


# --- interval margins ------------------------------------------------------------------------------------------------


def rigorous_margins(network: Network, lower: Array, upper: Array, labels: Integers) -> Array:
    """Per image, what z_y - z_j is guaranteed to exceed, least over j, for every binary32 evaluation in the box.

    Already subtracted: all rounding, and the reserve of 1e-9 of the margin's scale. NaN or infinite where nothing can
    be said; ask `proven`.
    """
    return _interval_margins(network, lower, upper, labels, BINARY32)


def interval_margins(network: Network, lower: Array, upper: Array, labels: Integers) -> Array:
    """The same over the reals, evaluated in float64: no rounding of the network, no reserve."""
    return _interval_margins(network, lower, upper, labels, EXACT)


def _interval_margins(network: Network, lower: Array, upper: Array, labels: Integers, rounding: Rounding) -> Array:
    _check(network, lower, upper, labels)
    margins = np.empty(len(labels))
    with np.errstate(over="ignore", invalid="ignore"):
        for batch in _batches(len(labels), _BATCH):
            ball = _normalize(network, _ball(lower[batch], upper[batch], rounding), rounding)
            ball = _through(network.layers, ball, rounding)
            margins[batch] = _least_margin(network.classifier, ball, labels[batch], rounding)
    return margins


def proven(margins: Array) -> npt.NDArray[np.bool_]:
    """A proof is a margin that is finite and strictly positive."""
    return np.isfinite(margins) & (margins > 0)


def _least_margin(classifier: Affine, ball: Ball, labels: Integers, rounding: Rounding) -> Array:
    """The least of the margins, each below what binary32 makes of z_y - z_j.

    The network computes z_y and z_j apart, each with n + 1 roundings on its own |w||x|, so the error is
    gamma_{n+2} ((|W_y| + |W_j|)(|c| + r) + |b_y| + |b_j|), the one to spare for us; |W_y - W_j| would forget what
    cancels. Only over the reals may the rows be merged: (W_y - W_j) c - |W_y - W_j| r.
    """
    weight, bias = classifier.weight, classifier.bias
    merged, merged_bias = weight[labels][:, None] - weight, bias[labels][:, None] - bias
    real = _dot(merged, ball.center) - _dot(np.abs(merged), ball.radius) + merged_bias
    size = ball.reach @ np.abs(weight).T + np.abs(bias)
    scale = np.take_along_axis(size, labels[:, None].astype(np.intp), axis=1) + size
    magnitude = _magnitude(classifier, _scaling(classifier), ball)
    error = rounding.gamma(weight.shape[1] + 2) * scale + 2 * rounding.tiny * magnitude
    margins = real - _unless_overflow(magnitude, error, rounding) - rounding.reserve * scale
    margins[np.arange(len(labels)), labels] = np.inf
    return np.asarray(margins.min(axis=1))


def _dot(rows: Array, x: Array) -> Array:
    """Of every image its own rows times its own vector."""
    return np.asarray((rows @ x[:, :, None])[:, :, 0])


# --- CROWN-IBP -------------------------------------------------------------------------------------------------------


def crown_ibp_margins(network: Network, lower: Array, upper: Array, labels: Integers) -> Array:
    """Per image, a lower bound of z_y - z_j over the box, least over j, in exact arithmetic (evaluated in float64).

    Interval bounds at every ReLU, then the margins pulled back to the input as linear functions.
    """
    _check(network, lower, upper, labels)
    with np.errstate(all="ignore"):
        margins = [_crown_ibp(network, lower[i : i + 1], upper[i : i + 1], int(y)) for i, y in enumerate(labels)]
    return np.array(margins, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class _Seen:
    """A step and the ball that entered it; for a residual block also what its two sides have seen."""

    step: Step
    ball: Ball
    branch: tuple[_Seen, ...] = ()
    shortcut: tuple[_Seen, ...] = ()


@dataclass(frozen=True, eq=False)
class _Line:
    """Margins are at least rows . x + constant, x the value at this place of the network."""

    rows: Array
    constant: Array


def _crown_ibp(network: Network, lower: Array, upper: Array, label: int) -> float:
    box = _ball(lower, upper, EXACT)
    seen, _ = _record(network.layers, _normalize(network, box, EXACT))
    weight, bias = network.classifier.weight, network.classifier.bias
    others = np.delete(np.arange(len(bias)), label)
    least = [math.inf]
    for group in _batches(len(others), _ROWS):
        chosen = others[group]
        line = _pull_back(seen, _Line(weight[label] - weight[chosen], bias[label] - bias[chosen]))
        least.append(_minimum(_before_normalize(network, line), box))
    return float(np.min(least))


def _record(steps: tuple[Step, ...], ball: Ball) -> tuple[tuple[_Seen, ...], Ball]:
    seen: list[_Seen] = []
    for step in steps:
        if isinstance(step, Residual):
            (branch, one), (shortcut, other) = _record(step.branch, ball), _record(step.shortcut, ball)
            seen.append(_Seen(step, ball, branch, shortcut))
            ball = _sum(one, other, EXACT)
        else:
            seen.append(_Seen(step, ball))
            ball = _through((step,), ball, EXACT)
    return tuple(seen), ball


def _pull_back(seen: tuple[_Seen, ...], line: _Line) -> _Line:
    for place in reversed(seen):
        match place.step:
            case Affine():
                line = _before_affine(place.step, line, place.ball.center.shape[1:])
            case Relu():
                line = _before_relu(place.ball, line)
            case Flatten():
                line = _Line(line.rows.reshape(-1, *place.ball.center.shape[1:]), line.constant)
            case Residual():
                # rows . (p + q) is the sum of both; the constant may be counted on one side only.
                one = _pull_back(place.branch, line)
                other = _pull_back(place.shortcut, _Line(line.rows, np.zeros_like(line.constant)))
                line = _Line(one.rows + other.rows, one.constant + other.constant)
    return line


def _before_affine(step: Affine, line: _Line, shape: tuple[int, ...]) -> _Line:
    """rows . (a (W x + b - mu) + beta) = W^T (a rows) . x + rows . (a (b - mu) + beta)."""
    scaling = _scaling(step)
    constant = scaling.factor * (step.bias - scaling.mean) + scaling.beta
    rows = _transposed(step, line.rows * _per_channel(scaling.factor, line.rows), shape)
    return _Line(rows, line.constant + _total(line.rows * _per_channel(constant, line.rows)))


def _before_relu(ball: Ball, line: _Line) -> _Line:
    """Positive coefficients take a line below ReLU, negative ones the chord above it, between l < 0 < u:

    t x <= relu(x) <= u/(u - l) (x - l),  t = 1 where u > -l, else 0: the smaller triangle (CROWN, adaptive slope).
    Stable units need no case of their own: u <= 0 gives 0 twice, l >= 0 gives x twice. NaN bounds stay NaN.
    """
    lower, upper = _edges_of(ball, EXACT)
    chord = np.where(upper <= 0, 0.0, np.where(lower >= 0, 1.0, upper / (upper - lower)))
    below = (upper > -lower).astype(np.float64)
    positive, negative = np.maximum(line.rows, 0), np.minimum(line.rows, 0)
    height = negative * (-chord * np.minimum(lower, 0))
    return _Line(positive * below + negative * chord, line.constant + _total(height))


def _before_normalize(network: Network, line: _Line) -> _Line:
    rows = line.rows / _per_channel(network.std, line.rows)
    return _Line(rows, line.constant - _total(rows * _per_channel(network.mean, rows)))


def _minimum(line: _Line, box: Ball) -> float:
    """Of a linear function over a box; NaN if any row has one."""
    return float((line.constant + _total(line.rows * box.center) - _total(np.abs(line.rows) * box.radius)).min())


def _total(values: Array) -> Array:
    return np.asarray(values.reshape(len(values), -1).sum(axis=1))


# --- linear algebra --------------------------------------------------------------------------------------------------


def _apply(step: Affine, weight: Array, x: Array) -> Array:
    """The layer's linear part with this weight (its own, or the absolute one)."""
    if weight.ndim == 2:
        return np.asarray(x @ weight.T)
    height, breadth = ((size + 2 * step.padding - weight.shape[2]) // step.stride + 1 for size in x.shape[2:])
    matrix = weight.reshape(len(weight), -1)
    result = np.empty((len(x), len(weight), height, breadth))
    for block in _batches(len(x), _COLUMNS // (matrix.shape[1] * height * breadth)):
        columns = _columns(x[block], weight.shape[2], step.stride, step.padding)
        result[block] = (matrix @ columns).reshape(-1, *result.shape[1:])
    return result


def _columns(x: Array, kernel: int, stride: int, padding: int) -> Array:
    """im2col: (N, C k k, H' W'), each column what one output position sees."""
    padded = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), axis=(2, 3))
    seen = windows[:, :, ::stride, ::stride].transpose(0, 1, 4, 5, 2, 3)
    return seen.reshape(len(x), -1, seen.shape[4] * seen.shape[5])


def _transposed(step: Affine, rows: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of `_apply`, from its outputs back to inputs of this shape."""
    if step.weight.ndim == 2:
        return np.asarray(rows @ step.weight)
    matrix = step.weight.reshape(len(step.weight), -1).T
    result = np.empty((len(rows), *shape))
    for block in _batches(len(rows), _COLUMNS // (len(matrix) * rows[0, 0].size)):
        columns = matrix @ rows[block].reshape(-1, len(step.weight), rows[0, 0].size)
        result[block] = _scattered(step, columns.reshape(-1, *step.weight.shape[1:], *rows.shape[2:]), shape)
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


def _per_channel(values: Array, like: Array) -> Array:
    return values.reshape(1, -1, *[1] * (like.ndim - 2))


def _scale(factor: Array, x: Array, shift: Array) -> Array:
    return _per_channel(factor, x) * x + _per_channel(shift, x)


def _batches(count: int, size: int) -> Iterator[slice]:
    size = max(size, 1)
    return (slice(start, start + size) for start in range(0, count, size))


def _check(network: Network, lower: Array, upper: Array, labels: Integers) -> None:
    """A box turned inside out would prove anything."""
    shape = (len(labels), *network.shape)
    if lower.shape != shape or upper.shape != shape or lower.dtype != np.float64 or upper.dtype != np.float64:
        raise InputError(f"the box has the shapes {lower.shape} and {upper.shape}, expected {shape} in float64")
    if not (lower <= upper).all():
        raise InputError("the box has a lower edge above the upper one, or NaN")
    if not np.issubdtype(labels.dtype, np.integer) or ((labels < 0) | (labels >= len(network.classifier.bias))).any():
        raise InputError(f"labels must be integers from 0 to {len(network.classifier.bias) - 1}")
