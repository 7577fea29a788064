"""`inspect`: what a checkpoint's scales take, now and otherwise, from headers alone, here or on the hub."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finegrained_kernels.checkpoint.layouts import Checkpoint, open_checkpoint, without_gc
from finegrained_kernels.checkpoint.names import EXCEPTIONS, Plane
from finegrained_kernels.checkpoint.wire import SLAB_ROWS, fixed_bytes, geometry_problem

GPU_GIB = (24, 32, 48, 80, 96, 141, 180, 288)
USABLE = 0.9
"""Share of a GPU's memory that weights may take; the rest is for the KV cache, activations and the runtime."""
_TP_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)


@dataclass(frozen=True)
class ScaleStats:
    """Scale planes of one projection of a layer's experts. Sizes in bytes.

    Attributes:
        layer: module of the layer's experts. projection: as in tensor names.
        planes, compressed: how many there are, and how many of them are compressed.
        rows, cols: of one plane.
        dense_bytes: of all planes if they were dense.
        stored_bytes: as they are.
        least_bytes: if all were compressed, and those that are not now had no exceptions.
        exceptions: in the compressed planes; exception_rate: a byte of those planes, None if none is compressed.
    """

    layer: str
    projection: str
    planes: int
    compressed: int
    rows: int
    cols: int
    dense_bytes: int
    stored_bytes: int
    least_bytes: int
    exceptions: int
    exception_rate: float | None


@dataclass(frozen=True)
class InspectReport:
    """A checkpoint from its headers. Sizes in bytes.

    Attributes:
        name: directory or hub id. layout: "hf" or "container".
        stored_bytes, dense_bytes, least_bytes: of all tensors, as they are, with all expert scales dense, and with all
            compressed (those that are not now without exceptions).
        tp_sizes: tensor-parallel sizes, of common ones, that every expert scale can be cut into.
        fits: for each GPU memory size in GiB, how many GPUs hold `stored_bytes`, `dense_bytes` and `least_bytes` in
            90 % of their memory.
        faults: what contradicts the format, as `verify` would say.
    """

    name: str
    layout: str
    shards: int
    tensors: int
    stored_bytes: int
    dense_bytes: int
    least_bytes: int
    tp_sizes: list[int]
    fits: dict[int, dict[str, int]]
    scales: list[ScaleStats]
    faults: list[str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect(checkpoint: str | Path, *, revision: str | None = None) -> InspectReport:
    """Describe a checkpoint: a directory, or a hub id of which only headers are fetched.

    Shards may end after their headers. Faults of the format are listed, not raised.

    Raises:
        CheckpointError: no checkpoint there, or a header or index that cannot be read.
    """
    name = str(checkpoint)
    if Path(checkpoint).is_dir() or not _is_hub_id(name):
        with without_gc():  # once for both
            return describe(open_checkpoint(checkpoint, data_present=False), name)

    from finegrained_kernels.checkpoint.hub import open_hub_checkpoint

    return describe(open_hub_checkpoint(name, revision=revision), name)


@without_gc()
def describe(checkpoint: Checkpoint, name: str) -> InspectReport:
    """The report of an opened checkpoint."""
    scales = [
        _stats(checkpoint, layer, projection, planes)
        for layer, experts in checkpoint.experts.items()
        for projection, planes in _by_projection(experts).items()
    ]
    stored = sum(header.data_bytes for header in checkpoint.headers.values())
    dense = stored + sum(stats.dense_bytes - stats.stored_bytes for stats in scales)
    least = stored + sum(stats.least_bytes - stats.stored_bytes for stats in scales)
    sizes = {"stored": stored, "dense": dense, "least": least}
    return InspectReport(
        name=name,
        layout=checkpoint.layout.kind,
        shards=len(checkpoint.headers),
        tensors=len(checkpoint.located),
        stored_bytes=stored,
        dense_bytes=dense,
        least_bytes=least,
        tp_sizes=[size for size in _TP_SIZES if scales and all(_can_cut(stats, size) for stats in scales)],
        fits={gib: {key: math.ceil(size / (gib * 2**30 * USABLE)) for key, size in sizes.items()} for gib in GPU_GIB},
        scales=scales,
        faults=[str(fault) for fault in checkpoint.faults],
    )


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _by_projection(experts: dict[tuple[int, str], Plane]) -> dict[str, list[Plane]]:
    projections: dict[str, list[Plane]] = {}
    for (_, projection), plane in experts.items():
        projections.setdefault(projection, []).append(plane)
    return projections


def _stats(checkpoint: Checkpoint, layer: str, projection: str, planes: Sequence[Plane]) -> ScaleStats:
    located = checkpoint.located
    compressed = dense_bytes = stored_bytes = least_bytes = exceptions = decoded = 0
    for plane in planes:
        size = plane.nbytes
        dense_bytes += size
        if plane.compressed:
            words = located[plane.name + EXCEPTIONS][1].nbytes
            stored = least = fixed_bytes(plane.rows, plane.cols) + words
            compressed += 1
            exceptions += words // 4
            decoded += size
        else:
            stored = size
            least = size if geometry_problem(plane.rows, plane.cols) else fixed_bytes(plane.rows, plane.cols)
        stored_bytes += stored
        least_bytes += least
    return ScaleStats(
        layer=layer,
        projection=projection,
        planes=len(planes),
        compressed=compressed,
        rows=planes[0].rows,
        cols=planes[0].cols,
        dense_bytes=dense_bytes,
        stored_bytes=stored_bytes,
        least_bytes=least_bytes,
        exceptions=exceptions,
        exception_rate=exceptions / decoded if decoded else None,
    )


def _can_cut(stats: ScaleStats, tp_size: int) -> bool:
    extent, unit = (stats.cols, 2) if stats.projection == "down_proj" else (stats.rows, SLAB_ROWS)
    return extent % (unit * tp_size) == 0
