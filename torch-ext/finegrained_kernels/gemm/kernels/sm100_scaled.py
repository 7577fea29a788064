"""W4A4 on block-scaled tensor cores (sm_100, sm_120): both operands stay NVFP4, their scales go into the product.

A tile is BLOCK_N weight rows, the rows of the product as sm_100 wants 128 of them, by up to BLOCK_T routed rows of one
expert; with `GATE`, gate rows alternate with their up rows. Bytes read a tile and k: 9/16 of a row, for both operands.
The hardware's scale type has no sign, so a negative scale byte flips its codes' signs instead. Globals, gating and
output are those of portable.py. Compiled for these GPUs and run interpreted in the tests; never run on one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .portable import expert_weight, finish_tile, program_tile, scale_offsets
from .schedule import Schedule, source_rows


@triton.jit
def scaled_operand(codes_ptr, scales_ptr, rows, ok, k0, C: tl.constexpr, BLOCK_K: tl.constexpr, SWIZZLED: tl.constexpr):
    """(codes [rows, BLOCK_K / 2], unsigned E4M3 scales [rows, BLOCK_K / 16]) from k0 on; 0 outside the tensor."""
    ROWS: tl.constexpr = rows.shape[0]
    byte_cols = k0 // 2 + tl.arange(0, BLOCK_K // 2)
    mask = ok[:, None] & (byte_cols < 8 * C)[None, :]
    codes = tl.load(codes_ptr + rows.to(tl.int64)[:, None] * (8 * C) + byte_cols[None, :], mask=mask, other=0)
    scale_cols = k0 // 16 + tl.arange(0, BLOCK_K // 16)
    mask = ok[:, None] & (scale_cols < C)[None, :]
    offsets = scale_offsets(rows.to(tl.int64)[:, None], scale_cols[None, :], C, SWIZZLED)
    scales = tl.load(scales_ptr + offsets, mask=mask, other=0)
    flips = (scales >> 7) * 0x88
    codes = (codes.reshape(ROWS, BLOCK_K // 16, 8) ^ flips[:, :, None]).reshape(ROWS, BLOCK_K // 2)
    return codes, (scales & 0x7F).to(tl.float8e4nv, bitcast=True)


@triton.jit
def weight_rows(n_tile, N: tl.constexpr, BLOCK_N: tl.constexpr, GATE: tl.constexpr):
    """(weight row, whether it exists) of a tile's rows."""
    rows = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATE:
        return rows % 2 * N + rows // 2, rows < 2 * N
    else:
        return rows, rows < N


@triton.jit(do_not_specialize=["num_rows", "num_sources", "num_experts"])
def scaled_gemm_kernel(
    x_ptr, x_scales_ptr, weight, routing, epilogue, num_rows, num_sources, num_experts,
    SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As `portable_gemm_kernel`, on packed activations and their scales."""
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    BLOCK_T: tl.constexpr = TILE.BLOCK_T
    C: tl.constexpr = SHAPE.C
    schedule = Schedule(routing, 0, num_rows, num_sources, num_experts)
    tile = program_tile(schedule, SHAPE, TILE)
    sources = source_rows(schedule, tile, tl.arange(0, TILE.BLOCK_T))
    depth = tl.where(tile.expert < num_experts, SHAPE.K, 0)
    codes_ptr, scales_ptr = expert_weight(weight, tile, schedule, SHAPE)
    w_rows, w_ok = weight_rows(tile.n_tile, SHAPE.N, TILE.BLOCK_N, SHAPE.GATE)
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for k0 in range(0, depth, BLOCK_K):
        x, x_scales = scaled_operand(
            x_ptr, x_scales_ptr, sources, sources >= 0, k0, C=C, BLOCK_K=BLOCK_K, SWIZZLED=False
        )  # fmt: skip
        w, w_scales = scaled_operand(
            codes_ptr, scales_ptr, w_rows, w_ok, k0, C=C, BLOCK_K=BLOCK_K, SWIZZLED=SHAPE.SWIZZLED
        )  # fmt: skip
        acc = tl.dot_scaled(w, w_scales, "e2m1", x.trans(), x_scales, "e2m1", acc)
    sums = acc.trans()
    up = sums
    if SHAPE.GATE:
        sums, up = tl.split(sums.reshape(BLOCK_T, BLOCK_N // 2, 2))
    finish_tile(sums, up, tile, schedule, epilogue, SHAPE=SHAPE)
