"""What every command that fills a directory does: check first, then process shards in parallel."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock
from typing import TypeVar

from finegrained_kernels.checkpoint.errors import CheckpointError
from finegrained_kernels.checkpoint.stream import LOCK_SUFFIX, Stopped, locked

Shard = TypeVar("Shard")

DEFAULT_JOBS = min(max(2, (os.cpu_count() or 1) // 2), 8)
"""The default number of shards at a time: one for every two cores, because hashing and writing run beside encoding; at
least two, so that one is encoded while another is hashed; at most eight, to limit memory."""


def check_request(jobs: int, device: str) -> None:
    """Raise, before anything is written, if a command cannot run with these options."""
    import torch

    if jobs < 1:
        raise CheckpointError(f"jobs must be at least 1, got {jobs}")
    try:
        if torch.device(device).type not in ("cpu", "cuda"):
            raise CheckpointError(f"device {device!r} cannot be used: expected cpu or cuda")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error


def check_space(root: Path, needed: int) -> None:
    """Raise, before anything is written, if ``needed`` bytes do not fit."""
    free = shutil.disk_usage(root).free
    if needed > free:
        raise CheckpointError(f"{root} has {free} bytes free, at least {needed} are needed")


def for_each_shard(shards: Sequence[str], work: Path, jobs: int, handle: Callable[[str, Event], None]) -> None:
    """Call ``handle(shard, stop)`` for each shard, ``jobs`` at a time, sharing them with other processes.

    Each shard is handled under a lock. If another process holds it, the shard is handled last, once that process is
    done with it, so ``handle`` must recognize finished shards. Errors are those of `run_shards`.
    """
    locks = {shard: work / f"{i}{LOCK_SUFFIX}" for i, shard in enumerate(shards)}
    held_elsewhere: list[str] = []

    def attempt(shard: str, stop: Event) -> None:
        with locked(locks[shard], wait=False) as got:
            if got:
                handle(shard, stop)
            else:
                held_elsewhere.append(shard)

    def wait_for(shard: str, stop: Event) -> None:
        with locked(locks[shard], wait=True) as got:
            if got:
                handle(shard, stop)

    run_shards(shards, jobs, attempt)
    run_shards(held_elsewhere, jobs, wait_for)


def run_shards(shards: Sequence[Shard], jobs: int, call: Callable[[Shard, Event], None]) -> None:
    """Call ``call(shard, stop)`` for each shard, ``jobs`` at a time. After an error or an interruption, set ``stop``
    and raise the first error."""
    stop = Event()

    def guarded(shard: Shard) -> None:
        if stop.is_set():
            raise Stopped
        try:
            call(shard, stop)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(guarded, shard) for shard in shards]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            stop.set()
            raise
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error


class _TorchThreads:
    """The number of threads that torch had before the first `one_torch_thread` context that is still open."""

    lock = Lock()
    open_contexts = 0
    before = 1


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Keep torch's operators on the thread that calls them, because here shards and streams run in parallel.

    Contexts of several threads may overlap. torch has a number for each thread, and one for new threads. Every context
    restores that of its own thread, and the last context that of new threads, to what it was before the first.
    """
    import torch

    with _TorchThreads.lock:
        if not _TorchThreads.open_contexts:
            _TorchThreads.before = torch.get_num_threads()
        _TorchThreads.open_contexts += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _TorchThreads.lock:
            _TorchThreads.open_contexts -= 1
            torch.set_num_threads(_TorchThreads.before)
