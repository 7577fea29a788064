"""Runs many threads at once, each with its own list of calls."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

NUM_THREADS = 8


def in_threads(work: Callable[[int], object], num_threads: int = NUM_THREADS) -> list:
    """The results of `work(i)` in each thread `i`; all begin together. The first exception is raised."""
    barrier = threading.Barrier(num_threads)

    def begin(i: int):
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(num_threads) as pool, quick_switches():
        return [future.result() for future in [pool.submit(begin, i) for i in range(num_threads)]]


@contextmanager
def quick_switches():
    """Make Python switch threads every 10 us instead of 5 ms, because operations on tiny tensors are shorter than
    that."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
