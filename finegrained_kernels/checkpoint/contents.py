"""Works on a checkpoint's bytes: turns them into the source's bytes again, and checks every tensor and plane."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Event
from types import ModuleType

from finegrained_kernels.checkpoint.codec import batch_bytes, batches, decode
from finegrained_kernels.checkpoint.errors import CheckpointError, Fault
from finegrained_kernels.checkpoint.headers import Header, TensorInfo
from finegrained_kernels.checkpoint.layouts import Checkpoint
from finegrained_kernels.checkpoint.names import Located, Plane
from finegrained_kernels.checkpoint.records import Record
from finegrained_kernels.checkpoint.stream import Fanout, Progress, TensorChecksums, checksum, opened, read_exact


class TensorReader:
    """Reads whole tensors of a checkpoint by name; keeps its shards open while used as a context manager."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self._located = checkpoint, checkpoint.located
        self._fds: dict[str, int] = {}

    def __enter__(self) -> TensorReader:
        self._stack = ExitStack()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def place(self, name: str) -> tuple[int, int, TensorInfo, str]:
        """A tensor's file descriptor, first byte in the file, header entry and shard."""
        shard, info = self._located[name]
        if shard not in self._fds:
            self._fds[shard] = self._stack.enter_context(opened(self.checkpoint.root / shard, shard))
        return self._fds[shard], self.checkpoint.headers[shard].data_start + info.begin, info, shard

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        """Bytes ``begin`` to ``end`` of a tensor, in new memory."""
        end = self._located[name][1].nbytes if end is None else end
        data = memoryview(bytearray(end - begin))
        self.read_into(name, data, begin)
        return data

    def read_value(self, name: str, part: int | None = None) -> memoryview:
        """The 4 bytes of a float32 value; if the tensor has one for each part of a stack, that of ``part``."""
        begin = 4 * part if part is not None and self._located[name][1].nbytes > 4 else 0
        return self.read(name, begin, begin + 4)

    def read_into(self, name: str, view: memoryview, begin: int = 0) -> None:
        """Fill the view with the tensor's bytes from ``begin`` on."""
        fd, start, _, shard = self.place(name)
        read_exact(fd, view, start + begin, shard, name)


def send_source(header: Header, reader: TensorReader, stream: Fanout, bundle: ModuleType, device: str) -> None:
    """Send the data of the source shard with this header, made from the checkpoint that ``reader`` reads.

    Raises:
        CheckpointError: a plane is malformed, or a file is cut short.
    """
    located, planes = reader.checkpoint.located, reader.checkpoint.planes_of_scale
    for run in _runs(header.in_data_order(), located, batch_bytes(device)):
        if run[0] in located:
            fd, begin, _, shard = reader.place(run[0])
            _, last, info, _ = reader.place(run[-1])
            stream.read(fd, begin, last + info.nbytes, shard)
            continue
        for batch in batches({plane.name: plane for name in run for plane in planes[name]}, device):
            try:
                data = decode(bundle, batch, reader, device)
            except CheckpointError:
                raise
            except ValueError as error:
                shard, _ = located[batch[0].tensors[0]]
                message = f"malformed, or one of the {len(batch)} scales decoded with it: {error}"
                raise CheckpointError([Fault(shard, batch[0].name, message)]) from error
            stream.send(data)


def _runs(order: Sequence[tuple[str, TensorInfo]], located: Located, limit: int) -> Iterator[list[str]]:
    """Runs of consecutive tensors of a source shard that can be sent at once; compressed ones up to ``limit`` bytes."""
    run: list[str] = []
    size = 0
    shape: tuple[int, ...] = ()
    for name, info in order:
        if run and run[-1] in located and name in located:
            shard, before = located[run[-1]]
            joins = located[name][0] == shard and located[name][1].begin == before.end
        else:
            compressed = bool(run) and run[-1] not in located and name not in located
            joins = compressed and info.shape == shape and size + info.nbytes <= limit
        if not joins and run:
            yield run
            run, size = [], 0
        run.append(name)
        size, shape = size + info.nbytes, info.shape
    if run:
        yield run


@dataclass
class ContentCheck:
    """Compares the bytes on disk with what is known about them.

    Attributes:
        bundle: decodes the planes.
        checkpoint: what to check.
        expected: CRC-32 of stored tensors, by name.
        decoded: CRC-32 of compressed scales once they are decoded.
        file_digests: SHA-256 of whole shards.
        source: the uncompressed checkpoint of the same model, to compare with.
        proven: tensors of compressed scales that need not be decoded; set by `prove`.
    """

    bundle: ModuleType
    checkpoint: Checkpoint
    expected: Mapping[str, int]
    decoded: Mapping[str, int]
    file_digests: Mapping[str, str]
    source: Checkpoint | None
    device: str
    progress: Progress
    faults: list[Fault] = field(default_factory=list)
    proven: set[str] = field(default_factory=set)

    def prove(self, record: Record, stop: Event) -> bool:
        """Whether the stored tensors, decoded, make up the record's source file, by its SHA-256. Collects no faults."""
        try:
            header = record.source_header()
            digest = hashlib.sha256(header.raw)
            with TensorReader(self.checkpoint) as reader, Fanout([digest.update], stop, self.progress) as stream:
                send_source(header, reader, stream, self.bundle, self.device)
        except (CheckpointError, OSError, KeyError):  # a damaged or missing tensor: `check_shard` names it
            return False
        if digest.hexdigest() != record.sha256:
            return False
        self.proven |= header.tensors.keys()
        return True

    def check_shard(self, shard: str, stop: Event) -> None:
        """Collect the faults of one shard: those of its tensors, and of the planes whose fixed stream it has."""
        try:
            self._check_stored(shard, stop)
            own = {
                name: plane
                for name, plane in self.checkpoint.planes.items()
                if plane.compressed
                and self.checkpoint.located[plane.tensors[0]][0] == shard
                and (self.source is not None or plane.scale not in self.proven)
            }
            with ExitStack() as stack:
                reader = stack.enter_context(TensorReader(self.checkpoint))
                source = None if self.source is None else stack.enter_context(TensorReader(self.source))
                for batch in batches(own, self.device):
                    self._check_decoding(batch, reader, source)
        except (CheckpointError, OSError) as error:
            self.faults += getattr(error, "faults", None) or [Fault(shard, None, f"cannot be read: {error}")]

    def _check_stored(self, shard: str, stop: Event) -> None:
        header = self.checkpoint.headers[shard]
        order = header.in_data_order()
        sums, whole = TensorChecksums(order), hashlib.sha256(header.raw)
        consumers = [sums.update] + [whole.update] * (shard in self.file_digests)
        with ExitStack() as stack:
            if self.source is not None:
                reader = stack.enter_context(TensorReader(self.source))
                comparison = _Comparison([item for item in order if item[0] in self.source.located], reader)
                consumers.append(comparison.update)
            fd = stack.enter_context(opened(self.checkpoint.root / shard, shard))
            with Fanout(consumers, stop, self.progress) as stream:
                stream.read(fd, header.data_start, header.data_start + header.data_bytes, shard)
        self.progress(header.data_start)
        for name, value in sums.checksums.items():
            if self.expected.get(name, value) != value:
                message = f"its bytes have changed: CRC-32 {value}, expected {self.expected[name]}"
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
            value = checksum(dense)
            if self.decoded.get(plane.name, value) != value:
                self.faults.append(Fault(shard, plane.name, "does not decode to the source's bytes"))
            if (
                source is not None
                and plane.scale in source.checkpoint.located
                and bytes(source.read(plane.scale, plane.scale_begin, plane.scale_begin + size)) != bytes(dense)
            ):
                self.faults.append(Fault(shard, plane.name, "decoded, it differs from the source"))


class _Comparison:
    """Compares a shard's stream with the same tensors elsewhere; ``differing`` has the names of those that differ."""

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
