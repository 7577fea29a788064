"""Runs planes through the bundle's codec in batches, from the bytes of a shard to wire form and back.

Every encoded batch is decoded again and compared before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from finegrained_kernels.checkpoint.errors import CheckpointError, Fault
from finegrained_kernels.checkpoint.names import Plane
from finegrained_kernels.checkpoint.stream import Kept, Spool
from finegrained_kernels.checkpoint.wire import fixed_bytes, geometry_problem

if TYPE_CHECKING:
    import torch

    from finegrained_kernels.checkpoint.contents import TensorReader

_CPU_BATCH_BYTES = 2 << 20
_GPU_BATCH_BYTES = 64 << 20

ReadInto = Callable[[Plane, memoryview], None]
"""Fills the view with the bytes of a dense plane."""


class Encoded(NamedTuple):
    """A plane's wire form, kept in a spool: the fixed stream and the exception words."""

    fixed: Kept
    exceptions: Kept


def batch_bytes(device: torch.device | str) -> int:
    """How many bytes of dense planes to process at a time."""
    import torch

    return _CPU_BATCH_BYTES if torch.device(device).type == "cpu" else _GPU_BATCH_BYTES


def batches(planes: Mapping[str, Plane], device: torch.device | str) -> Iterator[list[Plane]]:
    """The planes in runs of equal geometry, each small enough to process at a time."""
    by_shape: dict[tuple[int, int], list[Plane]] = {}
    for plane in planes.values():
        by_shape.setdefault((plane.rows, plane.cols), []).append(plane)
    for (rows, cols), group in by_shape.items():
        size = max(1, batch_bytes(device) // max(1, rows * cols))
        for first in range(0, len(group), size):
            yield group[first : first + size]


def encode(
    bundle: ModuleType,
    planes: Mapping[str, Plane],
    read_into: ReadInto,
    device: torch.device | str,
    shard: str,
    spool: Spool,
) -> tuple[dict[str, Encoded], dict[str, str]]:
    """Compress the planes of one shard into ``spool``. Returns the planes that shrink, by name, and for every other
    tensor of scales why it stays dense.

    A stack of experts is one tensor. It stays dense if one of its planes has to, or if it would not shrink as a whole.
    """
    import torch

    encoded: dict[str, Encoded] = {}
    dense: dict[str, str] = {}
    fits = {}
    before: dict[str, int] = {}
    after: dict[str, int] = {}
    for name, plane in planes.items():
        if problem := geometry_problem(plane.rows, plane.cols):
            dense[plane.scale] = problem
        else:
            fits[name] = plane
    for batch in batches(fits, device):
        first = batch[0]
        data = memoryview(bytearray(len(batch) * first.nbytes))
        for i, plane in enumerate(batch):
            read_into(plane, data[i * first.nbytes : (i + 1) * first.nbytes])
        source = torch.frombuffer(data, dtype=torch.uint8).view(len(batch), first.rows, first.cols).to(device)
        fixed, exceptions = bundle.compress_nvfp4_csf_scales(source)
        scales = bundle.prepare_nvfp4_csf_scales(fixed, exceptions, num_rows=first.rows, num_cols=first.cols)
        decoded = bundle.decompress_nvfp4_csf_scales(scales).view(torch.uint8)
        # compared eight bytes at a time: 16 rows of an even number of bytes are a multiple of that
        if not torch.equal(decoded.view(-1).view(torch.int64), source.view(-1).view(torch.int64)):
            plane = batch[int((decoded != source).flatten(1).any(1).nonzero()[0])]
            raise CheckpointError([Fault(shard, plane.name, "does not decode to the bytes it was encoded from")])
        streams, words = to_bytes(fixed), to_bytes(exceptions.words)
        size, end = fixed.shape[1], 0
        for i, (plane, count) in enumerate(zip(batch, exceptions.counts, strict=True)):
            begin, end = end, end + 4 * count
            before[plane.scale] = before.get(plane.scale, 0) + plane.nbytes
            after[plane.scale] = after.get(plane.scale, 0) + size + end - begin
            encoded[plane.name] = Encoded(spool.keep(streams[i * size : (i + 1) * size]), spool.keep(words[begin:end]))
    for scale, nbytes in before.items():
        if after[scale] >= nbytes:
            dense[scale] = f"would take {after[scale]} bytes instead of {nbytes}"
    return {name: own for name, own in encoded.items() if planes[name].scale not in dense}, dense


def decode(bundle: ModuleType, batch: Sequence[Plane], reader: TensorReader, device: torch.device | str) -> memoryview:
    """Dense bytes of compressed planes of equal geometry, one after the other.

    Raises:
        ValueError: a plane is malformed. It comes from the bundle, which counts planes and does not know their names.
    """
    import torch

    rows, cols = batch[0].rows, batch[0].cols
    wire = bundle.NVFP4CSFWire(*read_wire(batch, reader, range(rows)), rows, cols).to(device)
    scales = bundle.NVFP4CSFScales.from_wire(wire)
    return to_bytes(bundle.decompress_nvfp4_csf_scales(scales).view(torch.uint8))


def read_wire(
    planes: Sequence[Plane], reader: TensorReader, rows: range
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read compressed planes of equal geometry. Returns the slabs of ``rows``, uint8 `[E,
    bytes]`, all exceptions, int32 `[X]`, and where those of each plane end, int64 `[E]`."""
    import torch

    begin, end = (fixed_bytes(row, planes[0].cols) for row in (rows.start, rows.stop))
    size = end - begin
    streams = memoryview(bytearray(len(planes) * size))
    words = [reader.read(plane.tensors[1]) for plane in planes]
    for i, plane in enumerate(planes):
        reader.read_into(plane.tensors[0], streams[i * size : (i + 1) * size], begin)
    fixed = torch.frombuffer(streams, dtype=torch.uint8).view(len(planes), size)
    ends = torch.tensor([len(own) // 4 for own in words]).cumsum(0)
    joined = bytearray(b"".join(words)) or bytearray(4)  # frombuffer does not accept an empty buffer
    return fixed, torch.frombuffer(joined, dtype=torch.int32)[: int(ends[-1])], ends


def to_bytes(tensor: torch.Tensor) -> memoryview:
    """A copy of a tensor's bytes on the host, made without numpy."""
    import torch

    data = bytearray(tensor.nbytes)
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(tensor.contiguous().view(-1).view(torch.uint8))
    return memoryview(data)
