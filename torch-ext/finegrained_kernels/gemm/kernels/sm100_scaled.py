"""W4A4 on block-scaled tensor cores (sm_100, sm_120): both operands stay NVFP4, their scales go into the product.

A tile is BLOCK_N weight rows, the rows of the product as sm_100 wants 128 of them, by up to BLOCK_T routed rows of one
expert; with `GATE`, gate rows alternate with their up rows. Bytes read a tile and k: 9/16 of a row, for both operands.
The hardware's scale type has no sign, so a negative scale byte flips its codes' signs instead. Globals, gating and
output are those of portable.py. Compiled for these GPUs and run interpreted in the tests; never run on one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .portable import finish_tile, locate, plane_bytes, routed_sources, scale_offsets


@triton.jit
def scaled_operand(codes_ptr, scales_ptr, rows, ok, k0, K: tl.constexpr, BLOCK_K: tl.constexpr, SWIZZLED: tl.constexpr):
    """(codes [rows, BLOCK_K / 2], unsigned E4M3 scales [rows, BLOCK_K / 16]) from k0 on; 0 outside the tensor."""
    ROWS: tl.constexpr = rows.shape[0]
    byte_cols = k0 // 2 + tl.arange(0, BLOCK_K // 2)
    mask = ok[:, None] & (byte_cols < K // 2)[None, :]
    codes = tl.load(codes_ptr + rows.to(tl.int64)[:, None] * (K // 2) + byte_cols[None, :], mask=mask, other=0)
    scale_cols = k0 // 16 + tl.arange(0, BLOCK_K // 16)
    mask = ok[:, None] & (scale_cols < K // 16)[None, :]
    offsets = scale_offsets(rows.to(tl.int64)[:, None], scale_cols[None, :], K // 16, SWIZZLED)
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
    x_ptr, x_scales_ptr, x_global_ptr, w_ptr, scales_ptr, w_global_ptr, out_ptr, out_scales_ptr, out_global_ptr,
    expert_start_ptr, expert_ids_ptr, gather_ptr, scatter_ptr, num_rows, num_sources, num_experts, strides, swiglu,
    N: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, HAS_LIMIT: tl.constexpr, SWIZZLED: tl.constexpr,
    X_GLOBAL_PER_ROW: tl.constexpr, ROUNDED: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One tile a program; strides and swiglu as `finish_tile` takes them."""
    n_tile = tl.program_id(1)
    expert, first, end = locate(
        tl.program_id(0), expert_start_ptr, expert_ids_ptr, num_rows, num_experts, BLOCK_E, BLOCK_T
    )
    rows = first + tl.arange(0, BLOCK_T)
    sources, ok = routed_sources(rows, end, gather_ptr, num_sources)
    ROWS: tl.constexpr = 2 * N if GATE else N
    depth = tl.where(expert < num_experts, K, 0)
    plane = tl.minimum(expert, num_experts - 1).to(tl.int64)
    w_ptr += plane * (ROWS * (K // 2))
    scales_ptr += plane * plane_bytes(ROWS, K // 16, SWIZZLED)
    w_rows, w_ok = weight_rows(n_tile, N, BLOCK_N, GATE)
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for k0 in range(0, depth, BLOCK_K):
        x, x_scales = scaled_operand(x_ptr, x_scales_ptr, sources, sources >= 0, k0, K, BLOCK_K, False)
        w, w_scales = scaled_operand(w_ptr, scales_ptr, w_rows, w_ok, k0, K, BLOCK_K, SWIZZLED)
        acc = tl.dot_scaled(w, w_scales, "e2m1", x.trans(), x_scales, "e2m1", acc)
    sums = acc.trans()
    up = sums
    if GATE:
        sums, up = tl.split(sums.reshape(BLOCK_T, BLOCK_N // 2, 2))
    finish_tile(
        sums, up, expert, rows, ok, sources, n_tile,
        x_global_ptr, w_global_ptr, out_ptr, out_scales_ptr, out_global_ptr, scatter_ptr,
        num_rows, num_experts, strides, swiglu, N, GATE, HAS_LIMIT, X_GLOBAL_PER_ROW, ROUNDED,
    )  # fmt: skip
