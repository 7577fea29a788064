"""Decode compressed scale planes on a GPU, fixed stream and exceptions in one launch.

Bytes moved: a base a row, half a byte in and one byte out a scale, 4 bytes an exception; the roof is a copy of as many.

Routing is read on the device. Every program ranks the active experts in `expert_start` and takes its share of their
tiles, so inactive planes cost nothing, not even an empty program.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..device import cdiv, next_power_of_2, num_sms
from ..formats import NVFP4_CSF
from ..launching import BoundKernel, bind
from ..swizzle import swizzled_shape
from .decode_tiles import decode_row_tile, decode_swizzled_tile
from .scales import TILE_BYTES


@triton.jit
def decode_items(
    out_ptr, bases_ptr, codes_ptr, exceptions_ptr, offsets_ptr, expert, rank, found, item, shift,
    NUM_ROWS: tl.constexpr, NUM_COLS: tl.constexpr, OFFSET_TILE: tl.constexpr, POSITION_BITS: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_X: tl.constexpr, ALIGNED: tl.constexpr, decode_tile: tl.constexpr,
):  # fmt: skip
    """Decode the program's items from `item`, of plane `found - 1`, as long as their plane's expert is among `expert`.

    Returns the first item that is not, and zero.
    """
    while found > 0:
        decode_tile(
            out_ptr, bases_ptr, codes_ptr, exceptions_ptr, offsets_ptr, found - 1, item % TILES, shift,
            NUM_ROWS, NUM_COLS, OFFSET_TILE, POSITION_BITS, BLOCK, BLOCK_X, ALIGNED,
        )  # fmt: skip
        item += tl.num_programs(0)
        found = tl.sum(tl.where(rank == item // TILES, expert + 1, 0))
    return item, found


@triton.jit(do_not_specialize=["num_planes", "shift"])
def decode_kernel(
    out_ptr, bases_ptr, codes_ptr, exceptions_ptr, offsets_ptr, expert_start_ptr, num_planes, shift,
    NUM_ROWS: tl.constexpr, NUM_COLS: tl.constexpr, OFFSET_TILE: tl.constexpr, POSITION_BITS: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, MANY: tl.constexpr, MANY_TILES: tl.constexpr, MANY_BLOCK: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_E: tl.constexpr,
    SWIZZLED: tl.constexpr, ALIGNED: tl.constexpr, ROUTED: tl.constexpr,
):  # fmt: skip
    """Decode every plane, one tile a program, or if `ROUTED` the planes of experts that have rows.

    With `MANY` not zero, in tiles of `MANY_BLOCK` where so many of the first `BLOCK_E` experts or more have rows.
    """
    if SWIZZLED:
        decode_tile: tl.constexpr = decode_swizzled_tile
    else:
        decode_tile: tl.constexpr = decode_row_tile
    item = tl.program_id(0)
    if ROUTED:
        num_seen = 0  # active experts in the blocks before this one
        are_many = False
        for first_expert in range(0, num_planes, BLOCK_E):
            expert = first_expert + tl.arange(0, BLOCK_E)
            mask = expert < num_planes
            begin = tl.load(expert_start_ptr + expert, mask=mask, other=0)
            end = tl.load(expert_start_ptr + expert + 1, mask=mask, other=0)
            active = (end > begin).to(tl.int32)
            rank = tl.where(active > 0, num_seen + tl.cumsum(active) - 1, -1)
            # The plane of the item's active expert, plus one; zero when it is not in this block.
            found = tl.where(rank == item // TILES, expert + 1, 0)
            if MANY > 0:
                # Both in one sum, as a sum takes longer than few planes' tiles do.
                found = tl.sum(found | tl.where(rank == MANY - 1, 1 << 30, 0))
                are_many = are_many | ((first_expert == 0) & (found >= 1 << 30))
                found = found & ((1 << 30) - 1)
            else:
                found = tl.sum(found)
            if are_many:
                found = tl.sum(tl.where(rank == item // MANY_TILES, expert + 1, 0))
                item, found = decode_items(
                    out_ptr, bases_ptr, codes_ptr, exceptions_ptr, offsets_ptr, expert, rank, found, item, shift,
                    NUM_ROWS, NUM_COLS, OFFSET_TILE, POSITION_BITS, MANY_TILES, MANY_BLOCK, BLOCK_X, ALIGNED,
                    decode_tile,
                )  # fmt: skip
            # Nothing is left for it where many were found; as an `else` it would cost registers.
            item, found = decode_items(
                out_ptr, bases_ptr, codes_ptr, exceptions_ptr, offsets_ptr, expert, rank, found, item, shift,
                NUM_ROWS, NUM_COLS, OFFSET_TILE, POSITION_BITS, TILES, BLOCK, BLOCK_X, ALIGNED, decode_tile,
            )  # fmt: skip
            if first_expert + BLOCK_E < num_planes:
                num_seen = tl.maximum(num_seen, tl.max(rank) + 1)
    else:
        decode_tile(
            out_ptr, bases_ptr, codes_ptr, exceptions_ptr, offsets_ptr, item // TILES, item % TILES, shift,
            NUM_ROWS, NUM_COLS, OFFSET_TILE, POSITION_BITS, BLOCK, BLOCK_X, ALIGNED,
        )  # fmt: skip


def decode_config(
    num_sms: int, num_planes: int, num_rows: int, num_cols: int, *, routed: bool, swizzled: bool, max_active: int | None
) -> dict:
    """Grid and constants of `decode_kernel`, from shape and device alone.

    A routed launch with few active planes is bound by latency and wants few programs, one with many wants all the
    loads in flight that fit: `max_active` says which. Unknown, few programs are launched, which take larger tiles where
    they find many planes.
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
    """Grid and kernel of one kind of launch. `overrides` replace entries of `decode_config`, for tuning."""
    config = decode_config(
        num_sms(device), num_planes, num_rows, num_cols, routed=routed, swizzled=swizzled, max_active=max_active
    )
    config = {**config, **overrides}
    grid = (config.pop("grid"),)
    kernel = bind(
        decode_kernel,
        NUM_ROWS=num_rows, NUM_COLS=num_cols, OFFSET_TILE=TILE_BYTES, POSITION_BITS=NVFP4_CSF.position_bits,
        SWIZZLED=swizzled, ALIGNED=aligned, ROUTED=routed,
        **config,
    )  # fmt: skip
    return grid, kernel


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
    """Launch on the current stream of `out`'s device. `out` may be longer than what is written, from its start."""
    num_planes, num_rows, half_cols = codes.shape
    if codes.data_ptr() % 8:
        raise ValueError(f"codes: expected memory aligned to 8 bytes, got address {codes.data_ptr():#x}")
    shift = out.data_ptr() % 8
    if max_active is not None:
        max_active = min(max_active, num_planes)
    grid, kernel = decode_launch(  # by position: names would cost the CPU more than the lookup
        out.device, num_planes, num_rows, half_cols * 2, expert_start is not None, swizzled, shift == 0, max_active,
        **overrides,
    )  # fmt: skip
    if expert_start is None:
        expert_start = exception_offsets  # not read
    kernel(grid, out, bases, codes, exceptions, exception_offsets, expert_start, num_planes, shift)
