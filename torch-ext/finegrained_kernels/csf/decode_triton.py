"""Decodes compressed scale planes on a GPU, fixed stream and exceptions in one launch.

Bytes moved: one for each row (its base), half a byte in and one byte out for each scale, and 4 for each exception. The
roof is a copy of as many bytes.

Routing is read on the device. Every program numbers the active experts in `expert_start` and takes its share of their
tiles, so inactive planes cost nothing, not even an empty program.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..device import cdiv, next_power_of_2, num_sms
from ..launching import BoundKernel, bind
from ..swizzle import swizzled_shape
from .decode_tiles import Plane, Stream, decode_row_tile, decode_swizzled_tile


@dataclass(frozen=True)
class DecodeLaunch:
    """The compile-time options of `decode_kernel`, apart from the geometry of the planes.

    A plane has TILES tiles of BLOCK words. If MANY is not zero, and at least MANY of the first BLOCK_E experts have
    rows, it has MANY_TILES tiles of MANY_BLOCK words instead. BLOCK_X exceptions are stored at a time.
    """

    TILES: int
    BLOCK: int
    MANY: int
    MANY_TILES: int
    MANY_BLOCK: int
    BLOCK_X: int
    BLOCK_E: int
    SWIZZLED: bool
    ALIGNED: bool
    """Whether the output begins at a multiple of 8 bytes."""
    ROUTED: bool


@triton.jit
def decode_items(
    out_ptr, stream, expert, rank, found, item, shift,
    PLANE: tl.constexpr, LAUNCH: tl.constexpr, ARE_MANY: tl.constexpr,
):  # fmt: skip
    """Decode this program's items, beginning with `item`, of plane `found - 1`, as long as their expert is in `expert`.

    Returns the first item whose expert is not, and zero.
    """
    TILES: tl.constexpr = LAUNCH.MANY_TILES if ARE_MANY else LAUNCH.TILES
    BLOCK: tl.constexpr = LAUNCH.MANY_BLOCK if ARE_MANY else LAUNCH.BLOCK
    decode_tile: tl.constexpr = decode_swizzled_tile if LAUNCH.SWIZZLED else decode_row_tile
    while found > 0:
        decode_tile(
            out_ptr, stream, found - 1, item % TILES, shift,
            PLANE=PLANE, BLOCK=BLOCK, BLOCK_X=LAUNCH.BLOCK_X, ALIGNED=LAUNCH.ALIGNED,
        )  # fmt: skip
        item += tl.num_programs(0)
        found = tl.sum(tl.where(rank == item // TILES, expert + 1, 0))
    return item, found


@triton.jit(do_not_specialize=["num_planes", "shift"])
def decode_kernel(
    out_ptr, stream, expert_start_ptr, num_planes, shift, PLANE: tl.constexpr, LAUNCH: tl.constexpr
):  # fmt: skip
    """Decode every plane, one tile per program; if `LAUNCH.ROUTED`, only the planes of experts that have rows."""
    item = tl.program_id(0)
    if LAUNCH.ROUTED:
        num_seen = 0  # active experts in the blocks before this one
        are_many = False
        for first_expert in range(0, num_planes, LAUNCH.BLOCK_E):
            expert = first_expert + tl.arange(0, LAUNCH.BLOCK_E)
            mask = expert < num_planes
            begin = tl.load(expert_start_ptr + expert, mask=mask, other=0)
            end = tl.load(expert_start_ptr + expert + 1, mask=mask, other=0)
            active = (end > begin).to(tl.int32)
            rank = tl.where(active > 0, num_seen + tl.cumsum(active) - 1, -1)
            # The plane of the item's active expert, plus one; zero if that expert is not in this block.
            found = tl.where(rank == item // LAUNCH.TILES, expert + 1, 0)
            if LAUNCH.MANY > 0:
                # Both in one sum, because a sum takes longer than the tiles of a few planes.
                found = tl.sum(found | tl.where(rank == LAUNCH.MANY - 1, 1 << 30, 0))
                are_many = are_many | ((first_expert == 0) & (found >= 1 << 30))
                found = found & ((1 << 30) - 1)
            else:
                found = tl.sum(found)
            if are_many:
                found = tl.sum(tl.where(rank == item // LAUNCH.MANY_TILES, expert + 1, 0))
                item, found = decode_items(
                    out_ptr, stream, expert, rank, found,
                    item=item, shift=shift, PLANE=PLANE, LAUNCH=LAUNCH, ARE_MANY=True,
                )  # fmt: skip
            # If there were many experts, nothing is left to do here. An `else` would take more registers.
            item, found = decode_items(
                out_ptr, stream, expert, rank, found,
                item=item, shift=shift, PLANE=PLANE, LAUNCH=LAUNCH, ARE_MANY=False,
            )  # fmt: skip
            if first_expert + LAUNCH.BLOCK_E < num_planes:
                num_seen = tl.maximum(num_seen, tl.max(rank) + 1)
    else:
        decode_tile: tl.constexpr = decode_swizzled_tile if LAUNCH.SWIZZLED else decode_row_tile
        decode_tile(
            out_ptr, stream, item // LAUNCH.TILES, item % LAUNCH.TILES, shift,
            PLANE=PLANE, BLOCK=LAUNCH.BLOCK, BLOCK_X=LAUNCH.BLOCK_X, ALIGNED=LAUNCH.ALIGNED,
        )  # fmt: skip


def decode_config(
    num_sms: int, num_planes: int, num_rows: int, num_cols: int, *, routed: bool, swizzled: bool, max_active: int | None
) -> dict:
    """Grid and constants of `decode_kernel`, which depend on shape and device alone.

    A routed launch with few active planes is bound by latency and should have few programs; one with many should have
    as many loads in flight as fit. `max_active` says which it is. If it is None, few programs are launched, and they
    take larger tiles if they find many active planes.
    """
    plane_bytes = num_rows * num_cols
    block, num_warps, programs_per_sm, many = 512, 4, 2, 0
    many_block = block
    few_bytes = 8 * block * programs_per_sm * num_sms
    if swizzled:
        num_warps, programs_per_sm = 8 if num_cols >= 128 else 4, 8
        tiles = many_tiles = swizzled_shape(num_rows, num_cols)[0]
    else:
        if routed and max_active is None:
            num_warps, many, many_block = 8, cdiv(4 * few_bytes, plane_bytes), 8 * block
        elif routed and max_active is not None and max_active * plane_bytes > few_bytes:
            block, programs_per_sm = 1024, 6 if max_active * plane_bytes <= 16 * few_bytes else 8
        tiles, many_tiles = cdiv(plane_bytes, 8 * block), cdiv(plane_bytes, 8 * many_block)
    num_items = tiles * min(num_planes, num_planes if max_active is None else max_active)
    return {
        "grid": max(1, min(num_items, programs_per_sm * num_sms)) if routed else num_planes * tiles,
        "TILES": tiles,
        "BLOCK": block,
        "MANY": many,
        "MANY_TILES": many_tiles,
        "MANY_BLOCK": many_block,
        "BLOCK_X": 32 * num_warps,
        "BLOCK_E": min(1024, next_power_of_2(num_planes)),
        "num_warps": num_warps,
    }


@functools.lru_cache(maxsize=None)
def decode_launch(
    device: torch.device,
    num_planes: int,
    num_rows: int,
    num_cols: int,
    routed: bool,
    swizzled: bool,
    aligned: bool,
    max_active: int | None,
    **overrides: int,
) -> tuple[tuple[int], BoundKernel]:
    """Grid and kernel for one kind of launch. `overrides` replace entries of `decode_config`, for tuning."""
    config = decode_config(
        num_sms(device), num_planes, num_rows, num_cols, routed=routed, swizzled=swizzled, max_active=max_active
    )
    config = {**config, **overrides}
    grid, num_warps = (config.pop("grid"),), config.pop("num_warps")
    launch = DecodeLaunch(**config, SWIZZLED=swizzled, ALIGNED=aligned, ROUTED=routed)
    return grid, bind(decode_kernel, PLANE=plane_of(num_rows, num_cols), LAUNCH=launch, num_warps=num_warps)


def plane_of(num_rows: int, num_cols: int) -> Plane:
    """Describes planes of this size to the kernels."""
    return Plane(num_rows, num_cols, num_rows * num_cols)


def launch_decode(
    bases: torch.Tensor,
    codes: torch.Tensor,
    exceptions: torch.Tensor,
    exception_offsets: torch.Tensor,
    out: torch.Tensor,
    expert_start: torch.Tensor | None,
    swizzled: bool,
    max_active: int | None = None,
    **overrides: int,
) -> None:
    """Launch on the current stream of `out`'s device. Writes from the start of `out`, which may be longer than the
    result."""
    num_planes, num_rows, half_cols = codes.shape
    if codes.data_ptr() % 8:
        raise ValueError(f"codes: expected memory aligned to 8 bytes, got address {codes.data_ptr():#x}")
    shift = out.data_ptr() % 8
    if max_active is not None:
        max_active = min(max_active, num_planes)
    grid, kernel = decode_launch(  # by position: keywords would take more time than the lookup
        out.device, num_planes, num_rows, half_cols * 2, expert_start is not None, swizzled, shift == 0, max_active,
        **overrides,
    )  # fmt: skip
    if expert_start is None:
        expert_start = exception_offsets  # not read
    kernel(grid, out, Stream(bases, codes, exceptions, exception_offsets), expert_start, num_planes, shift)
