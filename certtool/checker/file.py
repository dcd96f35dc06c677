"""From a model file's bytes to the checker's network: the container and the architectures, read here once more."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from certtool.checker.network import Affine, Array, BatchNorm, Flatten, Network, Relu, Residual, Step
from certtool.errors import InputError

_HINT = "a certtool model is a .safetensors file written by `certtool train` or `certtool zoo`"
_HEADER_LIMIT = 1_000_000
_BATCH_NORM_EPS = 1e-5  # not in the file: both of certtool's BatchNorm layers use torch's default


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
    """Residual blocks of two 3x3 convolutions."""
    _only(arch, "width", "widen", "blocks", "hidden")
    mode, first = _mode(arch), _whole(arch, "width") * _whole(arch, "widen")

    def branch(name: str, channels: int, out: int, stride: int) -> tuple[Step, ...]:
        one = _layer(tensors, f"{name}.conv1", f"{name}.bn1", (out, channels, 3, 3), stride, mode)
        return one, Relu(), _layer(tensors, f"{name}.conv2", f"{name}.bn2", (out, out, 3, 3), 1, mode)

    return _residual(tensors, arch, shape, classes, first, branch)


def _resnext(
    tensors: _Tensors, arch: dict[str, Any], shape: tuple[int, int, int], classes: int
) -> tuple[tuple[Step, ...], Affine]:
    """Residual blocks of a 1x1 convolution, a 3x3 one in groups (with the stride), a 1x1 one to twice the filters."""
    _only(arch, "width", "cardinality", "bottleneck", "blocks", "hidden")
    mode, groups = _mode(arch), _whole(arch, "cardinality", 64)

    def branch(name: str, channels: int, out: int, stride: int) -> tuple[Step, ...]:
        inner = out // 2
        one = _layer(tensors, f"{name}.conv1", f"{name}.bn1", (inner, channels, 1, 1), 1, mode)
        middle = (inner, inner // groups, 3, 3)
        two = _layer(tensors, f"{name}.conv2", f"{name}.bn2", middle, stride, mode, groups)
        return one, Relu(), two, Relu(), _layer(tensors, f"{name}.conv3", f"{name}.bn3", (out, inner, 1, 1), 1, mode)

    return _residual(tensors, arch, shape, classes, 2 * groups * _whole(arch, "bottleneck"), branch)


_BUILDERS = {"cnn7": _cnn7, "wide_resnet": _wide_resnet, "resnext": _resnext}


def _residual(
    tensors: _Tensors,
    arch: dict[str, Any],
    shape: tuple[int, int, int],
    classes: int,
    first: int,
    branch: Callable[[str, int, int, int], tuple[Step, ...]],
) -> tuple[tuple[Step, ...], Affine]:
    """A convolution, three stages of residual blocks, a linear layer, the classifier.

    Blocks of the first stage give `first` filters, of the next two twice and four times as many from an image that its
    first block halves. The shortcut is a 1x1 convolution, or nothing where neither width nor stride changes.
    """
    width, hidden, mode = _whole(arch, "width"), _whole(arch, "hidden"), _mode(arch)
    channels, height, breadth = shape
    steps: list[Step] = [_layer(tensors, "conv1", "bn1", (width, channels, 3, 3), 1, mode), Relu()]
    channels = width
    for index, (stage, begins) in enumerate(_stages(arch)):
        name, out, stride = f"blocks.{index}", first * 2**stage, 2 if stage > 0 and begins else 1
        beside: tuple[Step, ...] = ()
        if stride != 1 or channels != out:
            kernel = (out, channels, 1, 1)
            beside = (_layer(tensors, f"{name}.shortcut.0", f"{name}.shortcut.1", kernel, stride, mode),)
        steps += [Residual(branch(name, channels, out, stride), beside), Relu()]
        channels, height, breadth = out, -(-height // stride), -(-breadth // stride)
    flat = channels * height * breadth
    steps += [Flatten(), _layer(tensors, "linear", "bn2", (hidden, flat), 1, mode), Relu()]
    return tuple(steps), _layer(tensors, "classifier", "", (classes, hidden), 1, "none")


def _stages(arch: dict[str, Any]) -> Iterator[tuple[int, bool]]:
    """Of every block its stage, and whether it is the first one there."""
    counts = arch.get("blocks")
    if not isinstance(counts, list) or len(counts) != 3 or any(type(n) is not int or n < 1 for n in counts):
        raise InputError("the file's header has no three counts in arch.blocks", _HINT)
    return ((stage, index == 0) for stage, count in enumerate(counts) for index in range(count))


def _layer(
    tensors: _Tensors, name: str, norm: str, shape: tuple[int, ...], stride: int, mode: str, groups: int = 1
) -> Affine:
    """3x3 kernels are padded by 1, 1x1 kernels and linear layers by nothing."""
    convolution, out = len(shape) == 4, shape[0]
    weight, bias = tensors.take(f"{name}.weight", *shape), tensors.take(f"{name}.bias", out)
    padding = shape[3] // 2 if convolution else 0
    if mode == "none" or (mode == "conv" and not convolution):
        return Affine(weight, bias, stride, padding, None, groups)
    names = ("weight", "bias", "running_mean", "running_var")
    gamma, beta, mean, var = (tensors.take(f"{norm}.{part}", out) for part in names)
    if (var < 0).any():
        raise InputError(f"`{norm}.running_var` has negative entries, which no variance has")
    batch_norm = BatchNorm(gamma, beta, mean, var, _BATCH_NORM_EPS, center=mode != "scale", scale=mode != "center")
    return Affine(weight, bias, stride, padding, batch_norm, groups)


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
