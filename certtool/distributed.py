"""One run on several processes, by torchrun and torch.distributed: N ranks train as one does at the same global batch.

Every rank holds the whole network and a part of each batch. What is a mean over the batch is summed over ranks with its
gradient (bounds/together.py); gradients of the parameters are summed before they are clipped. DistributedDataParallel
would average gradients of a forward pass that this method does not have: its bounds walk the graph.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from certtool.errors import OutsideError

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)  # one rank may read or decode a data set while the others wait
_GONE = re.compile(r"connection|peer|timed out|timeout|nccl|socket|gloo", re.IGNORECASE)


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them. Alone, every question is answered at once."""

    rank: int = 0
    size: int = 1

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def leads(self) -> bool:
        """One rank writes and speaks."""
        return self.rank == 0

    def part(self, values: Tensor) -> Tensor:
        """This rank's share of a batch; the first ranks take what does not divide."""
        return values.tensor_split(self.size)[self.rank]

    def total(self, values: Tensor) -> Tensor:
        """Summed over ranks, without gradient."""
        if not self.alone:
            dist.all_reduce(values)
        return values

    def total_gradients(self, parameters: Iterable[Tensor]) -> None:
        """All gradients in one message."""
        if self.alone:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        whole = self.total(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, summed in zip(gradients, torch.split(whole, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def any(self, answer: bool, device: torch.device) -> bool:
        """Whether any rank says yes: all stop after the same step, or none does."""
        return answer if self.alone else bool(self.total(torch.tensor(float(answer), device=device)) > 0)

    def share(self, value: T) -> T:
        """The leader's value, on every rank."""
        if self.alone:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        result: T = box[0]
        return result

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        if not self.alone:
            dist.barrier()

    def batch(self, images: int) -> SharedBatch:
        """A batch of so many images, of which this rank has a part."""
        return SharedBatch(self, images)


@dataclass(frozen=True)
class SharedBatch:
    """See `bounds.together.Together`."""

    world: World
    images: int

    @property
    def alone(self) -> bool:
        return self.world.alone

    def sum(self, part: Tensor) -> Tensor:
        return part if self.alone else _Sum.apply(part)  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """A sum over ranks. Each rank's loss depends on it, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(context: Any, part: Tensor) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        whole = gradient.contiguous().clone()
        dist.all_reduce(whole)
        return whole


def launched() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def local_device(device: torch.device) -> torch.device:
    """Each rank of a machine its own GPU."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if device.type == "cuda" else device


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[World]:
    """The world this process belongs to; alone where torchrun did not start it."""
    if not launched():
        yield World()
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        with _lost_ranks():
            yield World(dist.get_rank(), dist.get_world_size())
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


@contextlib.contextmanager
def _lost_ranks() -> Iterator[None]:
    """A rank that died is noticed by the others in their next message to it."""
    try:
        yield
    except RuntimeError as error:
        if not _GONE.search(str(error)):
            raise
        raise OutsideError(
            f"another process of this run has ended: {str(error).splitlines()[0][:200]}",
            "go on from what was saved last with `certtool train --resume`, on any number of processes",
        ) from error
