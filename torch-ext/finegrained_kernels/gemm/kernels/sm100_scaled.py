"""W4A4 on block-scaled tensor cores (sm_100, sm_120): both operands stay NVFP4, and the product takes their scales.

A tile is BLOCK_N weight rows by up to BLOCK_T routed rows of one expert. Weights are the rows of the product, because
sm_100 needs 128 of them. With a gate, gate rows alternate with the matching up rows. Bytes read per tile and k: 9/16
for each row of both operands. The hardware's scale type has no sign, so a negative scale byte flips the signs of its
codes instead. Globals, gating and output are those of portable.py. The kernel is compiled for these GPUs and run by the
interpreter in the tests; it has never run on such a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .portable import expert_weight, finish_tile, scale_offsets
from .schedule import Schedule, count_tiles, find_tile, source_rows
from .tile_scales import decode_tile


@triton.jit
def scaled_operand(
    codes_ptr, scales_ptr, rows, scale_rows, ok, k0,
    C: tl.constexpr, STRIDE: tl.constexpr, BLOCK_K: tl.constexpr, SWIZZLED: tl.constexpr,
):  # fmt: skip
    """(codes [rows, BLOCK_K / 2], unsigned E4M3 scales [rows, BLOCK_K / 16]) from k0 on; 0 outside the tensor.

    `ok`: which rows exist. `scale_rows`: in which rows, of STRIDE bytes, their scales are.
    """
    ROWS: tl.constexpr = rows.shape[0]
    byte_cols = k0 // 2 + tl.arange(0, BLOCK_K // 2)
    mask = ok[:, None] & (byte_cols < 8 * C)[None, :]
    codes = tl.load(codes_ptr + rows.to(tl.int64)[:, None] * (8 * C) + byte_cols[None, :], mask=mask, other=0)
    scale_cols = k0 // 16 + tl.arange(0, BLOCK_K // 16)
    mask = ok[:, None] & (scale_cols < C)[None, :]
    offsets = scale_offsets(scale_rows.to(tl.int64)[:, None], scale_cols[None, :], STRIDE, SWIZZLED)
    scales = tl.load(scales_ptr + offsets, mask=mask, other=0)
    flips = (scales >> 7) * 0x88
    codes = (codes.reshape(ROWS, BLOCK_K // 16, 8) ^ flips[:, :, None]).reshape(ROWS, BLOCK_K // 2)
    return codes, (scales & 0x7F).to(tl.float8e4nv, bitcast=True)


@triton.jit
def plane_rows(row, n_tile, N: tl.constexpr, HALF: tl.constexpr, GATE: tl.constexpr):
    """(row of the plane, whether it exists) for a tile's rows. With a gate, gate rows alternate with the matching up
    rows."""
    if GATE:
        row = n_tile * (2 * HALF) + row
        return row % 2 * N + row // 2, row < 2 * N
    else:
        row = n_tile * HALF + row
        return row, row < N


@triton.jit
def multiply_scaled(x_ptr, x_scales_ptr, weight, tile, schedule, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Sums [BLOCK_N, BLOCK_T] of one tile; zeros for a tile without an expert."""
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    BLOCK_T: tl.constexpr = TILE.BLOCK_T
    HALF: tl.constexpr = TILE.HALF
    BLOCK_N: tl.constexpr = 2 * TILE.HALF if SHAPE.GATE else TILE.HALF
    C: tl.constexpr = SHAPE.C
    STRIDE: tl.constexpr = TILE.COLS if SHAPE.COMPRESSED else C
    sources = source_rows(schedule, tile, tl.arange(0, BLOCK_T))
    codes_ptr, scales_ptr = expert_weight(weight, tile, schedule, SHAPE)
    row = tl.arange(0, BLOCK_N)
    w_rows, w_ok = plane_rows(row, tile.n_tile, N=SHAPE.N, HALF=HALF, GATE=SHAPE.GATE)
    scale_rows = w_rows
    if SHAPE.COMPRESSED:
        scale_rows, _ = plane_rows(row, 0, N=HALF, HALF=HALF, GATE=SHAPE.GATE)  # in a plane that holds this tile alone
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    depth = tl.where(tile.expert < schedule.num_experts, SHAPE.K, 0)
    for first in range(0, depth, 16 * TILE.COLS):
        if SHAPE.COMPRESSED:
            scales_ptr = decode_tile(weight, tile, first // 16, HALF=HALF, COLS=TILE.COLS, SHAPE=SHAPE)
        for k0 in range(first, tl.minimum(first + 16 * TILE.COLS, depth), BLOCK_K):
            x, x_scales = scaled_operand(
                x_ptr, x_scales_ptr, sources, sources, sources >= 0,
                k0=k0, C=C, STRIDE=C, BLOCK_K=BLOCK_K, SWIZZLED=False,
            )  # fmt: skip
            w, w_scales = scaled_operand(
                codes_ptr, scales_ptr, w_rows, scale_rows, w_ok,
                k0=k0, C=C, STRIDE=STRIDE, BLOCK_K=BLOCK_K, SWIZZLED=SHAPE.SWIZZLED,
            )  # fmt: skip
            acc = tl.dot_scaled(w, w_scales, "e2m1", x.trans(), x_scales, "e2m1", acc)
    return acc


@triton.jit(do_not_specialize=["num_rows", "num_sources", "num_experts"])
def scaled_gemm_kernel(
    x_ptr, x_scales_ptr, weight, routing, epilogue, num_rows, num_sources, num_experts,
    SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Like `portable_gemm_kernel`, for packed activations and their scales."""
    experts = tl.arange(0, SHAPE.BLOCK_E)
    tile_ends, row_tiles = count_tiles(experts, routing, num_rows, num_experts, TILE.BLOCK_T)
    schedule = Schedule(routing, tile_ends, num_rows, num_sources, num_experts)
    for index in range(tl.program_id(0), row_tiles * TILE.N_TILES, tl.num_programs(0)):
        tile = find_tile(schedule, index // TILE.N_TILES, index % TILE.N_TILES, experts, TILE.BLOCK_T)
        sums = multiply_scaled(x_ptr, x_scales_ptr, weight, tile, schedule, SHAPE, TILE).trans()
        up = sums
        if SHAPE.GATE:
            sums, up = tl.split(sums.reshape(sums.shape[0], TILE.HALF, 2))
        finish_tile(sums, up, tile, schedule, epilogue, SHAPE=SHAPE)
