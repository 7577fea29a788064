"""Runs many small torch operators on the CPU, on the calling thread alone.

Torch splits an operator on 32,768 elements or more over its threads and ends it with a barrier, at which they spin. If
another process is busy, a thread waits for its core for a time slice of the scheduler, many times as long as the
operator takes. Hundreds of operators in a row all wait like that, and are more than ten times slower than on one
thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def on_one_thread() -> Iterator[None]:
    """Run torch operators on the calling thread. `torch.set_num_threads` would also affect threads that the rest of the
    program starts meanwhile; OpenMP's own setting belongs to the calling thread.

    Does nothing where torch's OpenMP is not found.
    """
    before, openmp = torch.get_num_threads(), _openmp()
    if before == 1 or openmp is None:
        yield
        return
    openmp.omp_set_num_threads(1)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(before)


@functools.lru_cache(maxsize=None)
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library of this process, if it is the one that torch uses."""
    before = torch.get_num_threads()
    try:
        openmp = ctypes.CDLL(None)
        openmp.omp_set_num_threads(before + 1)
    except (OSError, TypeError, AttributeError):
        return None
    is_torchs = torch.get_num_threads() == before + 1
    openmp.omp_set_num_threads(before)
    return openmp if is_torchs else None
