"""The resident form of compressed scales, and the way from the wire form into it and back.

The wire form interleaves bases and codes every 16 rows. The resident form keeps them apart, so that kernels read
flat words, and adds where each `TILE_BYTES` positions' exceptions begin, so that any tile finds its own. Both hold
the same bytes; the offsets are less than 1 % more.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence

import torch
from torch.utils import _pytree

from .._ops import add_op_namespace_prefix
from ..arguments import kind_of, no_dense_tensor
from ..formats import NVFP4_CSF
from ..one_thread import on_one_thread
from .wire import ExceptionList

TILE_BYTES = 1024
"""Decoded bytes between two entries of `exception_offsets`."""

MAX_EXCEPTIONS = 1 << 30
"""Exceptions a stack may hold, so that kernels index them with int32 and room to spare."""

_FIELDS = ("bases", "codes", "exceptions", "exception_offsets")


def tiles_per_plane(plane_bytes: int) -> int:
    return -(-plane_bytes // TILE_BYTES)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NVFP4CSFScales:
    """`E` compressed scale planes of `N` rows by `C` columns, ready for kernels. Made by `prepare_nvfp4_csf_scales`.

    Attributes:
        bases: uint8 `[E, N]`, the lowest byte value of each row's window, at most 240.
        codes: uint8 `[E, N, C / 2]`, two 4-bit offsets a byte, low nibble first; aligned to 8 bytes, as tensors of
            their own are.
        exceptions: int32 `[X]`, `value << 24 | position in the plane`, plane after plane, positions increasing.
        exception_offsets: int32 `[E * ceil(N * C / 1024) + 1]`, the first exception of each 1024 bytes.
    """

    bases: torch.Tensor
    codes: torch.Tensor
    exceptions: torch.Tensor
    exception_offsets: torch.Tensor

    @property
    def num_planes(self) -> int:
        return self.bases.shape[0]

    @property
    def num_rows(self) -> int:
        return self.bases.shape[1]

    @property
    def num_cols(self) -> int:
        return self.codes.shape[2] * 2

    @property
    def plane_bytes(self) -> int:
        """Decoded bytes of one plane."""
        return self.num_rows * self.num_cols

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the scales that this decodes to."""
        return self.num_planes, self.num_rows, self.num_cols

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes resident on the device."""
        return sum(tensor.nbytes for tensor in self.state_dict().values())

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"NVFP4CSFScales({shape}, {self.nbytes} bytes, {len(self.exceptions)} exceptions, {self.device})"

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors by name; `NVFP4CSFScales(**state)` is the same scales again."""
        return {name: getattr(self, name) for name in _FIELDS}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> NVFP4CSFScales:
        """The same scales on `device`; as bytes they have no other dtype."""
        device = torch.device(device)
        return NVFP4CSFScales(*(getattr(self, name).to(device, non_blocking=non_blocking) for name in _FIELDS))

    def to_wire(self) -> tuple[torch.Tensor, ExceptionList]:
        """The wire form these scales were prepared from, byte for byte.

        Returns:
            `fixed` uint8 `[E, bytes]` and a sequence of `E` uint32 exception tensors, copies on the scales' device.
        """
        num_planes, num_rows, num_cols = self.shape
        slabs = (num_planes, num_rows // NVFP4_CSF.rows_per_slab)
        fixed = torch.cat([self.bases.reshape(*slabs, -1), self.codes.reshape(*slabs, -1)], dim=2)
        tiles = tiles_per_plane(self.plane_bytes)
        ends = self.exception_offsets[tiles::tiles].to("cpu", torch.int64)
        return fixed.view(num_planes, -1), ExceptionList(self.exceptions.clone().view(torch.uint32), ends)


_pytree.register_pytree_node(
    NVFP4CSFScales,
    lambda scales: ([getattr(scales, name) for name in _FIELDS], None),
    lambda tensors, _: NVFP4CSFScales(*tensors),
    serialized_type_name=add_op_namespace_prefix("NVFP4CSFScales"),
    flatten_with_keys_fn=lambda scales: (
        [(_pytree.GetAttrKey(name), getattr(scales, name)) for name in _FIELDS],
        None,
    ),
)


@on_one_thread()
def prepare_nvfp4_csf_scales(
    fixed: torch.Tensor | Sequence[torch.Tensor],
    exceptions: torch.Tensor | Sequence[torch.Tensor],
    *,
    num_rows: int,
    num_cols: int,
) -> NVFP4CSFScales:
    """Validate the wire form of `E` planes and lay it out for kernels, on the tensors' device.

    Args:
        fixed: `E` uint8 tensors of `num_rows / 16 * 16 * (1 + num_cols / 2)` bytes, flat or
            `[num_rows / 16, bytes a slab]`, or all as one `[E, ...]`; a single one for a single plane.
        exceptions: `E` 1-D uint32 tensors (an int32 view is accepted), in a list or as `compress` returns them, which
            spares the CPU a look at each; or the single tensor of a single plane.
        num_rows: rows `N` of each plane, a multiple of 16.
        num_cols: columns `C` of each plane, even; `N * C` at most 2^24.

    Raises:
        ValueError: geometry, dtype, length, device, a base above 240, or a position that is out of range or not
            above the one before it. Names the tensor and the place. Nothing is returned.

    Source: docs/format.md, "One compressed plane". One host sync on a GPU, for the verdict.

    >>> fixed = torch.tensor([100] * 16 + [0x10] * 16, dtype=torch.uint8)  # 16 rows: base 100, codes 0 and 1
    >>> exceptions = torch.tensor([7 << 24 | 3], dtype=torch.int32)  # row 1, column 1 is 7
    >>> scales = prepare_nvfp4_csf_scales(fixed, exceptions, num_rows=16, num_cols=2)
    >>> scales.shape, scales.nbytes
    ((1, 16, 2), 44)
    >>> scales.to_wire()[1][0].tolist() == exceptions.tolist()
    True
    """
    NVFP4_CSF.check_plane(num_rows, num_cols)
    num_rows, num_cols = int(num_rows), int(num_cols)
    stream, words, counts = _gather_wire(
        fixed, exceptions, (num_rows // NVFP4_CSF.rows_per_slab, NVFP4_CSF.slab_bytes(num_cols))
    )
    num_planes, plane_bytes, device = len(counts), num_rows * num_cols, stream.device
    counts_cpu = torch.tensor(counts, device="cpu")  # lives until the verdict, as the copy may be read late
    counts_device = counts_cpu.to(device, non_blocking=True)
    if stream.data_ptr() % 8 or stream.storage_offset() % 8 or not stream.is_contiguous():
        stream = stream.clone(memory_format=torch.contiguous_format)
    # Copied even where a view would do: kernels count on aligned memory that nobody else writes. And eight bytes at a
    # time, of which two are a slab's bases.
    slabs = stream.view(torch.int64).view(num_planes, num_rows // NVFP4_CSF.rows_per_slab, -1)
    bases, codes = (part.clone(memory_format=torch.contiguous_format) for part in (slabs[..., :2], slabs[..., 2:]))
    bases = bases.view(torch.uint8).view(num_planes, num_rows)
    codes = codes.view(torch.uint8).view(num_planes, num_rows, -1)

    positions = words & NVFP4_CSF.position_mask
    # Positions made unique across planes: sorted without repeats exactly if every plane's own positions are.
    keys = torch.repeat_interleave(counts_device, output_size=len(words)).mul_(plane_bytes).add_(positions)
    faults = torch.stack(
        [
            (bases > NVFP4_CSF.max_base).any(),
            (positions >= plane_bytes).any(),
            (keys[1:] <= keys[:-1]).any(),
        ]
    )
    if faults.any():
        raise ValueError(_describe_fault(bases, positions, counts, plane_bytes))

    planes = torch.arange(num_planes, device=device)
    starts = torch.arange(0, plane_bytes, TILE_BYTES, device=device) + planes[:, None] * plane_bytes
    starts = torch.cat([starts.flatten(), starts.new_full((1,), num_planes * plane_bytes)])
    return NVFP4CSFScales(bases, codes, words, torch.searchsorted(keys, starts, out_int32=True))


def _gather_wire(
    fixed: torch.Tensor | Sequence[torch.Tensor],
    exceptions: torch.Tensor | Sequence[torch.Tensor],
    slabs: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Check types, shapes and devices; return `stream [E, bytes]`, new words int32 `[X]` and the exceptions a plane.

    `slabs` is the shape of one plane's stream, `[slabs, bytes a slab]`, which may also come flat.
    """
    if isinstance(exceptions, torch.Tensor):
        fixed, exceptions = [fixed], [exceptions]  # type: ignore[list-item]  # whatever it is, it is checked below
    for name, tensors in (("fixed", fixed), ("exceptions", exceptions)):
        if not isinstance(tensors, (torch.Tensor, ExceptionList, list, tuple)) or not getattr(tensors, "ndim", 1):
            raise ValueError(f"{name} must be a list of one tensor a plane, got {kind_of(tensors)}")
    if not exceptions or len(fixed) != len(exceptions):
        raise ValueError(f"need one fixed and one exceptions tensor a plane, got {len(fixed)} and {len(exceptions)}")
    flat = (slabs[0] * slabs[1],)
    if isinstance(fixed, torch.Tensor):
        device = fixed.device
        _check_tensors("fixed", [fixed], _BYTES, [(len(fixed), *flat), (len(fixed), *slabs)], device)
        stream = fixed.reshape(len(fixed), -1)
    else:
        device = getattr(fixed[0], "device", None)  # type: ignore[assignment]  # what is no tensor is refused below
        _check_tensors("fixed", fixed, _BYTES, [flat, slabs], device)
        if len({plane.ndim for plane in fixed}) > 1:
            fixed = [plane.reshape(-1) for plane in fixed]
        stream = torch.stack(tuple(fixed)).view(len(fixed), -1)
    if isinstance(exceptions, ExceptionList):
        counts, exceptions = exceptions.counts, [exceptions.words]
        _check_tensors("exceptions", exceptions, _WORDS, None, device)
        if min(counts) < 0 or sum(counts) != len(exceptions[0]):
            raise ValueError(f"exceptions: {len(exceptions[0])} words cannot be cut into planes of {counts}")
    else:
        _check_tensors("exceptions", exceptions, _WORDS, None, device)
        counts = list(map(torch.Tensor.numel, exceptions))
    if sum(counts) > MAX_EXCEPTIONS:
        raise ValueError(f"exceptions: a stack holds at most {MAX_EXCEPTIONS}, got {sum(counts)}: split it")
    if len(set(map(operator.attrgetter("dtype"), exceptions))) > 1:
        exceptions = [words.view(torch.int32) for words in exceptions]
    return stream, torch.cat(tuple(exceptions)).view(torch.int32), counts


_BYTES = (torch.uint8,)
_WORDS = (torch.uint32, torch.int32)


def _check_tensors(
    name: str,
    tensors: Sequence[torch.Tensor],
    dtypes: tuple[torch.dtype, ...],
    shapes: list[tuple[int, ...]] | None,
    device: torch.device | None,
) -> None:
    """Raise `ValueError` for the first that is not a tensor as asked for, naming it; `shapes` None: any 1-D."""
    if set(map(type, tensors)) == {torch.Tensor}:  # the usual hundreds of them, at once
        extent, extents = ("ndim", [1]) if shapes is None else ("shape", shapes)
        kinds = set(map(operator.attrgetter("dtype", extent, "device"), tensors))
        if kinds <= set(itertools.product(dtypes, extents, [device])) and not no_dense_tensor(tensors[0]):
            return
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            fault = f"must be a tensor, got {kind_of(tensor)}"
        elif tensor.dtype not in dtypes:
            fault = f"must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}"
        elif shapes is None and tensor.ndim != 1:
            fault = f"must be 1-D, got shape {tuple(tensor.shape)}"
        elif shapes is not None and tuple(tensor.shape) not in shapes:
            fault = f"must have shape {' or '.join(map(str, shapes))}, got {tuple(tensor.shape)}"
        elif tensor.device != device:
            fault = f"must be on {device} like the other tensors, got {tensor.device}"
        elif got := no_dense_tensor(tensor):
            fault = f"must be a tensor on a CPU or GPU, got {got}"
        else:
            continue
        raise ValueError(f"{name if len(tensors) == 1 else f'{name}[{i}]'} {fault}")


def _describe_fault(bases: torch.Tensor, positions: torch.Tensor, counts: list[int], plane_bytes: int) -> str:
    """Name the first fault. Only called once one is known to exist."""
    single = len(counts) == 1
    high = (bases > NVFP4_CSF.max_base).nonzero()
    if len(high):
        plane, row = high[0].tolist()
        name = "fixed" if single else f"fixed[{plane}]"
        return f"{name}: base {int(bases[plane, row])} at row {row} is above {NVFP4_CSF.max_base}"
    for plane, own in enumerate(positions.split(counts)):
        name = "exceptions" if single else f"exceptions[{plane}]"
        beyond = (own >= plane_bytes).nonzero()
        if len(beyond):
            i = int(beyond[0])
            return f"{name}: position {int(own[i])} at index {i} is out of range for a plane of {plane_bytes} bytes"
        unordered = (own[1:] <= own[:-1]).nonzero()
        if len(unordered):
            i = int(unordered[0])
            return f"{name}: position {int(own[i + 1])} at index {i + 1} is not above {int(own[i])} before it"
    raise AssertionError("no fault found in scales that were rejected")
