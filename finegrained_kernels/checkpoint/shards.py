"""Compresses one shard.

A shard is read twice: first its scale planes, to know their compressed sizes and so where everything will be; then all
of it, in chunks, which are hashed and, except for the scales, written. Compressed scales wait in a file meanwhile, so
that only a few planes of them are in memory, however many a shard has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import TYPE_CHECKING

from finegrained_kernels.checkpoint.errors import CheckpointError, Fault
from finegrained_kernels.checkpoint.headers import Header, NewTensor, TensorInfo, read_header, replace_tensors
from finegrained_kernels.checkpoint.layouts import CONTAINER_LAYOUT, Checkpoint
from finegrained_kernels.checkpoint.names import EXCEPTIONS, FIXED, Plane, group_by_scale
from finegrained_kernels.checkpoint.records import Job, Record, read_record
from finegrained_kernels.checkpoint.stream import (
    AtomicFile,
    Fanout,
    Kept,
    Progress,
    Splice,
    Spool,
    TensorChecksums,
    checksum,
    opened,
    read_exact,
    watch,
)
from finegrained_kernels.checkpoint.wire import SLAB_ROWS, slab_bytes

if TYPE_CHECKING:
    from finegrained_kernels.checkpoint.codec import Encoded


@dataclass(frozen=True)
class ShardWork:
    """What is needed to compress any shard of a job."""

    bundle: ModuleType
    source: Checkpoint
    selected: Mapping[str, Plane]
    job: Job
    destination: Path
    work: Path
    device: str
    progress: Progress

    @cached_property
    def by_scale(self) -> dict[str, list[Plane]]:
        """The selected planes by their tensor of dense scales, which the experts of a stack share."""
        return group_by_scale(self.selected.values())

    def path(self, shard: str) -> Path:
        return self.destination / self.job.shards[shard]

    def compress(self, shard: str, stop: Event) -> None:
        """Write a shard and, once it is in place, its record."""
        header = self.source.headers[shard]
        source_hash, sums = hashlib.sha256(header.raw), TensorChecksums(header.in_data_order())
        source = self.source.root / shard
        with opened(source, shard) as fd, Spool(self.work, shard) as spool:
            check_unchanged = watch(fd, header, shard)
            encoded, dense, again, read = self._encode(shard, header, fd, spool)
            output, parts = self._lay_out(header, encoded)
            with AtomicFile(self.path(shard), self.work, self.job.shards[shard], like=source) as file:
                sinks: list[Callable] = [file.write]
                file_hash = hashlib.sha256()
                if self.job.layout == CONTAINER_LAYOUT:
                    sinks.append(file_hash.update)
                splices = [Splice(parts, sink) for sink in sinks]
                consumers = [source_hash.update, sums.update, again.update, *(splice.update for splice in splices)]
                with Fanout(consumers, stop, self.progress) as stream:
                    stream.read(fd, header.data_start, header.data_start + header.data_bytes, shard)
                for splice in splices:
                    splice.finish()
                check_unchanged()
                for name, value in read.items():  # a file may change and get its old times back
                    if again.checksums[name] != value:
                        raise CheckpointError([Fault(shard, name, "changed while it was read")])
                written = read_header(file.temporary, self.job.shards[shard])
                if written.tensors != output.tensors:
                    raise CheckpointError([Fault(shard, None, "its compressed form does not read back as written")])
                file.commit()
        components = {name: kept.checksum for name, kept in _components(encoded).items()}
        Record(
            file=shard,
            nbytes=header.data_start + header.data_bytes,
            sha256=source_hash.hexdigest(),
            header=header.raw[8:].decode(),
            tensors=sums.checksums,
            components=components,
            dense=dense,
            file_sha256=file_hash.hexdigest() if self.job.layout == CONTAINER_LAYOUT else None,
        ).write(self.destination, self.work)
        self.progress(header.data_start)

    def is_finished(self, shard: str, stop: Event) -> bool:
        """Whether the shard is still as an earlier run wrote it, according to its record. The caller has checked whose
        record it is."""
        try:
            record = read_record(self.destination, shard)
            header = read_header(self.path(shard), self.job.shards[shard])
        except CheckpointError:
            return False
        sums = TensorChecksums(header.in_data_order())
        with opened(self.path(shard), shard) as fd, Fanout([sums.update], stop, self.progress) as stream:
            stream.read(fd, header.data_start, header.data_start + header.data_bytes, shard)
        return sums.checksums == record.expected_tensors()

    def _lay_out(self, header: Header, encoded: Mapping[str, Encoded]) -> tuple[Header, list]:
        """The header of the compressed shard, and the parts of the whole file: ranges of the source's data, and new
        bytes."""
        replacements: dict[str, list[NewTensor]] = {}
        for name, data in encoded.items():
            plane = self.selected[name]
            replacements.setdefault(plane.scale, []).extend(_new_tensors(plane, data))
        output, parts = replace_tensors(header, replacements)
        components = _components(encoded)
        data_of_parts = (part if isinstance(part, tuple) else components[part] for part in parts)
        return output, [memoryview(output.raw), *data_of_parts]

    def _planes_of(self, header: Header) -> dict[str, Plane]:
        """The planes of a shard that are to be compressed, by name, in the order of its data."""
        names = (name for name, _ in header.in_data_order() if name in self.by_scale)
        return {plane.name: plane for name in names for plane in self.by_scale[name]}

    def _encode(
        self, shard: str, header: Header, fd: int, spool: Spool
    ) -> tuple[dict[str, Encoded], dict[str, str], TensorChecksums, dict[str, int]]:
        """Returns the compressed scales; why others stay dense; what computes the CRC-32 of scales from a stream of the
        shard's data; and the CRC-32 of the bytes that were read here."""
        planes = self._planes_of(header)
        read: dict[str, int] = {}
        places = []
        for plane in planes.values():
            begin = header.tensors[plane.scale].begin + plane.scale_begin
            places.append((plane.name, TensorInfo("U8", (plane.nbytes,), begin, begin + plane.nbytes)))
        again = TensorChecksums(places)
        if not planes:
            return {}, {}, again, read
        from finegrained_kernels.checkpoint.codec import encode

        def read_into(plane: Plane, view: memoryview) -> None:
            begin = header.data_start + header.tensors[plane.scale].begin + plane.scale_begin
            read_exact(fd, view, begin, shard, plane.scale)
            read[plane.name] = checksum(view)

        return *encode(self.bundle, planes, read_into, self.device, shard, spool), again, read


def _components(encoded: Mapping[str, Encoded]) -> dict[str, Kept]:
    """The tensors that replace the compressed scales."""
    return {
        scale + suffix: data
        for scale, planes in encoded.items()
        for suffix, data in zip((FIXED, EXCEPTIONS), planes, strict=True)
    }


def _new_tensors(plane: Plane, encoded: Encoded) -> list[NewTensor]:
    return [
        (plane.name + FIXED, "U8", (plane.rows // SLAB_ROWS, slab_bytes(plane.cols))),
        (plane.name + EXCEPTIONS, "U32", (encoded.exceptions.nbytes // 4,)),
    ]
