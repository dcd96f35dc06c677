"""`certtool ...` inside this process: what a user gets, without the seconds in which a new process imports torch."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TextIO

import torch

from certtool.errors import Exit

FIRST_SEED = 67280421310721  # of torch's own generator in a new process


def run_inside(arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess:
    """The module that `python -m certtool` runs, with its own arguments, folder, environment and streams.

    A warning is an error here as in any test; a process would only print it.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with _caught(out, err), _in(folder, environment), _nothing_left_behind():
            code = _exit_code([sys.executable, *arguments])
        if code == Exit.INTERRUPTED:
            raise KeyboardInterrupt  # somebody wants to stop the tests, not the command
        return subprocess.CompletedProcess(["certtool", *arguments], code, _text(out), _text(err))


def _exit_code(words: list[str]) -> int:
    before, sys.argv = sys.argv, words
    try:
        runpy.run_module("certtool", run_name="__main__", alter_sys=True)
    except SystemExit as leave:
        if isinstance(leave.code, str):
            print(leave.code, file=sys.stderr)
            return 1
        return leave.code or 0
    finally:
        sys.argv = before
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


@functools.cache
def _stream(number: int) -> TextIO:
    """One for the whole session: what keeps it, as a handler of `logging` does, never holds a closed file."""
    errors = "strict" if number == 1 else "backslashreplace"
    return open(number, "w", 1 if number == 2 else -1, "utf-8", errors, closefd=False)


@contextlib.contextmanager
def _caught(out: IO[bytes], err: IO[bytes]) -> Iterator[None]:
    """By file descriptor, so that what C++ or a child process writes is caught too."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.flush()
    kept = [os.dup(number) for number in (1, 2)]
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = streams
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)


@contextlib.contextmanager
def _in(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    kept = dict(os.environ)
    _set_environment(environment)
    try:
        with contextlib.chdir(folder):
            yield
    finally:
        _set_environment(kept)


def _set_environment(values: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(values)


@contextlib.contextmanager
def _nothing_left_behind() -> Iterator[None]:
    """Random numbers as in a new process; threads, signals, warnings and logging as they were."""
    threads, root = torch.get_num_threads(), logging.getLogger()
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)}
    logs = root.level, list(root.handlers)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            torch.manual_seed(FIRST_SEED)
            yield
    finally:
        torch.set_num_threads(threads)
        for number, handler in signals.items():
            signal.signal(number, handler)
        root.setLevel(logs[0])
        root.handlers[:] = logs[1]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode().replace("\r\n", "\n")
