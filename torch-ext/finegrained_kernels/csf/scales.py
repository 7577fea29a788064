"""The resident form of compressed scales, and the conversions from and to the wire form.

The wire form interleaves bases and codes every 16 rows. The resident form keeps them apart, so that kernels read flat
words. It also stores where the exceptions of every `TILE_BYTES` positions begin, so that any tile finds its own. Apart
from these offsets, less than 1 % more, both forms hold the same bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.utils import _pytree

from .._ops import add_op_namespace_prefix
from ..formats import NVFP4_CSF
from ..one_thread import on_one_thread
from .exception_list import ExceptionList
from .wire import NVFP4CSFWire

TILE_BYTES = 1024
"""Decoded bytes between two entries of `exception_offsets`."""

_FIELDS = ("bases", "codes", "exceptions", "exception_offsets")


def tiles_per_plane(plane_bytes: int) -> int:
    return -(-plane_bytes // TILE_BYTES)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NVFP4CSFScales:
    """`E` compressed scale planes of `N` rows by `C` columns, ready for kernels. Made by `prepare_nvfp4_csf_scales`.

    Attributes:
        bases: uint8 `[E, N]`, the lowest byte value of each row's window, at most 240.
        codes: uint8 `[E, N, C / 2]`, two 4-bit offsets in each byte, low nibble first; aligned to 8 bytes, as newly
            allocated tensors are.
        exceptions: int32 `[X]`, `value << 24 | position in the plane`, plane after plane, in order of position.
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
        """The tensors by name; `NVFP4CSFScales(**state)` restores the scales."""
        return {name: getattr(self, name) for name in _FIELDS}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> NVFP4CSFScales:
        """The same scales on `device`. They are bytes, so there is no dtype to convert to."""
        device = torch.device(device)
        return NVFP4CSFScales(*(getattr(self, name).to(device, non_blocking=non_blocking) for name in _FIELDS))

    @classmethod
    def from_wire(cls, wire: NVFP4CSFWire) -> NVFP4CSFScales:
        """Validate the planes of `wire`, and lay them out for kernels in new memory on its device.

        Raises:
            WireFault: as in `NVFP4CSFWire.check`. One host sync on a GPU, for the result of the check.
        """
        num_planes, plane_bytes = len(wire.ends), wire.num_rows * wire.num_cols
        keys = wire.checked_keys(plane_bytes)
        stream = wire.fixed
        if stream.data_ptr() % 8 or stream.storage_offset() % 8 or not stream.is_contiguous():
            stream = stream.clone(memory_format=torch.contiguous_format)
        # Copied even where a view would do, because kernels need aligned memory that nobody else writes. Copied eight
        # bytes at a time; a slab's bases are two times eight.
        slabs = stream.view(torch.int64).view(num_planes, wire.num_rows // NVFP4_CSF.rows_per_slab, -1)
        bases, codes = (part.clone(memory_format=torch.contiguous_format) for part in (slabs[..., :2], slabs[..., 2:]))
        bases = bases.view(torch.uint8).view(num_planes, wire.num_rows)
        codes = codes.view(torch.uint8).view(num_planes, wire.num_rows, -1)
        starts = torch.arange(0, plane_bytes, TILE_BYTES, device=wire.device)
        starts = starts + torch.arange(num_planes, device=wire.device)[:, None] * plane_bytes
        starts = torch.cat([starts.flatten(), starts.new_full((1,), num_planes * plane_bytes)])
        offsets = torch.searchsorted(keys, starts, out_int32=True)
        return cls(bases, codes, wire.words.clone(), offsets)

    def to_wire(self) -> tuple[torch.Tensor, ExceptionList]:
        """The wire form from which these scales were prepared, byte for byte.

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
        exceptions: `E` 1-D uint32 tensors (an int32 view is accepted), as a list or as `compress` returns them, which
            is faster to check; or the single tensor of a single plane.
        num_rows: rows `N` of each plane, a multiple of 16.
        num_cols: columns `C` of each plane, even; `N * C` at most 2^24.

    Raises:
        ValueError: a size, dtype, length or device is wrong, a base is above 240, or a position is out of range or not
            above the one before it. The message names the tensor and the place.

    Source: docs/format.md, "One compressed plane". One host sync on a GPU, for the result of the check.

    >>> fixed = torch.tensor([100] * 16 + [0x10] * 16, dtype=torch.uint8)  # 16 rows: base 100, codes 0 and 1
    >>> exceptions = torch.tensor([7 << 24 | 3], dtype=torch.int32)  # row 1, column 1 is 7
    >>> scales = prepare_nvfp4_csf_scales(fixed, exceptions, num_rows=16, num_cols=2)
    >>> scales.shape, scales.nbytes
    ((1, 16, 2), 44)
    >>> scales.to_wire()[1][0].tolist() == exceptions.tolist()
    True
    """
    return NVFP4CSFScales.from_wire(NVFP4CSFWire.of(fixed, exceptions, num_rows=num_rows, num_cols=num_cols))
