"""Checks of a checkpoint's bytes: digests of every tensor, decoding of every plane, equality with the source."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Event
from types import ModuleType

from finegrained_kernels.checkpoint.codec import batches, decode
from finegrained_kernels.checkpoint.errors import CheckpointError, Fault
from finegrained_kernels.checkpoint.headers import TensorInfo
from finegrained_kernels.checkpoint.layouts import Checkpoint
from finegrained_kernels.checkpoint.names import Plane
from finegrained_kernels.checkpoint.stream import Fanout, Progress, TensorDigests, opened, read_exact


class TensorReader:
    """Reads whole tensors of a checkpoint by name; keeps its shards open while used as a context manager."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._located = checkpoint, checkpoint.located
        self._fds: dict[str, int] = {}

    def __enter__(self) -> TensorReader:
        self._stack = ExitStack()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def place(self, name: str) -> tuple[int, int, TensorInfo, str]:
        """Descriptor, first byte in the file, entry and shard of a tensor."""
        shard, info = self._located[name]
        if shard not in self._fds:
            self._fds[shard] = self._stack.enter_context(opened(self._checkpoint.root / shard, shard))
        return self._fds[shard], self._checkpoint.headers[shard].data_start + info.begin, info, shard

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        """Bytes ``begin`` to ``end`` of a tensor, in memory of their own."""
        end = self._located[name][1].nbytes if end is None else end
        data = memoryview(bytearray(end - begin))
        self.read_into(name, data, begin)
        return data

    def read_into(self, name: str, view: memoryview, begin: int = 0) -> None:
        """Fill the view with the tensor's bytes from ``begin`` on."""
        fd, start, _, shard = self.place(name)
        read_exact(fd, view, start + begin, shard, name)


@dataclass
class ContentCheck:
    """Compares what is on disk with what is known of it.

    Attributes:
        bundle: decodes the planes.
        checkpoint: what to check.
        expected: SHA-256 by tensor name, as stored.
        decoded: SHA-256 of compressed scales, decoded.
        file_digests: SHA-256 of whole shards.
        source: the same model's uncompressed checkpoint, to compare with.
    """

    bundle: ModuleType
    checkpoint: Checkpoint
    expected: Mapping[str, str]
    decoded: Mapping[str, str]
    file_digests: Mapping[str, str]
    source: Checkpoint | None
    device: str
    progress: Progress
    faults: list[Fault] = field(default_factory=list)

    def check_shard(self, shard: str, stop: Event) -> None:
        """Collect the faults of one shard: of the tensors in it, and of the planes whose fixed stream it has."""
        try:
            self._check_stored(shard, stop)
            own = {
                name: plane
                for name, plane in self.checkpoint.planes.items()
                if plane.compressed and self.checkpoint.located[plane.tensors[0]][0] == shard
            }
            with ExitStack() as stack:
                reader = stack.enter_context(TensorReader(self.checkpoint))
                source = self.source and stack.enter_context(TensorReader(self.source))
                for batch in batches(own, self.device):
                    self._check_decoding(batch, reader, source)
        except (CheckpointError, OSError) as error:
            self.faults += getattr(error, "faults", None) or [Fault(shard, None, f"cannot be read: {error}")]

    def _check_stored(self, shard: str, stop: Event) -> None:
        header = self.checkpoint.headers[shard]
        order = header.in_data_order()
        digests, whole = TensorDigests(order), hashlib.sha256(header.raw)
        consumers = [digests.update] + [whole.update] * (shard in self.file_digests)
        with ExitStack() as stack:
            if self.source is not None:
                reader = stack.enter_context(TensorReader(self.source))
                comparison = _Comparison([item for item in order if item[0] in self.source.located], reader)
                consumers.append(comparison.update)
            fd = stack.enter_context(opened(self.checkpoint.root / shard, shard))
            with Fanout(consumers, stop, self.progress) as stream:
                stream.read(fd, header.data_start, header.data_start + header.data_bytes, shard)
        self.progress(header.data_start)
        for name, digest in digests.digests.items():
            if self.expected.get(name, digest) != digest:
                message = f"its bytes have changed: SHA-256 {digest}, expected {self.expected[name]}"
                self.faults.append(Fault(shard, name, message))
        if self.file_digests.get(shard, "") not in ("", whole.hexdigest()):
            self.faults.append(Fault(shard, None, f"SHA-256 of the file is not {self.file_digests[shard]}"))
        if self.source is not None:
            self.faults += [Fault(shard, name, "differs from the source") for name in comparison.differing]

    def _check_decoding(self, batch: Sequence[Plane], reader: TensorReader, source: TensorReader | None) -> None:
        try:
            data = decode(self.bundle, batch, reader, self.device)
        except CheckpointError as error:  # it names the tensor already
            self.faults += error.faults
            return
        except ValueError as error:
            if len(batch) > 1:  # one plane at a time, to name it
                for plane in batch:
                    self._check_decoding([plane], reader, source)
            else:
                name = batch[0].tensors[0 if str(error).startswith("fixed") else 1]
                self.faults.append(Fault(self.checkpoint.located[name][0], name, f"malformed: {error}"))
            return
        size = batch[0].nbytes
        for i, plane in enumerate(batch):
            dense = data[i * size : (i + 1) * size]
            shard = self.checkpoint.located[plane.tensors[0]][0]
            digest = hashlib.sha256(dense).hexdigest()
            if self.decoded.get(plane.name, digest) != digest:
                self.faults.append(Fault(shard, plane.name, "does not decode to the source's bytes"))
            if source is not None and plane.name in self.source.located and source.read(plane.name) != dense:
                self.faults.append(Fault(shard, plane.name, "decoded, it differs from the source"))


class _Comparison:
    """Compares a shard's stream with the same tensors elsewhere; ``differing`` names those that are not equal."""

    def __init__(self, tensors: Sequence[tuple[str, TensorInfo]], other: TensorReader) -> None:
        self.differing: list[str] = []
        self._tensors, self._other = tensors, other
        self._next = 0
        self._position = 0

    def update(self, chunk: memoryview) -> None:
        start, end = self._position, self._position + len(chunk)
        self._position = end
        while self._next < len(self._tensors):
            name, info = self._tensors[self._next]
            if info.begin >= end and info.nbytes:
                return
            first, last = max(info.begin, start), min(info.end, end)
            if first < last:
                there = self._other.read(name, first - info.begin, last - info.begin)
                if bytes(there) != bytes(chunk[first - start : last - start]) and name not in self.differing[-1:]:
                    self.differing.append(name)
            if info.end > end:
                return
            self._next += 1
