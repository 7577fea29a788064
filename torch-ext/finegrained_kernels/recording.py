"""A record of what a call launches, written by the launchers for `plans.py`."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple, Tuple

import torch


class Launch(NamedTuple):
    """A launch without Triton's launch path: the binary's launcher and its arguments. `hooks` are the kernel's own."""

    run: Any
    function: Any
    metadata: Any
    grid: Tuple[int, int, int]
    arguments: tuple
    hooks: list


class Recorder:
    """All launches of a call, for `plans.py`; complete unless something is launched without being recorded here."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.constants: list[torch.Tensor] = []
        self.is_complete = True


class _Current(threading.local):
    recorder: Recorder | None = None
    note: Callable[[Any, tuple], None] | None = None


_current = _Current()


def current_recorder() -> Recorder | None:
    """The recorder of this thread's launches, if there is one."""
    return _current.recorder


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record this thread's launches."""
    _current.recorder = new = Recorder()
    try:
        yield new
    finally:
        _current.recorder = None


def forgo_plan() -> None:
    """Say that the call that is being recorded, if any, does something that a replay would not do."""
    if _current.recorder is not None:
        _current.recorder.is_complete = False


@contextlib.contextmanager
def launches_noted(note: Callable[[Any, tuple], None]) -> Iterator[None]:
    """Call `note(kernel, arguments)` instead of launching what this thread launches on placeholders."""
    _current.note = note
    try:
        yield
    finally:
        _current.note = None


def is_noted(kernel: Any, arguments: tuple) -> bool:
    """Note a launch, if this thread's launches are noted."""
    if _current.note is None:
        return False
    _current.note(kernel, arguments)
    return True


def picker(indices: list[int]) -> Callable[[Any], tuple]:
    """Like `operator.itemgetter`, but always returns a tuple."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return (lambda items: (items[indices[0]],)) if indices else (lambda items: ())
