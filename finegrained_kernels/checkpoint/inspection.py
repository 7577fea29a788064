"""`inspect`: how large a checkpoint's scales are, dense and compressed, from headers alone, on disk or on the hub."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finegrained_kernels.checkpoint.errors import CheckpointError, Fault
from finegrained_kernels.checkpoint.kinds import layer_kind, other_formats
from finegrained_kernels.checkpoint.layouts import Checkpoint, open_checkpoint, without_gc
from finegrained_kernels.checkpoint.names import Plane
from finegrained_kernels.checkpoint.quantization_config import NVFP4, LayerFormat
from finegrained_kernels.checkpoint.wire import SLAB_ROWS, fixed_bytes, geometry_problem

GPU_GIB = (24, 32, 48, 80, 96, 141, 180, 288)
USABLE = 0.9
"""The share of a GPU's memory that weights may take. The rest is for the KV cache, activations and the runtime."""
EXPERTS = "experts"
_CUT_BY_COLUMNS = ("down_proj", "w2", "o_proj", "out_proj")
_TP_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)


@dataclass(frozen=True)
class ScaleStats:
    """NVFP4 scale planes of one linear layer, or of one projection of a layer's experts. Sizes in bytes.

    Attributes:
        kind: the kind of layer, such as "experts", "shared experts", "attention", "MLP" or "lm_head".
        layer: the module that contains it, such as a layer's experts or attention. projection: as in tensor names.
        algorithm: as in the config, such as "NVFP4" or "W4A16_NVFP4"; None if the config does not mention this layer.
        planes, compressed: the number of planes, and how many of them are compressed.
        rows, cols: the size of one plane.
        dense_bytes: size of all planes if they were dense.
        stored_bytes: their size now.
        least_bytes: their size if all were compressed, and those that are dense now had no exceptions.
        exceptions: how many the compressed planes have. exception_rate: exceptions per byte of the compressed planes;
            None if none is compressed.
    """

    kind: str
    layer: str
    projection: str
    algorithm: str | None
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
class OtherFormat:
    """Layers of one kind that are quantized to another format than NVFP4: how many weights, and their bytes without
    scales."""

    kind: str
    format: str
    weights: int
    nbytes: int


@dataclass(frozen=True)
class InspectReport:
    """A checkpoint from its headers. Sizes in bytes.

    Attributes:
        name: directory or hub id. layout: "hf" or "container".
        stored_bytes, dense_bytes, least_bytes: size of all tensors now, with all NVFP4 scales dense, and with all
            compressed (counting no exceptions for those that are dense now).
        tp_sizes: the common tensor-parallel sizes into which every expert scale can be cut; in a model without NVFP4
            experts, every scale.
        fits: for each GPU memory size in GiB, how many GPUs hold `stored_bytes`, `dense_bytes` and `least_bytes` in
            90 % of their memory.
        scales: every NVFP4 layer. others: layers that are quantized otherwise.
        kv_cache: the algorithm of a quantized KV cache, as in the config.
        faults: what contradicts the format, as `verify` would report it, and what can never be loaded.
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
    others: list[OtherFormat]
    kv_cache: str | None
    faults: list[str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect(checkpoint: str | Path, *, revision: str | None = None) -> InspectReport:
    """Describe a checkpoint: a directory, or a hub id, from which only headers are fetched.

    Shards may end after their headers. Faults of the format are listed in the report, not raised.

    Raises:
        CheckpointError: there is no checkpoint, or a header or index cannot be read.
    """
    name = str(checkpoint)
    if not name or (not Path(checkpoint).exists() and not _is_hub_id(name)):
        raise CheckpointError(f"{name}: neither a directory nor a hub id (org/name)")
    if Path(checkpoint).exists():
        with without_gc():  # once for both steps
            return describe(open_checkpoint(checkpoint, data_present=False), name)

    from finegrained_kernels.checkpoint.hub import open_hub_checkpoint

    return describe(open_hub_checkpoint(name, revision=revision), name)


@without_gc()
def describe(checkpoint: Checkpoint, name: str) -> InspectReport:
    """The report of an opened checkpoint."""
    faults = list(checkpoint.faults)
    quantization = None
    try:
        quantization = checkpoint.quantization
        faults += quantization.unsupported if quantization else ()
    except CheckpointError as error:
        faults += error.faults
    scales = []
    for (layer, projection), planes in _by_projection(checkpoint.planes.values()).items():
        said = None if quantization is None else quantization.layer_format(planes[0].module)
        scales.append(_stats(checkpoint, layer, projection, None if said is None else said.algorithm, planes))
        if quantization is not None and (said is None or said.family != NVFP4):
            faults.append(_contradiction(checkpoint, planes[0], said))
    others, unknown = _others(checkpoint)
    stored = sum(header.data_bytes for header in checkpoint.headers.values())
    dense = stored + sum(stats.dense_bytes - stats.stored_bytes for stats in scales)
    least = stored + sum(stats.least_bytes - stats.stored_bytes for stats in scales)
    cut = [stats for stats in scales if stats.kind == EXPERTS] or scales
    sizes = {"stored": stored, "dense": dense, "least": least}
    return InspectReport(
        name=name,
        layout=checkpoint.layout.kind,
        shards=len(checkpoint.headers),
        tensors=len(checkpoint.located),
        stored_bytes=stored,
        dense_bytes=dense,
        least_bytes=least,
        tp_sizes=[size for size in _TP_SIZES if cut and all(_can_cut(stats, size) for stats in cut)],
        fits={gib: {key: math.ceil(size / (gib * 2**30 * USABLE)) for key, size in sizes.items()} for gib in GPU_GIB},
        scales=scales,
        others=others,
        kv_cache=None if quantization is None else quantization.kv_cache,
        faults=[str(fault) for fault in faults + unknown],
    )


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name, re.ASCII) is not None


def _by_projection(planes: Iterable[Plane]) -> dict[tuple[str, str], list[Plane]]:
    """Planes grouped by module and projection; those of a layer's experts are together."""
    projections: dict[tuple[str, str], list[Plane]] = {}
    for plane in planes:
        expert = plane.expert
        layer, _, projection = expert or plane.module.rpartition(".")
        projections.setdefault((layer, projection), []).append(plane)
    return projections


def _contradiction(checkpoint: Checkpoint, plane: Plane, said: LayerFormat | None) -> Fault:
    if said is None:
        message = "NVFP4 by its tensors, but not quantized by the config, which other loaders go by"
    else:
        message = f"NVFP4 by its tensors, but {said.algorithm} by the config: no loader can tell which is right"
    return Fault(checkpoint.located[plane.weight][0], plane.weight, message)


def _others(checkpoint: Checkpoint) -> tuple[list[OtherFormat], list[Fault]]:
    """Layers that are quantized otherwise, and a fault for each weight whose format nothing here can read."""
    found: dict[tuple[str, str], list[str]] = {}
    faults = []
    for name, stored in other_formats(checkpoint.located, checkpoint.planes).items():
        shard, info = checkpoint.located[name]
        if stored is None:
            message = f"{info.dtype} {list(info.shape)}: quantized to a format that nothing here reads"
            faults.append(Fault(shard, name, message))
        else:
            found.setdefault((layer_kind(name), stored), []).append(name)
    others = [
        OtherFormat(kind, stored, len(names), sum(checkpoint.located[name][1].nbytes for name in names))
        for (kind, stored), names in found.items()
    ]
    return others, faults


def _stats(
    checkpoint: Checkpoint, layer: str, projection: str, algorithm: str | None, planes: Sequence[Plane]
) -> ScaleStats:
    located = checkpoint.located
    compressed = dense_bytes = stored_bytes = least_bytes = exceptions = decoded = 0
    for plane in planes:
        size = plane.nbytes
        dense_bytes += size
        if plane.compressed:
            words = located[plane.tensors[1]][1].nbytes
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
        kind=layer_kind(f"{layer}.{projection}"),
        layer=layer,
        projection=projection,
        algorithm=algorithm,
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
    extent, unit = (stats.cols, 2) if stats.projection in _CUT_BY_COLUMNS else (stats.rows, SLAB_ROWS)
    return extent % (unit * tp_size) == 0
