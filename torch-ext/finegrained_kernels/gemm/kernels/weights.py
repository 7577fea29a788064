"""The ring in shared memory for chunks of weights, and of scales if these arrive with the weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from ...swizzle_triton import col_tiles, swizzled_bytes, swizzled_offset
from .unpack import copy_layout, load_async


class Ring(NamedTuple):
    """STAGES chunks: activations in each kernel's own layout, codes, and pairs of scale bytes (0 if scales have a
    strip)."""

    tokens: Any
    codes: Any
    scales: Any


@gluon.jit
def new_ring(tokens, TILE: gl.constexpr):
    """Allocate a ring. `tokens` is the shared memory for activations."""
    CODES: gl.constexpr = row_swizzle(TILE.GROUPS, 2)
    codes = gl.allocate_shared_memory(gl.int64, [TILE.STAGES, TILE.BLOCK_N, TILE.GROUPS], CODES)
    scales = 0
    if TILE.STRIPS == 0:
        PAIRS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        scales = gl.allocate_shared_memory(gl.int16, [TILE.STAGES, TILE.BLOCK_N, TILE.GROUPS // 2], PAIRS)
    return Ring(tokens, codes, scales)


@gluon.constexpr_function
def scale_vector(columns: int, groups: int, swizzled: bool) -> int:
    """How many pairs of scale bytes are contiguous and aligned in every row; one copy takes 4 to 16 bytes."""
    return 2 if swizzled else min(8, groups // 2, (columns & -columns) // 2)


@gluon.constexpr_function
def row_swizzle(cols: int, vector: int):
    """Shared layout of [rows, cols] in which lanes that read 16-byte vectors of 8 rows use 8 different groups of
    banks."""
    vectors = cols // vector
    return gl.SwizzledSharedLayout(vector, max(1, 8 // vectors), min(8, vectors), [1, 0])


@gluon.jit
def tile_row(rows, TILE: gl.constexpr):
    """(row in its half, half) for rows of a tile. With a gate, 8 gate rows alternate with the 8 matching up rows."""
    if TILE.HALVES == 2:
        return rows // 16 * 8 + rows % 8, rows // 8 % 2
    else:
        return rows, 0


@gluon.jit
def copy_rows(destination, source_ptr, columns, step, tile, ROW: gl.constexpr, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Start the copy of columns `step + columns` of a tile's rows of [experts, N or 2N, ROW]; zeros past the end.

    Offsets are 64-bit from the start, so that their constant part becomes part of the instruction.
    """
    LAYOUT: gl.constexpr = columns.type.layout.parent
    row, half = tile_row(gl.arange(0, TILE.BLOCK_N, gl.SliceLayout(1, LAYOUT)), TILE)
    mask = (tile.n_tile * TILE.HALF + row < SHAPE.N)[:, None] if SHAPE.N % TILE.HALF != 0 else (row >= 0)[:, None]
    if ROW % columns.shape[0] != 0:
        mask = mask & (step + columns < ROW)[None, :]
    first = tile.expert.to(gl.int64) * (TILE.HALVES * SHAPE.N * ROW) + tile.n_tile * (TILE.HALF * ROW)
    start_ptr = source_ptr + (first + step)
    offsets = (half * SHAPE.N + row).to(gl.int64)[:, None] * ROW + columns.to(gl.int64)[None, :]
    load_async(destination, start_ptr + offsets, mask=mask)


@gluon.jit
def copy_swizzled_scales(destination, scales_ptr, pairs, chunk, tile, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """The same for `pairs` of scale bytes of a chunk, in swizzled planes."""
    LAYOUT: gl.constexpr = pairs.type.layout.parent
    PLANE: gl.constexpr = swizzled_bytes(TILE.HALVES * SHAPE.N, SHAPE.C) // 2
    row, half = tile_row(gl.arange(0, TILE.BLOCK_N, gl.SliceLayout(1, LAYOUT)), TILE)
    row = tile.n_tile * TILE.HALF + row
    mask = (row < SHAPE.N)[:, None]
    if SHAPE.C % TILE.GROUPS != 0:
        mask = mask & (pairs < (SHAPE.C - chunk * TILE.GROUPS) // 2)[None, :]
    offsets = swizzled_offset((half * SHAPE.N + row)[:, None], pairs[None, :], col_tiles(SHAPE.C), UNIT=2)
    base = tile.expert.to(gl.int64) * PLANE + chunk * (TILE.GROUPS // 4 * 256)
    load_async(destination, scales_ptr + base + offsets, mask=mask)


@gluon.jit
def copy_weights(ring, weight, tile, chunk, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Start copying a K chunk of codes, and of scales unless these have a strip, into the chunk's stage of the ring."""
    C: gl.constexpr = SHAPE.C
    CODES: gl.constexpr = copy_layout(TILE.GROUPS, 2, gl.num_warps())
    groups = gl.arange(0, TILE.GROUPS, gl.SliceLayout(0, CODES))
    codes = ring.codes.index(chunk % TILE.STAGES)
    copy_rows(codes, weight.codes, groups, chunk * TILE.GROUPS, tile, ROW=C, SHAPE=SHAPE, TILE=TILE)
    if TILE.STRIPS == 0:
        PAIRS: gl.constexpr = copy_layout(
            TILE.GROUPS // 2, scale_vector(C, TILE.GROUPS, SHAPE.SWIZZLED), gl.num_warps()
        )
        pairs = gl.arange(0, TILE.GROUPS // 2, gl.SliceLayout(0, PAIRS))
        destination = ring.scales.index(chunk % TILE.STAGES)
        if SHAPE.SWIZZLED:
            copy_swizzled_scales(destination, weight.scales.dense, pairs, chunk, tile, SHAPE=SHAPE, TILE=TILE)
        else:
            step = chunk * (TILE.GROUPS // 2)
            copy_rows(destination, weight.scales.dense, pairs, step, tile, ROW=C // 2, SHAPE=SHAPE, TILE=TILE)
