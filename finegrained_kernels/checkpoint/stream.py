"""Streams bytes from files to consumers in bounded memory, and writes files that appear whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from finegrained_kernels.checkpoint.errors import CheckpointError, Fault
from finegrained_kernels.checkpoint.headers import Header, TensorInfo

CHUNK_BYTES = 4 << 20
TEMPORARY_SUFFIX = ".csf-tmp"
LOCK_SUFFIX = ".csf-lock"
_BUFFERS = 3
_PIECE_BYTES = 1 << 20

Progress = Callable[[int], None]
"""Called with the number of further bytes that are done."""


class Stopped(Exception):
    """This thread gives up, because another failed or the user interrupted."""


def read_exact(fd: int, view: memoryview, offset: int, file: str, tensor: str) -> None:
    """Fill ``view`` with the file's bytes from ``offset`` on; ``file`` and ``tensor`` are for messages."""
    while len(view):
        count = os.preadv(fd, [view], offset)
        if count == 0:
            raise CheckpointError([Fault(file, tensor, f"cut short: the file ends at byte {offset}")])
        view, offset = view[count:], offset + count


class Fanout:
    """A stream of bytes that every consumer gets in order, in chunks, on a thread of its own.

    Hashing, comparing and writing release the interpreter's lock, so they overlap with each other and with reading.
    Buffers are reused, so a consumer must be done with a chunk when it returns.
    """

    def __init__(self, consumers: Iterable[Callable[[memoryview], object]], stop: Event, progress: Progress) -> None:
        self._consumers = list(consumers)
        self._stop, self._progress = stop, progress
        self._buffers = deque(memoryview(bytearray(CHUNK_BYTES)) for _ in range(_BUFFERS))
        self._pending: deque[list[Future]] = deque()
        self._filled = 0

    def __enter__(self) -> Fanout:
        self._stack = ExitStack()
        self._lanes = [self._stack.enter_context(ThreadPoolExecutor(1)) for _ in self._consumers]
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        with self._stack:
            if kind is None:
                self._flush()
                while self._pending:
                    self._wait()

    def read(self, fd: int, begin: int, end: int, name: str) -> None:
        """Send bytes ``begin`` to ``end`` of a file, called ``name`` in messages."""
        while begin < end:
            space = self._buffers[0][self._filled : self._filled + end - begin]
            count = os.preadv(fd, [space], begin)
            if count == 0:
                raise CheckpointError([Fault(name, None, f"ends at byte {begin}, expected {end} or more")])
            begin += count
            self._advance(count)

    def send(self, data: memoryview) -> None:
        """Send bytes from memory."""
        while len(data):
            count = min(len(data), CHUNK_BYTES - self._filled)
            self._buffers[0][self._filled : self._filled + count] = data[:count]
            data = data[count:]
            self._advance(count)

    def _advance(self, count: int) -> None:
        self._filled += count
        if self._filled == CHUNK_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._stop.is_set():
            raise Stopped
        chunk = self._buffers[0][: self._filled]
        lanes = zip(self._lanes, self._consumers, strict=True)
        self._pending.append([lane.submit(take, chunk) for lane, take in lanes])
        self._buffers.rotate(-1)
        if len(self._pending) == _BUFFERS:
            self._wait()
        self._progress(self._filled)
        self._filled = 0

    def _wait(self) -> None:
        for future in self._pending.popleft():
            future.result()


def checksum(data: bytes | memoryview, before: int = 0) -> int:
    """CRC-32, which tells what has changed; ``before`` is that of the bytes before. The proof is the SHA-256 of whole
    files."""
    return zlib.crc32(data, before)


class TensorChecksums:
    """Computes the CRC-32 of every tensor from a stream of a shard's data, from the first byte to the last."""

    def __init__(self, tensors: Sequence[tuple[str, TensorInfo]]) -> None:
        """``tensors`` are in the order of the data."""
        self.checksums: dict[str, int] = {}
        self._tensors = iter(tensors)
        self._position = 0
        self._name: str | None = None
        self._begin = self._end = self._value = 0
        self._next()

    def update(self, chunk: memoryview) -> None:
        start, end = self._position, self._position + len(chunk)
        self._position = end
        while self._name is not None and self._end <= end:
            self._value = checksum(chunk[max(self._begin - start, 0) : self._end - start], self._value)
            self._next()
        if self._name is not None and self._begin < end:
            self._value = checksum(chunk[max(self._begin - start, 0) :], self._value)

    def _next(self) -> None:
        if self._name is not None:
            self.checksums[self._name] = self._value
        self._name = None
        for name, info in self._tensors:
            if info.nbytes:
                self._name, self._begin, self._end, self._value = name, info.begin, info.end, checksum(b"")
                return
            self.checksums[name] = checksum(b"")


@dataclass(frozen=True)
class Kept:
    """Bytes that a `Spool` keeps, and their CRC-32."""

    fd: int
    begin: int
    nbytes: int
    checksum: int

    def send(self, sink: Callable[[memoryview], object]) -> None:
        """Send them piece by piece."""
        buffer = memoryview(bytearray(min(self.nbytes, _PIECE_BYTES)))
        for done in range(0, self.nbytes, _PIECE_BYTES):
            piece = buffer[: self.nbytes - done]
            read_exact(self.fd, piece, self.begin + done, "what was put aside", "compressed scales")
            sink(piece)


class Spool:
    """Keeps bytes until they are needed in a file without a name, so that none stay in memory, however many there are.

    It is a context manager, after which nothing is left.
    """

    def __init__(self, work: Path, name: str) -> None:
        """``work`` is the folder to use; ``name`` is for messages."""
        self._work, self._name, self._end = work, name, 0

    def __enter__(self) -> Spool:
        with _named(self._name):
            self._file = tempfile.TemporaryFile(dir=self._work, buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def keep(self, data: memoryview) -> Kept:
        kept = Kept(self._file.fileno(), self._end, len(data), checksum(data))
        with _named(self._name):
            while len(data):
                count = os.pwrite(kept.fd, data, self._end)
                data, self._end = data[count:], self._end + count
        return kept


class Splice:
    """Turns one stream into another: ranges of the source, in increasing order, with other bytes between them."""

    def __init__(
        self, parts: Sequence[tuple[int, int] | memoryview | Kept], sink: Callable[[memoryview], object]
    ) -> None:
        """``parts`` are, in order, ``(begin, end)`` ranges of the source, and bytes. ``sink`` receives the new
        stream."""
        self._parts = deque(parts)
        self._sink = sink
        self._position = 0

    def update(self, chunk: memoryview) -> None:
        start, end = self._position, self._position + len(chunk)
        self._position = end
        while self._parts:
            part = self._parts[0]
            if isinstance(part, Kept):
                part.send(self._sink)
            elif isinstance(part, memoryview):
                self._sink(part)
            elif part[0] >= end:
                return
            else:
                self._sink(chunk[max(part[0] - start, 0) : part[1] - start])
                if part[1] > end:
                    return
            self._parts.popleft()

    def finish(self) -> None:
        """Send what follows the source's last range."""
        while self._parts:
            part = self._parts.popleft()
            assert not isinstance(part, tuple), f"the source ended before its range {part}"
            if isinstance(part, Kept):
                part.send(self._sink)
            else:
                self._sink(part)


class AtomicFile:
    """A file written under a name in ``work``, and moved to ``path`` by `commit` once its bytes are on disk."""

    def __init__(self, path: Path, work: Path, name: str, like: Path | None = None) -> None:
        """``like`` is a file whose permissions it gets; by default it gets those of any new file. ``name`` is for
        messages."""
        self._path, self._name, self._like = path, name, like
        self._temporary = work / (hashlib.sha256(name.encode()).hexdigest()[:32] + TEMPORARY_SUFFIX)

    def __enter__(self) -> AtomicFile:
        with _named(self._name):
            self._mode = None if self._like is None else stat.S_IMODE(self._like.stat().st_mode) & 0o777
            self._temporary.unlink(missing_ok=True)  # a killed run may have left one that cannot be written
            created = 0o666 if self._mode is None else 0o600
            self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, created)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        self._temporary.unlink(missing_ok=True)

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        with _named(self._name):
            while len(view):
                view = view[os.write(self._fd, view) :]

    def write_at(self, data: memoryview, offset: int) -> None:
        with _named(self._name):
            while len(data):
                count = os.pwrite(self._fd, data, offset)
                data, offset = data[count:], offset + count

    @property
    def temporary(self) -> Path:
        return self._temporary

    def commit(self) -> None:
        with _named(self._name):
            if self._mode is not None:
                os.fchmod(self._fd, self._mode)
            os.fsync(self._fd)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            os.rename(self._temporary, self._path)
            sync_directory(self._path.parent)


def write_file(path: Path, data: bytes, work: Path, name: str, *, like: Path | None = None) -> None:
    """Replace the file at ``path`` as a whole; ``like`` is as for `AtomicFile`."""
    with AtomicFile(path, work, name, like) as file:
        file.write(data)
        file.commit()


def copy_file(source: Path, path: Path, work: Path, name: str) -> str:
    """Copy a file of any size as a whole, with its permissions. Returns its SHA-256."""
    digest = hashlib.sha256()
    with opened(source, name) as fd, AtomicFile(path, work, name, like=source) as copy:
        while chunk := os.read(fd, CHUNK_BYTES):
            digest.update(chunk)
            copy.write(chunk)
        copy.commit()
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with opened(path, str(path)) as fd:
        while chunk := os.read(fd, CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def watch(fd: int, header: Header, shard: str) -> Callable[[], None]:
    """Raise if the open shard is not the file from which ``header`` was read. Returns a function to call once the shard
    is read, which raises if it has changed meanwhile."""
    before = os.fstat(fd)
    if os.pread(fd, header.data_start, 0) != header.raw or before.st_size != header.data_start + header.data_bytes:
        raise CheckpointError([Fault(shard, None, "has changed since it was checked")])

    def check() -> None:
        after = os.fstat(fd)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise CheckpointError([Fault(shard, None, "changed while it was read")])

    return check


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def opened(path: Path, name: str) -> Iterator[int]:
    """A descriptor for reading the file at ``path``, called ``name`` in messages."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError([Fault(name, None, f"cannot be read: {error.strerror}")]) from error
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a lock, which is released when this process ends, however it ends.

    Yields False without the lock if another process has it and ``wait`` is false, or has removed it because it is done.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        got = path.exists() and os.path.samestat(os.fstat(fd), path.stat())
    except BlockingIOError:
        got = False
    try:
        yield got
    finally:
        os.close(fd)


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError([Fault(name, None, f"cannot be written: {error.strerror}")]) from error
