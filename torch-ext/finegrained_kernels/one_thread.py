"""Many small torch operators on the CPU, each on the calling thread alone.

Torch splits an operator of 32,768 elements or more over its threads and ends it with a barrier, at which they spin.
Beside another busy process a thread waits for its core a time slice of the scheduler, many times what such an operator
takes, and hundreds of operators in a row each wait so: less than one tenth of one thread's speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def on_one_thread() -> Iterator[None]:
    """Run torch operators on the calling thread. `torch.set_num_threads` would change what threads that start
    meanwhile, in the program around this, are born with; OpenMP's own setting is the calling thread's.

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
    """The OpenMP library of this process, if it is the one that torch asks."""
    before = torch.get_num_threads()
    try:
        openmp = ctypes.CDLL(None)
        openmp.omp_set_num_threads(before + 1)
    except (OSError, TypeError, AttributeError):
        return None
    is_torchs = torch.get_num_threads() == before + 1
    openmp.omp_set_num_threads(before)
    return openmp if is_torchs else None
