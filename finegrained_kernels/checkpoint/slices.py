"""Scales for engines: those of a layer, for some experts and one tensor-parallel rank, from any NVFP4 checkpoint.

Compressed planes are cut in wire form, without decoding: rows in whole slabs of 16, and columns in even numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from finegrained_kernels.checkpoint.codec import read_wire
from finegrained_kernels.checkpoint.config import marked_layers
from finegrained_kernels.checkpoint.contents import TensorReader
from finegrained_kernels.checkpoint.errors import CheckpointError, Fault, raise_faults
from finegrained_kernels.checkpoint.layouts import CONFIG, Checkpoint, open_checkpoint
from finegrained_kernels.checkpoint.names import EXCEPTIONS, FIXED, Plane, layer_number
from finegrained_kernels.checkpoint.wire import MAX_BASE, POSITION_BITS, SLAB_ROWS

if TYPE_CHECKING:
    import torch

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
GATE_UP = "gate_up_proj"
NAMES = {GATE: (GATE, "w1"), UP: (UP, "w3"), DOWN: (DOWN, "w2")}
"""The names that checkpoints use for each projection: those of Llama, or those of Mixtral."""
ORDERS = {"gate_up": (GATE, UP), "up_gate": (UP, GATE)}
"""The order of rows in the stacked projection, from the top."""


class _Half(NamedTuple):
    """A projection of some experts: planes, and which of their rows; a plane may have the rows of both gate and up."""

    planes: list[Plane]
    rows: range


class _Cut(NamedTuple):
    """The rows and columns of each plane that belong to one rank."""

    rows: range
    cols: range


def load_layer_scales(
    checkpoint: str | Path | Checkpoint,
    layer: int | str,
    projection: str,
    *,
    experts: Iterable[int] | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    device: torch.device | str = "cpu",
    order: str | None = None,
) -> Any:
    """Scales of one projection of a layer's experts, ready for kernels.

    Args:
        checkpoint: a directory, or what `open_checkpoint` returned, so that headers are not read again. Both layouts
            work. Scales that are dense in it are compressed now, on ``device``.
        layer: its number, or the module, such as ``model.layers.3.mlp.experts``, if a number is ambiguous.
        projection: "gate_proj", "up_proj", "down_proj", or "gate_up_proj" for both stacked.
        experts: the numbers of the experts, in this order; None for all.
        tp_rank, tp_size: the slice to take. Gate and up are cut by rows, down by columns, as the weights are.
        device: where to put the result.
        order: only for "gate_up_proj": "gate_up" is `[gate; up]`, "up_gate" is `[up; gate]`.

    Returns:
        The bundle's `NVFP4CSFScales` of `E` planes: `[I / tp_size, H / 16]` for gate or up, twice the rows for both
        (each half is cut by itself, then they are stacked), `[H, I / 16 / tp_size]` for down. Second-level scales are
        not included, because gate and up may have different ones: see `load_layer_globals`.

    Raises:
        CheckpointError: there is nothing of that name, a size cannot be cut (the message names sizes that can), or
            compressed scales are malformed or not marked. The message names shard and tensor.
    """
    checkpoint, wanted = _find(checkpoint, layer, projection, experts, order)
    with TensorReader(checkpoint) as reader:
        cuts = _cut_stack(wanted, projection == DOWN, tp_rank, tp_size)
        return _read_compressed_stack(reader, wanted, cuts, device)


def load_layer_globals(
    checkpoint: str | Path | Checkpoint,
    layer: int | str,
    projection: str,
    *,
    experts: Iterable[int] | None = None,
    device: torch.device | str = "cpu",
    order: str | None = None,
) -> torch.Tensor:
    """Second-level scales of the same projection, as multipliers: float32 `[E]`, or `[E, 2]` for "gate_up_proj".

    The columns of `[E, 2]` are in ``order``. compressed-tensors stores divisors; their reciprocals are returned,
    rounded once to float32. Other arguments and errors are as in `load_layer_scales`.
    """
    checkpoint, wanted = _find(checkpoint, layer, projection, experts, order)
    with TensorReader(checkpoint) as reader:
        return read_globals(reader, [half.planes for half in wanted]).to(device)


def read_compressed_stack(
    reader: TensorReader,
    halves: Sequence[Sequence[Plane]],
    *,
    by_columns: bool,
    rows: Sequence[range] | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    device: torch.device | str = "cpu",
) -> Any:
    """`NVFP4CSFScales` of a stack with one plane per expert, or of two joined by rows; compresses dense planes.

    ``by_columns`` says how tensor parallelism cuts each plane, ``rows`` which of its rows a half has (by default all).
    Errors are as in `load_layer_scales`.
    """
    whole = _halves(halves, rows)
    return _read_compressed_stack(reader, whole, _cut_stack(whole, by_columns, tp_rank, tp_size), device)


def _read_compressed_stack(
    reader: TensorReader, halves: Sequence[_Half], cuts: Sequence[_Cut], device: torch.device | str
) -> Any:

    from finegrained_kernels import load

    rows, cols = sum(len(cut.rows) for cut in cuts), len(cuts[0].cols)
    if rows * cols > 1 << POSITION_BITS:
        message = f"{rows} x {cols} stacked is more than 2^{POSITION_BITS} bytes: load the halves apart"
        raise CheckpointError(f"{halves[0].planes[0].name}: {message}")
    bundle = load()
    wires = [_read_wire(bundle, reader, half.planes, cut, device) for half, cut in zip(halves, cuts, strict=True)]
    wire = wires[0].stack(wires[1]) if len(wires) == 2 else wires[0]
    return bundle.NVFP4CSFScales.from_wire(wire)


def _halves(halves: Sequence[Sequence[Plane]], rows: Sequence[range] | None) -> list[_Half]:
    rows = rows or [range(planes[0].rows) for planes in halves]
    return [_Half(list(planes), own) for planes, own in zip(halves, rows, strict=True)]


def read_dense_stack(
    reader: TensorReader,
    halves: Sequence[Sequence[Plane]],
    *,
    by_columns: bool,
    rows: Sequence[range] | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The same for planes that are all dense, as they are: uint8 `[E, N, C]`."""
    import torch

    whole = _halves(halves, rows)
    cuts = _cut_stack(whole, by_columns, tp_rank, tp_size)
    shape = len(halves[0]), sum(len(cut.rows) for cut in cuts), len(cuts[0].cols)
    stack = torch.empty(shape, dtype=torch.uint8, device=device)
    first = 0
    for planes, cut in zip(halves, cuts, strict=True):
        stack[:, first : first + len(cut.rows)] = _read_dense(reader, planes, cut).to(device)
        first += len(cut.rows)
    return stack


def read_globals(reader: TensorReader, halves: Sequence[Sequence[Plane]]) -> torch.Tensor:
    """Second-level scales as multipliers: float32 `[E]`, or `[E, 2]` for two stacked halves.

    An infinite divisor, which weights that are all zero may get from 1 / amax, is a multiplier of 0.

    Raises:
        CheckpointError: a multiplier is negative, infinite or NaN.
    """
    import torch

    columns = []
    for planes in halves:
        data = b"".join(reader.read_value(plane.global_scale, plane.part) for plane in planes)
        stored = torch.frombuffer(bytearray(data), dtype=torch.float32)
        divisors = torch.tensor([plane.global_scale_divides for plane in planes])
        values = torch.where(divisors, 1 / stored, stored)
        for i in (~(values.isfinite() & (values >= 0) & ~stored.signbit())).nonzero().flatten().tolist():
            name = planes[i].global_scale
            what = "a divisor above 0 with a finite reciprocal" if divisors[i] else "a finite number, not negative"
            message = f"is {float(stored[i])}, which is not a scale: expected {what}"
            raise CheckpointError([Fault(reader.checkpoint.located[name][0], name, message)])
        columns.append(values)
    return columns[0] if len(columns) == 1 else torch.stack(columns, dim=1)


def _cut_stack(halves: Sequence[_Half], by_columns: bool, tp_rank: int, tp_size: int) -> list[_Cut]:
    if tp_size < 1 or not 0 <= tp_rank < tp_size:
        raise CheckpointError(f"tp_rank must be from 0 to tp_size - 1, got {tp_rank} of {tp_size}")
    first, *others = [(half.planes[0], len(half.rows)) for half in halves]
    for other, rows in others:
        if (rows, other.cols) != (first[1], first[0].cols):
            shapes = f"{rows} x {other.cols}, but {first[0].name}: {first[1]} x {first[0].cols}"
            raise CheckpointError(f"{other.name}: {shapes}; gate and up are stacked only if they are alike")
    return [_cut(half, by_columns, tp_rank, tp_size) for half in halves]


def _find(
    checkpoint: str | Path | Checkpoint,
    layer: int | str,
    projection: str,
    experts: Iterable[int] | None,
    order: str | None,
) -> tuple[Checkpoint, list[_Half]]:
    """The planes of every requested projection, in the requested order."""
    if projection == GATE_UP:
        if order not in ORDERS:
            raise CheckpointError(f"{GATE_UP} needs an order, one of {', '.join(ORDERS)}; got {order!r}")
        projections: tuple[str, ...] = ORDERS[order]
    elif projection in (GATE, UP, DOWN):
        if order is not None:
            raise CheckpointError(f"order is for {GATE_UP}, got {order!r} with {projection}")
        projections = (projection,)
    else:
        raise CheckpointError(f"projection must be {GATE}, {UP}, {DOWN} or {GATE_UP}, got {projection!r}")
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint)
    raise_faults(checkpoint.faults)
    module, found = _layer_planes(checkpoint, layer)
    if experts is None:
        experts = sorted({expert for expert, _ in found})
        if experts != list(range(len(experts))):
            gap = next(i for i, expert in enumerate(experts) if i != expert)
            raise CheckpointError(f"{module}: expert {gap} of 0 to {experts[-1]} is missing")
    experts = list(experts)
    if not experts:
        raise CheckpointError(f"{module}: experts must name at least one")
    wanted = []
    for name in projections:
        wanted.append(_half(module, found, name, experts))
    if any(plane.compressed for half in wanted for plane in half.planes):
        marked, faults = marked_layers(checkpoint.config)
        raise_faults(faults)
        if module not in marked:
            raise CheckpointError([Fault(CONFIG, module, "has compressed scales, but is not marked as compressed")])
    return checkpoint, wanted


def _half(module: str, found: Mapping[tuple[int, str], Plane], projection: str, experts: Sequence[int]) -> _Half:
    """A projection of experts, found by either of its names, or as rows of stacked gate and up."""
    for name in (*NAMES[projection], *([GATE_UP] if projection != DOWN else [])):
        planes = [found[expert, name] for expert in experts if (expert, name) in found]
        if planes:
            break
    if len(planes) < len(experts):
        name = name if planes else projection
        names = f"{name} of experts {[expert for expert in experts if (expert, name) not in found]}"
        others = ", ".join(sorted({other for _, other in found}))
        raise CheckpointError(f"{module}: no NVFP4 scales for {names}; it has {others}")
    rows = planes[0].rows
    if name != GATE_UP:
        return _Half(planes, range(rows))
    if rows % 2:
        raise CheckpointError(f"{planes[0].name}: {rows} rows are not those of gate and up")
    return _Half(planes, range(rows // 2) if projection == GATE else range(rows // 2, rows))


def _layer_planes(checkpoint: Checkpoint, layer: int | str) -> tuple[str, dict[tuple[int, str], Plane]]:
    matching = [module for module in checkpoint.experts if layer in (module, layer_number(module))]
    if len(matching) != 1:
        found = ", ".join(matching) or "no layer of NVFP4 experts"
        raise CheckpointError(f"layer {layer!r} of {checkpoint.root} means {found}: name one module")
    return matching[0], checkpoint.experts[matching[0]]


def _cut(half: _Half, by_columns: bool, tp_rank: int, tp_size: int) -> _Cut:
    planes, own = half
    rows, cols = planes[0].rows, planes[0].cols
    for plane in planes:
        if (plane.rows, plane.cols) != (rows, cols):
            raise CheckpointError(f"{plane.name}: {plane.rows} x {plane.cols}, but {planes[0].name}: {rows} x {cols}")
    extent, unit, what = (cols, 2, "columns") if by_columns else (len(own), SLAB_ROWS, "rows")
    units = extent // unit
    if extent % unit or units % tp_size:
        sizes = [size for size in range(1, units + 1) if units % size == 0 and extent % unit == 0]
        message = f"{extent} {what} cannot be cut into {tp_size} parts of a multiple of {unit}"
        raise CheckpointError(f"{planes[0].name}: {message}; tp_size can be {', '.join(map(str, sizes)) or 'none'}")
    part = range(tp_rank * extent // tp_size, (tp_rank + 1) * extent // tp_size)
    return _Cut(own, part) if by_columns else _Cut(own[part.start : part.stop], range(cols))


def _read_wire(
    bundle: ModuleType, reader: TensorReader, planes: Sequence[Plane], cut: _Cut, device: torch.device | str
) -> Any:
    """The slices of all planes in order, compressed or not, as the bundle's `NVFP4CSFWire` on ``device``."""
    compressed = [i for i, plane in enumerate(planes) if plane.compressed]
    dense = [i for i, plane in enumerate(planes) if not plane.compressed]
    wires = []
    if compressed:
        wires.append(_read_compressed(bundle, reader, [planes[i] for i in compressed], cut).to(device))
    if dense:
        wires.append(_compress(bundle, reader, [planes[i] for i in dense], cut, device))
    if len(wires) == 1:
        return wires[0]
    found = compressed + dense
    return wires[0].with_planes(wires[1], sorted(range(len(found)), key=found.__getitem__))


def _read_compressed(bundle: ModuleType, reader: TensorReader, planes: Sequence[Plane], cut: _Cut) -> Any:
    """Read the slabs of the requested rows, and all exceptions, because these have no index."""
    rows, cols = planes[0].rows, planes[0].cols
    try:  # otherwise, faults in parts that are cut away would not be found
        wire = bundle.NVFP4CSFWire.of_rows(*read_wire(planes, reader, cut.rows), cut.rows, num_rows=rows, num_cols=cols)
    except bundle.WireFault as fault:
        name = planes[fault.plane].name + (FIXED if fault.part == "fixed" else EXCEPTIONS)
        message = f"a base is above {MAX_BASE}"
        if fault.part == "exceptions":
            message = f"exceptions are out of order, or beyond a plane of {rows} x {cols}"
        raise CheckpointError([Fault(reader.checkpoint.located[name][0], name, message)]) from fault
    return wire if len(cut.cols) == cols else wire.cut(cols=cut.cols)


def _compress(
    bundle: ModuleType, reader: TensorReader, planes: Sequence[Plane], cut: _Cut, device: torch.device | str
) -> Any:
    dense = _read_dense(reader, planes, cut).to(device)
    try:
        wire = bundle.compress_nvfp4_csf_scales(dense)
    except ValueError as error:
        raise CheckpointError(f"{planes[0].name}: {error}") from error
    return bundle.NVFP4CSFWire.of(*wire, num_rows=len(cut.rows), num_cols=len(cut.cols))


def _read_dense(reader: TensorReader, planes: Sequence[Plane], cut: _Cut) -> torch.Tensor:
    """The slice as a view, uint8 `[E, rows, columns]`."""
    import torch

    cols = planes[0].cols
    size = len(cut.rows) * cols
    data = memoryview(bytearray(len(planes) * size))
    for i, plane in enumerate(planes):
        begin = plane.scale_begin + cut.rows.start * cols
        reader.read_into(plane.scale, data[i * size : (i + 1) * size], begin)
    dense = torch.frombuffer(data, dtype=torch.uint8).view(len(planes), len(cut.rows), cols)
    return dense[:, :, cut.cols.start : cut.cols.stop]
