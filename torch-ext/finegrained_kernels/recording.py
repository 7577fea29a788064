"""What a call launches, written down for `plans.py` by those who launch."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple, Tuple

import torch


class Launch(NamedTuple):
    """A launch past Triton: the binary's launcher and what it is given; `hooks` is the kernel's list of them."""

    run: Any
    function: Any
    metadata: Any
    grid: Tuple[int, int, int]
    arguments: tuple
    hooks: list


class Recorder:
    """What a call launches, for `plans.py`; complete unless something is launched that is not written down here."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.constants: list[torch.Tensor] = []
        self.is_complete = True


class _Current(threading.local):
    recorder: Recorder | None = None


_current = _Current()


def current_recorder() -> Recorder | None:
    """The one that this thread's launches are written to, if any."""
    return _current.recorder


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Write this thread's launches down."""
    _current.recorder = new = Recorder()
    try:
        yield new
    finally:
        _current.recorder = None


def forgo_plan() -> None:
    """The call that is being recorded, if any, does what a replay would not."""
    if _current.recorder is not None:
        _current.recorder.is_complete = False


def picker(indices: list[int]) -> Callable[[Any], tuple]:
    """`operator.itemgetter`, but always to a tuple."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return (lambda items: (items[indices[0]],)) if indices else (lambda items: ())
