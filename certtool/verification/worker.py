"""auto_LiRPA in a process of its own: repairs stay there, memory and time are limited, its death costs a batch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import resource
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from certtool.bounds.interval import Interval
from certtool.errors import InputError

Failure = Literal["memory", "time", "engine"]
# What torch says when an allocation fails; a C++ bad_alloc reaches Python as a MemoryError or not at all.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "std::bad_alloc", "out of memory")


@dataclass(frozen=True)
class Job:
    """A network for the worker: pickled, so that nothing of it is shared."""

    model: bytes
    preprocessing: str | None
    example_shape: tuple[int, ...]
    classes: int


def job_for(model: nn.Module, preprocessing: str | None, example: Tensor, classes: int) -> Job:
    try:
        content = pickle.dumps(model.cpu())
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"this network cannot be sent to another process: {error}",
            "define its class in a module that can be imported, or stop at `method='ibp'`",
        ) from None
    return Job(content, preprocessing, tuple(example.shape), classes)


class Worker:
    """Starts when first asked, and again after a death. Every answer is margins or the reason why there are none."""

    def __init__(self, job: Job, memory: int, deadline: float | None) -> None:
        self.job, self.memory, self.deadline = job, memory, deadline
        self.complaint: str | None = None  # the engine's own words, when it failed for another reason than memory
        self._process: Any = None
        self._pipe: Connection | None = None

    def margins(self, method: str, box: Interval, labels: Tensor) -> Tensor | Failure:
        """The least margin of each image (over the other classes), or why the worker could not tell."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return "time"
        try:
            pipe = self._connected()
        except OSError as error:  # the system has no process, or no more open files, to give
            self.complaint = f"its process cannot be started: {(error.strerror or str(error)).lower()}"
            return "engine"
        try:
            pipe.send((method, box.center.numpy(), box.radius.numpy(), labels.numpy()))
            left = None if self.deadline is None else max(self.deadline - time.monotonic(), 0)
            if not pipe.poll(left):
                self.close()
                return "time"
            kind, answer = pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self.close()
            if code is not None and code > 0:  # it ended by itself: it could not even start
                self.complaint = f"its process ended with exit code {code}"
                return "engine"
            return "memory"  # a signal, or an allocation that C++ could not report
        if kind == "ok":
            return torch.from_numpy(answer)
        if kind == "memory":
            self.close()  # what it holds half-done is given back with the process
            return "memory"
        self.complaint = answer
        self.close()
        return "engine"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _connected(self) -> Connection:
        if self._pipe is None:
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            arguments = (theirs, self.job, self.memory, torch.get_num_threads())
            process = context.Process(target=_serve, args=arguments, daemon=True)
            try:
                process.start()
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            self._process, self._pipe = process, ours  # only now: what did not start can be neither killed nor joined
        return self._pipe


def _serve(pipe: Connection, job: Job, memory: int, threads: int) -> None:
    """The worker's life: limit itself, build the bounded model, answer until the other side is gone."""
    # A crash in C++ for lack of memory should leave neither a message nor a core file on the user's disk.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    torch.set_num_threads(threads)
    bounded: Any = None
    while True:
        try:
            method, center, radius, labels = pipe.recv()
        except EOFError:
            return
        try:
            if bounded is None:
                from certtool.bounds.lirpa import BoundedModel

                model = pickle.loads(job.model)
                bounded = BoundedModel(model, torch.zeros(1, *job.example_shape[1:]), job.preprocessing)
            box = Interval(torch.from_numpy(center), torch.from_numpy(radius))
            margins = bounded.lower_margins(box, torch.from_numpy(labels), job.classes, method)
            pipe.send(("ok", _least(margins, torch.from_numpy(labels))))
        except MemoryError:
            pipe.send(("memory", ""))
        except Exception as error:
            out_of_memory = any(word in str(error) for word in _OUT_OF_MEMORY)
            pipe.send(("memory" if out_of_memory else "engine", f"{type(error).__name__}: {error}"))


def _least(margins: Tensor, labels: Tensor) -> np.ndarray[Any, Any]:
    """Over the other classes; NaN stays NaN, so that it can never be taken for a proof."""
    others = margins.scatter(1, labels.unsqueeze(1), torch.inf)
    result: np.ndarray[Any, Any] = others.min(1).values.numpy()
    return result
